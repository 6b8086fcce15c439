"""The kernels of element-wise arithmetic, y = f(a), f(a, b) or f(a, b, c), and their launcher.

The launcher merges adjacent dimensions if the strides of every operand allow it. Operands that become one contiguous
range use `flat_kernel`. All others use `tile_kernel`, whose program writes one tile of an [M, N] plane of y:

    y [D0, D1, D2, D3, M, N]      N: innermost in y's memory      M: the largest other dimension
      +----+----+----+
    M |    | ## |    |     one program: BLOCK_M x BLOCK_N elements of y, and of each operand by its own strides,
      +----+----+----+     0 where the operand is repeated; D0 D1 D2 D3 such planes
             N
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, check, memory_layout
from minidl.kernels.activation import Activation
from minidl.kernels.elementwise.functions import CHOICES, COMPARISONS, Operation, function
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

Operand = torch.Tensor | float | int | bool

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MAX_OUTER = 4


class Planes(NamedTuple):
    """Sizes of the planes [M, N] and of the dimensions outside them (D0 follows from the grid)."""

    D1: int
    D2: int
    D3: int
    M: int
    N: int


class Strides(NamedTuple):
    """Strides of an operand along the dimensions outside the planes, and in a plane."""

    d0: int
    d1: int
    d2: int
    d3: int
    m: int
    n: int


@triton.jit
def load_range(p, start, o, m, SCALAR: tl.constexpr, ACC: tl.constexpr):
    """Return a contiguous block [BLOCK_N] of an operand, or its single value."""
    if SCALAR:
        return tl.load(p).to(ACC)
    else:
        return tl.load(p + start + o, mask=m, other=0).to(ACC)


@triton.jit
def flat_kernel(p_a, p_b, p_c, p_y, N, SCALARS: tl.constexpr, operation: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute N contiguous elements; bit i of SCALARS says that operand i is a single value."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    o = tl.arange(0, BLOCK_N)
    m = o < tl.minimum(N - start, BLOCK_N).to(tl.int32)
    b_a = load_range(p_a, start, o, m, SCALARS & 1, operation.ACC_A)
    b_b = None
    b_c = None
    if p_b is not None:
        b_b = load_range(p_b, start, o, m, SCALARS & 2, operation.ACC)
    if p_c is not None:
        b_c = load_range(p_c, start, o, m, SCALARS & 4, operation.ACC)
    b_y = function(b_a, b_b, b_c, operation)
    tl.store(p_y + start + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def plane_pointers(p, strides, outer, o_m, o_n, OUTER: tl.constexpr):
    """Return pointers [BLOCK_M, BLOCK_N] to a tile of the plane at the `outer` indices."""
    if OUTER:
        p += outer[0] * strides.d0 + outer[1] * strides.d1 + outer[2] * strides.d2 + outer[3] * strides.d3
    return p + o_m * strides.m + o_n * strides.n


@triton.jit
def load_tile(p, strides, outer, o_m, o_n, m, OUTER: tl.constexpr, ACC: tl.constexpr):
    """Return a tile [BLOCK_M, BLOCK_N] of an operand."""
    return tl.load(plane_pointers(p, strides, outer, o_m, o_n, OUTER), mask=m, other=0).to(ACC)


@triton.jit
def tile_kernel(
    p_a, p_b, p_c, p_y, planes, s_a, s_b, s_c, s_y,
    operation: tl.constexpr, OUTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a plane [M, N] of y; OUTER: there are dimensions outside it."""
    i_m = tl.program_id(0) % tl.cdiv(planes.M, BLOCK_M)
    rest = tl.program_id(0) // tl.cdiv(planes.M, BLOCK_M)
    i_n = rest % tl.cdiv(planes.N, BLOCK_N)
    rest = rest // tl.cdiv(planes.N, BLOCK_N)
    i_3 = (rest % planes.D3).to(tl.int64)
    rest = rest // planes.D3
    i_2 = (rest % planes.D2).to(tl.int64)
    rest = rest // planes.D2
    outer = ((rest // planes.D1).to(tl.int64), (rest % planes.D1).to(tl.int64), i_2, i_3)
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m = (o_m < planes.M) & (o_n < planes.N)
    b_a = load_tile(p_a, s_a, outer, o_m, o_n, m, OUTER, operation.ACC_A)
    b_b = None
    b_c = None
    if p_b is not None:
        b_b = load_tile(p_b, s_b, outer, o_m, o_n, m, OUTER, operation.ACC)
    if p_c is not None:
        b_c = load_tile(p_c, s_c, outer, o_m, o_n, m, OUTER, operation.ACC)
    b_y = function(b_a, b_b, b_c, operation)
    tl.store(plane_pointers(p_y, s_y, outer, o_m, o_n, OUTER), b_y.to(p_y.dtype.element_ty), mask=m)


@replayed
def compute(
    name: str,
    op: tl.constexpr,
    *operands: Operand,
    integers: bool = False,
    act: Activation = None,
    condition: bool = False,
    wide: bool = False,
    like: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return f of up to three operands of one dtype, that of the first tensor; numbers take the accumulation dtype.

    With `condition`, the first operand is a torch.bool tensor. With `wide`, tensors may have the accumulation dtype.
    The result has the memory layout of `like`, or follows `memory_layout`; or it is written to `out`, which may be an
    operand. Raises ValueError if `out` has another shape or dtype.
    """
    number = op.value
    first = next((x for x in operands[condition:] if isinstance(x, torch.Tensor)), None)
    if first is None:
        raise TypeError(f"{name}: got only Python numbers, expected at least one tensor")
    dtype, device = first.dtype, first.device
    comparison = number in COMPARISONS
    acc = _acc(name, dtype, integers, comparison)
    for i, x in enumerate(operands):
        if isinstance(x, torch.Tensor):
            _check(name, x, first, condition and i == 0, wide)
    tensors = [
        x if isinstance(x, torch.Tensor) else _as_scalar(name, x, dtype, device, number in CHOICES) for x in operands
    ]
    shape = broadcast(name, [x.shape for x in tensors])
    kind = torch.bool if comparison else dtype
    if out is not None and (out.shape != shape or out.dtype != kind):
        raise ValueError(
            f"{name}: the result has shape {list(shape)} and dtype {kind}, which does not fit in place of "
            f"{list(out.shape)} and {out.dtype}"
        )
    gaps = out is not None and not memory_layout.dense(shape, out.stride())
    if out is not None and (not gaps or len(shape) == 2):
        y = out
    else:
        y = memory_layout.empty(shape, tensors if like is None else [like], kind)
    code, slope = activation.parse(act)
    operation = Operation(number, acc, tl.int1 if condition else acc, activation.CODES[code], slope)
    _launch(tensors, y, dtype, operation, gaps and y is out)
    return y if out is None or out is y else out.copy_(y)


def _launch(
    tensors: list[torch.Tensor], y: torch.Tensor, dtype: torch.dtype, operation: Operation, gaps: bool = False
) -> None:
    total = y.numel()
    if total == 0:
        return
    absent = [None] * (3 - len(tensors))
    if not gaps and all(x.numel() == 1 or _is_contiguous_like(x, y) for x in tensors):
        tile = launch.tile("elementwise", dtype, N=total)
        # A single element counts as a range of length 1, so that a result is never a scalar.
        scalars = sum((x.numel() == 1 < total) << i for i, x in enumerate(tensors))
        grid = (launch.cdiv(total, tile["BLOCK_N"]),)
        launch.run(flat_kernel, grid, *tensors, *absent, y, total, SCALARS=scalars, operation=operation, **tile.options)
        return
    planned = _planes(y.shape, (*(_strides(x, y.shape) for x in tensors), y.stride()))
    if planned is None:
        copies = [x if x.numel() == 1 else torch.empty_like(y, dtype=x.dtype).copy_(x) for x in tensors]
        _launch(copies, y, dtype, operation)
        return
    planes, (*strides, of_y), count = planned
    tile = launch.tile("elementwise_tile", dtype, M=planes.M, N=planes.N)
    programs = launch.cdiv(planes.M, tile["BLOCK_M"]) * launch.cdiv(planes.N, tile["BLOCK_N"]) * count
    launch.run(
        tile_kernel, (programs,), *tensors, *absent, y, planes, *strides, *absent, of_y,
        operation=operation, OUTER=count > 1, **tile.options,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _planes(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> tuple[Planes, list[Strides], int] | None:
    """Return the planes of y (its strides are the last), the strides of the operands and y, and the number of planes;
    None if there are more than MAX_OUTER dimensions outside them."""
    # Dimensions in memory order, so that the result is contiguous along the last one.
    dims = sorted(range(len(shape)), key=strides[-1].__getitem__, reverse=True)
    sizes, merged = collapse([shape[i] for i in dims], [[steps[i] for i in dims] for steps in strides])
    missing = MAX_OUTER + 2 - len(sizes)
    if missing < 0:
        return None
    # Programs do not loop, so a large plane is best.
    others = sorted(range(len(sizes) - 1), key=sizes.__getitem__)
    axes = [*sorted(others[:-1]), *others[-1:], len(sizes) - 1]
    extents = [1] * missing + [sizes[i] for i in axes]
    of_operands = [Strides(*[0] * missing, *(steps[i] for i in axes)) for steps in merged]
    return Planes(*extents[1:]), of_operands, math.prod(extents[:MAX_OUTER])


def _is_contiguous_like(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether x has the memory layout of y, which is dense."""
    return x.numel() == y.numel() and (
        (x.stride() == y.stride() and x.shape == y.shape) or (x.is_contiguous() and y.is_contiguous())
    )


def broadcast(name: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape that all shapes broadcast to. Raises ValueError if they do not."""
    first = tuple(shapes[0])
    if all(tuple(shape) == first for shape in shapes):
        return first
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = " and ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"{name}: shapes {listed} do not broadcast: sizes must be equal or 1, counted from the end"
        ) from None


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides of each operand without size-1 dimensions and with neighbours merged if possible."""
    sizes: list[int] = []
    merged: list[list[int]] = []  # of each dimension, the strides of all operands
    for i in [i for i, size in enumerate(shape) if size != 1] or range(len(shape))[-1:]:
        steps = [s[i] for s in strides]
        if sizes and merged[-1] == [step * shape[i] for step in steps]:
            sizes[-1] *= shape[i]
            merged[-1] = steps
        else:
            sizes.append(shape[i])
            merged.append(steps)
    return sizes, [[steps[j] for steps in merged] for j in range(len(strides))]


def _strides(x: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of x broadcast to `shape`: 0 along repeated dimensions."""
    steps = (0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True))
    return *[0] * (len(shape) - x.dim()), *steps


def _acc(name: str, dtype: torch.dtype, integers: bool, comparison: bool) -> tl.dtype:
    """Return the type to compute in. Raises TypeError for a dtype that the operation does not support."""
    if dtype.is_floating_point and dtype in check.FLOATING:
        return launch.acc(dtype)
    if integers and dtype in _INTEGERS:
        return getattr(tl, str(dtype).removeprefix("torch."))
    if comparison and dtype == torch.bool:
        return tl.int8
    expected = "a floating or integer type" if integers else "a floating type"
    raise TypeError(f"{name}: got dtype {dtype}, expected {expected}; convert it with .to()")


def _check(name: str, x: torch.Tensor, first: torch.Tensor, condition: bool, wide: bool) -> None:
    if condition and x.dtype != torch.bool:
        raise TypeError(f"{name}: the condition has dtype {x.dtype}, expected torch.bool; compare it, as in x > 0")
    if not condition and x.dtype != first.dtype and not (wide and x.dtype == launch.acc_torch(first.dtype)):
        raise TypeError(f"{name}: got operands of {first.dtype} and {x.dtype}; convert one of them with .to()")
    if x.device != first.device:
        raise ValueError(f"{name}: got operands on {first.device} and {x.device}; move one of them with .to()")


def _as_scalar(
    name: str, value: float | int | bool, dtype: torch.dtype, device: torch.device, narrow: bool
) -> torch.Tensor:
    """Return a number as a 0-d tensor in the accumulation dtype, to avoid rounding, or in `dtype` if `narrow`."""
    if not isinstance(value, int | float):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor or a number; use minidl.as_tensor(...)")
    if not dtype.is_floating_point and isinstance(value, float):
        raise TypeError(f"{name}: got a {dtype} tensor and the number {value}; convert the tensor to a floating type")
    if dtype == torch.bool:
        # Comparisons with bool need only the order of other numbers.
        return torch.full((), max(-1, min(2, value)), dtype=torch.int8, device=device)
    kind = launch.acc_torch(dtype) if dtype.is_floating_point and not narrow else dtype
    if not dtype.is_floating_point and not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
        raise ValueError(f"{name}: the number {value} is outside the range of {dtype}; convert the tensor with .to()")
    if isinstance(value, int) and value.bit_length() > 1023:
        raise ValueError(f"{name}: a whole number of {value.bit_length()} bits is outside the range of {dtype}")
    return torch.full((), value, dtype=kind, device=device)
