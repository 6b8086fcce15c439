"""A tensor scaled by channel and by example and added to another, as ConvNeXt's blocks end, as an operator of torch."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import scaled_sum as kernels
from minidl.torch.registry import operator


def _like(x: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of x's shape whose dimension `axis` lies last."""
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
    wanted = list(ctx.needs_input_grad[:2])
    found = iter(scaled_sum_backward(dy, *ctx.saved_tensors, ctx.axis, wanted) if any(wanted) else ())
    dx, dscale = (next(found) if want else None for want in wanted)
    return dx, dscale, None, dy.to(ctx.added) if ctx.needs_input_grad[3] else None, None


@operator(
    "scaled_sum(Tensor x, Tensor scale, Tensor? factor, Tensor added, int axis) -> Tensor",
    _fake, save=_save, backward=_gradients, replay=True,
)  # fmt: skip
def _scaled_sum(
    x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, added: torch.Tensor, axis: int
) -> torch.Tensor:
    """added + x * scale * factor: x and added of one shape, scale [C] along `axis`, factor [N] along the first."""
    return kernels.scaled_sum(x.movedim(axis, -1), scale, factor, added.movedim(axis, -1)).movedim(-1, axis)


def _fake_backward(dy: Any, x: Any, scale: Any, factor: Any, axis: Any, wanted: Any) -> list[torch.Tensor]:
    made = _like(x, axis, x.dtype), torch.empty_like(scale, memory_format=torch.contiguous_format)
    return [each for each, want in zip(made, wanted, strict=True) if want]


@operator(
    "scaled_sum_backward(Tensor dy, Tensor x, Tensor scale, Tensor? factor, int axis, bool[] wanted) -> Tensor[]",
    _fake_backward, replay=True,
)  # fmt: skip
def scaled_sum_backward(
    dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, axis: int, wanted: list[bool]
) -> list[torch.Tensor]:
    rows = dy.movedim(axis, -1), x.movedim(axis, -1)
    dx, dscale = kernels.scaled_sum_grad(*rows, scale, factor, want_x=wanted[0], want_scale=wanted[1])
    return [each for each in (None if dx is None else dx.movedim(-1, axis), dscale) if each is not None]


def scaled(scale: torch.Tensor, x: torch.Tensor, factor: torch.Tensor | None, added: torch.Tensor) -> torch.Tensor:
    """Return added + scale * x * factor; by torch where it would be copied to lie with the scale's dimension last."""
    axis = _axis(scale, x, added)
    if axis is None:
        y = scale * x
        return (y if factor is None else y * factor) + added
    return _scaled_sum(x, scale.reshape(-1), None if factor is None else factor.reshape(-1), added, axis)


def _axis(scale: torch.Tensor, x: torch.Tensor, added: torch.Tensor) -> int | None:
    """The dimension of x that a scale is along, where all that is read lies with it last."""
    for axis in {1, x.dim() - 1} if x.dim() > 1 else (0,):
        at = axis - x.dim()
        if scale.dim() >= -at and scale.shape[at] == scale.numel() == x.shape[axis]:
            dense = x.movedim(axis, -1).is_contiguous() and added.movedim(axis, -1).is_contiguous()
            return axis if dense else None
    return None
