"""Norms of rows by their own statistics: layer norm, RMS norm (also of a sum), group norm and instance norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import check
from minidl.kernels import row_norm as kernels
from minidl.ops import norm_grad, reduce
from minidl.ops.batchnorm import batch_norm
from minidl.ops.rearrange import repeat
from minidl.ops.shape import reshape
from minidl.tensors import Tensor

__all__ = ["add_rms_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]

# How x is seen as rows: `kernels.layers` or `kernels.groups`, and its argument.
Seen = tuple[Callable[[torch.Tensor, int], tuple[torch.Tensor, kernels.Rows]], int]


class RowNorm(Function):
    recorded_backward = staticmethod(norm_grad.row_norm)

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        seen: Seen,
        eps: float,
        rms: bool,
    ) -> torch.Tensor:
        x, ctx.rows = seen[0](x, seen[1])
        ctx.seen, ctx.rms, ctx.shapes = seen, rms, [None if t is None else t.shape for t in (weight, bias)]
        weight, bias = [t if t is None or t.dim() == 1 else t.reshape(-1) for t in (weight, bias)]
        y, ctx.mean, ctx.rstd = kernels.forward(x, ctx.rows, weight, bias, eps, rms)
        ctx.save(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved
        dx, dw, db = kernels.backward(dy, x, ctx.rows, weight, ctx.mean, ctx.rstd, ctx.rms, ctx.needs[:3])
        dw, db = (None if t is None else t.view(shape) for t, shape in zip((dw, db), ctx.shapes, strict=True))
        return dx, dw, db, None, None, None


class AddRMSNorm(Function):
    recorded_backward = staticmethod(norm_grad.add_rms_norm)

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, seen: Seen, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, ctx.rows = seen[0](x, seen[1])
        ctx.seen, ctx.rms, ctx.shapes = seen, True, [None if weight is None else weight.shape, None]
        weight = None if weight is None else weight.reshape(-1)
        total = torch.empty_like(x)
        y, ctx.mean, ctx.rstd = kernels.forward(
            x, ctx.rows, weight, None, eps, True, added=residual.contiguous(), total=total
        )
        ctx.save(total, weight)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dtotal: torch.Tensor | None) -> Any:
        total, weight = ctx.saved
        need, need_weight = any(ctx.needs[:2]), ctx.needs[2]
        dw = None
        if dy is not None:
            needs = need, need_weight, False
            dtotal = None if dtotal is None else dtotal.contiguous()
            dtotal, dw, _ = kernels.backward(
                dy, total, ctx.rows, weight, ctx.mean, ctx.rstd, True, needs, added=dtotal
            )  # fmt: skip
        dw = None if dw is None else dw.view(ctx.shapes[0])
        return *(dtotal if wants else None for wants in ctx.needs[:2]), dw, None, None


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int] | int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return (input - mean) / sqrt(var + eps) weight + bias, mean and variance over the last dimensions.

    Shapes: input [*, *normalized_shape], weight and bias normalized_shape -> input's, in its dtype.
    Raises TypeError for dtypes that are not floating or differ, ValueError for shapes that do not fit.
    """
    dims = _dims("layer_norm", input, normalized_shape, weight, bias)
    return RowNorm.apply(input, weight, bias, (kernels.layers, dims), check.real("layer_norm", "eps", eps), False)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int] | int, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return input / sqrt(mean input^2 + eps) weight, the mean over the last dimensions; eps None is the dtype's
    epsilon.

    Shapes and errors as `layer_norm`.
    """
    dims = _dims("rms_norm", input, normalized_shape, weight, None)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return RowNorm.apply(input, weight, None, (kernels.layers, dims), check.real("rms_norm", "eps", eps), True)


def add_rms_norm(
    input: Tensor, residual: Tensor, normalized_shape: Sequence[int] | int, weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (`rms_norm` of the sum, input + residual) in as few launches as `rms_norm` if rows fit a block.

    Shapes: residual as input; else shapes and errors as `rms_norm`. The sum is rounded to input's dtype before it is
    normalised (as in Liger Kernel, arXiv 2410.10989).
    """
    dims = _dims("add_rms_norm", input, normalized_shape, weight, None)
    check.same("add_rms_norm", input=input, residual=residual)
    if residual.shape != input.shape:
        raise ValueError(f"add_rms_norm: residual has shape {list(residual.shape)}, expected {list(input.shape)}")
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    seen = kernels.layers, dims
    return AddRMSNorm.apply(input, residual, weight, seen, check.real("add_rms_norm", "eps", eps))


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return `layer_norm` over each of num_groups groups of channels of each image, with a weight and bias for each
    channel.

    Shapes: input [N, C, ...], weight and bias [C] -> input's, in its dtype and order in memory.
    Raises TypeError for dtypes, ValueError for shapes or a number of groups that does not divide the channels.
    """
    return _by_channels("group_norm", input, num_groups, weight, bias, eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return `group_norm` with every channel a group; or, not use_input_stats, `batch_norm` with running statistics.

    If both are tensors, the running statistics [C] move towards the means of the images' by `momentum`, in place.
    Raises as these; ValueError for images of one pixel.
    """
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if input.ndim > 2 and input.shape[2:].numel() == 1:
        raise ValueError(f"instance_norm: expected more than 1 value per channel, got input {list(input.shape)}")
    if running_mean is None or running_var is None or input.ndim < 3:
        return _by_channels("instance_norm", input, input.shape[1] if input.ndim > 1 else 1, weight, bias, eps)
    # As a batch of one, with the channels of all images.
    N, C = input.shape[:2]
    _fit("instance_norm", (C,), weight, bias)
    for name, buffer in (("running_mean", running_mean), ("running_var", running_var)):
        if tuple(buffer.shape) != (C,):
            raise ValueError(f"instance_norm: {name} has shape {list(buffer.shape)}, expected [{C}]")
    means, variances = (repeat(buffer, N) for buffer in (running_mean, running_var))
    scale, shift = (None if t is None else repeat(t, N) for t in (weight, bias))
    x = reshape(input, 1, N * C, *input.shape[2:])
    y = reshape(batch_norm(x, means, variances, scale, shift, True, momentum, eps), *input.shape)
    for buffer, moved in ((running_mean, means), (running_var, variances)):
        buffer.copy_(reduce.mean(reshape(moved, N, C), 0))
    return y


def _by_channels(
    op: str, input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    check.floating(op, input=input.data)
    check.same(op, input=input, weight=weight, bias=bias)
    if input.ndim < 2:
        raise ValueError(f"{op}: input has shape {list(input.shape)}, expected [N, C, ...]")
    C = input.shape[1]
    num_groups = check.integer(op, "num_groups", num_groups)
    if num_groups < 1 or C % num_groups:
        raise ValueError(f"{op}: {C} channels cannot be shared out to num_groups {num_groups}")
    _fit(op, (C,), weight, bias)
    return RowNorm.apply(input, weight, bias, (kernels.groups, num_groups), check.real(op, "eps", eps), False)


def _dims(
    op: str, input: Tensor, normalized_shape: Sequence[int] | int, weight: Tensor | None, bias: Tensor | None
) -> int:
    """Return the number of dimensions that are normalised."""
    check.floating(op, input=input.data)
    check.same(op, input=input, weight=weight, bias=bias)
    sizes = check.integers(op, "normalized_shape", normalized_shape)
    if not sizes or tuple(input.shape[-len(sizes) :]) != sizes:
        raise ValueError(f"{op}: input has shape {list(input.shape)}, expected one that ends in {list(sizes)}")
    _fit(op, sizes, weight, bias)
    return len(sizes)


def _fit(op: str, shape: tuple[int, ...], *parameters: Tensor | None) -> None:
    for name, parameter in zip(("weight", "bias"), parameters, strict=True):
        if parameter is not None and tuple(parameter.shape) != shape:
            raise ValueError(f"{op}: {name} has shape {list(parameter.shape)}, expected {list(shape)}")
