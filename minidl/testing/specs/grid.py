"""The specs of `affine_grid`, and of `grid_sample`: a weighted sum of up to 8 pixels, and the gradients of pixels and
positions.

A coordinate v has an error of a few roundings of numbers up to its size, `error`. The sum is continuous in it: along
each axis it changes by at most 2 max |x| for each unit, as a pixel's gradient changes by at most 2 |dy|. Positions are
drawn away from kinks, where differences are no derivatives.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case, OpSpec, in_either_order, integers, refuses
from minidl.testing.specs.make import Make


def _sampled(x: torch.Tensor, grid: torch.Tensor, mode: str, padding: str, corners: bool) -> torch.Tensor:
    if not x.numel() or not grid.numel():  # torch reads memory outside
        return (x.sum() + grid.sum()) * x.new_zeros(*x.shape[:2], *grid.shape[1:-1])
    return F.grid_sample(x, grid, mode, padding, corners)


def _error(case: Case, dtype: torch.dtype) -> float:
    x, grid, mode, *_ = case.args
    top = (float(grid.abs().max()) + 3) * max(x.shape[2:])
    return 0.0 if mode == "nearest" else 8 * len(x.shape[2:]) * bounds.acc_unit(dtype) * top


def _bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, *settings = case.args
    total = _sampled(x.abs(), *settings)
    error = bounds.gamma(16, bounds.acc_unit(dtype)) * total + 2 * _error(case, dtype) * x.abs().max()
    return bounds.rounded(y, bounds.or_infinite(error + 16 * bounds.TINY[dtype], 8 * total, dtype), dtype)


def _grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    dx, dgrid = grads
    x, grid, mode, padding, corners = case.args
    u, off, tiny, P = bounds.acc_unit(dtype), _error(case, dtype), bounds.TINY[dtype], dy[0, 0].numel()
    like = torch.zeros_like(x).requires_grad_()
    with torch.enable_grad():
        (total,) = torch.autograd.grad(_sampled(like, grid, mode, padding, corners), like, dy.abs())
    each = dy.abs().sum(tuple(range(2, dy.dim())), keepdim=True)
    error = bounds.gamma(8 * P + 16, u) * total + 2 * off * each + 8 * P * tiny
    scale = 2 * max(x.shape[2:]) * x.abs().max() * dy.abs().sum(1).unsqueeze(-1)
    slope = scale * (bounds.gamma(dy.shape[1] + 32, u) + 4 * off) * (mode != "nearest") + 8 * P * tiny * (1 + scale)
    limits = bounds.or_infinite(error, 8 * each + total, dtype), bounds.or_infinite(slope, 8 * scale, dtype)
    return bounds.rounded(dx, limits[0], dtype), bounds.rounded(dgrid, limits[1].expand_as(dgrid), dtype)


def _case(make: Make, N: int, C: int, sizes: tuple[int, ...], out: tuple[int, ...], *settings: Any) -> Case:
    numbers = 2 * make.integers(N, *out, len(sizes), low=-5800, high=5800) + 1  # odd numbers over 8198 = 2 * 4099
    grid = (numbers + 2 * (numbers % 4099 == 0)).to(make.dtype) / 8198
    return Case((in_either_order(make, make.tensor(N, C, *sizes)), grid, *settings))


def _inputs(make: Make) -> Case:
    D = make.integer(2, 3)
    sizes, out = (tuple(make.size(1, 7) for _ in range(D)) for _ in "io")
    padding, corners = make.choice(["zeros", "border", "reflection"]), bool(make.integer(0, 1))
    shape = make.size(1, 3), make.size(1, 5)
    return _case(make, *shape, sizes, out, make.choice(["bilinear", "nearest"]), padding, corners)


def _points(theta: torch.Tensor, size: tuple[int, ...], corners: bool) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # that sizes of 1 have changed
        return F.affine_grid(theta, list(size), corners)


def _points_bound(case: Case, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Coordinates up to 1 are rounded once, from float64; then it is a product."""
    total = case.args[0].abs().sum(-1)
    error = (4 * bounds.UNIT[dtype] + bounds.gamma(8, bounds.acc_unit(dtype))) * total + 8 * bounds.TINY[dtype]
    error = bounds.or_infinite(error, total, dtype)
    return bounds.rounded(y, error.reshape(len(y), *[1] * (y.dim() - 2), -1).expand_as(y), dtype)


def _points_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    total, P = dy.abs().flatten(1, -2).sum(1), dy[0, ..., 0].numel()
    error = (4 * bounds.UNIT[dtype] + bounds.gamma(P + 8, bounds.acc_unit(dtype))) * total + P * bounds.TINY[dtype]
    return (bounds.rounded(grads[0], bounds.or_infinite(error, total, dtype).unsqueeze(-1).expand_as(grads[0]), dtype),)


def _matrices(make: Make) -> Case:
    D = make.integer(2, 3)
    size = make.size(1, 3), make.size(1, 3), *(make.size(1, 7) for _ in range(D))
    return Case((make.tensor(size[0], D, D + 1), size, bool(make.integer(0, 1))))


SPECS = [
    OpSpec(
        name="affine_grid",
        op=ops.affine_grid,
        reference=_points,
        inputs=_matrices,
        bound=_points_bound,
        grad_bound=_points_grad_bound,
        differentiable=(0,),
        families=("gemm", "gemm_pointer", "gemm_sum"),
        examples={
            "images": lambda make: Case((make.tensor(2, 2, 3), (2, 3, 33, 17), False)),
            "volumes": lambda make: Case((make.tensor(2, 3, 4), (2, 1, 5, 6, 7), True)),
        },
        bad=(
            refuses(ValueError, r"theta has shape \[1, 2, 3\] and size is \[2,", (1, 2, 3), extra=((2, 1, 4, 4),)),
            refuses(TypeError, "theta has dtype torch.int64", integers(1, 2, 3), extra=((1, 1, 4, 4),)),
        ),
    ),
    OpSpec(
        name="grid_sample",
        op=ops.grid_sample,
        reference=_sampled,
        inputs=_inputs,
        bound=_bound,
        grad_bound=_grad_bound,
        differentiable=(0, 1),
        families=("sparse",),
        examples={
            "images": lambda make: _case(make, 2, 19, (9, 12), (11, 13), "bilinear", "zeros", False),
            "volumes": lambda make: _case(make, 1, 3, (4, 5, 6), (3, 4, 5), "bilinear", "reflection", True),
        },
        bad=(
            refuses(ValueError, "mode is 'bicubic', expected", (1, 2, 3, 3), (1, 2, 2, 2), extra=("bicubic",)),
            refuses(ValueError, r"got input \[1, 2, 3, 3\] and grid \[2, 2, 2, 2\]", (1, 2, 3, 3), (2, 2, 2, 2)),
            refuses(TypeError, "input has dtype torch.int64", integers(1, 2, 3, 3), (1, 2, 2, 2)),
        ),
    ),
]  # fmt: skip
