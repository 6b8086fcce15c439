"""A sum with a tensor that is scaled by channel and by example, as the blocks of ConvNeXt end, as an operator of torch.

`scaled` is what `accelerate` puts in place of the lines that `shortcuts` finds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minidl.kernels import scaled_sum as kernels
from minidl.torch.layers import ready
from minidl.torch.registry import operator, transformed

# Modules that multiply examples by 0 or 1 / (1 - p) in training: module and class, and what holds p.
_DEPTHS = {("torchvision.ops.stochastic_depth", "StochasticDepth"): "p", ("timm.layers.drop", "DropPath"): "drop_prob"}


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


def drops(module: nn.Module) -> bool:
    """Whether a module is stochastic depth, or nothing in its place."""
    return type(module) is nn.Identity or _named(module) in _DEPTHS


def _named(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


def scaled(scale: Any, x: Any, depth: nn.Module | None, added: Any, in_place: bool) -> Any:
    """added + depth(scale * x); in place: of added into the rest, whose dtype the result then has."""
    axis = _axis(scale, x, added, in_place)
    if axis is None or not (depth is None or _fits(depth)):
        y = scale * x if depth is None else depth(scale * x)
        if in_place:
            y += added
            return y
        return y + added
    factor = None if depth is None else _factor(depth, x, torch.promote_types(x.dtype, scale.dtype))
    return _scaled_sum(x, scale.reshape(-1), factor, added, axis)


def _fits(depth: nn.Module) -> bool:
    """torch.vmap has rules of its own for random numbers."""
    mapped = not torch.compiler.is_compiling() and transformed()
    return drops(depth) and not (mapped and depth.training)


def _factor(depth: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """What a module multiplies examples by, of the random numbers that it takes for x; None where it leaves them."""
    name = _DEPTHS.get(_named(depth))
    if name is None or not depth.training or getattr(depth, name) == 0:
        return None
    ones = torch.ones((x.shape[0],) + (1,) * (x.dim() - 1), dtype=dtype, device=x.device)
    found: torch.Tensor = depth(ones)
    return found.reshape(-1)


def _axis(scale: Any, x: Any, added: Any, in_place: bool) -> int | None:
    """The dimension of x that a scale is along, if all can be one operator: torch's rules are left to torch, and what
    would be copied to lie with that dimension last."""
    if not (ready(x) and ready(scale) and ready(added)) or x.dim() < 2 or scale.dim() > x.dim():
        return None
    if not x.device == scale.device == added.device or x.shape != added.shape:
        return None
    if in_place and torch.promote_types(x.dtype, scale.dtype) != kernels.promoted(x, scale, added):
        return None
    for axis in (1, x.dim() - 1):
        at = axis - x.dim()
        if scale.dim() >= -at and scale.shape[at] == scale.numel() == x.shape[axis]:
            dense = x.movedim(axis, -1).is_contiguous() and added.movedim(axis, -1).is_contiguous()
            return axis if dense else None
    return None
