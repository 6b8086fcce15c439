"""Torch operators on rows: softmax, cross-entropy, and norms with statistics of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from minidl.kernels import check, memory_layout
from minidl.kernels import cross_entropy as entropy
from minidl.kernels import row_norm as norms
from minidl.kernels import softmax as kernels
from minidl.ops.loss import named_reduction
from minidl.torch.activations import _as
from minidl.torch.registry import FLOAT32, RESULT, Gradients, accumulator, may_want, operator


def _fake_softmax(x: Any, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _save_softmax(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    _, ctx.dim, ctx.log = inputs
    ctx.save_for_backward(output)


def _softmax_gradients(ctx: Any, dy: torch.Tensor) -> Any:
    return softmax_backward(dy, *ctx.saved_tensors, ctx.dim, ctx.log), None, None


@operator(
    "softmax(Tensor x, int dim, bool log) -> Tensor", _fake_softmax, save=_save_softmax, backward=_softmax_gradients,
    cast=(FLOAT32, (0,)), replay=True,
)  # fmt: skip
def _softmax(x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    return _as((kernels.log_softmax if log else kernels.softmax)(x, dim), x)


def _fake_softmax_backward(dy: Any, y: Any, *_: Any) -> torch.Tensor:
    return torch.empty_like(y)


@operator("softmax_backward(Tensor dy, Tensor y, int dim, bool log) -> Tensor", _fake_softmax_backward, replay=True)
def softmax_backward(dy: torch.Tensor, y: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    return _as((kernels.log_softmax_grad if log else kernels.softmax_grad)(dy, y, dim), y)


def softmax(input: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch.nn.functional.softmax."""
    return _softmax(input if dtype is None else input.to(dtype), dim, False)


def log_softmax(input: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch.nn.functional.log_softmax."""
    return _softmax(input if dtype is None else input.to(dtype), dim, True)


def _fake_entropy(
    x: Any, target: Any, weight: Any, ignore_index: Any, reduction: Any, smoothing: Any, keep: Any
) -> tuple[torch.Tensor, ...]:
    axis = min(1, x.dim() - 1)
    loss = x.new_empty((*x.shape[:axis], *x.shape[axis + 1 :]) if reduction == "none" else ())
    return loss, torch.empty_like(x) if keep else x.new_empty(0), x.new_empty((), dtype=accumulator(x.dtype))


def _save_entropy(ctx: Any, inputs: Any, output: Any) -> None:
    if not inputs[-1]:
        raise ValueError("minidl::cross_entropy: its gradient needs keep=True")
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        raise ValueError("minidl::cross_entropy: only the logits get a gradient; pass target.detach()")
    _, grad, divisor = output
    ctx.mark_non_differentiable(divisor)  # grad stays differentiable, so that a second derivative is refused
    ctx.save_for_backward(grad, divisor)


def _entropy_gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    return cross_entropy_backward(dy, *ctx.saved_tensors), *[None] * 6


@operator(
    "cross_entropy(Tensor x, Tensor target, Tensor? weight, int ignore_index, str reduction, float label_smoothing, "
    "bool keep) -> (Tensor, Tensor, Tensor)",
    _fake_entropy, save=_save_entropy, backward=_entropy_gradients, cast=(FLOAT32, (0, 1, 2)), replay=True,
)  # fmt: skip
def _cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, reduction: str,
    smoothing: float, keep: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the loss, its unscaled gradient, and the gradient's divisor."""
    result = entropy.cross_entropy_parts(x, target, weight, ignore_index, reduction, smoothing, keep)
    divisor = result.divisor
    if divisor is None:
        divisor = torch.ones((), dtype=accumulator(x.dtype), device=x.device)
    return result.loss, x.new_empty(0) if result.grad is None else _as(result.grad, x), divisor


def _fake_entropy_backward(dy: Any, grad: Any, divisor: Any) -> torch.Tensor:
    return torch.empty_like(grad)


@operator(
    "cross_entropy_backward(Tensor dy, Tensor grad, Tensor divisor) -> Tensor", _fake_entropy_backward, replay=True
)
def cross_entropy_backward(dy: torch.Tensor, grad: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    dense = grad.is_contiguous() or memory_layout.channels_last(grad)
    product = grad.clone() if dense else grad.contiguous()  # the kernel needs one of these two orders
    return _as(entropy.cross_entropy_grad_(product, dy, divisor), grad)


def cross_entropy(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.cross_entropy, which computes the gradient of the logits with the loss."""
    keep = may_want(input)
    reduction = named_reduction(size_average, reduce, reduction)
    return _cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing, keep)[0]


def _rows(x: torch.Tensor, dims: int, groups: int) -> tuple[torch.Tensor, norms.Rows]:
    return norms.groups(x, groups) if groups else norms.layers(x, dims)


def _order(x: Any, groups: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an empty result of a norm: contiguous, but a group norm preserves channels-last order."""
    last = groups and x.dim() > 2 and x.shape[1] > 1 and x.shape[2:].numel() > 1 and not x.is_contiguous()
    if last and x.movedim(1, -1).is_contiguous():
        return torch.empty_like(x, dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _fake_norm(
    x: Any, weight: Any, bias: Any, dims: Any, groups: Any, eps: Any, rms: Any, dtype: Any
) -> tuple[torch.Tensor, ...]:
    count = x.shape[0] * groups if groups else math.prod(x.shape[: x.dim() - dims])
    vector = x.new_empty(count, dtype=accumulator(x.dtype))
    return _order(x, groups, dtype), vector, torch.empty_like(vector)


def _save_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, ctx.dims, ctx.groups, _, ctx.rms, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _norm_gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    mask = list(ctx.needs_input_grad[:3])
    return *row_norm_backward(dy, *ctx.saved_tensors, ctx.dims, ctx.groups, ctx.rms, mask), *[None] * 5


@operator(
    "row_norm(Tensor x, Tensor? weight, Tensor? bias, int dims, int groups, float eps, bool rms, "
    "ScalarType? dtype) -> (Tensor, Tensor, Tensor)",
    _fake_norm, save=_save_norm, backward=_norm_gradients, cast=(RESULT, (7,)), replay=True,
)  # fmt: skip
def _row_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dims: int, groups: int, eps: float,
    rms: bool, dtype: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the result, and the mean and rstd of rows: the last `dims` dimensions of x, or one of `groups` groups.
    The result has `dtype` (default: x's); weight and bias may have another."""
    op = "rms_norm" if rms else "group_norm" if groups else "layer_norm"
    check.floating(op, x=x, weight=weight, bias=bias)
    shape = x.shape[1:2] if groups else x.shape[x.dim() - dims :]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != shape or vector.device != x.device):
            raise ValueError(
                f"{op}: {name} is {list(vector.shape)} on {vector.device}, expected {list(shape)} on {x.device}"
            )
    x, rows = _rows(x, dims, groups)
    weight, bias = (None if t is None else t.reshape(-1) for t in (weight, bias))
    return tuple(norms.forward(x, rows, weight, bias, eps, rms, dtype))


def _fake_norm_backward(
    dy: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, dims: Any, groups: Any, rms: Any, mask: Any
) -> list[torch.Tensor]:
    return [_order(x, groups), *(x if t is None else torch.empty_like(t) for t in (weight, bias))]


@operator(
    "row_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, int dims, "
    "int groups, bool rms, bool[] wanted) -> Tensor[]",
    _fake_norm_backward, replay=True,
)  # fmt: skip
def row_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, rstd: torch.Tensor, dims: int,
    groups: int, rms: bool, mask: list[bool],
) -> Gradients:  # fmt: skip
    x, rows = _rows(x, dims, groups)
    flat = None if weight is None else weight.reshape(-1)
    dx, *others = norms.backward(dy, x, rows, flat, mean, rstd, rms, mask)
    parameters = zip(others, (weight, bias), strict=True)
    return dx, *(t if t is None else t.view_as(like).to(like.dtype) for t, like in parameters)


def _dims(op: str, x: torch.Tensor, normalized_shape: Sequence[int] | int) -> int:
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not sizes or tuple(x.shape[-len(sizes) :]) != sizes:
        raise ValueError(f"{op}: input has shape {list(x.shape)}, expected one that ends in {list(sizes)}")
    return len(sizes)


def layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int] | int, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.layer_norm, with a result of `dtype` (default: input's)."""
    return _row_norm(input, weight, bias, _dims("layer_norm", input, normalized_shape), 0, eps, False, dtype)[0]


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int] | int, weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.rms_norm."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _row_norm(input, weight, None, _dims("rms_norm", input, normalized_shape), 0, eps, True, None)[0]


def group_norm(
    input: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.group_norm."""
    if input.dim() < 2 or num_groups < 1 or input.shape[1] % num_groups:
        raise ValueError(f"group_norm: input {list(input.shape)} cannot be divided into num_groups {num_groups}")
    return _row_norm(input, weight, bias, 0, num_groups, eps, False, None)[0]
