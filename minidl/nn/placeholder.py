"""Placeholder tensors of a trace, with a value or without, and the layer calls that produced them."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from minidl.autograd import UnknownTensor
from minidl.autograd.graph import Variable
from minidl.nn.module import Module
from minidl.tensors import Tensor


@dataclass(eq=False)
class Call:
    """One call of a layer: the batch norms that used its output, and whether anything else did."""

    layer: Module
    norms: list[Module] = field(default_factory=list)
    used_elsewhere: bool = False
    outputs: list[weakref.ref[Traced]] = field(default_factory=list)


def _view_method(name: str) -> Any:
    """Return a method as Tensor's, which also returns the positions in the view."""

    def method(self: Traced, *args: Any, **named: Any) -> Tensor:
        positions = None
        if self.positions is not None:
            with contextlib.suppress(TypeError, RuntimeError, IndexError, UnknownTensor):
                positions = getattr(self.positions, name)(*args, **named)
        if positions is None or self.positions is None or len(positions) != len(self.positions):
            return getattr(Tensor, name)(self, *args, **named)
        value = None if self._value is None else getattr(Tensor(self._value), name)(*args, **named).data
        return Traced(value, self.call, positions)

    return method


class Traced(Tensor):
    """A tensor in a trace: the output of the layer call `call`, or of something else (None); with a value if traced on
    an example. `positions` int64 [N, ...] are the indices of a linear layer's outputs, tracked through views.
    """

    __slots__ = ("_value", "call", "positions")

    def __init__(
        self, value: torch.Tensor | None, call: Call | None = None, positions: torch.Tensor | None = None
    ) -> None:
        super().__init__(torch.empty(0) if value is None else value)
        self._value, self.call, self.positions = value, call, positions
        if call is not None:
            call.outputs.append(weakref.ref(self))

    @property
    def data(self) -> torch.Tensor:
        mark_used(self)
        return self.value()

    @data.setter
    def data(self, value: torch.Tensor | Variable) -> None:
        self._value = value.data if isinstance(value, Variable) else value

    def value(self) -> torch.Tensor:
        """Return the value without marking the tensor as used."""
        if self._value is None:
            _unknown("the values of a tensor")
        return self._value

    @property
    def shape(self) -> Any:
        return _Shape() if self._value is None else self._value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value().dtype

    @property
    def device(self) -> torch.device:
        return self.value().device

    @property
    def ndim(self) -> int:
        return self.value().dim()

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.value().dim()

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the extent of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    reshape, flatten, permute, transpose = map(_view_method, ("reshape", "flatten", "permute", "transpose"))
    view = reshape

    # Not in place: other references do not see the change, which no trace depends on.
    __iadd__, __isub__, __imul__ = Tensor.__add__, Tensor.__sub__, Tensor.__mul__  # type: ignore[assignment, misc]
    __itruediv__, __ipow__ = Tensor.__truediv__, Tensor.__pow__  # type: ignore[assignment, misc]


class _Size:
    """A size of a tensor of unknown shape: it supports arithmetic, but no comparison."""

    def _unknown_size(self, *_: Any) -> _Size:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _unknown_size
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __pow__ = _unknown_size

    def _not_comparable(self, *_: Any) -> NoReturn:
        _unknown("the shape of a tensor")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _not_comparable
    __index__ = __int__ = __float__ = __hash__ = _not_comparable


class _Shape(_Size):
    """The shape of a tensor of unknown shape."""

    def __getitem__(self, index: Any) -> _Size:
        return _Size() if isinstance(index, int) else self

    __iter__ = __len__ = _Size._not_comparable


def _unknown(what: str) -> NoReturn:
    raise UnknownTensor(f"it reads {what}", placeholder_result)


def placeholder_result(arguments: Any) -> Traced:
    """Return the result of an operation on tensors without values."""
    mark_used(arguments)
    return Traced(None)


def mark_used(value: Any) -> None:
    """Mark the layer outputs in an argument as used by something other than a batch norm."""
    if isinstance(value, Traced):
        if value.call is not None:
            value.call.used_elsewhere = True
    elif isinstance(value, list | tuple):
        for item in value:
            mark_used(item)
    elif isinstance(value, dict):
        mark_used(list(value.values()))
