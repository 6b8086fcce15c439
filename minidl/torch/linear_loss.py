"""Cross-entropy of a linear layer's logits, which are never all stored, as an operator of torch."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import linear_cross_entropy as kernels
from minidl.torch.registry import LOWER, accumulator, may_want, operator
from minidl.torch.rows import cross_entropy_backward

_OPTIONS = "Tensor? bias, Tensor? weight, int ignore_index, str reduction, float label_smoothing"


def _fake(x: Any, w: Any, target: Any, bias: Any, weight: Any, *more: Any) -> tuple[torch.Tensor, ...]:
    _, reduction, _, wide, wanted = more
    acc = accumulator(x.dtype)
    loss = x.new_empty(x.shape[:1] if reduction == "none" else (), dtype=acc if wide else x.dtype)
    shapes = (shape if want else 0 for shape, want in zip((x.shape, w.shape, w.shape[:1]), wanted, strict=True))
    made = (x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, _dtypes(x, reduction), strict=True))
    return loss, *made, x.new_empty((), dtype=acc)


def _dtypes(x: torch.Tensor, reduction: str) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Those of the gradients of x, w and bias as the operator keeps them."""
    later = x.dtype == torch.float16 and reduction == "mean"
    of_sums = accumulator(x.dtype) if later else x.dtype
    return x.dtype, of_sums, of_sums


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, target, bias, weight, *ctx.options, _, made = inputs
    if any(ctx.needs_input_grad[2:5:2]):
        raise ValueError("minidl::linear_cross_entropy: target and weight get no gradient; pass them detached")
    _, *grads, divisor = output
    ctx.mark_non_differentiable(divisor)  # grads stay differentiable, so that a second derivative is refused
    ctx.of_each, ctx.dtype = ctx.options[1] == "none", x.dtype
    if not ctx.of_each and any(want and not kept for want, kept in zip(_wanted(ctx), made, strict=True)):
        raise ValueError("minidl::linear_cross_entropy: gradients need to be wanted")
    ctx.save_for_backward(*((x, w, target, bias, weight) if ctx.of_each else (*grads, divisor)))


def _wanted(ctx: Any) -> list[bool]:
    return [ctx.needs_input_grad[index] for index in (0, 1, 3)]


def _gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    wanted = _wanted(ctx)
    if ctx.of_each:
        made = iter(linear_cross_entropy_backward(dy, *ctx.saved_tensors, *ctx.options, wanted))
        dx, dw, db = (next(made) if want else None for want in wanted)
    else:
        *grads, divisor = ctx.saved_tensors
        dx, dw, db = (
            cross_entropy_backward(dy, grad, divisor).to(ctx.dtype) if want else None
            for grad, want in zip(grads, wanted, strict=True)
        )
    return dx, dw, None, db, *[None] * 6


@operator(
    f"linear_cross_entropy(Tensor x, Tensor linear_weight, Tensor target, {_OPTIONS}, bool wide, bool[] wanted) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake, save=_save, backward=_gradients, cast=(LOWER, (0, 1, 2, 3, 4)),
)  # fmt: skip
def _linear_cross_entropy(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *more: Any) -> Any:
    """(loss, what the gradients of x, w and bias are multiples of, what to divide these by)."""
    *options, wide, wanted = more
    loss, grads, divisor = kernels.linear_cross_entropy(x, w, target, *options, wanted=wanted, wide=wide)
    if divisor is None:
        divisor = torch.ones((), dtype=accumulator(x.dtype), device=x.device)
    found, dtypes = iter(grads), _dtypes(x, options[3])
    kept = (next(found) if want else x.new_empty(0, dtype=dtype) for want, dtype in zip(wanted, dtypes, strict=True))
    return loss, *kept, divisor


def _fake_backward(dy: Any, x: Any, w: Any, *more: Any) -> list[torch.Tensor]:
    made = x.new_empty(x.shape), x.new_empty(w.shape), x.new_empty(w.shape[:1])
    return [each for each, want in zip(made, more[-1], strict=True) if want]


@operator(
    f"linear_cross_entropy_backward(Tensor dy, Tensor x, Tensor linear_weight, Tensor target, {_OPTIONS}, "
    "bool[] wanted) -> Tensor[]",
    _fake_backward,
)
def linear_cross_entropy_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *more: Any
) -> list[torch.Tensor]:
    """The gradients that are wanted of x, w and bias, for the gradient dy of each row's loss."""
    *options, wanted = more
    return kernels.linear_cross_entropy(x, w, target, *options, wanted=wanted, dy=dy.contiguous()).grads


def linear_cross_entropy(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None, reduction: str = "mean", ignore_index: int | None = None,
    label_smoothing: float = 0.0, options: Any = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.linear_cross_entropy, in chunks of rows whose logits are not kept.

    input is [K] or [R, K], linear_weight [N, K]. The gradients are made with the loss but for the reduction "none",
    where the logits are computed again. Chunks are chosen here: torch's options are taken and change nothing.
    """
    one = input.dim() == 1
    x, t = (input.unsqueeze(0), target.unsqueeze(0)) if one else (input, target)
    given = x, linear_weight, linear_bias
    wanted = [reduction != "none" and each is not None and may_want(each) for each in given]
    index = -100 if ignore_index is None else ignore_index
    wide = torch.is_autocast_enabled(input.device.type)
    how = linear_bias, weight, index, reduction, label_smoothing, wide, wanted
    loss = _linear_cross_entropy(x, linear_weight, t, *how)[0]
    return loss[0] if one and reduction == "none" else loss
