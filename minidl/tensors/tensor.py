"""Tensor: a torch buffer and its position in the graph of operations.

torch supplies memory, strides, devices and copies; `minidl.ops` computes, and attaches its operators here when it is
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from minidl.autograd import Function
from minidl.autograd.deferred import Deferred, open_
from minidl.autograd.graph import Variable, set_arithmetic
from minidl.common import suggestions
from minidl.kernels import check, elementwise, reduce
from minidl.tensors.conversions import TensorConversions
from minidl.tensors.core import Scalar as Scalar
from minidl.tensors.core import TensorCore
from minidl.tensors.devices import device_of
from minidl.tensors.torch_callers import refuse_callers

if TYPE_CHECKING:
    from minidl.tensors.attached import AttachedOperations

    _Operations = AttachedOperations["Tensor"]
else:
    _Operations = TensorCore  # minidl.ops attaches the operations to Tensor itself

OPERATIONS: set[str] = set()  # names of `minidl.ops`, which fills it
_NOTHING = torch.empty(0)  # the memory of a result that is not computed yet


class Tensor(TensorConversions["Tensor"], _Operations):
    """An n-dimensional array that records the operations on it.

    `data` is the torch tensor underneath. With `requires_grad`, operations on it are recorded and
    `backward()` fills `grad`. Raises TypeError for data that is not a torch tensor (see `minidl.as_tensor`) and for
    gradients of integers, or whose gradient torch records, or that is a view with the other sign.
    """

    __slots__ = ()

    __hash__ = object.__hash__

    # A NumPy number on the left of an operator leaves the operator to Tensor.
    __array_ufunc__ = None

    def __init__(self, data: torch.Tensor, requires_grad: bool = False) -> None:
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"Tensor wraps a torch tensor, got {type(data).__name__}; use minidl.as_tensor(...)")
        if data.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{type(self).__name__}: torch records the gradient of this tensor, which would end here; pass "
                "t.detach(), and requires_grad=True for a gradient of minidl's"
            )
        if data.is_neg():
            raise TypeError(
                f"{type(self).__name__}: this tensor stands for its memory's numbers with the other sign; pass "
                "t.resolve_neg()"
            )
        Variable.__init__(self, data.detach())
        if requires_grad is not False:
            self.requires_grad_(requires_grad)

    @classmethod
    def _of_deferred(cls, deferred: Deferred) -> Tensor:
        """Return the tensor of a deferred result."""
        tensor = cls.__new__(cls)
        Variable.__init__(tensor, _NOTHING)
        tensor._deferred, tensor._requires_grad = deferred, deferred.requires_grad
        open_(tensor)
        return tensor

    def _twin(self) -> Tensor:
        """Return a second tensor of the same value, at the same position in the graph."""
        twin = Tensor.__new__(Tensor)
        Variable.__init__(twin, self._data)
        twin._take_place(self)
        return twin

    def _take_place(self, other: Tensor) -> None:
        """Take over another tensor's value, computed or deferred, and its position in the graph."""
        self._data, self._deferred, self._fused = other._data, other._deferred, False
        self._node, self._index, self._requires_grad = other._node, other._index, other._requires_grad
        if self._deferred is not None:
            open_(self)

    def new_zeros(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """Return a Tensor of zeros, of this one's dtype and on its device unless named."""
        shape = check.sizes("zeros", size)
        return Tensor(torch.zeros(shape, dtype=dtype or self.dtype, device=device_of(device or self.device)))

    def new_ones(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """Return a Tensor of ones, of this one's dtype and on its device unless named."""
        shape = check.sizes("ones", size)
        return Tensor(torch.ones(shape, dtype=dtype or self.dtype, device=device_of(device or self.device)))

    def type_as(self, other: Tensor) -> Tensor:
        """Return the tensor in the dtype of another, and on its device."""
        return self.to(other.device, other.dtype)

    def view_as(self, other: Tensor) -> Tensor:
        """Return the tensor in the shape of another."""
        return self.reshape(other.shape)

    reshape_as = view_as

    def expand_as(self, other: Tensor) -> Tensor:
        """Return the tensor broadcast to the shape of another."""
        return self.expand(other.shape)

    def t(self) -> Tensor:
        """Return the transposed matrix; a vector as it is. Raises ValueError for more dimensions."""
        if self.ndim > 2:
            raise ValueError(f"t: the tensor has shape {list(self.shape)}, expected a matrix; use transpose or .mT")
        return self.T

    @property
    def mT(self) -> Tensor:  # noqa: N802 (torch's name)
        """A view with the last two dimensions exchanged."""
        return self.transpose(-2, -1)

    def detach(self) -> Tensor:
        """Return the same values without a graph, sharing memory."""
        return Tensor(self.data)

    def cpu(self) -> Tensor:
        """Return the tensor on the CPU."""
        return self.to("cpu")

    def cuda(self) -> Tensor:
        """Return the tensor on the current CUDA device."""
        return self.to("cuda")

    def __iter__(self) -> Iterator[Tensor]:
        refuse_callers()
        if self.ndim == 0:
            raise TypeError("a tensor of 0 dimensions cannot be iterated over")
        return (self[i] for i in range(len(self)))

    def __format__(self, spec: str) -> str:
        as_number = self.ndim == 0 and type(self) is Tensor  # a parameter is printed as a tensor, as torch's
        return format(self.item(), spec) if as_number else super().__format__(spec)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Return torch asks this of a Tensor among the arguments of its functions: refuse, and name minidl's."""
        refuse_callers(depth=4)
        name = getattr(function, "__name__", "").strip("_")
        matching = next((n for n in (name, name[1:]) if n in OPERATIONS), None)
        advice = "" if matching is None else f"minidl.ops.{matching}, or "
        text = (
            f"{torch.overrides.resolve_name(function) or name} got a minidl Tensor; use {advice}torch's with "
            "x.to_torch(), whose gradient is torch's alone"
        )
        # After a TypeError Python tries x + t for t + x; an in-place operation must not be retried.
        in_place = getattr(function, "__name__", "") == f"{name}_"
        raise RuntimeError(text) if in_place else TypeError(text)

    if not TYPE_CHECKING:  # hidden from type checkers, which would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            if name.endswith("_") and name[:-1] in OPERATIONS:
                raise AttributeError(f"Tensor has no {name}; write x = minidl.ops.{name[:-1]}(x), or x.copy_() of that")
            if name in OPERATIONS:
                raise AttributeError(f"Tensor has no {name}; write minidl.ops.{name}(x)")
            raise suggestions.attribute("minidl.Tensor", name, [*dir(type(self)), *OPERATIONS])


def _has_nan(values: torch.Tensor) -> bool:
    return bool(reduce.amax(elementwise.ne(values, values)))


Function.result_class = Tensor
set_arithmetic(elementwise.add, _has_nan)


def _converting(name: str) -> Callable[..., Tensor]:
    """Return the method that converts to torch's dtype of a name."""

    def method(self: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self.to(getattr(torch, name), memory_format=memory_format)

    method.__name__, method.__doc__ = name, f"The tensor as {getattr(torch, name)}. Raises TypeError as `to`."
    return method


for _name in ("float", "half", "double", "bfloat16", "long", "int", "bool"):
    setattr(Tensor, _name, _converting(_name))
