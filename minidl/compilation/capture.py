"""Capture of a training step as a CUDA graph: one call then replays all of its kernel launches.

    step = minidl.capture(train_step)       # forward, loss, backward, clipping and update of one batch
    for x, y in batches:
        loss = step(x, y)

A step on tensors of constant shapes and addresses that reads nothing on the host launches the same kernels each time.
A graph holds these launches; its results equal those of the step bit for bit. Everything that changes from step to
step is on the device: inputs, in buffers that each call copies into; learning rates and step counts, in the optimisers;
the seed and stream of random numbers, here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from minidl import random
from minidl.autograd.deferred import settle_all
from minidl.common import thread_settings
from minidl.compilation.cuda_graph import record_graph, shared_resources
from minidl.compilation.first_call import delayed_launches
from minidl.compilation.step_inputs import Input, Kind, check_inputs, kind_of, shape_of, shapes_message
from minidl.runtime import launch, streams
from minidl.tensors import Tensor

T = TypeVar("T")
EAGER = 3  # calls before the recording, in which kernels are compiled
_thread = thread_settings.settings()


def capture(step: Callable[..., T], *, eager: int = EAGER, shapes: int = 1) -> Captured[T]:
    """Return `step` as a CUDA graph: the first `eager` calls run normally, the next is recorded, later ones replay it.

    The first call delays its launches until all kernels that they need are compiled, on all processors in parallel, or
    until a value is read; `minidl.compile_ahead` compiles earlier.

    On a CPU every call runs the step normally. `step` takes Tensors, torch tensors and CSR batches by position, all on
    one device and without requires_grad, and returns tensors: one, None, or tuples, lists and dicts of them. A call
    returns new tensors without a graph of operations. A captured step inside another one becomes part of it. Capture
    a bound method: self.step = capture(self.step).

    All calls must have inputs of the same dtypes and of at most `shapes` different shapes. Each shape is recorded
    separately and holds the memory of a step; recordings share what they can. Once it is recorded, the Python code of
    the step no longer runs. So it must
      - keep everything it reads except its inputs (weights, buffers) at fixed addresses and change it in place;
      - not change its inputs, which are copies on a GPU;
      - read no value on the host (item, float, a condition on a tensor), not synchronise, and copy nothing to or from
        host memory: return the values and read them after the call;
      - call zero_grad() before backward(). Gradients are in the graph's memory and do not outlive a call;
      - not change modes such as train() and eval().
    Learning rates and other numbers of an optimiser, the random state, a loss scale, and weights (by load_state_dict)
    may change between calls. A call whose step raises does not count.

    A call raises TypeError for inputs or results of another type or dtype and ValueError for other shapes, devices or
    numbers of inputs, also on a CPU; RuntimeError for a step that reads a value on the host while it is recorded.
    """
    return Captured(step, eager, shapes)


def recording() -> bool:
    """Return whether this thread's step is being recorded, so that its Python code runs for the last time."""
    return getattr(_thread, "recording", False)


def at_replay(prepare: Callable[[], None]) -> None:
    """Call `prepare` before each replay of the captured step that runs in this thread, if any.

    Use it for work on the host, which a graph cannot do: `prepare` may change memory that the graph reads.
    """
    hooks = getattr(_thread, "hooks", None)
    if hooks is not None:
        hooks[prepare] = None


@dataclass
class _Recording:
    """The state for one set of input shapes: the number of calls and, once recorded, the graph and its memory."""

    calls: int = 0
    graph: Any = None
    inputs: tuple[Input, ...] = ()
    outputs: Any = None
    draws: int = 0  # streams of random numbers that a step uses
    precision: str = ""
    hooks: dict[Callable[[], None], None] = field(default_factory=dict)


class Captured(Generic[T]):
    """A step captured by `capture`; call it like the step."""

    def __init__(self, step: Callable[..., T], eager: int = EAGER, shapes: int = 1) -> None:
        if not callable(step):
            raise TypeError(f"capture: step is a {type(step).__name__}, expected a function")
        for name, value in (("eager", eager), ("shapes", shapes)):
            if type(value) is not int or value < 1:
                raise ValueError(f"capture: {name} is {value!r}, expected a number of at least 1")
        self._step, self._eager, self._shapes = step, eager, shapes
        self._kinds: tuple[Kind, ...] | None = None
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        # On a GPU, set by the first call: seed and stream of random numbers, and resources of all recordings.
        self._key: torch.Tensor | None = None
        self._seed = 0  # the seed in `_key`
        self._resources: tuple[Any, Any] | None = None
        self._lock = threading.RLock()
        self._stream: Any = None  # of the last call

    def __call__(self, *inputs: Any, **keywords: Any) -> T:
        """Run the step with these inputs; on a GPU it is queued on the current stream, one call after another."""
        if keywords:
            raise TypeError(f"a captured step takes its inputs by position; got the keywords {', '.join(keywords)}")
        device = check_inputs(inputs, self._kinds, self._key)
        uses_graph = _has_graphs(device) and not getattr(_thread, "inside", False)
        with self._after_others(device) if uses_graph else contextlib.nullcontext():
            return self._run(inputs, device)

    @contextlib.contextmanager
    def _after_others(self, device: torch.device) -> Iterator[None]:
        """A context for a call: all share memory, so it starts after the calls of other threads and their GPU work."""
        with self._lock:
            before, self._stream = self._stream, streams.current(device)
            streams.follow(self._stream, before)
            yield

    def _run(self, inputs: tuple[Input, ...], device: torch.device) -> T:
        shape = tuple(map(shape_of, inputs))
        state = self._recordings.get(shape)
        if state is None:
            if len(self._recordings) == self._shapes:
                raise ValueError(shapes_message(shape, self._recordings))
            state = _Recording()
        if getattr(_thread, "inside", False):
            return _map(self._step(*inputs), _detached)
        if not _has_graphs(device):
            with _inside():
                outputs = _map(self._step(*inputs), _copied)
        elif state.graph is None and state.calls < self._eager:
            # Clones, as in the recording, so that kernels are compiled for aligned memory.
            first = delayed_launches(device) if state.calls == 0 else contextlib.nullcontext()
            with self._numbered(state, device), first:
                outputs = _map(self._step(*map(_clone, inputs)), _copied)
        else:
            if state.graph is None:
                self._record(state, inputs, device)
            outputs = self._replay(state, inputs)
        state.calls += 1
        self._recordings[shape] = state
        self._kinds = tuple(map(kind_of, inputs))
        return outputs

    def rehearse(self, inputs: tuple[Any, ...]) -> None:
        """Run the step as its first calls do, without counting the call."""
        device = check_inputs(inputs, self._kinds, self._key)
        with self._numbered(_Recording(), device) if _has_graphs(device) or launch.for_other_target() else _inside():
            self._step(*map(_clone, inputs))

    def __get__(self, instance: object, owner: type | None = None) -> Captured[T]:
        """Raise TypeError for a captured method of a class, which would be called without `self`."""
        if instance is None:
            return self
        name = (instance if isinstance(instance, type) else type(instance)).__name__
        raise TypeError(
            f"a captured step is an attribute of the class {name} and would be called without `self`: "
            "capture a bound method, as in self.step = minidl.capture(self.step)"
        )

    @contextlib.contextmanager
    def _numbered(self, state: _Recording, device: torch.device) -> Iterator[None]:
        """A context that reads random streams from the device, as the recording does, to use the same kernels."""
        if self._key is None:
            self._key = torch.zeros(2, dtype=torch.int64, device=device)
        numbers = random.get_state()
        self._number(self._key, numbers)
        before, _thread.hooks = getattr(_thread, "hooks", None), state.hooks
        try:
            with random.numbered_by(self._key, numbers["stream"]), _inside():
                yield
        finally:
            _thread.hooks = before

    def _number(self, key: torch.Tensor, numbers: dict[str, int]) -> None:
        if numbers["seed"] != self._seed:
            key[0].fill_(numbers["seed"])
            self._seed = numbers["seed"]
        key[1].fill_(numbers["stream"])

    def _record(self, state: _Recording, inputs: tuple[Input, ...], device: torch.device) -> None:
        # Copy changed values now; the graph would copy them at every replay.
        for prepare in list(state.hooks):
            prepare()
        buffers = tuple(_clone(x) for x in inputs)
        if self._resources is None:
            self._resources = shared_resources(device)
        try:
            _thread.recording = True
            with random.forked(), self._numbered(state, device):
                first = random.get_state()["stream"]

                def call() -> Any:
                    outputs = _map(self._step(*buffers), _detached)
                    settle_all()
                    return outputs

                graph, outputs = record_graph(call, *self._resources)
                state.draws = random.get_state()["stream"] - first
        except BaseException:
            self._resources = None  # the allocator counts the memory of a failed recording as in use
            raise
        finally:
            _thread.recording = False
        # Store complete graphs only.
        state.graph, state.inputs, state.outputs = graph, buffers, outputs
        state.precision = launch.float32_precision()

    def _replay(self, state: _Recording, inputs: tuple[Input, ...]) -> Any:
        if launch.float32_precision() != state.precision:
            raise ValueError(
                f"the step was captured with float32 precision {state.precision}, which is now "
                f"{launch.float32_precision()}: capture the step again"
            )
        for prepare in state.hooks:
            prepare()
        for buffer, x in zip(state.inputs, inputs, strict=True):
            _copy(buffer, x)
        if state.draws:
            assert self._key is not None
            self._number(self._key, random.skip(state.draws))
        state.graph.replay()
        return _map(state.outputs, _clone)


def _clone(x: Any) -> Any:
    return Tensor(x.data.clone()) if isinstance(x, Tensor) else x.clone()


def _copy(buffer: Any, x: Any) -> None:
    if isinstance(buffer, Tensor):
        buffer.data.copy_(x.data)
    else:
        buffer.copy_(x)


def _detached(output: Tensor | torch.Tensor) -> Tensor | torch.Tensor:
    return output.detach()


def _copied(output: Tensor | torch.Tensor) -> Any:
    """Return a copy, as a replay does: the next call may change the memory that a step returns."""
    return _clone(output.detach())


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """A context for a captured step that runs in this thread; computes deferred results before and after it."""
    settle_all()
    before, _thread.inside = getattr(_thread, "inside", False), True
    try:
        yield
        settle_all()
    finally:
        _thread.inside = before


def _map(outputs: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to every tensor in the outputs of a step. Raises TypeError for other outputs."""
    if outputs is None:
        return None
    if isinstance(outputs, Tensor | torch.Tensor):
        return function(outputs)
    if type(outputs) in (tuple, list):
        return type(outputs)(_map(part, function) for part in outputs)
    if type(outputs) is dict:
        return {name: _map(part, function) for name, part in outputs.items()}
    raise TypeError(
        f"a captured step returns tensors, or tuples, lists and dicts of them; it returned a {type(outputs).__name__}"
    )


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"
