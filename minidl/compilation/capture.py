"""Capture of a training step as a CUDA graph: one call then replays all of its kernel launches.

    step = minidl.capture(train_step)       # forward, loss, backward, clipping and update of one batch
    for x, y in batches:
        loss = step(x, y)

A step on tensors of constant shapes and addresses that reads nothing on the host launches the same kernels each time.
A graph holds these launches; its results equal those of the step bit for bit. Everything that changes from step to
step is kept on the device: inputs, in buffers that each call copies into; learning rates and step counts, by the
optimisers; the seed and stream of random numbers, here.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidl import random
from minidl.autograd.deferred import settle_all
from minidl.common import locks, thread_settings
from minidl.compilation.first_call import together
from minidl.runtime import launch, streams
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device

T = TypeVar("T")
Input = Tensor | torch.Tensor | CSR

EAGER = 3  # calls before the recording, in which kernels are compiled
_thread = thread_settings.settings()


def capture(step: Callable[..., T], *, eager: int = EAGER, shapes: int = 1) -> Captured[T]:
    """`step` as a CUDA graph: its first `eager` calls run normally, the next is recorded, all later ones replay it.

    In the first call launches wait until all kernels that they need are compiled, on every processor at once, or until
    a value is read; `minidl.compile_ahead` does that earlier.

    On a CPU every call runs the step normally. `step` takes Tensors, torch tensors and CSR batches by position, all on
    one device and without requires_grad, and returns tensors: one, None, or tuples, lists and dicts of them. A call
    returns new tensors without a graph of operations. A captured step inside another one runs as a part of it. Capture
    a bound method: self.step = capture(self.step).

    All calls must have inputs of the same dtypes and of at most `shapes` different shapes. Each shape is recorded
    separately and holds the memory of a step; recordings share what they can. Once it is recorded, the Python code of
    the step no longer runs. So it must
      - keep everything it reads beside its inputs (weights, buffers) at fixed addresses and change it in place;
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
    """Whether this thread's step is being recorded, so that its work on the host happens only this once."""
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
    """The state for inputs of certain shapes: calls so far, and once recorded, the graph and its memory."""

    calls: int = 0
    graph: Any = None
    inputs: tuple[Input, ...] = ()
    outputs: Any = None
    draws: int = 0  # streams of random numbers that a step takes
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
        self._kinds: tuple[tuple[type, torch.dtype], ...] | None = None
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        # On a GPU, from the first call on: seed and stream of random numbers, and what recordings share.
        self._key: torch.Tensor | None = None
        self._seed = 0  # in the key
        self._shared: tuple[Any, Any] | None = None
        self._lock = threading.RLock()
        self._stream: Any = None  # of the last call

    def __call__(self, *inputs: Any, **named: Any) -> T:
        """Run the step with these inputs; on a GPU it is queued on the current stream, one call after another."""
        if named:
            raise TypeError(f"a captured step takes its inputs by position; given by name: {', '.join(named)}")
        device = self._check(inputs)
        shares = _has_graphs(device) and not getattr(_thread, "inside", False)
        with self._after_others(device) if shares else contextlib.nullcontext():
            return self._run(inputs, device)

    @contextlib.contextmanager
    def _after_others(self, device: torch.device) -> Iterator[None]:
        """A context for a call in memory that all calls share: those of other threads, and what they queued, end before
        it."""
        with self._lock:
            before, self._stream = self._stream, streams.current(device)
            streams.follow(self._stream, before)
            yield

    def _run(self, inputs: tuple[Input, ...], device: torch.device) -> T:
        shape = tuple(map(_shape, inputs))
        known = self._recordings.get(shape)
        if known is None:
            if len(self._recordings) == self._shapes:
                raise ValueError(_other_shapes(shape, self._recordings))
            known = _Recording()
        if getattr(_thread, "inside", False):
            return _map(self._step(*inputs), _detached)
        if not _has_graphs(device):
            with _inside():
                outputs = _map(self._step(*inputs), _copied)
        elif known.graph is None and known.calls < self._eager:
            # Copies, as in the recording: kernels are compiled for memory that begins at multiples of 16 bytes.
            first = together(device) if known.calls == 0 else contextlib.nullcontext()
            with self._watched(known, device), first:
                outputs = _map(self._step(*map(_clone, inputs)), _copied)
        else:
            if known.graph is None:
                self._record(known, inputs, device)
            outputs = self._replay(known, inputs)
        known.calls += 1
        self._recordings[shape] = known
        self._kinds = tuple(map(_kind, inputs))
        return outputs

    def rehearse(self, inputs: tuple[Any, ...]) -> None:
        """Run the step as its first calls do, without counting it as one."""
        device = self._check(inputs)
        with self._watched(_Recording(), device) if _has_graphs(device) or launch.recording() else _inside():
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

    def _check(self, inputs: tuple[Any, ...]) -> torch.device:
        """The device of the inputs. Raises TypeError and ValueError, see `capture`."""
        for i, given in enumerate(inputs):
            if not isinstance(given, Tensor | torch.Tensor | CSR):
                raise TypeError(
                    f"a captured step takes tensors and CSR batches, input {i} is a {type(given).__name__}: pass a "
                    "tensor if it changes from call to call, else use it inside the step without passing it"
                )
            if not isinstance(given, CSR) and given.requires_grad:
                raise ValueError(
                    f"input {i} of a captured step requires a gradient: .detach() it, or compute it in the step; "
                    "backward() in the step cannot reach beyond its inputs"
                )
        if self._kinds is not None:
            if len(inputs) != len(self._kinds):
                raise ValueError(f"a captured step was called with {len(self._kinds)} inputs, now with {len(inputs)}")
            for i, (given, (type_, dtype)) in enumerate(zip(inputs, self._kinds, strict=True)):
                if _kind(given) != (type_, dtype):
                    raise TypeError(
                        f"input {i} of a captured step is a {_named(type(given))} of {given.dtype}, and was a "
                        f"{_named(type_)} of {dtype} before: convert it, or capture another step for it"
                    )
        devices = {given.device for given in inputs}
        if len(devices) > 1:
            raise ValueError(
                f"the inputs of a captured step are on {' and '.join(sorted(map(str, devices)))}, expected one device"
            )
        device = devices.pop() if devices else default_device()
        if self._key is not None and device != self._key.device:
            raise ValueError(
                f"the inputs of a captured step are on {device}, and were on {self._key.device} before: capture "
                "another step for each device"
            )
        return device

    @contextlib.contextmanager
    def _watched(self, known: _Recording, device: torch.device) -> Iterator[None]:
        """A context that numbers random streams on the device, as in the recording, to compile the same kernels."""
        if self._key is None:
            self._key = torch.zeros(2, dtype=torch.int64, device=device)
        state = random.get_state()
        self._number(self._key, state)
        before, _thread.hooks = getattr(_thread, "hooks", None), known.hooks
        try:
            with random.numbered_by(self._key, state["stream"]), _inside():
                yield
        finally:
            _thread.hooks = before

    def _number(self, key: torch.Tensor, state: dict[str, int]) -> None:
        if state["seed"] != self._seed:
            key[0].fill_(state["seed"])
            self._seed = state["seed"]
        key[1].fill_(state["stream"])

    def _record(self, known: _Recording, inputs: tuple[Input, ...], device: torch.device) -> None:
        # Copies of changed values happen now; in the graph they would happen at every replay.
        for prepare in list(known.hooks):
            prepare()
        kept = tuple(_clone(given) for given in inputs)
        if self._shared is None:
            self._shared = _shared(device)
        try:
            _thread.recording = True
            with random.forked(), self._watched(known, device):
                first = random.get_state()["stream"]

                def call() -> Any:
                    made = _map(self._step(*kept), _detached)
                    settle_all()
                    return made

                graph, outputs = _recorded(call, *self._shared)
                known.draws = random.get_state()["stream"] - first
        except BaseException:
            self._shared = None  # the allocator counts the memory of a failed recording as in use
            raise
        finally:
            _thread.recording = False
        # Only complete graphs are kept.
        known.graph, known.inputs, known.outputs = graph, kept, outputs
        known.precision = launch.float32_precision()

    def _replay(self, known: _Recording, inputs: tuple[Input, ...]) -> Any:
        if launch.float32_precision() != known.precision:
            raise ValueError(
                f"the step was captured with float32 precision {known.precision}, which is now "
                f"{launch.float32_precision()}: capture the step again"
            )
        for prepare in known.hooks:
            prepare()
        for kept, given in zip(known.inputs, inputs, strict=True):
            _copy(kept, given)
        if known.draws:
            assert self._key is not None
            self._number(self._key, random.skip(known.draws))
        known.graph.replay()
        return _map(known.outputs, _clone)


def _shape(given: Input) -> tuple[Any, ...]:
    return (given.shape, *given.sizes.values()) if isinstance(given, CSR) else tuple(given.shape)


def _kind(given: Input) -> tuple[type, torch.dtype]:
    return type(given), given.dtype


def _named(type_: type) -> str:
    return f"torch.{type_.__name__}" if issubclass(type_, torch.Tensor) else f"minidl.{type_.__name__}"


def _other_shapes(shape: tuple[Any, ...], known: dict[tuple[Any, ...], _Recording]) -> str:
    """The message for a call with one shape too many."""
    had = " and ".join(str(list(map(_words, shapes))) for shapes in known)
    more = "" if len(known) == 1 else f", {len(known)} different ones"
    return (
        f"a captured step has inputs of shapes {list(map(_words, shape))}, and was called with {had} before{more}: "
        f"give batches of one size, or capture(step, shapes={len(known) + 1})"
    )


def _words(shape: tuple[Any, ...]) -> Any:
    if shape and isinstance(shape[0], tuple):
        return f"CSR {list(shape[0])} of sizes {list(shape[1:])}"
    return list(shape)


def _clone(given: Any) -> Any:
    return Tensor(given.data.clone()) if isinstance(given, Tensor) else given.clone()


def _copy(kept: Any, given: Any) -> None:
    if isinstance(kept, Tensor):
        kept.data.copy_(given.data)
    else:
        kept.copy_(given)


def _detached(output: Tensor | torch.Tensor) -> Tensor | torch.Tensor:
    return output.detach()


def _copied(output: Tensor | torch.Tensor) -> Any:
    """A copy, as a replay returns it: the next call may change the memory that a step returns."""
    return _clone(output.detach())


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """A context for a captured step that runs in this thread: nothing is computed later that was asked for before it or
    in it."""
    settle_all()
    before, _thread.inside = getattr(_thread, "inside", False), True
    try:
        yield
        settle_all()
    finally:
        _thread.inside = before


def _map(outputs: Any, function: Callable[[Any], Any]) -> Any:
    """The outputs of a step with `function` applied to every tensor. Raises TypeError for anything else."""
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


def _shared(device: torch.device) -> tuple[Any, Any]:
    """Shared by all recordings of a step: a stream, and a memory pool for intermediate results."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


_capturing = locks.lock()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A context, of one thread at a time, for a capture: collection might free a graph or an event, which CUDA does not
    allow then."""
    with _capturing:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


def _recorded(call: Callable[[], Any], stream: Any, pool: Any) -> tuple[Any, Any]:
    """A CUDA graph of the launches of `call`, and its result.

    Raises RuntimeError when it reads a value on the host.
    """
    graph = torch.cuda.CUDAGraph()
    with _without_garbage_collection():
        torch.cuda.synchronize(stream.device)
        # Return the memory of earlier calls, so that the graph's pool can use it.
        torch.cuda.empty_cache()
        with torch.cuda.stream(stream):
            # Other threads may ask for memory meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with NoHostReads("cuda"):
                    outputs = call()
            except BaseException as error:
                _abandon(graph, stream, pool)
                if isinstance(error, torch.AcceleratorError) or "stream is capturing" in str(error):
                    raise RuntimeError(
                        f"the step waits for the device while it is recorded ({error}): {_WHY}"
                    ) from error
                raise
            graph.capture_end()
    return graph, outputs


def _abandon(graph: Any, stream: Any, pool: Any) -> None:
    """End a failed recording."""
    try:
        graph.capture_end()
    except RuntimeError:
        # CUDA has already ended the capture, but torch's allocator would keep allocating from the graph's pool.
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):
                end(stream.device.index, pool)


_WHY = "a graph runs without the host, so return the tensor and read it after the call"
READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"}
_COPIES = {"aten::copy_", "aten::_to_copy"}


class NoHostReads(TorchDispatchMode):
    """A context that raises when a tensor on this type of device is read on the host or copied from pageable memory.

    CUDA would refuse that, too, but end the recording with an error that does not name the cause.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there = device_type

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Steps are never compiled by torch. True would make torch import its compiler: 2.6 s of R8's 3.3."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in READS and self._is_there(args[0]):
            raise RuntimeError(f"the step reads a value on the host while it is recorded ({func}): {_WHY}")
        if name in _COPIES:
            to, source = (args[0].device, args[1]) if name == "aten::copy_" else (kwargs.get("device"), args[0])
            to = source.device if to is None else to
            if self._is_there(source) and to.type != self._there:
                raise RuntimeError(f"the step copies a tensor to the host while it is recorded ({func}): {_WHY}")
            if to.type == self._there and not self._is_there(source) and not source.is_pinned():
                raise RuntimeError(
                    f"the step copies a tensor of the host to the device while it is recorded ({func}): the "
                    "graph would copy the same memory at every call; create it before, or pass it as an input"
                )
        return func(*args, **kwargs)

    def _is_there(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.device.type == self._there
