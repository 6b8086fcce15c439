"""Create Tensors: from data, from torch tensors, and filled with a value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.kernels import check
from minidl.tensors.devices import device_of
from minidl.tensors.tensor import Scalar, Tensor


def is_tensor(obj: Any) -> bool:
    """Return whether an object is a Tensor."""
    return isinstance(obj, Tensor)


def from_torch(data: torch.Tensor, requires_grad: bool = False) -> Tensor:
    """Return a Tensor over a torch tensor's memory, without a copy. Raises TypeError where torch records its
    gradient."""
    return Tensor(data, requires_grad)


def as_tensor(
    data: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a Tensor over `data`: numbers, nested lists, a NumPy array, a torch tensor or a Tensor, sharing memory if
    it can.

    Python floats become float32. The device is where kernels run unless named; a Tensor is returned as it is, or
    converted as by `to`, so that gradients flow through. Raises TypeError or ValueError for data without a regular
    shape.
    """
    if isinstance(data, Tensor):
        same = dtype in (None, data.dtype) and (device is None or torch.device(device) == data.device)
        data = data if same else data.to(device or data.device, dtype or data.dtype)
        return data if data.requires_grad or not requires_grad else Tensor(data.data, True)
    return made_by(torch.as_tensor, data, dtype, device, requires_grad)


def made_by(
    create: Callable[..., torch.Tensor], data: Any, dtype: torch.dtype | None, device: torch.device | str | None,
    requires_grad: bool,
) -> Tensor:  # fmt: skip
    """Return the Tensor that torch.tensor or torch.as_tensor creates from `data`, whose lists may contain Tensors."""
    try:
        tensor = create(data, dtype=dtype, device=device_of(device))
    except (TypeError, ValueError):
        if (plain := _without_tensors(data)) is data:
            raise
        tensor = create(plain, dtype=dtype, device=device_of(device))
    return Tensor(tensor, requires_grad)


def _without_tensors(data: Any) -> Any:
    """Return nested lists with torch tensors instead of Tensors; data without Tensors unchanged."""
    if isinstance(data, Tensor):
        return data.data
    if not isinstance(data, list | tuple):
        return data
    parts = [_without_tensors(part) for part in data]
    return data if all(map(operator.is_, parts, data)) else parts


def zeros(
    *shape: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a Tensor of zeros. Raises ValueError for a size below 0, TypeError for a size that is no whole number."""
    return Tensor(torch.zeros(check.sizes("zeros", shape), dtype=dtype, device=device_of(device)), requires_grad)


def ones(
    *shape: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a Tensor of ones. Raises as `zeros`."""
    return full(check.sizes("ones", shape), 1.0, dtype=dtype, device=device, requires_grad=requires_grad)


def full(
    size: Sequence[int],
    fill_value: Scalar,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a Tensor of one value: of torch's default dtype unless named, or int64 of an integer and bool of a
    bool."""
    shape = check.sizes("full", (size,))
    return Tensor(torch.full(shape, fill_value, dtype=dtype, device=device_of(device)), requires_grad)
