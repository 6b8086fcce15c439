"""The launches of a step's first call, which wait until the kernels that they need are compiled all at once.

Triton compiles a kernel as it is first launched, one after another: 115 kernels of a ResNet-50 step take 41 s. Here
launches are noted in place of being run, missing kernels are compiled on every processor, and then the launches run in
their order. They run earlier, with what is known by then, as soon as anything else could see their results: before an
operation of torch on memory that they use (a value read on the host, a copy), a kernel that is not launched by minidl,
another stream; and where little memory is left, as what they use is not freed meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from minidl import compilers
from minidl.jobs import Job
from minidl.runtime import ahead, launch

_FEW = 4  # kernels are compiled as they are launched before a process has started
_MOST = 0.6  # of the memory that was free may be held before the launches run
_LOOK = 16  # launches after which the memory is looked at again
_NEW = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@contextlib.contextmanager
def together(device: torch.device) -> Iterator[None]:
    """A context in which this thread's launches wait, on a device; at its end, whatever that is, they have run.

    Does nothing within a context of `launch.record` or `launch.watch`: there launches are another's.
    """
    if launch.handed_over():
        yield
        return
    with contextlib.ExitStack() as opened:
        waiting = _Waiting(device, opened)
        launch.keepers.append(waiting.keep)
        try:
            with launch.watch(waiting.note), waiting:
                yield
        finally:
            launch.keepers.remove(waiting.keep)
            waiting.run()


class _Waiting(TorchDispatchMode):
    """The launches that wait, and the memory that they use."""

    def __init__(self, device: torch.device, opened: contextlib.ExitStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._thread, self._opened = device, threading.get_ident(), opened
        self._gpu = device.type == "cuda"
        self._launches: list[Callable[[], None]] = []
        self._used: set[int] = set()  # storages, which the launches keep
        self._kept: list[torch.Tensor] = []
        self._missing: list[Job] = []
        self._stream: Any = None
        self._least = self._free() * (1.0 - _MOST) if self._gpu else 0.0
        self._compilers: compilers.Compilers | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As `captured.NoHostReads`."""
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
        if threading.get_ident() != self._thread:
            go()
            return
        if self._gpu:
            stream = torch.cuda.current_stream(self._device)
            if stream != self._stream:
                self.run()
                self._stream = stream
            self._look_for(kernel, grid, args, meta)
        self._launches.append(go)
        for value in args:
            tensor = getattr(value, "base", value)  # of a box
            if isinstance(tensor, torch.Tensor):
                self._used.add(_storage(tensor))
        if self._gpu and len(self._launches) % _LOOK == 0 and self._free() < self._least:
            self.run()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep what the launches that wait find by its address."""
        if self._launches and threading.get_ident() == self._thread:
            self._kept += tensors
            self._used.update(map(_storage, self._kept))

    def run(self) -> None:
        """Compile what is missing, and run the launches that wait."""
        launches, self._launches = self._launches, []
        kept, self._kept = self._kept, []
        self._used = set()
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
        if self._launches and not func.is_view and func._schema.name.partition("::")[2] not in _NEW:
            used = self._used
            if any(_storage(tensor) in used for tensor in _tensors((args, kwargs or {}))):
                self.run()
        return func(*args, **(kwargs or {}))

    def _other(self, *_: Any) -> None:
        """Another's kernel is launched by Triton."""
        if threading.get_ident() == self._thread:
            self.run()

    def _look_for(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        """Note the kernel's job, if it is not compiled; with a few of them, processes begin to get ready."""
        if not ahead.compilable(kernel):
            return
        try:
            job = ahead.job_of(_architecture(self._device), kernel, grid, args, meta)
        except TypeError:  # a constant that cannot be told to another process
            return
        if ahead.is_wanted(job):
            self._missing.append(job)
            if len(self._missing) == _FEW:
                self._started(self._missing)

    def _started(self, jobs: list[Job]) -> compilers.Compilers:
        if self._compilers is None:
            self._compilers = self._opened.enter_context(compilers.at_hand())
            self._opened.callback(self._compilers.end)  # their memory is the step's
        self._compilers.start(jobs)
        return self._compilers

    def _free(self) -> float:
        free, _ = torch.cuda.mem_get_info(self._device)
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)


def _architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


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
        print(f"\r{line}" if done < of else f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
