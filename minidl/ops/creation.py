"""Create Tensors from data or filled with values, under torch's names; by default on the device that runs kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from minidl.kernels import check, elementwise
from minidl.ops import random, sorting
from minidl.ops.promotion import python_number
from minidl.ops.random import rand, randn
from minidl.tensors import Scalar, Tensor, device_of, full, made_by

__all__ = [
    "arange", "empty", "empty_like", "eye", "from_numpy", "full_like", "linspace", "ones_like", "rand_like", "randint",
    "randn_like", "randperm", "tensor", "zeros_like",
]  # fmt: skip

Where = torch.device | str | None
Kind = torch.dtype | None


def tensor(data: Any, dtype: Kind = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Return a copy of `data`: numbers, lists of them, a NumPy array or a tensor, without a graph. Floats become
    float32.

    Raises TypeError or ValueError for data without a regular shape.
    """
    if isinstance(data, Tensor | torch.Tensor):
        source = data.data if isinstance(data, Tensor) else data.detach()
        copy = torch.empty_like(source, dtype=dtype or source.dtype, device=device or source.device)
        return Tensor(copy.copy_(source), requires_grad)
    return made_by(torch.tensor, data, dtype, device, requires_grad)


def from_numpy(ndarray: Any) -> Tensor:
    """Return a Tensor over a NumPy array's memory, on the CPU as torch's; `as_tensor` puts it where kernels run."""
    return Tensor(torch.from_numpy(ndarray))


def arange(
    start: Scalar | None = None, end: Scalar | None = None, step: Scalar = 1, *, dtype: Kind = None,
    device: Where = None, requires_grad: bool = False,
) -> Tensor:  # fmt: skip
    """Return start, start + step, ... below end (above it for a step below 0); from 0 where end is left out.

    int64 for whole numbers, else float32, computed in float64 and rounded once.
    Raises ValueError for a step of 0, or one that leads away from end, and for values that are not finite.
    """
    if start is None and end is None:
        raise TypeError("arange: got no end, expected arange(end) or arange(start, end)")
    start = 0 if start is None else start
    start, end, step = map(python_number, (0, start, step) if end is None else (start, end, step))
    if step == 0 or (end - start) * step < 0 or not all(map(math.isfinite, (start, end, step))):
        raise ValueError(f"arange: a step of {step!r} does not lead from {start!r} to {end!r}")
    integers = all(isinstance(value, int) for value in (start, end, step))
    dtype = dtype or (torch.int64 if integers else torch.get_default_dtype())
    where = device_of(device)
    if integers and not dtype.is_floating_point:
        return Tensor(torch.arange(start, end, step, dtype=dtype, device=where), requires_grad)
    count = math.ceil((end - start) / step)
    return Tensor(_steps(start, step, count, where).to(dtype), requires_grad)


def linspace(
    start: Any, end: Any, steps: int, *, dtype: Kind = None, device: Where = None, requires_grad: bool = False
) -> Tensor:
    """Return `steps` numbers from start to end, both included, evenly spaced; float32, computed in float64 and rounded
    once.

    Raises ValueError for a negative number of steps.
    """
    if not hasattr(steps, "__index__") or steps < 0:
        raise ValueError(f"linspace: steps is {steps!r}, expected a whole number from 0")
    for value in (start, end):
        if isinstance(value, Tensor | torch.Tensor) and value.numel() != 1:
            raise ValueError(f"linspace: an end has shape {list(value.shape)}, expected one number")
    start, end = (v.item() if isinstance(v, Tensor | torch.Tensor) else python_number(v) for v in (start, end))
    where, between = device_of(device), (end - start) / max(steps - 1, 1)
    # From both ends, so that both are exact.
    half = (steps + 1) // 2
    parts = _steps(start, between, half, where), _steps(end, -between, steps - half, where).flip(0)
    return Tensor(torch.cat(parts).to(dtype or torch.get_default_dtype()), requires_grad)


def _steps(start: float, step: float, count: int, device: torch.device | str) -> torch.Tensor:
    """Return start + i step for i from 0 to count, float64."""
    i = torch.arange(count, dtype=torch.int64, device=device).double()
    return elementwise.add(elementwise.mul(i, step), start)


def eye(
    n: int, m: int | None = None, *, dtype: Kind = None, device: Where = None, requires_grad: bool = False
) -> Tensor:
    """Return ones on the diagonal, else zeros: [n, m], or [n, n]. Raises ValueError for a negative size."""
    columns = n if m is None else m
    if n < 0 or columns < 0:
        raise ValueError(f"eye: got [{n}, {columns}], expected sizes from 0")
    data = torch.zeros(n, columns, dtype=dtype or torch.get_default_dtype(), device=device_of(device))
    data.diagonal().fill_(1)
    return Tensor(data, requires_grad)


def empty(*size: Any, dtype: Kind = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor whose values are whatever the memory holds."""
    data = torch.empty(check.sizes("empty", size), dtype=dtype or torch.get_default_dtype(), device=device_of(device))
    return Tensor(data, requires_grad)


def full_like(
    input: Tensor, fill_value: Scalar, *, dtype: Kind = None, device: Where = None, requires_grad: bool = False
) -> Tensor:
    """Return a Tensor of one value in input's shape, and its dtype and device unless named."""
    dtype, device = dtype or input.dtype, device or input.device
    return full(input.shape, fill_value, dtype=dtype, device=device, requires_grad=requires_grad)


def zeros_like(input: Tensor, *, dtype: Kind = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Return zeros, as `full_like`."""
    return full_like(input, 0, dtype=dtype, device=device, requires_grad=requires_grad)


def ones_like(input: Tensor, *, dtype: Kind = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Return ones, as `full_like`."""
    return full_like(input, 1, dtype=dtype, device=device, requires_grad=requires_grad)


def empty_like(input: Tensor, *, dtype: Kind = None, device: Where = None, requires_grad: bool = False) -> Tensor:
    """Return an uninitialised Tensor in input's shape, dtype and device unless named."""
    return empty(input.shape, dtype=dtype or input.dtype, device=device or input.device, requires_grad=requires_grad)


def rand_like(
    input: Tensor, *, seed: int | None = None, dtype: Kind = None, device: Where = None, requires_grad: bool = False
) -> Tensor:
    """Return `rand` in input's shape, and its dtype and device unless named."""
    dtype, device = dtype or input.dtype, device or input.device
    return rand(input.shape, seed=seed, dtype=dtype, device=device, requires_grad=requires_grad)


def randn_like(
    input: Tensor, *, seed: int | None = None, dtype: Kind = None, device: Where = None, requires_grad: bool = False
) -> Tensor:
    """Return `randn` in input's shape, and its dtype and device unless named."""
    dtype, device = dtype or input.dtype, device or input.device
    return randn(input.shape, seed=seed, dtype=dtype, device=device, requires_grad=requires_grad)


def randint(
    low: Any = 0, high: Any = None, size: Sequence[int] | None = None, *, seed: int | None = None, dtype: Kind = None,
    device: Where = None, requires_grad: bool = False,
) -> Tensor:  # fmt: skip
    """Return whole numbers from low (included, 0 by default) to high (excluded), int64: randint(10, (2, 3)).

    Seeds as `rand`. Raises ValueError unless low < high <= low + 2^31 or for a negative size, TypeError without a size.
    """
    if size is None:
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    if not isinstance(size, Sequence):
        raise TypeError(f"randint: size is {size!r}, expected a sequence, as in randint(10, (2, 3))")
    data = random.randint(low, high, size, seed, device).data
    return Tensor(data if dtype is None else data.to(dtype), requires_grad)


def randperm(n: int, *, seed: int | None = None, dtype: torch.dtype = torch.int64, device: Where = None) -> Tensor:
    """Return the numbers from 0 to below n in a random order. Seeds as `rand`. Raises ValueError for a negative
    number."""
    return Tensor(sorting.argsort(rand(n, seed=seed, dtype=torch.float64, device=device)).data.to(dtype))
