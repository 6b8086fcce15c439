"""Errors of long sums, and of the gradient of the activation after them, for the specs of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.activation import apply, derivative, output_error
from minidl.testing.specs.base import Case

# (case, dtype) -> z = the sums of products with the bias, and the error of z in the accumulate type.
Preactivation = Callable[[Case, torch.dtype], tuple[torch.Tensor, torch.Tensor]]

ACTIVATIONS: tuple[Activation, ...] = (
    None, "relu", "leaky_relu", ("leaky_relu", 0.25), "sigmoid", "tanh", "gelu", "gelu_tanh", "silu",
    "relu6",
)  # fmt: skip
# sup |act''|.
_CURVATURES = {"gelu": 0.8, "gelu_tanh": 0.86, "silu": 0.5}


def sum_error(total: torch.Tensor, near_zero: torch.Tensor, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of sums of products a b.

    `total` is sum |a| |b|, `near_zero` sum (|a| + 1) (|b| + 1), and `depth` the longest chain of additions.
    """
    left_out = 0.0
    if dtype == torch.float32 and not launch.ON_CPU:
        # The parts of a number that the products drop, if parts are truncated to 11 bits.
        left_out = {"tf32x3": 3 * 2.0**-20, "tf32": 2 * 2.0**-10 + 2.0**-20, "ieee": 0.0}[launch.float32_precision()]
    relative = bounds.gamma(depth, bounds.dot_unit(dtype)) + left_out
    # A product below the smallest normal number may underflow, and so may such a number before its product.
    return bounds.or_infinite(total * relative + near_zero * bounds.TINY[launch.acc_torch(dtype)], total, dtype)


def with_bias(z: torch.Tensor, error: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the error of z in the accumulate type, from the error of the sums before the bias."""
    return error if bias is None else error + bounds.acc_unit(dtype) * (z.abs() + error)


def slope_error(
    act: Activation, z: torch.Tensor, error: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return act'(z) for z with an error of `error`, and its error if computed from z or act(z) in `dtype`.

    The error is infinite if the stored value overflows.
    """
    name, slope = activation.parse(act)
    u = bounds.acc_unit(dtype)
    exact = derivative(z, act)
    if name is None:
        return exact, torch.zeros_like(z)
    if name in ("relu", "leaky_relu"):
        # The side of 0 is certain beyond the error of z.
        other = 1.0 if name == "relu" else abs(1.0 - slope)
        return exact, torch.where(z.abs() <= error + bounds.TINY[dtype], other, u * exact)
    if name == "relu6":
        near = torch.minimum(z.abs(), (z - 6).abs() - 6 * torch.finfo(dtype).eps)
        return exact, torch.where(near <= error + bounds.TINY[dtype], 1.0, 0.0)
    if name in activation.FROM_OUTPUT:
        stored_error = bounds.rounded(apply(z, act), output_error(z, error, act, dtype), dtype)
        return exact, (2 if name == "tanh" else 1) * stored_error + 4 * u
    stored_error = bounds.rounded(z, error, dtype)
    off = _CURVATURES[name] * stored_error + 16 * u * (1 + z.abs())
    return exact, torch.where(z.abs() + stored_error > torch.finfo(dtype).max, math.inf, off)


def output_bound(op: Callable[..., Any], preactivation: Preactivation) -> Callable[..., torch.Tensor]:
    """Return the bound of act(z); the activation is the last argument of `op`."""

    def bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        z, error = preactivation(case, dtype)
        return bounds.rounded(result, output_error(z, error, case.arguments(op)[-1], dtype), dtype)

    return bound


def incoming(
    act: Activation, dy: torch.Tensor, z: torch.Tensor, z_error: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an upper bound of |dz| for dz = dy act'(z), stored in `dtype`, and the error of dz.

    Both are infinite if dz may overflow.
    """
    slope, off = slope_error(act, z, z_error, dtype)
    dz = (dy * slope).abs()
    error = torch.zeros_like(dz) if act is None else bounds.rounded(dz, dy.abs() * off, dtype)
    error = torch.where(dz + error > torch.finfo(dtype).max, math.inf, error.nan_to_num(nan=math.inf, posinf=math.inf))
    return dz + error, error


def bias_error(magnitude: torch.Tensor, error: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the error of the sum of dz over `dims`, for |dz| up to `magnitude` with errors `error`."""
    sums, count = magnitude.sum(dims), math.prod(magnitude.shape[d] for d in dims)
    total = error.sum(dims) + bounds.gamma(count + 2, bounds.acc_unit(dtype)) * sums
    return torch.where(sums > torch.finfo(dtype).max / 2, math.inf, total)


def gradient_bounds(grads: Sequence[Any], errors: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bounds of gradients with errors `errors` before they are rounded; None for a gradient None."""
    return tuple(
        None if grad is None else bounds.rounded(grad, error.nan_to_num(nan=math.inf, posinf=math.inf), dtype)
        for grad, error in zip(grads, errors, strict=True)
    )
