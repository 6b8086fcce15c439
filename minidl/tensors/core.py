"""The part of Tensor that every other part uses: shape, dtype, device, and the operation that computed it."""

from __future__ import annotations

from typing import TypeVar

import torch

from minidl import autograd
from minidl.autograd.graph import Variable

Scalar = int | float | bool
TensorT = TypeVar("TensorT", bound="TensorCore")  # Tensor, which is composed of its parts


class TensorCore(Variable):
    """A value with the attributes of a tensor, those of what it will be computed from if that is deferred."""

    __slots__ = ()

    @property
    def shape(self) -> torch.Size:
        """Its sizes."""
        return (self._deferred or self._data).shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements, one of torch's."""
        return (self._deferred or self._data).dtype

    @property
    def device(self) -> torch.device:
        """Where its memory is."""
        return (self._deferred or self._data).device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len((self._deferred or self._data).shape)

    def dim(self) -> int:
        """Return number of dimensions."""
        return len((self._deferred or self._data).shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape, or the extent of one dimension."""
        shape = (self._deferred or self._data).shape
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        """Return number of elements."""
        return (self._deferred or self._data).shape.numel()

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a GPU."""
        return bool(self.device.type == "cuda")

    def is_floating_point(self) -> bool:
        """Return whether it has a floating type."""
        return bool(self.dtype.is_floating_point)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Return whether its elements lie in this order, row by row unless another is named."""
        return self.data.is_contiguous(memory_format=memory_format)

    def stride(self, dim: int | None = None) -> tuple[int, ...] | int:
        """Return the distance in elements between neighbours in memory, along each dimension or one."""
        return self.data.stride() if dim is None else self.data.stride(dim)

    @property
    def grad_fn(self) -> autograd.Node | None:
        """The recorded operation that computed this tensor, or None."""
        return self._edge_node()

    def _edge_node(self) -> autograd.Node | None:
        """Return the recorded operation that computed this tensor, or None."""
        self._settle()
        return self._node
