"""Rehearse a step to learn which kernels it launches, and compile them before the step runs.

A rehearsal runs the Python code of a step and allocates memory, but records launches instead of running them. Tensors
that are arguments of a launch, and copies of them, have *unknown* values. No unknown value leaves the rehearsal: none
is copied into memory allocated before it, and it ends when the host reads one.
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
from minidl.compilation.compiler_processes import Progress, current
from minidl.compilation.cuda_graph import READS
from minidl.compilation.job import Job
from minidl.runtime import launch

_SETS = {"aten::copy_", "aten::fill_", "aten::zero_"}  # performed, because the step may read these values
# They update running statistics, arguments 3 and 4, without declaring it in their schemas.
_UPDATE_STATISTICS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_SHAPES = {
    "aten::resize_", "aten::set_", "aten::detach_", "aten::t_", "aten::transpose_", "aten::squeeze_",
    "aten::unsqueeze_", "aten::as_strided_",
}  # fmt: skip


def compile_ahead(
    step: Callable[..., Any], *examples: Any, processes: int = 0, progress: Progress = lambda done, of: None
) -> int:
    """Compile the kernels that `step(*examples)` launches, before it runs, in parallel on all processors.

        step = minidl.capture(train_step)
        minidl.compile_ahead(step, x, y)
        for x, y in batches:
            loss = step(x, y)

    Otherwise kernels are compiled one after another at their first launch, which can take most of a minute. The first
    call of a captured step also compiles them in parallel; this function works for any step, and before the first batch
    is available. It runs the Python code of the step once without its launches. `examples` are tensors with the shapes,
    dtypes and device of later batches; `step` may be a captured step. Weights, the optimizer's state and the random
    state keep their values; gradients are undefined until `zero_grad()`, with which a step begins. Python side effects,
    such as counters, happen once. If the step reads a value on the host, only the launches before that are compiled.

    `processes` compile in parallel (0: the number of processors), and `progress(done, of)` is called after each kernel.
    Returns the number of kernels that Triton's cache did not have; 0 on a CPU. Raises the exceptions of the step.
    """
    if launch.ON_CPU:
        return 0
    jobs = missing(lambda: rehearse(step, *examples))
    if jobs:
        with current() as compilers:
            compilers.compile(jobs, progress, processes)
    return len(jobs)


def rehearse(step: Callable[..., Any], *examples: Any) -> None:
    """Run a step in a rehearsal until the host reads a value; a captured step runs as its first calls do."""
    with contextlib.suppress(UnknownError):
        if isinstance(step, Captured):
            step.rehearse(examples)
        else:
            step(*examples)


def missing(work: Callable[[], object]) -> list[Job]:
    """Return the kernels that `work` launches on the current device and that Triton's cache lacks."""
    return [job for job in launched(work, launch.architecture()) if launch_jobs.is_wanted(job)]


def launched(work: Callable[[], object], arch: int, target: str | None = None) -> list[Job]:
    """Return the kernels that `work` launches on the current device, or on any device with this `target`."""
    jobs: dict[str, Job] = {}

    def add(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        with contextlib.suppress(TypeError):  # a constant that cannot be sent to another process
            if launch_jobs.compilable(kernel):
                job = launch_jobs.job_of(arch, kernel, grid, args, meta)
                jobs[job.key] = job

    with rehearsal(add, target):
        work()
    return list(jobs.values())


class UnknownError(RuntimeError):
    """The host reads a value that was not computed."""


@contextlib.contextmanager
def rehearsal(recorder: Callable[..., None], target: str | None = None) -> Iterator[None]:
    """A context that passes launches to `recorder(kernel, grid, args, meta)` and preserves memory allocated before."""

    def record(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        for value in args:
            tensor = getattr(value, "base", value)  # of a descriptor
            if isinstance(tensor, torch.Tensor):
                memory.unknown.add(tensor)
        recorder(kernel, grid, args, meta)

    memory = _Memory(lambda: launch.record(record, target))
    # Functions of torch.compile run eagerly: Dynamo would trace the rehearsal.
    loaded = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with random.forked(), torch.random.fork_rng(devices), launch.record(record, target), eager:
        try:
            with memory:
                yield
        finally:
            memory.restore()


class _Storages:
    """A set of storages, which may be freed without being confused with new ones."""

    def __init__(self) -> None:
        # A weak reference prevents reuse of the address that identifies a storage.
        self._references: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._references

    def add(self, tensor: torch.Tensor) -> None:
        if tensor not in self:
            storage = tensor.untyped_storage()
            self._references[storage._cdata] = StorageWeakRef(storage)

    def discard(self, tensor: torch.Tensor) -> None:
        self._references.pop(tensor.untyped_storage()._cdata, None)


class _Memory(TorchDispatchMode):
    """Tracks torch's operations: which memory is new, and which has unknown values.

    torch's backward enters this mode in other threads, where `recording` creates the context for launches.
    """

    def __init__(self, recording: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self.new = _Storages()
        self.unknown = _Storages()
        self._derived = _Storages()  # computed from memory allocated before
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: dict[torch.Generator, torch.Tensor] = {}

    def restore(self) -> None:
        """Undo copies of derived values into memory allocated before, and reset generators."""
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
        tensors = [value for value in _flat((args, kwargs)) if isinstance(value, torch.Tensor)]
        name = func._schema.name
        generator = kwargs.get("generator")
        if generator is not None:
            self._generators.setdefault(generator, generator.get_state())
        if name in _UPDATE_STATISTICS:
            args = (*args[:3], *(None if x is None else x.clone() for x in args[3:5]), *args[5:])
        # An operator of minidl.torch writes by launches, which mark their tensors.
        written = [] if func.namespace == "minidl" else _written(func, args, kwargs)
        read = [tensor for tensor in tensors if not any(tensor is target for target in written)]
        unknown = any(tensor in self.unknown for tensor in read)
        if written and name not in _SHAPES:
            lasting = any(target not in self.new for target in written)
            if lasting and (unknown or name not in _SETS):
                return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
            derived = any(map(self._is_derived, read))
            for target in written:
                if derived and target in self.new:
                    self._derived.add(target)
                elif derived:
                    self._before.append((target.detach(), target.clone()))
                if unknown:
                    self.unknown.add(target)
                elif name in _SETS and target.nbytes == target.untyped_storage().nbytes():  # such as loaded weights
                    self.unknown.discard(target)
            return func(*args, **kwargs)
        if name == "aten::lift_fresh":  # values from the host
            self.new.add(tensors[0])
        if name in READS and any(tensor in self.unknown for tensor in tensors):
            raise UnknownError
        if name == "aten::_to_copy" and unknown and tensors[0].device.type != _device_type(tensors[0], kwargs):
            raise UnknownError
        with self._recording() if func.namespace == "minidl" and launch.runs() else contextlib.nullcontext():
            outputs = func(*args, **kwargs)
        for output in _flat((outputs,)):
            if isinstance(output, torch.Tensor) and not any(_same_memory(output, tensor) for tensor in tensors):
                self.new.add(output)
                (self._derived.add if any(map(self._is_derived, tensors)) else self._derived.discard)(output)
                if func.namespace != "minidl":
                    (self.unknown.add if unknown else self.unknown.discard)(output)
        return outputs

    def _is_derived(self, tensor: torch.Tensor) -> bool:
        return tensor in self._derived or tensor not in self.new


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes into."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs[argument.name] if argument.name in kwargs else args[i] if i < len(args) else None
            written += [tensor for tensor in _flat((value,)) if isinstance(tensor, torch.Tensor)]
    return written


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
