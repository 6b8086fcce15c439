"""Specs of resized and padded images.

A pixel is a weighted sum of up to 16 pixels. A weight has an error of one rounding and, if positions are computed in
another order of operations, of `size` units of float64. A gradient is such a sum over the pixels that use the pixel.
Bicubic weights, some of them negative, add up to less than 2 in magnitude (1.375 along each axis).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minidl.ops.resample import LINEAR
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, integers, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make


def _error(total: torch.Tensor, terms: int, size: int, top: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of such a sum; volumes are resized along two dimensions first, and rounded."""
    between = (bounds.UNIT[dtype] * total + terms * bounds.TINY[dtype]) if total.dim() == 5 else 0.0
    error = between + bounds.gamma(terms + 4, bounds.acc_unit(dtype)) * total + 8 * size * 2.0**-53 * top
    return bounds.or_infinite(error + terms * bounds.TINY[launch.acc_torch(dtype)], total, dtype)


def _bounds(op: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the bounds of a sum with nonnegative weights, from the operation on absolute values."""

    def bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        mode = case.kwargs.get("mode", "nearest")
        if name == "pad" or mode.startswith("nearest"):
            return torch.zeros_like(y)
        x = case.args[0].abs()
        if mode == "bicubic":
            total = (2 * x.amax((2, 3), keepdim=True)).expand(y.shape)
            return bounds.rounded(y, _error(total, 16, 8 * max(*x.shape, *y.shape), x.amax(), dtype), dtype)
        total = op(x, *case.args[1:], **case.kwargs)
        terms = x[0, 0].numel() if mode == "area" else 12
        return bounds.rounded(y, _error(total, terms, max(*x.shape, *y.shape), x.amax(), dtype), dtype)

    def grad_bound(
        case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        (dx,) = grads
        x = torch.zeros_like(case.args[0]).requires_grad_()
        with torch.enable_grad():
            y = op(x, *case.args[1:], **case.kwargs)
            (total,) = torch.autograd.grad(y, x, dy.abs()) if y.numel() else (torch.zeros_like(x),)
        cubic = case.kwargs.get("mode") == "bicubic"
        if cubic:
            total = (2 * dy.abs().sum((2, 3), keepdim=True)).expand(x.shape)
        terms = max(1, (16 if cubic else 4) * dy.numel())
        top = dy.abs().amax() * terms if dy.numel() else torch.zeros(())
        most = min(terms, 400)
        size = max(*x.shape, *dy.shape, 1) if cubic or case.kwargs.get("mode") in LINEAR.values() else 0
        return (bounds.rounded(dx, _error(total, most, size, top, dtype), dtype),)

    return {"reference": op, "bound": bound, "grad_bound": grad_bound}


def _images(make: Make, least: int = 1) -> torch.Tensor:
    x = make.tensor(make.size(1, 3), make.size(1, 5), make.size(least, 8), make.size(least, 8))
    return x.contiguous(memory_format=torch.channels_last) if make.integer(0, 1) else x


def _sizes(make: Make) -> Case:
    if make.integer(0, 2) == 0:
        rank = make.choice([1, 3])
        x = make.tensor(2, 2, *(make.size(1, 5) for _ in range(rank)))
        return Case((x, None, make.choice([2, 1.5])), {"mode": make.choice(["nearest", "area", LINEAR[rank + 2]])})
    settings: dict[str, Any] = {"mode": make.choice(["nearest", "nearest-exact", "area", "bilinear", "bicubic"])}
    if settings["mode"].startswith("bi"):
        settings["align_corners"] = bool(make.integer(0, 1))
    if make.integer(0, 1):
        return Case((_images(make), (make.size(1, 17), make.size(1, 17))), settings)
    return Case((_images(make, 2), None, make.choice([2, 3, 1.5, 0.5, (2.0, 0.75)])), settings)


def _margins(make: Make) -> Case:
    if make.integer(0, 1):
        mode = make.choice(["reflect", "replicate", "circular"])
        return Case((_images(make, 4), [make.integer(0, 3) for _ in range(4)]), {"mode": mode})
    if make.integer(0, 1):
        return Case((make.tensor(3, 4), [make.integer(-1, 2) for _ in range(2 * make.integer(1, 2))]), {"value": 1.5})
    x, count = _images(make, 3), 2 * make.integer(1, 4)
    return Case((x, [make.integer(-1 if x.shape[-1 - i // 2] > 2 else 0, 4) for i in range(count)]))


SPECS: list[OpSpec] = [
    spec_factory()(
        "interpolate",
        **_bounds(F.interpolate, "interpolate"),
        inputs=_sizes,
        differentiable=(0,),
        families=("elementwise", "pool", "pool_grad"),
        specials=False,  # torch multiplies by weights of 0
        examples={
            "twice": tensors((2, 3, 9, 33), extra=(None, 2), mode="bilinear"),
            "nearest": tensors((2, 3, 9, 33), extra=((20, 50),)),
            "cubic": tensors((2, 3, 9, 33), extra=((5, 50),), mode="bicubic"),
        },
        bad=(
            refuses(ValueError, "unknown mode 'lanczos'", (2, 3, 4, 4), extra=(8,), mode="lanczos"),
            refuses(ValueError, "give one of size and scale_factor", (2, 3, 4, 4)),
            refuses(ValueError, r"\[2, 3, 4\] does not fit mode 'bilinear'", (2, 3, 4), extra=(8,), mode="bilinear"),
        ),
    ),
    spec_factory()(
        "pad",
        **_bounds(F.pad, "pad"),
        inputs=_margins,
        differentiable=(0,),
        families=("elementwise",),
        examples={
            "zeros": tensors((2, 3, 9, 33), extra=([1, 2, 3, 4],)),
            "mirrored": tensors((2, 3, 9, 33), extra=([1, 2, 3, 4],), mode="reflect"),
        },
        bad=(
            refuses(ValueError, "margins 4 and 0 do not fit", (1, 1, 4, 4), extra=([4, 0],), mode="reflect"),
            refuses(ValueError, "unknown mode 'wrap'", (1, 1, 4, 4), extra=([1, 1],), mode="wrap"),
            refuses(TypeError, "input has dtype torch.int64", integers(1, 1, 4, 4), extra=([1, 1],), mode="reflect"),
        ),
    ),
    spec_factory()(
        "pixel_shuffle",
        reference=F.pixel_shuffle,
        inputs=lambda make: Case((make.tensor(make.size(1, 3), 4 * make.size(1, 3), make.size(1, 5), 3), 2)),
        bound=lambda case, y, dtype: torch.zeros_like(y),
        grad_bound=lambda case, dy, grads, dtype: (torch.zeros_like(grads[0]),),
        differentiable=(0,),
        families=("elementwise",),
        bad=(refuses(ValueError, r"input \[1, 3, 4, 4\] has no multiple of 4 channels", (1, 3, 4, 4), extra=(2,)),),
    ),
]
