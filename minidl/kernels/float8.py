"""float8: values of 8 bits with one scale for a tensor, x = scale * values.

    float8_e4m3fn  4 bits of exponent, 3 of fraction: to 448, steps of 2^-9 below 2^-6, NaN but no infinity
    float8_e5m2    5 and 2, the upper byte of a float16: to 57344, steps of 2^-16 below 2^-14, NaN and infinity

The scale is the power of two that brings the largest finite |x| to at most the largest value and above half of it, so
scaling is exact and all errors come from rounding to nearest even: 2^-4 (2^-3) of x, or half a step. With a scale from
the caller, larger values saturate; infinity stays infinity or, in a format without it, becomes NaN. Codes are computed
with integers, so they are the same on every device.

Source: Micikevicius et al., FP8 formats for deep learning, arXiv 2209.05433.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.runtime import launch

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SOURCES = (torch.float16, torch.bfloat16, torch.float32)
PARTS = 1024  # of the maximum, at most


@triton.jit
def encode(b_x, E5: tl.constexpr):
    """Return the codes, uint8, of float32 values."""
    FRACTION: tl.constexpr = 2 if E5 else 3
    BIAS: tl.constexpr = 15 if E5 else 7
    LARGEST: tl.constexpr = 0x7B if E5 else 0x7E
    INFINITY: tl.constexpr = 0x7C if E5 else 0x7F
    SHIFT: tl.constexpr = 23 - FRACTION
    # A power of two whose last bit is the step of subnormal numbers: adding it rounds to that step.
    STEP: tl.constexpr = 2.0 ** (24 - BIAS - FRACTION)
    STEP_BITS: tl.constexpr = (127 + 24 - BIAS - FRACTION) << 23
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_abs = b_bits & 0x7FFFFFFF
    b_normal = (b_abs + ((1 << (SHIFT - 1)) - 1) + ((b_abs >> SHIFT) & 1)) >> SHIFT
    b_small = (tl.abs(b_x) + STEP).to(tl.int32, bitcast=True) - STEP_BITS
    b_code = tl.where(b_abs < ((128 - BIAS) << 23), b_small, b_normal - ((127 - BIAS) << FRACTION))
    b_code = tl.where(b_code > LARGEST, LARGEST, b_code)
    b_code = tl.where(b_abs == 0x7F800000, INFINITY, b_code)
    b_code = tl.where(b_abs > 0x7F800000, 0x7F, b_code)
    return (b_code | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode(b_code, E5: tl.constexpr):
    """Return the exact float16 values of codes, uint8."""
    b_code = b_code.to(tl.int16)
    if E5:
        return (b_code << 8).to(tl.float16, bitcast=True)
    b_bits = ((b_code & 0x7F) << 7) | ((b_code & 0x80) << 8)  # of x / 256: the exponents are 8 apart
    b_x = b_bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((b_code & 0x7F) == 0x7F, float("nan"), b_x).to(tl.float16)


@triton.jit
def product(b_a, b_b, b_acc, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """Return b_acc + b_a b_b for blocks [M, K] and [K, N] of any type.

    PRECISION is "ieee", "tf32x3" or "tf32", and for float8: "float8" adds at most 128 products in tensor cores, whose
    registers have some 14 bits, before the sum moves to float32; "float8_fast" adds all there; "float16" converts both
    blocks to float16 first.
    """
    MOST: tl.constexpr = min(b_a.shape[1], 128)
    if PRECISION == "float8":
        return tl.dot(b_a, b_b, b_acc, max_num_imprecise_acc=MOST, out_dtype=ACC)
    elif PRECISION == "float8_fast":
        return tl.dot(b_a, b_b, b_acc, out_dtype=ACC)
    elif PRECISION == "float16":
        b_a = decode(b_a.to(tl.uint8, bitcast=True), b_a.dtype == tl.float8e5)
        b_b = decode(b_b.to(tl.uint8, bitcast=True), b_b.dtype == tl.float8e5)
        return tl.dot(b_a, b_b, b_acc, out_dtype=ACC)
    else:
        return tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def stored(b_x, TYPE: tl.constexpr):
    """Return b_x rounded to TYPE, float8 by `encode`."""
    E5: tl.constexpr = tl.float8e5 == TYPE
    if E5 or tl.float8e4nv == TYPE:
        return encode(b_x.to(tl.float32), E5).to(TYPE, bitcast=True)
    else:
        return b_x.to(TYPE)


@triton.jit
def float8_largest_kernel(p_x, p_parts, total, BLOCK_N: tl.constexpr):
    """p_parts[i] = the largest finite |x| of the blocks of program i (every num_programs-th one)."""
    b_most = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for i in range(tl.program_id(0).to(tl.int64) * BLOCK_N, total, tl.num_programs(0) * BLOCK_N):
        o = i + tl.arange(0, BLOCK_N)
        b_x = tl.load(p_x + o, mask=o < total, other=0.0).to(tl.float32)  # [BLOCK_N]
        # Non-negative floats have the order of their bits.
        b_abs = b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        b_most = tl.maximum(b_most, tl.where(b_abs < 0x7F800000, b_abs, 0))
    tl.store(p_parts + tl.program_id(0), tl.max(b_most, axis=0))


@triton.jit
def float8_cast_kernel(
    p_x, p_parts, p_scale, p_y, total, parts, E5: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write the codes of x / scale; the scale is read or, from partial maxima p_parts, computed and stored."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < total
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)  # [BLOCK_N]
    if p_parts is None:
        b_x = tl.div_rn(b_x, tl.zeros((BLOCK_N,), dtype=tl.float32) + tl.load(p_scale))
    else:
        o_parts = tl.arange(0, PARTS)
        most = tl.max(tl.load(p_parts + o_parts, mask=o_parts < parts, other=0), axis=0)
        # The largest value is 1.75 * 2^TOP: a fraction above 1.75 needs the next power of two.
        TOP: tl.constexpr = 15 if E5 else 8
        bits = ((most + 0x1FFFFF) & 0x7F800000) - (TOP << 23)
        bits = tl.where(most == 0, 127 << 23, tl.maximum(bits, 1 << 23))
        if tl.program_id(0) == 0:
            tl.store(p_scale, bits.to(tl.float32, bitcast=True))
        b_x *= ((254 << 23) - bits).to(tl.float32, bitcast=True)  # 1 / scale
    tl.store(p_y + o, encode(b_x, E5), mask=m)


@triton.jit
def float8_decode_kernel(p_x, p_scale, p_y, total, E5: tl.constexpr, BLOCK_N: tl.constexpr):
    """y = scale * values."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < total
    b_y = decode(tl.load(p_x + o, mask=m, other=0), E5).to(tl.float32)  # [BLOCK_N]
    if p_scale is not None:
        b_y *= tl.load(p_scale)
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def float8_scale_kernel(p_a, p_b, p_factor, p_bias, p_result, p_y, p_z, total, BLOCK_N: tl.constexpr):
    """y [total] = the product of two scales, and of a factor for each column; z = bias; both over a third scale."""
    o = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Infinity times a sum of 0 would be NaN.
    b_y = tl.zeros((BLOCK_N,), dtype=tl.float32) + tl.minimum(tl.load(p_a) * tl.load(p_b), 2.0**127)
    if p_factor is not None:
        b_y *= tl.load(p_factor + o, mask=o < total, other=0.0).to(tl.float32)
    if p_result is not None:
        b_result = tl.zeros((BLOCK_N,), dtype=tl.float32) + tl.load(p_result)
        b_y = tl.div_rn(b_y, b_result)
        if p_bias is not None:
            b_z = tl.load(p_bias + o, mask=o < total, other=0.0).to(tl.float32)
            tl.store(p_z + o, tl.div_rn(b_z, b_result), mask=o < total)
    tl.store(p_y + o, b_y, mask=o < total)


def quantize(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, scale): x in float8, in x's memory order, and the float32 scale [] with x = scale * values.

    scale  a positive float32 tensor of one value that replaces the scale computed from x
    Raises TypeError for dtypes, ValueError for a scale that is not one float32 on x's device.
    """
    if dtype not in DTYPES:
        raise TypeError(f"quantize: dtype is {dtype}, expected torch.float8_e4m3fn or torch.float8_e5m2")
    if x.dtype not in SOURCES:
        raise TypeError(f"quantize: x has dtype {x.dtype}, expected float16, bfloat16 or float32")
    if scale is not None:
        check_scale("quantize", "scale", scale, x)
    x = _dense(x)
    values = torch.empty_like(x, dtype=dtype)
    total, chosen = x.numel(), scale
    block = launch.tile("float8", x.dtype, N=total)["BLOCK_N"]
    parts = None
    if chosen is None:
        chosen = torch.empty((), dtype=torch.float32, device=x.device)
        programs = max(1, min(launch.cdiv(total, block), PARTS, 4 * launch.processors()))
        parts = torch.empty(programs, dtype=torch.int32, device=x.device)
        launch.run(float8_largest_kernel, (programs,), x, parts, total, **_options(x.dtype, total))
    launch.run(
        float8_cast_kernel, (max(1, launch.cdiv(total, block)),), x, parts, chosen, values.view(torch.uint8), total,
        0 if parts is None else parts.numel(), E5=dtype == torch.float8_e5m2, PARTS=PARTS, **_options(x.dtype, total),
    )  # fmt: skip
    return values, chosen


def dequantize(values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return scale * values in `dtype`, in the memory order of `values`; scale None means 1.

    Raises TypeError for dtypes, ValueError for a scale that is not one float32 on the device of `values`.
    """
    check_values("dequantize", values=values)
    if dtype not in SOURCES:
        raise TypeError(f"dequantize: dtype is {dtype}, expected float16, bfloat16 or float32")
    if scale is not None:
        check_scale("dequantize", "scale", scale, values)
    values = _dense(values)
    y = torch.empty_like(values, dtype=dtype)
    total = y.numel()
    block = launch.tile("float8", dtype, N=total)["BLOCK_N"]
    launch.run(
        float8_decode_kernel, (launch.cdiv(total, block),), values.view(torch.uint8), scale, y, total,
        E5=values.dtype == torch.float8_e5m2, **_options(dtype, total),
    )  # fmt: skip
    return y


def epilogue(
    a: torch.Tensor, b: torch.Tensor, columns: int, factor: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, result: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the float32 factors [columns] of a product of values with scales a and b, and its bias.

    The factors are a b, times `factor` [columns] if it is not None. A scale of the result divides factors and bias.
    """
    y = torch.empty(columns, dtype=torch.float32, device=a.device)
    bias = None if bias is None else bias.contiguous()
    shift = bias if bias is None or result is None else torch.empty_like(y)
    options = _options(torch.float32, columns)
    launch.run(
        float8_scale_kernel, (launch.cdiv(columns, options["BLOCK_N"]),), a, b,
        None if factor is None else factor.contiguous(), bias, result, y, shift, columns, **options,
    )  # fmt: skip
    return y, shift


def check_values(op: str, **tensors: torch.Tensor) -> None:
    """Raise TypeError unless every tensor has a float8 dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected float8; use quantize(...)")


def check_scale(op: str, name: str, scale: torch.Tensor, x: torch.Tensor) -> None:
    """Raise ValueError unless `scale` is one float32 on the device of x."""
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device:
        raise ValueError(
            f"{op}: {name} is {scale.dtype} {list(scale.shape)} on {scale.device}, expected one float32 on {x.device}"
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if check.memory_order(x) is not None else x.contiguous()


def _options(dtype: torch.dtype, total: int) -> dict[str, Any]:
    return launch.tile("float8", dtype, N=total).options
