"""Record a call: the memory it allocates, its launches, and where its result is. `replay` decides when to record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.runtime import launch, launch_tape
from minidl.runtime.descriptors import of_base
from minidl.runtime.launch_cache import fast_launch
from minidl.runtime.launch_cache.recorded_call import (
    Allocation,
    Location,
    RecordedCall,
    RecordedLaunch,
    map_items,
    start_of,
)
from minidl.runtime.launch_tape import Tape

_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# And the position of the value.
_FILLS = {
    _aten.clone.default: 0, _aten._to_copy.default: 0, _aten.copy_.default: 1, _aten.full.default: 1,
    _aten.fill_.Scalar: 1,
}  # fmt: skip
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.zero_.default}
_VIEWS = {_aten._unsafe_view.default, _aten.detach.default, _aten.alias.default}
_ALIGNMENT = 512  # bytes, as in torch's allocator
_local = threading.local()


def is_recording() -> bool:
    """Return whether a call of this thread is being recorded."""
    return getattr(_local, "recording", False)


def record_call(
    function: Callable[..., Any], args: Any, kwargs: Any, inputs: list[torch.Tensor]
) -> tuple[Any, RecordedCall | None]:
    """Call the function and return its result and its recording, None if it cannot be replayed.

    inputs: the tensors among its arguments.
    """
    allocations, tape = _Allocations(), Tape()
    _local.recording = True
    try:
        with allocations, tape:
            result = function(*args, **kwargs)
    finally:
        _local.recording = False
    if allocations.has_other_operations or tape.indirect:
        return result, None
    try:
        return result, _recorded(result, tape, inputs, allocations.buffers)
    except _UnsupportedError:
        return result, None


class _Allocations(TorchDispatchMode):
    """Collects torch's allocations, copies and fills in this thread, and notes operations that cannot be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[torch.Tensor] = []
        self.has_other_operations = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        writes = func in _FILLS or func in _ZEROS
        if func in _ALLOCATES or (writes and output is not args[0]):
            self.buffers.append(output)
        if writes and (func is not _aten._to_copy.default or output.device == args[0].device):
            value = args[_FILLS[func]] if func in _FILLS else 0
            method = torch.Tensor.copy_ if isinstance(value, torch.Tensor) else torch.Tensor.fill_
            launch_tape.tapes[threading.get_ident()].launches.append((method, (), (output, value), {}))
        elif func not in _ALLOCATES and not func.is_view and func not in _VIEWS:
            self.has_other_operations = True
        return output


class _UnsupportedError(Exception):
    """The call uses memory that is neither an input nor a buffer, or a launch that Triton must look up."""


def _recorded(result: Any, tape: Tape, inputs: list[torch.Tensor], buffers: list[torch.Tensor]) -> RecordedCall:
    tensors = [*inputs, *buffers]
    index_of_storage: dict[int, int] = {}
    for index, x in enumerate(tensors):
        index_of_storage.setdefault(x.untyped_storage()._cdata, index)  # all empty storages share one address

    def locate(x: torch.Tensor) -> Location:
        index = index_of_storage.get(x.untyped_storage()._cdata)
        if index is None:
            raise _UnsupportedError
        return Location(index, start_of(x) - start_of(tensors[index]), tuple(x.shape), x.stride(), x.dtype)

    launches = [_recorded_launch(*launched, locate) for launched in tape.launches]
    layouts: dict[int, Any] = {}
    template = _template(result, locate, inputs, buffers, layouts)
    for x in buffers:
        layouts.setdefault(id(x), (x.shape, x.stride()))
    kernels = {id(each.kernel): (each.kernel, each.compiled.variants) for each in launches if each.compiled is not None}
    filled = [each.tensors[0][1].base for each in launches if not each.grid]
    allocations, relocate = _plan_memory(launches, {*_indices(template), *filled}, len(inputs), buffers, layouts)
    return RecordedCall(
        allocations,
        tuple(each.relocated(relocate) for each in launches),
        tuple(kernels.values()),
        _relocated(template, relocate),
    )


def _holds_tensors(value: Any) -> bool:
    """Return whether a sequence has tensors, which are not located."""
    if not isinstance(value, tuple | list):
        return False
    return any(isinstance(each, torch.Tensor | TensorDescriptor) or _holds_tensors(each) for each in value)


def _recorded_launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], locate: Callable[..., Location]
) -> RecordedLaunch:
    tensors = tuple((i, locate(x)) for i, x in enumerate(args) if isinstance(x, torch.Tensor))
    descriptors = tuple((i, locate(x.base)) for i, x in enumerate(args) if isinstance(x, TensorDescriptor))
    if not grid:
        return RecordedLaunch(kernel, (), (None, None if tensors[1:] else args[1]), meta, tensors, (), None, None)
    compiled = None if launch.ON_CPU else fast_launch.lookup(kernel, args, meta)
    if compiled is None and not launch.ON_CPU:
        raise _UnsupportedError
    if any(map(_holds_tensors, args)):
        raise _UnsupportedError
    on_cpu = None
    if launch.COMPILED_CPU:
        from minidl.cpu import run as cpu

        compiled_cpu = cpu.lookup(kernel, args, meta)
        if compiled_cpu is None or descriptors:
            raise _UnsupportedError
        on_cpu = compiled_cpu.bind(grid, args, tuple(i for i, _ in tensors))
    unpacked = None if compiled is None else fast_launch.unpack(compiled, args)
    if unpacked is not None:
        for i, _ in (*tensors, *descriptors):
            unpacked.args[unpacked.position[i]] = None  # release the tensors
    fixed = tuple(
        None if isinstance(x, torch.Tensor) else of_base(x, None) if isinstance(x, TensorDescriptor) else x
        for x in args
    )
    return RecordedLaunch(kernel, grid, fixed, meta, tensors, descriptors, compiled, unpacked, on_cpu)


def _plan_memory(
    launches: list[RecordedLaunch], results: set[int], first: int, buffers: list[torch.Tensor], layouts: dict[int, Any]
) -> tuple[tuple[Allocation, ...], Callable[[Location], Location]]:
    """Return the allocations of a replay, and the function from recorded to replayed locations.

    `results` (by index; the first buffer has index `first`) get tensors of their own. All other buffers share one
    tensor, in which buffers that no launch needs at the same time overlap.
    """
    outputs = [index for index in range(first, first + len(buffers)) if index in results]
    uses: dict[int, list[int]] = {}
    for number, recorded in enumerate(launches):
        for _, location in (*recorded.tensors, *recorded.descriptors):
            if location.base >= first and location.base not in results:
                uses.setdefault(location.base, []).append(number)
    begins, ends = _overlapped([(numbers[0], numbers[-1], buffers[i - first]) for i, numbers in uses.items()])
    begin_of = dict(zip(uses, begins, strict=True))
    index_of = {index: first + i for i, index in enumerate(outputs)}
    allocations: list[Allocation] = [
        (*layouts[id(x)], x.dtype, x.device) for x in (buffers[index - first] for index in outputs)
    ]
    if uses:
        allocations.append(((max(ends),), (1,), torch.uint8, buffers[next(iter(uses)) - first].device))

    def relocate(location: Location) -> Location:
        if location.base in begin_of:
            return location._replace(base=first + len(outputs), offset=begin_of[location.base] + location.offset)
        return location._replace(base=index_of.get(location.base, location.base))

    return tuple(allocations), relocate


def _overlapped(lifetimes: Sequence[tuple[int, int, torch.Tensor]]) -> tuple[list[int], list[int]]:
    """Return the first and the end byte of each tensor, given its first and last launch: the first gap that is free."""
    if len({x.device for _, _, x in lifetimes}) > 1:
        raise _UnsupportedError
    begins: list[int] = []
    ends: list[int] = []
    for start, end, x in lifetimes:
        size, begin = max(1, x.untyped_storage().nbytes()), 0
        live = [i for i, (a, b, _) in enumerate(lifetimes[: len(begins)]) if a <= end and start <= b]
        for i in sorted(live, key=begins.__getitem__):
            if begin + size <= begins[i]:
                break
            begin = max(begin, ends[i])
        begins.append(begin)
        ends.append(-(-(begin + size) // _ALIGNMENT) * _ALIGNMENT)
    return begins, ends


def _template(
    result: Any,
    locate: Callable[[torch.Tensor], Location],
    inputs: list[torch.Tensor],
    buffers: list[torch.Tensor],
    layouts: dict[int, Any],
) -> Any:
    """Return a result with an index or a location for each tensor; a buffer that is a result gets that layout."""
    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        for index, x in enumerate(inputs):
            if x is result:
                return index
        location = locate(result)
        index = location.base - len(inputs)
        if index >= 0 and location.offset == 0 and location.dtype == buffers[index].dtype:
            layout = result.shape, result.stride()
            if _is_dense(result, buffers[index]) and layouts.setdefault(id(buffers[index]), layout) == layout:
                return location.base
        return location
    if isinstance(result, tuple | list):
        return map_items(result, lambda item: _template(item, locate, inputs, buffers, layouts))
    raise _UnsupportedError


def _is_dense(result: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Return whether the result has every value of the buffer exactly once."""
    expected = 1
    for stride, size in sorted(zip(result.stride(), result.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return result.nbytes == buffer.untyped_storage().nbytes()


def _indices(template: Any) -> Iterator[int]:
    """Yield the indices of the inputs and buffers that a result is in."""
    if isinstance(template, int):
        yield template
    elif isinstance(template, Location):
        yield template.base
    else:
        for item in template or ():
            yield from _indices(item)


def _relocated(template: Any, relocate: Callable[[Location], Location]) -> Any:
    if template is None:
        return None
    if isinstance(template, int):
        return relocate(Location(template, 0, (), (), torch.uint8)).base
    if isinstance(template, Location):
        return relocate(template)
    return map_items(template, lambda item: _relocated(item, relocate))
