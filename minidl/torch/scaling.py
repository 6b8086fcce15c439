"""added + x * scale * factor (by channel and example), the end of ConvNeXt's blocks, as a torch operator."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import scaled_sum as kernels
from minidl.torch.registry import Gradients, operator


def _like(x: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor of x's shape with dimension `axis` innermost in memory."""
    return x.new_empty(x.movedim(axis, -1).shape, dtype=dtype).movedim(-1, axis)


def _fake(x: Any, scale: Any, factor: Any, added: Any, axis: Any) -> torch.Tensor:
    return _like(x, axis, kernels.promoted(x, scale, factor, added))


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, scale, factor, added, ctx.axis = inputs
    if ctx.needs_input_grad[2]:
        raise ValueError("minidl::scaled_sum: factor gets no gradient; pass factor.detach()")
    ctx.added = added.dtype
    ctx.save_for_backward(x, scale, factor)


def _gradients(ctx: Any, dy: torch.Tensor) -> Any:
    mask = list(ctx.needs_input_grad[:2])
    dx, dscale = scaled_sum_backward(dy, *ctx.saved_tensors, ctx.axis, mask) if any(mask) else (None, None)
    return dx, dscale, None, dy.to(ctx.added) if ctx.needs_input_grad[3] else None, None


@operator(
    "scaled_sum(Tensor x, Tensor scale, Tensor? factor, Tensor added, int axis) -> Tensor",
    _fake, save=_save, backward=_gradients, replay=True,
)  # fmt: skip
def _scaled_sum(
    x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, added: torch.Tensor, axis: int
) -> torch.Tensor:
    """Return added + x * scale * factor: x and added of one shape, scale [C] along `axis`, factor [N] along axis 0."""
    return kernels.scaled_sum(x.movedim(axis, -1), scale, factor, added.movedim(axis, -1)).movedim(-1, axis)


def _fake_backward(dy: Any, x: Any, scale: Any, factor: Any, axis: Any, mask: Any) -> list[torch.Tensor]:
    return [_like(x, axis, x.dtype), torch.empty_like(scale, memory_format=torch.contiguous_format)]


@operator(
    "scaled_sum_backward(Tensor dy, Tensor x, Tensor scale, Tensor? factor, int axis, bool[] wanted) -> Tensor[]",
    _fake_backward, replay=True,
)  # fmt: skip
def scaled_sum_backward(
    dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, axis: int, mask: list[bool]
) -> Gradients:
    rows = dy.movedim(axis, -1), x.movedim(axis, -1)
    dx, dscale = kernels.scaled_sum_grad(*rows, scale, factor, want_x=mask[0], want_scale=mask[1])
    return None if dx is None else dx.movedim(-1, axis), dscale


def scaled(scale: torch.Tensor, x: torch.Tensor, factor: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
    """Return added + scale * x * factor; by torch if the scale's dimension is not innermost in memory."""
    axis = _axis(scale, x, added)
    if axis is None:
        y = scale * x
        return (y if factor is None else y * factor) + added
    return _scaled_sum(x, scale.reshape(-1), None if factor is None else factor.reshape(-1), added, axis)


def _axis(scale: torch.Tensor, x: torch.Tensor, added: torch.Tensor) -> int | None:
    """Return the dimension of x that the scale is along if it is innermost in all tensors."""
    for axis in {1, x.dim() - 1} if x.dim() > 1 else (0,):
        at = axis - x.dim()
        if scale.dim() >= -at and scale.shape[at] == scale.numel() == x.shape[axis]:
            dense = x.movedim(axis, -1).is_contiguous() and added.movedim(axis, -1).is_contiguous()
            return axis if dense else None
    return None
