"""The order in which a model calls its layers, recorded by running `forward` on placeholder tensors.

Every operation on a `Traced` tensor without a value returns another one, which records the layer call that produced it.
Without values, code that depends on values or shapes cannot be traced, such as an `if` or a loop over a batch. With an
example input the tensors have values, and any code can be traced.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from minidl import random
from minidl.autograd import no_grad
from minidl.nn.layers import Linear, SparseLinear
from minidl.nn.module import Module
from minidl.nn.placeholder import Call, Traced, mark_used, placeholder_result
from minidl.tensors import Tensor

_BATCH = 13  # assumed rows of an input of unknown size; models are unlikely to use this number in a view


@dataclass(frozen=True, eq=False)
class NormCall:
    """One call of a batch norm on the output of the layer call `call`, or of something else (None).

    `features` int64 [C, ...] are the output indices of a linear layer at each position of one example.
    """

    norm: Module
    call: Call | None
    features: torch.Tensor | None


class _WatchedDict(dict[str, Any]):
    """The parameters or buffers of a module; `read` is called when one is read by name."""

    def __init__(self, values: dict[str, Any], read: Callable[[], None]) -> None:
        super().__init__(values)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read()
        return super().__getitem__(name)


class Trace:
    """The calls of layers and batch norms in one call of `model` in evaluation mode, in order.

    `is_layer` and `is_norm` select these modules. Without an example the model is called on placeholders; raises
    ValueError if the `forward` of a module with layers or batch norms fails on them. `callers` maps every called module
    to its callers (None for the call of `model`); `read` has the layers and norms whose parameters or buffers are read
    by other modules.
    """

    def __init__(
        self, model: Module, example: tuple[Any, ...], is_layer: Callable[[Module], bool],
        is_norm: Callable[[Module], bool],
    ) -> None:  # fmt: skip
        self.calls: list[Call] = []
        self.norm_calls: list[NormCall] = []
        self.read: set[Module] = set()
        self.callers: dict[Module, list[Module | None]] = {}
        modules = list(model.modules())
        self._layers, self._norms = set(filter(is_layer, modules)), set(filter(is_norm, modules))
        self._example = bool(example)
        self._stack: list[Module] = []
        with random.forked(), no_grad(), self._watching(model):
            # `result` is kept alive: a layer output in it may be used after this call.
            result = model(*example) if example else model.forward(*_arguments(model))
            for call in self.calls:
                call.used_elsewhere |= any(output() is not None for output in call.outputs)
            del result

    @contextlib.contextmanager
    def _watching(self, model: Module) -> Iterator[None]:
        modules = list(model.modules())
        settings = [(module, module.training, module.__dict__.get("forward")) for module in modules]
        watchers = [self._watcher(module) for module in modules]
        watched = self._layers | self._norms
        names = "_parameters", "_buffers"
        originals = {module: [(name, module.__dict__[name]) for name in names] for module in watched}
        try:
            for module, watcher in zip(modules, watchers, strict=True):
                module.__dict__.update(forward=watcher, training=False)
            for module in watched:
                read = self._reader(module)
                module.__dict__.update({name: _WatchedDict(values, read) for name, values in originals[module]})
            yield
        finally:
            for module in watched:
                module.__dict__.update(originals[module])
            for module, training, forward in settings:
                module.__dict__.update(forward=forward, training=training)
                if forward is None:
                    del module.__dict__["forward"]

    def _reader(self, module: Module) -> Callable[[], None]:
        def read() -> None:
            if not self._stack or self._stack[-1] is not module:
                self.read.add(module)

        return read

    def _watcher(self, module: Module) -> Callable[..., Any]:
        forward = module.forward

        def run(*args: Any, **named: Any) -> Any:
            self._stack.append(module)
            try:
                return forward(*args, **named)
            finally:
                self._stack.pop()

        def watched(*args: Any, **named: Any) -> Any:
            self.callers.setdefault(module, []).append(self._stack[-1] if self._stack else None)
            if module in self._layers:
                return self._layer(module, run, args, named)
            if module in self._norms:
                return self._norm(module, run, *args, **named)
            return self._other(module, run, args, named)

        return watched

    def _layer(self, layer: Module, forward: Callable[..., Tensor], args: Any, named: Any) -> Traced:
        mark_used((args, named))
        value = forward(*args, **named).data if self._example else None
        call = Call(layer)
        self.calls.append(call)
        positions = None
        if isinstance(layer, Linear | SparseLinear) and (value is None or value.dim() == 2):
            rows = _BATCH if value is None else len(value)
            positions = torch.arange(rows * layer.out_features).reshape(rows, -1)
        return Traced(value, call, positions)

    def _norm(self, norm: Module, forward: Callable[[Any], Tensor], x: Any) -> Tensor:
        call = features = None
        if isinstance(x, Traced):
            call = x.call
            if call is not None:
                call.norms.append(norm)
            if x.positions is not None:
                features = _features(x.positions)
        self.norm_calls.append(NormCall(norm, call, features))
        if not self._example:
            return Traced(None)
        return forward(Tensor(x.value()) if isinstance(x, Traced) else x)

    def _other(self, module: Module, forward: Callable[..., Any], args: Any, named: Any) -> Any:
        calls = len(self.calls) + len(self.norm_calls)
        try:
            return forward(*args, **named)
        except Exception as error:  # tensors without values can cause any error
            watched = self._layers | self._norms
            if self._example or isinstance(error, _TraceError):
                raise
            if watched.isdisjoint(module.modules()) and calls == len(self.calls) + len(self.norm_calls):
                return placeholder_result((args, named))
            raise _TraceError(
                f"fold_batch_norms: forward of {type(module).__name__} cannot be traced without an input "
                f"({error}); give an example: fold_batch_norms(model, x)"
            ) from error


class _TraceError(ValueError):
    """The order of layers and batch norms cannot be determined."""


def _arguments(module: Module) -> list[Traced]:
    """Return a placeholder for each required argument of `forward`."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(type(module).forward).parameters.values()
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return [Traced(None) for _ in required[1:]]


def _features(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the output indices of the first example of N; None if a view mixed the examples."""
    first = positions[0]
    indices = torch.arange(len(positions)).reshape(-1, *[1] * first.dim())
    return first if torch.equal(positions, first + indices * first.numel()) else None
