"""A step as a CUDA graph: what Python launched call by call, one call launches again.

    step = minidl.capture(train_step)       # forward, loss, backward, clipping and update of one batch
    for x, y in batches:
        loss = step(x, y)

A step that only works on tensors of constant shapes at addresses that stay, and reads nothing on the host, is the same
list of kernels each time. A graph holds that list; its results are those of the step itself, bit for bit. What is not
the same at every step lives on the device, where kernels read it: inputs, in buffers that each call copies into;
learning rate and numbers of steps, by the optimisers; the seed and stream of random numbers, here.
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
from minidl.csr import CSR
from minidl.kernels import launch
from minidl.tensor import Tensor, default_device

T = TypeVar("T")
Input = Tensor | torch.Tensor | CSR

EAGER = 3  # calls before a recording: kernels are compiled in them
_thread = threading.local()


def capture(step: Callable[..., T], *, eager: int = EAGER, shapes: int = 1) -> Captured[T]:
    """`step` as a CUDA graph: its first `eager` calls run as they are, the next is recorded, all later ones replay it.

    On a CPU every call runs the step as it is. `step` takes Tensors, torch tensors and CSR batches by position, all on
    one device and without gradients of their own, and returns tensors: one, None, or tuples, lists and dicts of them.
    A call returns new ones, which are no part of a graph of operations. In a step that is captured another one is run
    as it is, as a part of it. A method is captured of its object: self.step = capture(self.step).

    All calls must have inputs of the same dtypes, and of at most `shapes` different shapes: each is recorded on its own
    and holds the memory of a step, of which recordings share what they can. The step is Python that runs no more once
    it is recorded. So it must
      - leave what it reads beside its inputs (weights, buffers) where they are in memory, and change them in place;
      - leave its inputs as they are, which on a GPU are copies;
      - read no value on the host (item, float, a condition on a tensor), wait for nothing, and copy nothing to or from
        the host's memory: return the values instead, and read them afterwards;
      - begin with zero_grad() where it calls backward(). Gradients are the graph's memory: they do not outlive a call;
      - leave modes as they are, such as train() and eval().
    Learning rates and other numbers of an optimiser, the state of random numbers and a loss scale may change between
    calls, as may weights by load_state_dict. A call whose step raises does not count.

    A call raises TypeError for inputs or results of another type or dtype and ValueError for other shapes, devices or
    numbers of inputs, on a CPU as well; RuntimeError for a step that reads a value on the host while it is recorded.
    """
    return Captured(step, eager, shapes)


def recording() -> bool:
    """Whether the step that this thread runs is being recorded: what it does on the host happens this once."""
    return getattr(_thread, "recording", False)


def at_replay(prepare: Callable[[], None]) -> None:
    """Have `prepare` called before each replay of the step that is run in this thread, if a captured one is.

    For what a step does on the host and a graph cannot: `prepare` may change memory that the graph reads.
    """
    hooks = getattr(_thread, "hooks", None)
    if hooks is not None:
        hooks[prepare] = None


@dataclass
class _Recording:
    """What is known for inputs of certain shapes: calls so far, and from the recording on the graph and its memory."""

    calls: int = 0
    graph: Any = None
    inputs: tuple[Input, ...] = ()
    outputs: Any = None
    draws: int = 0  # streams of random numbers that a step takes
    precision: str = ""
    hooks: dict[Callable[[], None], None] = field(default_factory=dict)


class Captured(Generic[T]):
    """A step that `capture` made. Call it as the step."""

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

    def __call__(self, *inputs: Any, **named: Any) -> T:
        """The step with these inputs; on a GPU it is on its way on the current stream."""
        if named:
            raise TypeError(f"a captured step takes its inputs by position; given by name: {', '.join(named)}")
        device = self._check(inputs)
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
            with self._watched(known, device):
                outputs = _map(self._step(*map(_clone, inputs)), _copied)
        else:
            if known.graph is None:
                self._record(known, inputs, device)
            outputs = self._replay(known, inputs)
        known.calls += 1
        self._recordings[shape] = known
        self._kinds = tuple(map(_kind, inputs))
        return outputs

    def __get__(self, instance: object, owner: type | None = None) -> Captured[T]:
        """Raises TypeError for a method, which would be called without its object."""
        if instance is None:
            return self
        name = (instance if isinstance(instance, type) else type(instance)).__name__
        raise TypeError(
            f"a captured step is an attribute of the class {name}, and so would not get its object: "
            "capture the method of an object, as in self.step = minidl.capture(self.step)"
        )

    def _check(self, inputs: tuple[Any, ...]) -> torch.device:
        """The device of the inputs. Raises TypeError and ValueError, see `capture`."""
        for i, given in enumerate(inputs):
            if not isinstance(given, Tensor | torch.Tensor | CSR):
                raise TypeError(
                    f"a captured step takes tensors and CSR batches, input {i} is a {type(given).__name__}: make it a "
                    "tensor where it changes from call to call, and leave it to the step where it does not"
                )
            if not isinstance(given, CSR) and given.requires_grad:
                raise ValueError(
                    f"input {i} of a captured step has a gradient: .detach() it, or make it in the step; backward() "
                    "there cannot reach beyond the inputs"
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
        """Streams of random numbers are numbered on the device, as in the recording: the same variants of kernels."""
        if self._key is None:
            self._key = torch.zeros(2, dtype=torch.int64, device=device)
        self._number(self._key)
        before, _thread.hooks = getattr(_thread, "hooks", None), known.hooks
        try:
            with random.numbered_by(self._key), _inside():
                yield
        finally:
            _thread.hooks = before

    def _number(self, key: torch.Tensor) -> None:
        state = random.get_state()
        if state["seed"] != self._seed:
            key[0].fill_(state["seed"])
            self._seed = state["seed"]
        key[1].fill_(state["stream"])

    def _record(self, known: _Recording, inputs: tuple[Input, ...], device: torch.device) -> None:
        # What it finds changed is copied now: in the graph it would be copied at every replay.
        for prepare in list(known.hooks):
            prepare()
        state = random.get_state()
        kept = tuple(_clone(given) for given in inputs)
        if self._shared is None:
            self._shared = _shared(device)
        try:
            _thread.recording = True
            with self._watched(known, device):
                graph, outputs = _recorded(lambda: _map(self._step(*kept), _detached), *self._shared)
            known.draws = random.get_state()["stream"] - state["stream"]
        except BaseException:
            self._shared = None  # of a recording that CUDA broke off the allocator takes the memory to be in use
            raise
        finally:
            _thread.recording = False
            random.set_state(state)
        # A graph whose step raised holds its first kernels only, and is not kept.
        known.graph, known.inputs, known.outputs = graph, kept, outputs
        known.precision = launch.float32_precision()

    def _replay(self, known: _Recording, inputs: tuple[Input, ...]) -> Any:
        if launch.float32_precision() != known.precision:
            raise ValueError(
                f"float32 products were made in {known.precision} when the step was captured, and are set to "
                f"{launch.float32_precision()} now: capture the step again"
            )
        for prepare in known.hooks:
            prepare()
        for kept, given in zip(known.inputs, inputs, strict=True):
            _copy(kept, given)
        if known.draws:
            assert self._key is not None
            self._number(self._key)
            random.skip(known.draws)
        known.graph.replay()
        return _map(known.outputs, _clone)


def _shape(given: Input) -> tuple[Any, ...]:
    return (given.shape, *given.sizes.values()) if isinstance(given, CSR) else tuple(given.shape)


def _kind(given: Input) -> tuple[type, torch.dtype]:
    return type(given), given.dtype


def _named(type_: type) -> str:
    return f"torch.{type_.__name__}" if issubclass(type_, torch.Tensor) else f"minidl.{type_.__name__}"


def _other_shapes(shape: tuple[Any, ...], known: dict[tuple[Any, ...], _Recording]) -> str:
    """What is wrong with a call of one shape too many."""
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
    """As a replay gives it: a step may return memory that its next call changes."""
    return _clone(output.detach())


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """While a captured step runs in this thread."""
    before, _thread.inside = getattr(_thread, "inside", False), True
    try:
        yield
    finally:
        _thread.inside = before


def _map(outputs: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of every tensor among the outputs of a step. Raises TypeError for what is none."""
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
    """What the recordings of a step share: a stream, and the memory of what is computed on the way."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


def _recorded(call: Callable[[], Any], stream: Any, pool: Any) -> tuple[Any, Any]:
    """A CUDA graph of what `call` launches, and what it returned.

    Raises RuntimeError when it reads a value on the host.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(stream.device)
    # The memory of the calls before is the allocator's again, and not yet the graph's.
    torch.cuda.empty_cache()
    # A collection might free a graph or an event, which the device does not allow meanwhile.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool)
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
    finally:
        if collecting:
            gc.enable()
    return graph, outputs


def _abandon(graph: Any, stream: Any, pool: Any) -> None:
    """End a recording that came to nothing."""
    try:
        graph.capture_end()
    except RuntimeError:
        # CUDA had broken it off: then torch's allocator is not told, and would give out the graph's memory for good.
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):
                end(stream.device.index, pool)


_WHY = "a graph runs without the host, so return the tensor and read it after the call"
_READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"}
_COPIES = {"aten::copy_", "aten::_to_copy"}


class NoHostReads(TorchDispatchMode):
    """A context in which reading a tensor of a type of device on the host, or copying from pageable memory, raises.

    CUDA would refuse it, and lose the recording, with an error that does not say what was done.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there = device_type

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No step here is compiled by torch. Asked to keep its compiler away, torch imports it: 2.6 s of R8's 3.3."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _READS and self._is_there(args[0]):
            raise RuntimeError(f"the step reads a value on the host while it is recorded ({func}): {_WHY}")
        if name in _COPIES:
            to, source = (args[0].device, args[1]) if name == "aten::copy_" else (kwargs.get("device"), args[0])
            to = source.device if to is None else to
            if self._is_there(source) and to.type != self._there:
                raise RuntimeError(f"the step copies a tensor to the host while it is recorded ({func}): {_WHY}")
            if to.type == self._there and not self._is_there(source) and not source.is_pinned():
                raise RuntimeError(
                    f"the step copies a tensor of the host to the device while it is recorded ({func}): a graph would "
                    "copy the same memory again at every call, so make it before, or give it to the step as an input"
                )
        return func(*args, **kwargs)

    def _is_there(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.device.type == self._there
