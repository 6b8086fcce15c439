"""Linear layer and cross-entropy as one torch operator, which never stores all logits."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import linear_cross_entropy as kernels
from minidl.torch.registry import LOWER, accumulator, may_want, operator, spread
from minidl.torch.rows import cross_entropy_backward

_OPTIONS = "Tensor? bias, Tensor? weight, int ignore_index, str reduction, float label_smoothing"


def _fake(x: Any, w: Any, target: Any, bias: Any, weight: Any, *more: Any) -> tuple[torch.Tensor, ...]:
    _, reduction, _, wide, mask = more
    acc = accumulator(x.dtype)
    loss = x.new_empty(x.shape[:1] if reduction == "none" else (), dtype=acc if wide else x.dtype)
    shapes = (shape if want else 0 for shape, want in zip((x.shape, w.shape, w.shape[:1]), mask, strict=True))
    gradients = (x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, _dtypes(x, reduction), strict=True))
    return loss, *gradients, x.new_empty((), dtype=acc)


def _dtypes(x: torch.Tensor, reduction: str) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of the stored gradients of x, w and bias."""
    is_divided_later = x.dtype == torch.float16 and reduction == "mean"
    sum_dtype = accumulator(x.dtype) if is_divided_later else x.dtype
    return x.dtype, sum_dtype, sum_dtype


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, target, bias, weight, *ctx.options, _, computed = inputs
    if any(ctx.needs_input_grad[2:5:2]):
        raise ValueError("minidl::linear_cross_entropy: target and weight get no gradient; pass them detached")
    _, *grads, divisor = output
    ctx.mark_non_differentiable(divisor)  # grads stay differentiable, so that a second derivative is refused
    ctx.by_row, ctx.dtype = ctx.options[1] == "none", x.dtype
    if not ctx.by_row and any(want and not has for want, has in zip(_mask(ctx), computed, strict=True)):
        raise ValueError("minidl::linear_cross_entropy: the gradients that backward() needs must be in `needs_grad`")
    ctx.save_for_backward(*((x, w, target, bias, weight) if ctx.by_row else (*grads, divisor)))


def _mask(ctx: Any) -> list[bool]:
    return [ctx.needs_input_grad[index] for index in (0, 1, 3)]


def _gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    mask = _mask(ctx)
    if ctx.by_row:
        dx, dw, db = linear_cross_entropy_backward(dy, *ctx.saved_tensors, *ctx.options, mask)
    else:
        *grads, divisor = ctx.saved_tensors
        dx, dw, db = (
            cross_entropy_backward(dy, grad, divisor).to(ctx.dtype) if want else None
            for grad, want in zip(grads, mask, strict=True)
        )
    return dx, dw, None, db, *[None] * 6


@operator(
    f"linear_cross_entropy(Tensor x, Tensor linear_weight, Tensor target, {_OPTIONS}, bool wide, bool[] wanted) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake, save=_save, backward=_gradients, cast=(LOWER, (0, 1, 2, 3, 4)),
)  # fmt: skip
def _linear_cross_entropy(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *more: Any) -> Any:
    """Return the loss, the unscaled gradients of x, w and bias, and their divisor."""
    *options, wide, mask = more
    loss, grads, divisor = kernels.linear_cross_entropy(x, w, target, *options, needs_grad=mask, wide=wide)
    if divisor is None:
        divisor = torch.ones((), dtype=accumulator(x.dtype), device=x.device)
    computed, dtypes = iter(grads), _dtypes(x, options[3])
    all_grads = (
        next(computed) if want else x.new_empty(0, dtype=dtype) for want, dtype in zip(mask, dtypes, strict=True)
    )
    return loss, *all_grads, divisor


def _fake_backward(dy: Any, x: Any, w: Any, *more: Any) -> list[torch.Tensor]:
    return [x.new_empty(shape) for shape in (x.shape, w.shape, w.shape[:1])]


@operator(
    f"linear_cross_entropy_backward(Tensor dy, Tensor x, Tensor linear_weight, Tensor target, {_OPTIONS}, "
    "bool[] wanted) -> Tensor[]",
    _fake_backward,
)
def linear_cross_entropy_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *more: Any
) -> list[Any]:
    """Return the requested gradients of x, w and bias, for the gradient dy of each row's loss."""
    *options, mask = more
    computed = kernels.linear_cross_entropy(x, w, target, *options, needs_grad=mask, dy=dy.contiguous()).grads
    return spread(computed, mask)


def linear_cross_entropy(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None, reduction: str = "mean", ignore_index: int | None = None,
    label_smoothing: float = 0.0, options: Any = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.linear_cross_entropy, in chunks of rows whose logits are not stored.

    input is [K] or [R, K], linear_weight [N, K]. Gradients are computed with the loss, except for reduction "none",
    which computes the logits again. minidl chooses the chunks: torch's `options` are ignored.
    """
    is_vector = input.dim() == 1
    x, t = (input.unsqueeze(0), target.unsqueeze(0)) if is_vector else (input, target)
    tensors = x, linear_weight, linear_bias
    mask = [reduction != "none" and tensor is not None and may_want(tensor) for tensor in tensors]
    index = -100 if ignore_index is None else ignore_index
    wide = torch.is_autocast_enabled(input.device.type)
    arguments = linear_bias, weight, index, reduction, label_smoothing, wide, mask
    loss = _linear_cross_entropy(x, linear_weight, t, *arguments)[0]
    return loss[0] if is_vector and reduction == "none" else loss
