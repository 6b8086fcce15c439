"""The kernels of element-wise arithmetic and their launcher.

The launcher merges adjacent dimensions if the strides of every operand allow it. Operands that become one contiguous
range use `flat_kernel`, all others `tile_kernel`, with a grid of two-dimensional tiles.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minidl.kernels import activation, check, memory_layout
from minidl.kernels.activation import Activation
from minidl.kernels.elementwise.functions import CHOICES, COMPARISONS, function
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

Operand = torch.Tensor | float | int | bool

_INTEGERS = {
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}
MAX_OUTER = 4


@triton.jit
def load_run(p, o, m, SCALAR: tl.constexpr, ACC: tl.constexpr):
    """Load a contiguous block of an operand, or its single value."""
    if SCALAR:
        return tl.load(p).to(ACC)
    else:
        return tl.load(p + o, mask=m, other=0).to(ACC)


@triton.jit
def flat_kernel(
    p_a, p_b, p_c, p_y, N,
    OP: tl.constexpr, OPERANDS: tl.constexpr, SCALARS: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ACC: tl.constexpr, ACC_A: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute N contiguous elements; bit i of SCALARS says that operand i is a single value."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_N
    o = tl.arange(0, BLOCK_N)
    m = o < tl.minimum(N - start, BLOCK_N).to(tl.int32)
    b_a = load_run(p_a + (0 if SCALARS & 1 else start), o, m, SCALARS & 1, ACC_A)  # [BLOCK_N]
    b_b = b_a
    b_c = b_a
    if OPERANDS > 1:
        b_b = load_run(p_b + (0 if SCALARS & 2 else start), o, m, SCALARS & 2, ACC)
    if OPERANDS > 2:
        b_c = load_run(p_c + (0 if SCALARS & 4 else start), o, m, SCALARS & 4, ACC)
    b_y = function(b_a, b_b, b_c, OP, OPERANDS, ACT, SLOPE)
    tl.store(p_y + start + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def tile_kernel(
    p_a, p_b, p_c, p_y, M, N, D1, D2, D3,
    s_am, s_an, s_a0, s_a1, s_a2, s_a3, s_bm, s_bn, s_b0, s_b1, s_b2, s_b3,
    s_cm, s_cn, s_c0, s_c1, s_c2, s_c3, s_ym, s_yn, s_y0, s_y1, s_y2, s_y3,
    OP: tl.constexpr, OPERANDS: tl.constexpr, OUTER: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr,
    ACC: tl.constexpr, ACC_A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a tile of an [M, N] plane, at one index of up to four outer dimensions [D0, D1, D2, D3]."""
    i_m = tl.program_id(0) % tl.cdiv(M, BLOCK_M)
    rest = tl.program_id(0) // tl.cdiv(M, BLOCK_M)
    i_n = rest % tl.cdiv(N, BLOCK_N)
    rest = rest // tl.cdiv(N, BLOCK_N)
    if OUTER:
        i_3 = (rest % D3).to(tl.int64)
        rest = rest // D3
        i_2 = (rest % D2).to(tl.int64)
        rest = rest // D2
        i_1 = (rest % D1).to(tl.int64)
        i_0 = (rest // D1).to(tl.int64)
        p_a += i_0 * s_a0 + i_1 * s_a1 + i_2 * s_a2 + i_3 * s_a3
        p_y += i_0 * s_y0 + i_1 * s_y1 + i_2 * s_y2 + i_3 * s_y3
        if OPERANDS > 1:
            p_b += i_0 * s_b0 + i_1 * s_b1 + i_2 * s_b2 + i_3 * s_b3
        if OPERANDS > 2:
            p_c += i_0 * s_c0 + i_1 * s_c1 + i_2 * s_c2 + i_3 * s_c3
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m = (o_m < M) & (o_n < N)
    b_a = tl.load(p_a + o_m * s_am + o_n * s_an, mask=m, other=0).to(ACC_A)  # [BLOCK_M, BLOCK_N]
    b_b = b_a
    b_c = b_a
    if OPERANDS > 1:
        b_b = tl.load(p_b + o_m * s_bm + o_n * s_bn, mask=m, other=0).to(ACC)
    if OPERANDS > 2:
        b_c = tl.load(p_c + o_m * s_cm + o_n * s_cn, mask=m, other=0).to(ACC)
    b_y = function(b_a, b_b, b_c, OP, OPERANDS, ACT, SLOPE)
    tl.store(p_y + o_m * s_ym + o_n * s_yn, b_y.to(p_y.dtype.element_ty), mask=m)


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
    first = _first_tensor(name, operands[1:] if condition else operands)
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
    if out is not None and memory_layout.dense(shape, out.stride()):
        y = out
    else:
        y = memory_layout.empty(shape, tensors if like is None else [like], kind)
    activation_, slope = activation.parse(act)
    flags = {
        "OP": number,
        "OPERANDS": len(tensors),
        "ACT": activation.CODES[activation_],
        "SLOPE": slope,
        "ACC": acc,
        "ACC_A": tl.int1 if condition else acc,
    }
    _launch(tensors, y, dtype, flags)
    return y if out is None or out is y else out.copy_(y)


def _launch(tensors: list[torch.Tensor], y: torch.Tensor, dtype: torch.dtype, flags: dict) -> None:
    total = y.numel()
    if total == 0:
        return
    padding = [tensors[0]] * (3 - len(tensors))
    if all(x.numel() == 1 or _is_contiguous_like(x, y) for x in tensors):
        tile = launch.tile("elementwise", dtype, N=total)
        # A single element counts as a range of length 1, so that a result is never a scalar.
        scalars = sum((x.numel() == 1 < total) << i for i, x in enumerate(tensors))
        grid = (launch.cdiv(total, tile["BLOCK_N"]),)
        launch.run(flat_kernel, grid, *tensors, *padding, y, total, SCALARS=scalars, **flags, **tile.options)
        return
    # Dimensions in memory order, so that the result is contiguous along the last one.
    dims = sorted(range(y.dim()), key=y.stride, reverse=True)
    ordered = [[steps[dim] for dim in dims] for steps in (*(_strides(x, y.shape) for x in tensors), y.stride())]
    sizes, strides = collapse([y.shape[dim] for dim in dims], ordered)
    if len(sizes) > MAX_OUTER + 2:
        copies = [x if x.numel() == 1 else torch.empty_like(y, dtype=x.dtype).copy_(x) for x in tensors]
        _launch(copies, y, dtype, flags)
        return
    # The plane is the innermost and the largest other dimension: programs do not loop, so a large plane is best.
    others = sorted(range(len(sizes) - 1), key=lambda i: sizes[i])
    outer, plane = sorted(others[:-1]), [*others[-1:], len(sizes) - 1]
    extents = [1] * (2 - len(plane)) + [sizes[i] for i in plane]
    outside = [1] * (MAX_OUTER - len(outer)) + [sizes[i] for i in outer]
    steps = []
    for s in [*strides[:-1], *[strides[0]] * len(padding), strides[-1]]:
        steps += [0] * (2 - len(plane)) + [s[i] for i in plane] + [0] * (MAX_OUTER - len(outer)) + [s[i] for i in outer]
    M, N = extents
    tile = launch.tile("elementwise_tile", dtype, M=M, N=N)
    programs = launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(N, tile["BLOCK_N"])
    for extent in outside:
        programs *= extent
    launch.run(
        tile_kernel, (programs,), *tensors, *padding, y, M, N, *outside[1:], *steps,
        OUTER=bool(outer), **flags, **tile.options,
    )  # fmt: skip


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
    result: list[int] = []
    for i in range(1, max(len(shape) for shape in shapes) + 1):
        sizes = {shape[-i] for shape in shapes if len(shape) >= i} - {1}
        if len(sizes) > 1:
            listed = " and ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"{name}: shapes {listed} do not broadcast: sizes must be equal or 1, counted from the end"
            )
        result.append(sizes.pop() if sizes else 1)
    return tuple(reversed(result))


def collapse(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides of each operand without size-1 dimensions and with neighbours merged if possible."""
    axes = [i for i, size in enumerate(shape) if size != 1] or list(range(len(shape)))[-1:]
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for i in axes:
        if sizes and all(m[-1] == s[i] * shape[i] for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= shape[i]
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[i]
        else:
            sizes.append(shape[i])
            for m, s in zip(merged, strides, strict=True):
                m.append(s[i])
    return sizes, merged


def _strides(x: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Return the strides of x broadcast to `shape`: 0 along repeated dimensions."""
    missing = len(shape) - x.dim()
    return [0] * missing + [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]


def _first_tensor(name: str, operands: Sequence[Operand]) -> torch.Tensor:
    for x in operands:
        if isinstance(x, torch.Tensor):
            return x
    raise TypeError(f"{name}: got only Python numbers, expected at least one tensor")


def _acc(name: str, dtype: torch.dtype, integers: bool, comparison: bool) -> tl.dtype:
    """Return the type to compute in. Raises TypeError for a dtype that the operation does not support."""
    if dtype.is_floating_point and dtype in check.FLOATING:
        return launch.acc(dtype)
    if integers and dtype in _INTEGERS:
        return _INTEGERS[dtype]
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
