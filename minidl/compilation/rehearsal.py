"""A step without its arithmetic: which kernels would it launch? And these compiled, before the step runs.

In a rehearsal the Python code of a step runs, memory is given and freed, and launches are listed and not run. So the
values of what kernels write are unknown: tensors that took part in a launch are *unknown*, and what torch copies from
them. No unknown value leaves the rehearsal: into memory that was there before, none is copied; where the host asks for
one, the rehearsal ends.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from minidl import random
from minidl.compilation import launch_jobs
from minidl.compilation.capture import Captured
from minidl.compilation.cuda_graph import READS
from minidl.compilation.compiler_processes import Progress, at_hand
from minidl.compilation.job import Job
from minidl.runtime import launch

_SETS = {"aten::copy_", "aten::fill_", "aten::zero_"}  # done: a step may read what they set, or remember it as set
# They move running statistics, their arguments 3 and 4, and their schemas do not say so.
_MOVE_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_SHAPES = {
    "aten::resize_", "aten::set_", "aten::detach_", "aten::t_", "aten::transpose_", "aten::squeeze_",
    "aten::unsqueeze_", "aten::as_strided_",
}  # fmt: skip


def compile_ahead(
    step: Callable[..., Any], *examples: Any, processes: int = 0, progress: Progress = lambda done, of: None
) -> int:
    """Compile what `step(*examples)` will launch, before it runs: all at once, on every processor.

        step = minidl.capture(train_step)
        minidl.compile_ahead(step, x, y)
        for x, y in batches:
            loss = step(x, y)

    The kernels of a step are compiled one after another as it first meets them; with many of them, that takes most of
    a minute. The first call of a captured step compiles them all at once by itself; this does it for any function, and
    before the first batch is there. Here the Python code of the step runs once, and its launches are listed and not
    run. `examples` are tensors of the shapes and dtypes of the batches to come, on their device; a captured step may be
    given as it is. Whatever the step has made before this call keeps its value: weights, the optimizer's state, the
    random state; only gradients hold no numbers until `zero_grad()`, with which a step begins. What a step counts or
    collects in Python counts this call, too. A step that reads a value on the host is followed up to there.

    `processes` compile at a time (0: as many as there are processors), and `progress(done, of)` is called as kernels
    are done. Returns the number of kernels that were compiled: those that Triton's cache had not; 0 on a CPU, where
    nothing is compiled. Raises what the step raises.
    """
    if launch.INTERPRETED:
        return 0
    wanted = missing(lambda: rehearse(step, *examples))
    if wanted:
        with at_hand() as compilers:
            compilers.compile(wanted, progress, processes)
    return len(wanted)


def rehearse(step: Callable[..., Any], *examples: Any) -> None:
    """Run a step in a rehearsal, a captured one as its first calls run it; ends where the host reads a value."""
    with contextlib.suppress(UnknownError):
        if isinstance(step, Captured):
            step.rehearse(examples)
        else:
            step(*examples)


def missing(work: Callable[[], object]) -> list[Job]:
    """The kernels that `work` would launch on the device in use, and that Triton's cache lacks."""
    return [job for job in launched(work, launch.architecture()) if launch_jobs.is_wanted(job)]


def launched(work: Callable[[], object], arch: int, target: str | None = None) -> list[Job]:
    """The kernels that `work` would launch on the device in use; with a `target`, as `launch.record` has it, on a
    device of its tiles that need not be there."""
    found: dict[str, Job] = {}

    def keep(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        with contextlib.suppress(TypeError):  # a constant that cannot be told to another process
            if launch_jobs.compilable(kernel):
                job = launch_jobs.job_of(arch, kernel, grid, args, meta)
                found[job.key] = job

    with rehearsal(keep, target):
        work()
    return list(found.values())


class UnknownError(RuntimeError):
    """The host asks for a value that was not computed."""


@contextlib.contextmanager
def rehearsal(keep: Callable[..., None], target: str | None = None) -> Iterator[None]:
    """A context in which launches go to `keep(kernel, grid, args, meta)`, and nothing that lasts is changed."""

    def listed(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        for value in args:
            tensor = getattr(value, "base", value)  # of a box
            if isinstance(tensor, torch.Tensor):
                memory.unknown.add(tensor)
        keep(kernel, grid, args, meta)

    memory = _Memory(lambda: launch.record(listed, target))
    # What torch.compile has made is not followed: Dynamo would trace the rehearsal.
    loaded = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with random.forked(), torch.random.fork_rng(devices), launch.record(listed, target), eager:
        try:
            with memory:
                yield
        finally:
            memory.restore()


class _Storages:
    """A set of the memories of tensors. They may be freed meanwhile, and no other memory is taken for one of them."""

    def __init__(self) -> None:
        # While there is a weak reference, the address that names a storage is not used again.
        self._known: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def add(self, tensor: torch.Tensor) -> None:
        if tensor not in self:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage)

    def discard(self, tensor: torch.Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)


class _Memory(TorchDispatchMode):
    """Follows torch's operations: which memory is new, and of which the values are unknown.

    torch's backward takes this mode to threads of its own, where `recording` then makes the context for launches.
    """

    def __init__(self, recording: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self.new = _Storages()
        self.unknown = _Storages()
        self._derived = _Storages()  # computed from memory that was there before
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: dict[torch.Generator, torch.Tensor] = {}

    def restore(self) -> None:
        """Undo copies into lasting memory of what was computed from such, and draws from generators."""
        for tensor, values in reversed(self._before):
            tensor.copy_(values)
        for generator, state in self._generators.items():
            generator.set_state(state)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as `cuda_graph.NoHostReads` does."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in _flat((args, kwargs)) if isinstance(value, torch.Tensor)]
        name = func._schema.name
        generator = kwargs.get("generator")
        if generator is not None:
            self._generators.setdefault(generator, generator.get_state())
        if name in _MOVE_STATISTICS:
            args = (*args[:3], *(None if moved is None else moved.clone() for moved in args[3:5]), *args[5:])
        # An operator of minidl.torch writes by launches, which are listed and mark what they write.
        written = [] if func.namespace == "minidl" else _written(func, args, kwargs)
        read = [tensor for tensor in given if not any(tensor is target for target in written)]
        unknown = any(tensor in self.unknown for tensor in read)
        if written and name not in _SHAPES:
            lasting = any(target not in self.new for target in written)
            if lasting and (unknown or name not in _SETS):
                return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
            for target in written:
                if target not in self.new and any(map(self._is_derived, read)):
                    self._before.append((target.detach(), target.clone()))
                if unknown:
                    self.unknown.add(target)
                elif name in _SETS and target.nbytes == target.untyped_storage().nbytes():  # as weights that are loaded
                    self.unknown.discard(target)
            return func(*args, **kwargs)
        if name == "aten::lift_fresh":  # numbers of the host
            self.new.add(given[0])
        if name in READS and any(tensor in self.unknown for tensor in given):
            raise UnknownError
        if name == "aten::_to_copy" and unknown and given[0].device.type != _device_type(given[0], kwargs):
            raise UnknownError
        with self._recording() if func.namespace == "minidl" and launch.runs() else contextlib.nullcontext():
            outputs = func(*args, **kwargs)
        for output in _flat((outputs,)):
            if isinstance(output, torch.Tensor) and not any(_same_memory(output, tensor) for tensor in given):
                self.new.add(output)
                (self._derived.add if any(map(self._is_derived, given)) else self._derived.discard)(output)
                if func.namespace != "minidl":
                    (self.unknown.add if unknown else self.unknown.discard)(output)
        return outputs

    def _is_derived(self, tensor: torch.Tensor) -> bool:
        return tensor in self._derived or tensor not in self.new


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes into."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs[argument.name] if argument.name in kwargs else args[place] if place < len(args) else None
            found += [tensor for tensor in _flat((value,)) if isinstance(tensor, torch.Tensor)]
    return found


def _device_type(source: torch.Tensor, kwargs: Any) -> str:
    to = kwargs.get("device")
    return source.device.type if to is None else torch.device(to).type


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _flat(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, dict | list | tuple):
            yield from _flat(value)
        else:
            yield value
