"""The order in which a model calls its layers, found by running `forward` on placeholder tensors.

A `Traced` tensor without a value returns another one from every operation, and records the layer call that produced
it. A trace without values cannot follow code that depends on values or shapes, such as an `if` or a loop over a batch.
With an example input the tensors have values, and any code can be followed.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from minidl import random
from minidl.autograd import UnknownTensor, no_grad
from minidl.autograd.graph import Variable
from minidl.nn.layers import Linear, SparseLinear
from minidl.nn.module import Module
from minidl.tensors import Tensor

_BATCH = 13  # assumed rows of an input of unknown size; a number that no view of a model names


@dataclass(eq=False)
class Call:
    """One call of a layer: the batch norms that took its output, and whether anything else used it."""

    layer: Module
    norms: list[Module] = field(default_factory=list)
    elsewhere: bool = False
    outputs: list[weakref.ref[Traced]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Normed:
    """One call of a batch norm on the output of the layer call `call`, or of something else (None).

    `features` int64 [C, ...] are the output indices of a linear layer at each position of one example.
    """

    norm: Module
    call: Call | None
    features: torch.Tensor | None


class Traced(Tensor):
    """A tensor in a trace: the output of the layer call `call`, or of something else (None); with a value if traced on
    an example. `places` int64 [N, ...] are the indices of a linear layer's outputs, tracked through views.
    """

    __slots__ = ("_value", "call", "places")

    def __init__(
        self, value: torch.Tensor | None, call: Call | None = None, places: torch.Tensor | None = None
    ) -> None:
        super().__init__(torch.empty(0) if value is None else value)
        self._value, self.call, self.places = value, call, places
        if call is not None:
            call.outputs.append(weakref.ref(self))

    @property
    def data(self) -> torch.Tensor:
        _mark_used(self)
        return self.known()

    @data.setter
    def data(self, value: torch.Tensor | Variable) -> None:
        self._value = value.data if isinstance(value, Variable) else value

    def known(self) -> torch.Tensor:
        """The value, without marking the tensor as used."""
        if self._value is None:
            _unknown("the values of a tensor")
        return self._value

    @property
    def shape(self) -> Any:
        return _Shape() if self._value is None else self._value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.known().dtype

    @property
    def device(self) -> torch.device:
        return self.known().device

    @property
    def ndim(self) -> int:
        return self.known().dim()

    def dim(self) -> int:
        """Number of dimensions."""
        return self.known().dim()

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the extent of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def reshape(self, *shape: Any) -> Tensor:
        """As `Tensor.reshape`."""
        return self._viewed("reshape", *shape)

    def view(self, *shape: Any) -> Tensor:
        """As `Tensor.view`."""
        return self._viewed("reshape", *shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """As `Tensor.flatten`."""
        return self._viewed("flatten", start_dim, end_dim)

    def permute(self, *dims: Any) -> Tensor:
        """As `Tensor.permute`."""
        return self._viewed("permute", *dims)

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """As `Tensor.transpose`."""
        return self._viewed("transpose", dim0, dim1)

    # The same results; who else holds the name of what is changed sees none of it, and no trace asks that.
    __iadd__, __isub__, __imul__ = Tensor.__add__, Tensor.__sub__, Tensor.__mul__  # type: ignore[assignment]
    __itruediv__, __ipow__ = Tensor.__truediv__, Tensor.__pow__  # type: ignore[assignment]

    def _viewed(self, name: str, *args: Any) -> Tensor:
        places = None
        if self.places is not None:
            with contextlib.suppress(TypeError, RuntimeError, IndexError, UnknownTensor):
                places = getattr(self.places, name)(*args)
        if places is None or self.places is None or len(places) != len(self.places):
            return getattr(Tensor, name)(self, *args)
        value = None if self._value is None else getattr(Tensor(self._value), name)(*args).data
        return Traced(value, self.call, places)


class _Size:
    """A size of a tensor of unknown shape: it supports arithmetic, but no comparison."""

    def _computed(self, *_: Any) -> _Size:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _computed
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __pow__ = _computed

    def _looked_at(self, *_: Any) -> NoReturn:
        _unknown("the shape of a tensor")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _looked_at
    __index__ = __int__ = __float__ = __hash__ = _looked_at


class _Shape(_Size):
    """The shape of a tensor of unknown shape."""

    def __getitem__(self, index: Any) -> _Size:
        return _Size() if isinstance(index, int) else self

    __iter__ = __len__ = _Size._looked_at


def _unknown(what: str) -> NoReturn:
    raise UnknownTensor(f"it reads {what}", _answer)


def _answer(arguments: Any) -> Traced:
    """The result of an operation on tensors without values."""
    _mark_used(arguments)
    return Traced(None)


def _mark_used(value: Any) -> None:
    """Mark the layer outputs in an argument as used by something other than a batch norm."""
    if isinstance(value, Traced):
        if value.call is not None:
            value.call.elsewhere = True
    elif isinstance(value, list | tuple):
        for part in value:
            _mark_used(part)
    elif isinstance(value, dict):
        _mark_used(list(value.values()))


class _Watched(dict[str, Any]):
    """The parameters or the buffers of a module; `read` is called when one is read by its name."""

    def __init__(self, values: dict[str, Any], read: Callable[[], None]) -> None:
        super().__init__(values)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read()
        return super().__getitem__(name)


class Trace:
    """The calls of layers and batch norms in one call of `model` in evaluation mode, in order.

    `is_layer` and `is_norm` select these modules. Without an example the model is called on placeholders; raises
    ValueError when the `forward` of a module with layers or batch norms fails on them.
    `callers` has, for every module that is called, the modules that called it (None: `model` itself is called);
    `read` the layers and norms whose parameters or buffers anything else reads.
    """

    def __init__(
        self,
        model: Module,
        example: tuple[Any, ...],
        is_layer: Callable[[Module], bool],
        is_norm: Callable[[Module], bool],
    ) -> None:
        self.calls: list[Call] = []
        self.normed: list[Normed] = []
        self.read: set[Module] = set()
        self.callers: dict[Module, list[Module | None]] = {}
        modules = list(model.modules())
        self._layers, self._norms = set(filter(is_layer, modules)), set(filter(is_norm, modules))
        self._example = bool(example)
        self._under_way: list[Module] = []
        with random.forked(), no_grad(), self._watching(model):
            # Held until then: a layer output that is still alive may be used after this call.
            result = model(*example) if example else model.forward(*_arguments(model))
            for call in self.calls:
                call.elsewhere |= any(output() is not None for output in call.outputs)
            del result

    @contextlib.contextmanager
    def _watching(self, model: Module) -> Iterator[None]:
        modules = list(model.modules())
        before = [(module, module.training, module.__dict__.get("forward")) for module in modules]
        watchers = [self._watcher(module) for module in modules]
        watched = self._layers | self._norms
        own = {module: [(name, module.__dict__[name]) for name in ("_parameters", "_buffers")] for module in watched}
        try:
            for module, watcher in zip(modules, watchers, strict=True):
                module.__dict__.update(forward=watcher, training=False)
            for module in watched:
                module.__dict__.update({name: _Watched(values, self._reader(module)) for name, values in own[module]})
            yield
        finally:
            for module in watched:
                module.__dict__.update(own[module])
            for module, training, forward in before:
                module.__dict__.update(forward=forward, training=training)
                if forward is None:
                    del module.__dict__["forward"]

    def _reader(self, module: Module) -> Callable[[], None]:
        def read() -> None:
            if not self._under_way or self._under_way[-1] is not module:
                self.read.add(module)

        return read

    def _watcher(self, module: Module) -> Callable[..., Any]:
        forward = module.forward

        def entered(*args: Any, **named: Any) -> Any:
            self._under_way.append(module)
            try:
                return forward(*args, **named)
            finally:
                self._under_way.pop()

        def called(*args: Any, **named: Any) -> Any:
            self.callers.setdefault(module, []).append(self._under_way[-1] if self._under_way else None)
            if module in self._layers:
                return self._layer(module, entered, args, named)
            if module in self._norms:
                return self._norm(module, entered, *args, **named)
            return self._other(module, entered, args, named)

        return called

    def _layer(self, layer: Module, forward: Callable[..., Tensor], args: Any, named: Any) -> Traced:
        _mark_used((args, named))
        value = forward(*args, **named).data if self._example else None
        call = Call(layer)
        self.calls.append(call)
        places = None
        if isinstance(layer, Linear | SparseLinear) and (value is None or value.dim() == 2):
            rows = _BATCH if value is None else len(value)
            places = torch.arange(rows * layer.out_features).reshape(rows, -1)
        return Traced(value, call, places)

    def _norm(self, norm: Module, forward: Callable[[Any], Tensor], x: Any) -> Tensor:
        call = features = None
        if isinstance(x, Traced):
            call = x.call
            if call is not None:
                call.norms.append(norm)
            if x.places is not None:
                features = _of_one_example(x.places)
        self.normed.append(Normed(norm, call, features))
        if not self._example:
            return Traced(None)
        return forward(Tensor(x.known()) if isinstance(x, Traced) else x)

    def _other(self, module: Module, forward: Callable[..., Any], args: Any, named: Any) -> Any:
        calls = len(self.calls) + len(self.normed)
        try:
            return forward(*args, **named)
        except Exception as error:  # tensors without values can cause any error
            watched = self._layers | self._norms
            if self._example or isinstance(error, _OrderError):
                raise
            if watched.isdisjoint(module.modules()) and calls == len(self.calls) + len(self.normed):
                return _answer((args, named))
            raise _OrderError(
                f"fold_batch_norms: forward of {type(module).__name__} cannot be traced without an input "
                f"({error}); give an example: fold_batch_norms(model, x)"
            ) from error


class _OrderError(ValueError):
    """The order of layers and batch norms is unknown."""


def _arguments(module: Module) -> list[Traced]:
    """A placeholder for each required argument of `forward`."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(type(module).forward).parameters.values()
    needed = [one for one in parameters if one.kind in kinds and one.default is inspect.Parameter.empty]
    return [Traced(None) for _ in needed[1:]]


def _of_one_example(places: torch.Tensor) -> torch.Tensor | None:
    """The output indices of the first example, of those of N; None if a view mixed the examples."""
    first = places[0]
    numbers = torch.arange(len(places)).reshape(-1, *[1] * first.dim())
    return first if torch.equal(places, first + numbers * first.numel()) else None
