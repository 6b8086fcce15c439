"""The launches of a step's first call, which wait until the kernels that they need are compiled all at once.

Triton compiles a kernel as it is first launched, one after another: 115 kernels of a ResNet-50 step take 41 s. Here
launches are noted in place of being run, missing kernels are compiled on every processor, and then the launches run in
their order. Copies that torch makes on the device of what they write wait with them: a DenseNet joins its layers so.
They run earlier, with what is known by then, as soon as anything else could see their results: before another
operation of torch on memory that they use (a value read on the host), a kernel that is not launched by minidl,
another stream or thread, a change of how kernels are launched; and where little memory is left, as what they use is not
freed meanwhile. Code that is given an address, and neither torch nor Triton runs it, sees memory as it is by then.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from minidl.compilation import compiler_processes, launch_jobs
from minidl.compilation.job import Job
from minidl.runtime import launch

_FEW = 4  # kernels are compiled as they are launched before a process has started
_MOST = 0.6  # of the memory that was free may be held before the launches run
_LOOK = 16  # launches after which the memory is looked at again
_INTO = torch.ops.aten.copy_.default
_COPIES = {_INTO, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.cat.default}
# With the view that `reshape` makes of its copy.
_NEW = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like",
    "new_zeros", "new_ones", "new_full", "_unsafe_view",
}  # fmt: skip


@contextlib.contextmanager
def together(device: torch.device) -> Iterator[None]:
    """A context in which this thread's launches wait, on a device; at its end, whatever that is, they have run.

    Does nothing within a context of `launch.record` or `launch.watch`: there launches are another's; nor while they
    wait in another thread.
    """
    if launch.handed_over() or not _one.acquire(blocking=False):
        yield
        return
    with contextlib.ExitStack() as opened:
        opened.callback(_one.release)
        waiting = _Waiting(device, opened)
        launch.indirect_keepers.append(waiting.keep)
        try:
            with waiting, launch.watch(waiting.note), launch.settled_by(waiting.run):
                yield
        finally:
            launch.indirect_keepers.remove(waiting.keep)
            waiting.end()


_one = threading.Lock()


class _Waiting(TorchDispatchMode):
    """The launches that wait, and the memory that they use."""

    def __init__(self, device: torch.device, opened: contextlib.ExitStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._thread, self._opened = device, threading.get_ident(), opened
        self._gpu = device.type == "cuda"
        self._launches: list[Callable[[], None]] = []
        self._used = _Ranges()  # the memory of storages, which the launches keep
        self._kept: list[torch.Tensor] = []
        self._missing: list[Job] = []
        self._stream: Any = None
        self._ended = False
        self._lock = threading.RLock()  # other threads run the launches too: torch's backward is one
        self._least = self._free() * (1.0 - _MOST) if self._gpu else 0.0
        self._compilers: compiler_processes.Compilers | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as `cuda_graph.NoHostReads` does."""
        return False

    def __enter__(self) -> Any:
        triton.knobs.runtime.launch_enter_hook.add(self._other)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        triton.knobs.runtime.launch_enter_hook.remove(self._other)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def note(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], go: Callable[[], None]
    ) -> None:
        """A launch of minidl's, to be run by `go`."""
        tensors = [t for t in (getattr(value, "base", value) for value in args) if isinstance(t, torch.Tensor)]  # boxes
        if threading.get_ident() != self._thread or self._ended:
            self._before(tensors)
            go()
            return
        with self._lock:
            if self._gpu:
                stream = torch.cuda.current_stream(self._device)
                # Of torch's streams `!= None` is false.
                if self._stream is None or stream != self._stream:
                    self.run()
                    self._stream = stream
                self._look_for(kernel, grid, args, meta)
            self._add(go, tensors)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep what the launches that wait find by its address."""
        with self._lock:
            if self._launches and threading.get_ident() == self._thread:
                found = list(tensors)
                self._kept += found
                self._used.add(found)

    def end(self) -> None:
        """Run the launches that wait; from now on none does."""
        self._ended = True
        self.run()

    def run(self) -> None:
        """Compile what is missing, and run the launches that wait."""
        with self._lock:
            launches, self._launches = self._launches, []
            kept, self._kept = self._kept, []
            self._used = _Ranges()
            missing, self._missing = self._missing, []
            if len(missing) >= _FEW:
                self._started(missing).compile(missing, _progress)
            hooks = triton.knobs.runtime.launch_enter_hook
            heard = self._other in hooks.calls
            if heard:  # or every launch would be looked up by Triton
                hooks.remove(self._other)
            try:
                with self._on_their_stream():
                    for go in launches:
                        go()
            finally:
                if heard:
                    hooks.add(self._other)
            del kept

    def _add(self, go: Callable[[], Any], tensors: Iterable[torch.Tensor]) -> None:
        self._launches.append(go)
        self._used.add(tensors)
        if self._gpu and len(self._launches) % _LOOK == 0 and self._free() < self._least:
            self.run()

    def _can_wait(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether an operation is a copy on the device, on the stream of the launches, of what they use."""
        return (
            func in _COPIES and not torch.is_inference_mode_enabled() and self._used.meet(tensors)
            and all(t.device == tensors[0].device and t.layout is torch.strided for t in tensors)
            and (not self._gpu or torch.cuda.current_stream(self._device) == self._stream)
        )  # fmt: skip

    def _before(self, tensors: Iterable[torch.Tensor]) -> None:
        """Run the launches that wait, if they use the memory of these."""
        with self._lock:
            if self._launches and self._used.meet(tensors):
                self.run()

    @contextlib.contextmanager
    def _on_their_stream(self) -> Iterator[None]:
        """The stream that launches were made on; another one then waits for it, as it may have been told before."""
        now = torch.cuda.current_stream(self._device) if self._gpu else None
        if self._stream is None or now is None or now == self._stream:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        now.wait_stream(self._stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, waits = kwargs or {}, False
        tensors: list[torch.Tensor] = []
        if self._launches and not _sees_no_values(func):
            with self._lock:
                tensors = list(_tensors((args, kwargs)))
                waits = self._can_wait(func, tensors)
                if not waits:
                    self._before(tensors)
                elif func is _INTO:
                    # By `data`: for those who look at its version it has changed now, and not later.
                    self._add(functools.partial(func, args[0].data, *args[1:], **kwargs), tensors)
                    return args[0]
        try:
            made = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not self._launches or func._schema.is_mutable:
                raise
            self.run()  # and free what they use
            return func(*args, **kwargs)
        if waits and made.device == tensors[0].device:
            into = made.data  # a copy of what is not there yet: its memory is known, its values follow
            with self._lock:
                self._add(lambda: into.copy_(func(*args, **kwargs)), [*tensors, into])
        elif waits:
            self.run()
            return func(*args, **kwargs)
        return made

    def _other(self, *_: Any) -> None:
        """Another's kernel is launched by Triton."""
        if threading.get_ident() == self._thread:
            self.run()

    def _look_for(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        """Note the kernel's job, if it is not compiled; with a few of them, processes begin to get ready."""
        if not launch_jobs.compilable(kernel):
            return
        try:
            job = launch_jobs.job_of(launch.architecture(self._device), kernel, grid, args, meta)
            wanted = launch_jobs.is_wanted(job)
        except (TypeError, ImportError, AttributeError):  # a constant or a kernel that other processes cannot have
            return
        if wanted:
            self._missing.append(job)
            if len(self._missing) == _FEW:
                self._started(self._missing)

    def _started(self, jobs: list[Job]) -> compiler_processes.Compilers:
        if self._compilers is None:
            self._compilers = self._opened.enter_context(compiler_processes.at_hand())
            self._opened.callback(self._compilers.end)  # their memory is the step's
        self._compilers.start(jobs)
        return self._compilers

    def _free(self) -> float:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)


@functools.cache
def _sees_no_values(func: Any) -> bool:
    """Whether an operation makes a view, or memory that is empty or filled. (In inference mode torch shows `contiguous`
    and `to`, which may copy, before they are taken apart: by their schemas they are views.)"""
    apart = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return (func.is_view and not apart) or func._schema.name.partition("::")[2] in _NEW


class _Ranges:
    """The memory of some tensors' storages. By addresses: what came by DLPack has a storage of its own."""

    def __init__(self) -> None:
        # Of ranges that do not meet, in order.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for start, end in filter(None, map(_range, tensors)):
            first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._starts, end)
            low, high = min([start, *self._starts[first:last]]), max([end, *self._ends[first:last]])
            self._starts[first:last], self._ends[first:last] = [low], [high]

    def meet(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these tensors, of any layout, may have memory in common with them."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                return True
            found = _range(tensor)
            if found and bisect.bisect_right(self._ends, found[0]) < bisect.bisect_left(self._starts, found[1]):
                return True
        return False


def _range(tensor: torch.Tensor) -> tuple[int, int] | None:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return (start, start + storage.nbytes()) if start else None


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            yield from _tensors(value)


def _progress(done: int, of: int) -> None:
    """Said on a terminal: the first step takes seconds, and those after it milliseconds."""
    if sys.stderr.isatty():
        line = f"compiling kernels: {done} of {of}"
        sys.stderr.write(f"\r{line}" if done < of else f"\r{' ' * len(line)}\r")
        sys.stderr.flush()
