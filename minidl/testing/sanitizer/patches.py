"""Replacements of the interpreter's launches, loads, stores and atomic operations that call the sanitizer first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl.testing.sanitizer import lanes
from minidl.testing.sanitizer.autotuned import assert_statically, run_first
from minidl.testing.sanitizer.checks import ADDRESS, Sanitizer
from minidl.testing.sanitizer.findings import SanitizerError

_BUILDER = interpreter.InterpreterBuilder
_EXECUTOR = interpreter.GridExecutor
_active: list[Sanitizer] = []
_originals: dict[tuple[Any, str], Any] = {}
# Conversions, and functions for which NumPy replaces or drops NaN.
_CARRYING = (
    "create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui", "create_fp_ext", "create_fp_trunc",
    "create_fp_to_fp", "create_int_cast", "create_bitcast", "create_exp", "create_exp2", "create_log", "create_log2",
    "create_sin", "create_cos", "create_erf", "create_sqrt", "create_precise_sqrt", "create_rsqrt",
    "create_maxnumf", "create_minnumf", "create_clampf", "create_extern_elementwise",
)  # fmt: skip
# A barrier, and functions in which the lanes of a block exchange values.
_JOINING = (
    "create_barrier", "create_trans", "create_join", "create_split", "create_cat", "create_gather",
)  # fmt: skip
# Triton 3.9 has no other kinds of load.
_SEMANTIC_LOAD = "_load_legacy" if hasattr(TritonSemantic, "_load_legacy") else "load"


@contextlib.contextmanager
def checking(sanitizer: Sanitizer) -> Iterator[None]:
    """Return a context that checks every interpreted launch with the sanitizer of the innermost context."""
    if not _active:
        _install()
    _active.append(sanitizer)
    try:
        yield
    finally:
        _active.remove(sanitizer)
        if not _active:
            for (owner, name), original in _originals.items():
                setattr(owner, name, original)
            _originals.clear()


def _install() -> None:
    replacements: dict[tuple[Any, str], Callable[..., Any]] = {
        (_EXECUTOR, "__call__"): _call,
        (Autotuner, "run"): run_first(Autotuner.run),
        (tl, "static_assert"): assert_statically,
        (_EXECUTOR, "_init_args_hst"): _init_args,
        (interpreter, "_implicit_cvt"): _convert,
        (TritonSemantic, _SEMANTIC_LOAD): _load_with_other,
        (_BUILDER, "set_grid_idx"): _set_program,
        (_BUILDER, "create_load"): _load,
        (_BUILDER, "create_masked_load"): _masked_load,
        (_BUILDER, "create_store"): _store,
        (_BUILDER, "create_masked_store"): _masked_store,
        (_BUILDER, "create_descriptor_load"): _descriptor_load,
        (_BUILDER, "create_descriptor_store"): _descriptor_store,
        (_BUILDER, "create_atomic_rmw"): _atomic_rmw,
        (_BUILDER, "create_atomic_cas"): _atomic_cas,
        (_BUILDER, "create_ptr_to_int"): _pointer_to_int,
        **{(tl, name): _hinted(name) for name in ("multiple_of", "max_contiguous")},
        **{(_BUILDER, name): _joining(getattr(_BUILDER, name)) for name in _JOINING if hasattr(_BUILDER, name)},
        (interpreter.ReduceScanOpInterface, "apply"): _joining(interpreter.ReduceScanOpInterface.apply),
        (interpreter.ReduceOps, "apply_impl"): _carrying(
            interpreter.ReduceOps, "apply_impl", lanes.carry_through_reduction
        ),
        (_BUILDER, "create_histogram"): _joining(
            _carrying(_BUILDER, "create_histogram", lanes.carry_through_histogram)
        ),
        (_BUILDER, "create_dot"): _joining(_carrying(_BUILDER, "create_dot", lanes.carry_through_product)),
        **{(_BUILDER, name): _carrying(_BUILDER, name) for name in _CARRYING if hasattr(_BUILDER, name)},
    }
    for (owner, name), replacement in replacements.items():
        _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, replacement)


def _call(executor: Any, *args: Any, **kwargs: Any) -> None:
    sanitizer = _active[-1]
    sanitizer.begin(executor.fn.__name__)
    try:
        _originals[_EXECUTOR, "__call__"](executor, *args, **kwargs)
    except interpreter.InterpreterError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, SanitizerError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None
    finally:
        sanitizer.launch = None


def _init_args(executor: Any, args: Any, kwargs: Any) -> Any:
    launch = _active[-1].running
    for tensor in _tensors((*args, *kwargs.values())):
        _active[-1].unwritten.catch_up(interpreter._unwrap_tensor(tensor))
    positional, named = _originals[_EXECUTOR, "_init_args_hst"](executor, args, kwargs)
    for value, converted in zip(args, positional, strict=True):
        if hasattr(value, "beside"):
            converted.beside = value.beside  # Triton only knows the base of a descriptor
    for name, value in (*zip(executor.arg_names, positional, strict=False), *named.items()):
        for tensor in _tensors(value):
            launch.name(name, tensor)
    return positional, named


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, TensorDescriptor):
        yield value.base
        if (beside := getattr(value, "beside", None)) is not None:
            yield beside
    elif hasattr(value, "data_ptr"):
        yield value


def _convert(arg: Any) -> Any:
    converted = _originals[interpreter, "_implicit_cvt"](arg)
    launch = _active[-1].launch
    if launch is not None and hasattr(arg, "beside"):
        numbers = (launch.number(t, interpreter._unwrap_tensor(t)) for t in (arg.beside, arg.base))
        converted.handle.further = np.uint64(next(numbers) << 48) - np.uint64(next(numbers) << 48)
    if launch is not None and hasattr(arg, "data_ptr"):
        number = np.uint64(launch.number(arg, interpreter._unwrap_tensor(arg)) << 48)
        converted.handle.data = converted.handle.data | number
    return converted


def _set_program(builder: Any, x: int, y: int, z: int) -> None:
    _originals[_BUILDER, "set_grid_idx"](builder, x, y, z)
    sanitizer = _active[-1]
    sanitizer.grid = (x, y, z), tuple(builder.grid_dim)
    if sanitizer.launch is not None:
        sanitizer.launch.begin(sanitizer.program_number, math.prod(builder.grid_dim))


def _full_mask(pointers: Any) -> Any:
    return interpreter.TensorHandle(np.ones(np.shape(pointers.data), bool), tl.int1)


def _dtype(pointers: Any) -> Any:
    return np.dtype(interpreter._get_np_dtype(pointers.get_element_ty()))


def _load_with_other(semantic: Any, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
    """Load, and record whether `other` was passed: Triton drops an `other` of a single 0."""
    _active[-1].other_given = other is not None
    try:
        return _originals[TritonSemantic, _SEMANTIC_LOAD](semantic, ptr, mask, other, *rest)
    finally:
        _active[-1].other_given = False


def _carrying(owner: Any, name: str, carry: Callable[..., Any] = lanes.carry_through) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        launch, original = _active[-1].launch, _originals[owner, name]
        if launch is None or not launch.lanes.masked:
            return original(*arguments)
        return carry(original, launch.lanes, *arguments)

    return call


def _joining(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a barrier before it."""

    def join(*arguments: Any) -> Any:
        if (launch := _active[-1].launch) is not None:
            launch.join()
        return function(*arguments)

    return join


def _pointer_to_int(builder: Any, pointers: Any, kind: Any) -> Any:
    """Return the address without the argument's number: it may be stored, or compared with another."""
    address = interpreter.TensorHandle(pointers.data & ADDRESS, pointers.dtype)
    return _originals[_BUILDER, "create_ptr_to_int"](builder, address, kind)


def _load(builder: Any, pointers: Any, *policy: Any) -> Any:
    return _masked_load(builder, pointers, _full_mask(pointers), None)


def _masked_load(builder: Any, pointers: Any, mask: Any, other: Any, *policy: Any, **named: Any) -> Any:
    sanitizer, data, dtype = _active[-1], pointers.data, _dtype(pointers)
    active = np.broadcast_to(mask.data, data.shape).astype(bool)
    addresses, safe = sanitizer.access(data, active, dtype.itemsize, "load")
    values = np.zeros(data.shape, dtype) if other is None else np.array(np.broadcast_to(other.data, data.shape), dtype)
    if other is None and not sanitizer.other_given and not active.all():
        values[~active] = sanitizer.stand_in(pointers.get_element_ty(), dtype, masked=True)
    unread = active & ~safe
    if unread.any():
        values[unread] = sanitizer.stand_in(pointers.get_element_ty(), dtype, masked=False)
    loaded = interpreter._interpreter.load(addresses, safe, values, dtype)
    return interpreter.TensorHandle(loaded, pointers.get_element_ty())


def _store(builder: Any, pointers: Any, value: Any, *policy: Any) -> None:
    _masked_store(builder, pointers, value, _full_mask(pointers))


def _masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *policy: Any) -> None:
    sanitizer, data = _active[-1], pointers.data
    active = np.broadcast_to(mask.data, data.shape).astype(bool)
    addresses, safe = sanitizer.access(data, active, _dtype(pointers).itemsize, "store", value.data)
    sanitizer.check_lanes(data, safe, value.data)
    sanitizer.check_values(data, safe, value.data, pointers.get_element_ty())
    interpreter._interpreter.store(addresses, np.array(np.broadcast_to(value.data, data.shape)), safe)


def _box(descriptor: Any, indices: Any) -> tuple[Any, Any]:
    """Return the pointers and the mask (in Triton 3.9 a handle) of a descriptor's block, or of its second tensor's."""
    pointers, mask = descriptor.materialize_pointers(indices)
    if hasattr(descriptor, "further") and int(indices[0].data.reshape(())) == 1:
        pointers.data = pointers.data + descriptor.further
    return pointers, mask if isinstance(mask, interpreter.TensorHandle) else interpreter.TensorHandle(mask, tl.int1)


def _descriptor_load(builder: Any, descriptor: Any, indices: Any, *policy: Any) -> Any:
    pointers, mask = _box(descriptor, indices)
    zeros = descriptor.padding == interpreter._ir.PADDING_OPTION.PAD_ZERO
    padding = np.full(pointers.data.shape, 0 if zeros else np.nan, _dtype(pointers))
    other = interpreter.TensorHandle(padding, pointers.get_element_ty())
    loaded = _masked_load(builder, pointers, mask, other)
    if getattr(descriptor, "round_f32_to_tf32", False) and pointers.get_element_ty() == tl.float32:
        return interpreter.TensorHandle(interpreter._round_f32_to_tf32(loaded.data), loaded.dtype)
    return loaded


def _descriptor_store(builder: Any, descriptor: Any, value: Any, indices: Any) -> None:
    pointers, mask = _box(descriptor, indices)
    _masked_store(builder, pointers, value, mask)


def _atomic_rmw(builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
    sanitizer, data = _active[-1], pointers.data
    active = np.broadcast_to(mask.data, data.shape).astype(bool)
    addresses, safe = _access_atomically(sanitizer, pointers, active, sem, scope)
    sanitizer.check_values(data, safe, value.data, pointers.get_element_ty())
    return _originals[_BUILDER, "create_atomic_rmw"](
        builder, operation, interpreter.TensorHandle(addresses, pointers.dtype), value,
        interpreter.TensorHandle(safe, tl.int1), sem, scope,
    )  # fmt: skip


def _atomic_cas(builder: Any, pointers: Any, compared: Any, value: Any, sem: Any, scope: Any) -> Any:
    sanitizer, data = _active[-1], pointers.data
    addresses, safe = _access_atomically(sanitizer, pointers, np.ones(data.shape, bool), sem, scope)
    if not safe.all():
        return interpreter.TensorHandle(np.broadcast_to(compared.data, data.shape).copy(), compared.dtype)
    return _originals[_BUILDER, "create_atomic_cas"](
        builder, interpreter.TensorHandle(addresses, pointers.dtype), compared, value, sem, scope
    )


def _access_atomically(sanitizer: Sanitizer, pointers: Any, active: Any, sem: Any, scope: Any) -> Any:
    """Check an atomic operation, which may acquire the releases at its addresses and release all earlier accesses."""
    orders, both = interpreter._ir.MEM_SEMANTIC, interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE
    narrow = scope == interpreter._ir.MEM_SYNC_SCOPE.CTA
    order = None if narrow else sanitizer.running.order
    addresses = [] if order is None else (pointers.data & ADDRESS)[active].tolist()
    if order is not None and sem in (orders.ACQUIRE, both):
        order.acquire(addresses)
    kind = "narrow atomic" if narrow else "atomic"
    if pointers.data.size == 1:
        sanitizer.running.join()  # Triton passes the result to all lanes, with a barrier
    accessed = sanitizer.access(pointers.data, active, _dtype(pointers).itemsize, kind)
    if order is not None and sem in (orders.RELEASE, both):
        order.release(addresses)
    return accessed


def _hinted(name: str) -> Callable[..., Any]:
    def hint(values: Any, numbers: Any) -> Any:
        result, sanitizer = _originals[tl, name](values, numbers), _active[-1]
        if sanitizer.launch is not None and isinstance(getattr(values, "handle", None), interpreter.TensorHandle):
            listed = numbers if isinstance(numbers, (list, tuple, tl.tuple)) else [numbers]
            plain = [number.value if isinstance(number, tl.constexpr) else number for number in listed]
            sanitizer.check_hint(name, values.handle, plain)
        return result

    return hint
