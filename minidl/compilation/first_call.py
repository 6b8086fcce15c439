"""Delay the launches of a step's first call, and compile the kernels that they need in parallel.

Triton compiles a kernel at its first launch, one after another: the 115 kernels of a ResNet-50 step take 41 s. Here
launches are queued, missing kernels are compiled on all processors, and then the launches run in order. Torch's copies
on the device of their results are queued as well (DenseNet concatenates its layers with such copies).

The queue runs early if anything else could see the results: before another torch operation on the same memory (such as
a value read on the host), a kernel not launched by minidl, work on another stream or thread, or a change of launch
settings. It also runs when memory is low, because queued launches keep their tensors. Code outside torch and Triton
that reads memory by address can see it before the queued launches have run.
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
from minidl.runtime import launch, launch_tape

_FEW = 4  # fewer kernels are compiled at their launch, before a process would have started
_MAX_SHARE = 0.6  # of the free memory that queued launches may use
_CHECK_INTERVAL = 16  # launches between checks of free memory
_COPY = torch.ops.aten.copy_.default
_COPIES = {_COPY, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.cat.default}
# Includes the view that `reshape` makes of its copy.
_NEW = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like",
    "new_zeros", "new_ones", "new_full", "_unsafe_view",
}  # fmt: skip


@contextlib.contextmanager
def delayed_launches(device: torch.device) -> Iterator[None]:
    """A context that delays this thread's launches on a device; at its end, also after an error, they have run.

    Does nothing within `launch.record` or `launch.watch`, nor while another thread delays its launches.
    """
    if launch.handed_over() or not _one.acquire(blocking=False):
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(_one.release)
        queue = _Queue(device, stack)
        launch_tape.indirect_keepers.append(queue.keep)
        try:
            with queue, launch.watch(queue.add), launch.settled_by(queue.run):
                yield
        finally:
            launch_tape.indirect_keepers.remove(queue.keep)
            queue.end()


_one = threading.Lock()


class _Queue(TorchDispatchMode):
    """The delayed launches, and the memory that they use."""

    def __init__(self, device: torch.device, stack: contextlib.ExitStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._thread, self._stack = device, threading.get_ident(), stack
        self._gpu = device.type == "cuda"
        self._launches: list[Callable[[], None]] = []
        self._used = _Ranges()  # the memory of the storages that launches use
        self._indirect: list[torch.Tensor] = []
        self._missing: list[Job] = []
        self._stream: Any = None
        self._ended = False
        self._lock = threading.RLock()  # other threads, such as torch's backward, run the launches too
        self._min_free = self._free() * (1.0 - _MAX_SHARE) if self._gpu else 0.0
        self._compilers: compiler_processes.Compilers | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as `cuda_graph.NoHostReads` does."""
        return False

    def __enter__(self) -> Any:
        triton.knobs.runtime.launch_enter_hook.add(self._run_for_other_kernel)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        triton.knobs.runtime.launch_enter_hook.remove(self._run_for_other_kernel)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def add(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], go: Callable[[], None]
    ) -> None:
        """Queue a launch of minidl, run by `go`."""
        tensors = [t for t in (getattr(value, "base", value) for value in args) if isinstance(t, torch.Tensor)]
        if threading.get_ident() != self._thread or self._ended:
            self._before(tensors)
            go()
            return
        with self._lock:
            if self._gpu:
                stream = torch.cuda.current_stream(self._device)
                # `stream != None` is false for torch's streams.
                if self._stream is None or stream != self._stream:
                    self.run()
                    self._stream = stream
                self._add_job(kernel, grid, args, meta)
            self._enqueue(go, tensors)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep tensors that queued launches read by address."""
        with self._lock:
            if self._launches and threading.get_ident() == self._thread:
                tensors = list(tensors)
                self._indirect += tensors
                self._used.add(tensors)

    def end(self) -> None:
        """Run the queued launches, and queue no more."""
        self._ended = True
        self.run()

    def run(self) -> None:
        """Compile missing kernels, and run the queued launches."""
        with self._lock:
            launches, self._launches = self._launches, []
            indirect, self._indirect = self._indirect, []
            self._used = _Ranges()
            missing, self._missing = self._missing, []
            if len(missing) >= _FEW:
                self._started(missing).compile(missing, _progress)
            hooks = triton.knobs.runtime.launch_enter_hook
            is_hooked = self._run_for_other_kernel in hooks.calls
            if is_hooked:  # with a hook, Triton would look up every launch
                hooks.remove(self._run_for_other_kernel)
            try:
                with self._on_launch_stream():
                    for go in launches:
                        go()
            finally:
                if is_hooked:
                    hooks.add(self._run_for_other_kernel)
            del indirect

    def _enqueue(self, go: Callable[[], Any], tensors: Iterable[torch.Tensor]) -> None:
        self._launches.append(go)
        self._used.add(tensors)
        if self._gpu and len(self._launches) % _CHECK_INTERVAL == 0 and self._free() < self._min_free:
            self.run()

    def _can_wait(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Return whether an operation copies memory of queued launches on their device and stream."""
        return (
            func in _COPIES and not torch.is_inference_mode_enabled() and self._used.overlaps(tensors)
            and all(t.device == tensors[0].device and t.layout is torch.strided for t in tensors)
            and (not self._gpu or torch.cuda.current_stream(self._device) == self._stream)
        )  # fmt: skip

    def _before(self, tensors: Iterable[torch.Tensor]) -> None:
        """Run the queue if it uses the memory of these tensors."""
        with self._lock:
            if self._launches and self._used.overlaps(tensors):
                self.run()

    @contextlib.contextmanager
    def _on_launch_stream(self) -> Iterator[None]:
        """A context on the stream of the launches; the current stream then waits for it."""
        current = torch.cuda.current_stream(self._device) if self._gpu else None
        if self._stream is None or current is None or current == self._stream:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, waits = kwargs or {}, False
        tensors: list[torch.Tensor] = []
        if self._launches and not _sees_no_values(func):
            with self._lock:
                tensors = list(_tensors((args, kwargs)))
                waits = self._can_wait(func, tensors)
                if not waits:
                    self._before(tensors)
                elif func is _COPY:
                    # Through `data`, so that the tensor's version changes now and not later.
                    self._enqueue(functools.partial(func, args[0].data, *args[1:], **kwargs), tensors)
                    return args[0]
        try:
            output = func(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not self._launches or func._schema.is_mutable:
                raise
            self.run()  # which frees their tensors
            return func(*args, **kwargs)
        if waits and output.device == tensors[0].device:
            copy = output.data  # allocated, but its values are copied later
            with self._lock:
                self._enqueue(lambda: copy.copy_(func(*args, **kwargs)), [*tensors, copy])
        elif waits:
            self.run()
            return func(*args, **kwargs)
        return output

    def _run_for_other_kernel(self, *_: Any) -> None:
        """Run the queue before Triton launches a kernel that is not minidl's."""
        if threading.get_ident() == self._thread:
            self.run()

    def _add_job(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        """Add the kernel's job if it is not compiled; start processes once there are a few jobs."""
        if not launch_jobs.compilable(kernel):
            return
        try:
            job = launch_jobs.job_of(launch.architecture(self._device), kernel, grid, args, meta)
            is_wanted = launch_jobs.is_wanted(job)
        except (TypeError, ImportError, AttributeError):  # cannot be sent to another process
            return
        if is_wanted:
            self._missing.append(job)
            if len(self._missing) == _FEW:
                self._started(self._missing)

    def _started(self, jobs: list[Job]) -> compiler_processes.Compilers:
        if self._compilers is None:
            self._compilers = self._stack.enter_context(compiler_processes.current())
            self._stack.callback(self._compilers.end)  # which frees their memory for the step
        self._compilers.start(jobs)
        return self._compilers

    def _free(self) -> float:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)


@functools.cache
def _sees_no_values(func: Any) -> bool:
    """Return whether an operation makes a view, or empty or filled memory. (In inference mode torch dispatches
    composite operations such as `contiguous` and `to`, whose schemas are those of views but which may copy.)"""
    is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return (func.is_view and not is_composite) or func._schema.name.partition("::")[2] in _NEW


class _Ranges:
    """Address ranges of tensors' storages. (A tensor from DLPack has another storage for the same memory.)"""

    def __init__(self) -> None:
        # Disjoint ranges in order.
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for start, end in filter(None, map(_range, tensors)):
            first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._starts, end)
            low, high = min([start, *self._starts[first:last]]), max([end, *self._ends[first:last]])
            self._starts[first:last], self._ends[first:last] = [low], [high]

    def overlaps(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether one of these tensors, of any layout, may share memory with the ranges."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                return True
            bounds = _range(tensor)
            if bounds and bisect.bisect_right(self._ends, bounds[0]) < bisect.bisect_left(self._starts, bounds[1]):
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
    """Show progress on a terminal, because the first step takes seconds."""
    if sys.stderr.isatty():
        line = f"compiling kernels: {done} of {of}"
        sys.stderr.write(f"\r{line}" if done < of else f"\r{' ' * len(line)}\r")
        sys.stderr.flush()
