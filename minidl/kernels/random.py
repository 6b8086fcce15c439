"""Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011), keyed by a seed.

A counter of 128 bits gives four words of 32 bits. Its low half counts the groups of elements of a tensor, its high
half is the number of the stream; so an element's value depends only on (seed, stream, index in the flattened tensor),
not on tiles, strides or the machine.

    words      element e has word e % 4 of group e // 4; in float64 words 2 (e % 2) and the next of group e // 2
    uniform    low + (high - low) u,  u = the 24 upper bits / 2^24 (float64: 53 bits / 2^53), 0 <= u < 1
    normal     mean + std n,  neighbours n_0 = r cos a, n_1 = r sin a (Box and Muller, 1958),
               r = sqrt(-2 log u), 0 < u <= 1, from the first word of the pair, a from the second
    randint    low + floor(word (high - low) / 2^32)
    dropout    x / (1 - p) where word >= p 2^32, else 0; the gradient is dropout of dy with the same seed and stream

A tensor may be a slice of a larger one from its element `first` on; it then has the values of that slice.
The stream number may be on the device (`DeviceStream`), so that a captured launch draws new numbers at every replay.

float16 and bfloat16 values are the float32 ones rounded. Sums are not contracted with products, so uniform numbers
and integers have the same bits everywhere; normal numbers differ by a few units in the last place, as logarithms do.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import check, memory_layout
from minidl.kernels.philox import bits_53, from_bits, halves, interleave_4, normals_32, normals_64, unit_24, words
from minidl.runtime import launch

UNIFORM, NORMAL, INTEGER = map(tl.constexpr, range(3))


@dataclass(frozen=True)
class DeviceStream:
    """Stream number key[1] + offset of seed key[0]: `key` is int64 [2] on the device, read when a kernel runs."""

    key: torch.Tensor
    offset: int


class Image(NamedTuple):
    """The channels and pixels of channels-last images."""

    C: int
    P: int


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream_low", "stream_high", "first", "offset", "factor"])
def fill_kernel(
    p_y, n, p_key, seed_low, seed_high, stream_low, stream_high, first, offset, factor,
    LEAD: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """y = offset + factor * random; these are integers for INTEGER, else the bits of float64.

    y is a slice of a larger tensor from its element 4 first + LEAD on.
    """
    seed_low, seed_high, stream_low, stream_high = halves(p_key, seed_low, seed_high, stream_low, stream_high)
    i = tl.program_id(0).to(tl.int64)
    o = i * BLOCK_N + tl.arange(0, BLOCK_N)
    if p_y.dtype.element_ty == tl.float64:
        o_g = i * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2) + first.to(tl.int64) * 2
        a, b, c, d = words(seed_low, seed_high, stream_low, stream_high, o_g)
        if KIND == UNIFORM:
            b_u = tl.interleave(bits_53(a, b), bits_53(c, d)) * (2.0**-53)
        else:
            n_0, n_1 = normals_64(a, b, c, d)
            b_u = tl.interleave(n_0, n_1)
    else:
        o_g = i * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4) + first
        a, b, c, d = words(seed_low, seed_high, stream_low, stream_high, o_g)
        if KIND == NORMAL:
            n_0, n_1 = normals_32(a, b)
            n_2, n_3 = normals_32(c, d)
            b_u = interleave_4(n_0, n_1, n_2, n_3)
        else:
            b_u = interleave_4(a, b, c, d)  # [BLOCK_N]
    if KIND == INTEGER:
        span = factor.to(tl.int64)
        b_y = offset.to(tl.int64) + ((b_u.to(tl.int64) * span) >> 32)
    else:
        if KIND == UNIFORM and p_y.dtype.element_ty != tl.float64:
            b_u = unit_24(b_u)
        b_y = from_bits(offset).to(ACC) + from_bits(factor).to(ACC) * b_u
    m = o < n
    if LEAD:
        o -= LEAD
        m = (o >= 0) & (o < n)
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit
def normal_rows_kernel(p_y, p_seeds, rows, columns, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write rows of y: standard normal numbers of the row's seed, with the values of `fill_kernel`."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.program_id(1).to(tl.int64)
    seed = tl.load(p_seeds + o_r, mask=o_r < rows, other=0)
    o_g = tl.zeros([BLOCK_R, BLOCK_N // 4], tl.int64) + (j * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4))[None, :]
    seed = tl.zeros_like(o_g) + seed[:, None]
    zeros = tl.zeros([BLOCK_R, BLOCK_N // 4], tl.int32)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), (seed >> 32).to(tl.int32)
    a, b, c, d = words(low, high, zeros, zeros, o_g)
    n_0, n_1 = normals_32(a, b)
    n_2, n_3 = normals_32(c, d)
    b_y = 0.0 + interleave_4(n_0, n_1, n_2, n_3)  # [BLOCK_R, BLOCK_N]; no -0.0, as after a mean of 0
    o_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (o_r < rows)[:, None] & (o_n < columns)[None, :]
    tl.store(p_y + o_r[:, None] * columns + o_n[None, :], b_y, mask=m)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream_low", "stream_high", "first", "threshold", "scale"])
def dropout_kernel(
    p_x, p_y, n, p_key, seed_low, seed_high, stream_low, stream_high, first, threshold, scale, image,
    LEAD: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = scale * x where the element's word is at least the threshold (its bits as int32), else 0.

    Words are numbered as the elements of a contiguous tensor, also with an `image`, where x and y [N, C, P] have the
    memory order [N, P, C]; x is a slice of a larger tensor from its element 4 first + LEAD on.
    """
    seed_low, seed_high, stream_low, stream_high = halves(p_key, seed_low, seed_high, stream_low, stream_high)
    i = tl.program_id(0).to(tl.int64)
    o = i * BLOCK_N + tl.arange(0, BLOCK_N)
    o_g = i * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4) + first
    a, b, c, d = words(seed_low, seed_high, stream_low, stream_high, o_g)
    m_kept = interleave_4(a, b, c, d) >= threshold.to(tl.uint32, bitcast=True)
    m = o < n
    if LEAD:
        o -= LEAD
        m = (o >= 0) & (o < n)
        o = tl.where(m, o, 0)
    if image is not None:
        row = o // image.P
        o = ((row // image.C) * image.P + o - row * image.P) * image.C + row % image.C
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_y = tl.where(m_kept, b_x * from_bits(scale).to(ACC), 0.0)
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


def uniform(
    shape: Sequence[int], low: float, high: float, seed: int, stream: int | DeviceStream = 0,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", first: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return a new tensor of uniformly distributed numbers in [low, high); rounding may reach high.

    Raises TypeError for an integer dtype, ValueError for bounds out of order or a seed or stream out of [0, 2^63).
    """
    return uniform_(torch.empty(tuple(shape), dtype=dtype, device=device), low, high, seed, stream, first)


def uniform_(
    t: torch.Tensor, low: float, high: float, seed: int, stream: int | DeviceStream = 0, first: int = 0
) -> torch.Tensor:
    """Fill t (any strides) as `uniform` does, and return it."""
    if not low <= high:
        raise ValueError(f"uniform: low is {low} and high is {high}, expected low <= high")
    return _fill("uniform", t, seed, stream, first, UNIFORM, _bits(low), _bits(high - low))


def normal(
    shape: Sequence[int], mean: float, std: float, seed: int, stream: int | DeviceStream = 0,
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", first: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return a new tensor of normally distributed numbers.

    Raises TypeError for an integer dtype, ValueError for a negative std or a seed or stream out of [0, 2^63).
    """
    return normal_(torch.empty(tuple(shape), dtype=dtype, device=device), mean, std, seed, stream, first)


def normal_(
    t: torch.Tensor, mean: float, std: float, seed: int, stream: int | DeviceStream = 0, first: int = 0
) -> torch.Tensor:
    """Fill t (any strides) as `normal` does, and return it."""
    if not std >= 0:
        raise ValueError(f"normal: std is {std}, expected 0 or more")
    return _fill("normal", t, seed, stream, first, NORMAL, _bits(mean), _bits(std))


def normal_rows(seeds: Sequence[int], columns: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return float32 [seeds, columns]: each row is `normal((columns,), 0.0, 1.0, seed)`, independent of other rows.

    Raises ValueError for a seed out of [0, 2^63).
    """
    for seed in seeds:
        _key("normal_rows", seed, 0)
    y = torch.empty(len(seeds), columns, dtype=torch.float32, device=device)
    tile = launch.tile("random", y.dtype, floor=4, N=len(seeds) * triton.next_power_of_2(max(columns, 4)))
    across = min(tile["BLOCK_N"], max(4, triton.next_power_of_2(columns)))
    down = tile["BLOCK_N"] // across
    launch.run(
        normal_rows_kernel, (launch.cdiv(len(seeds), down), launch.cdiv(columns, across)), y,
        torch.tensor(list(seeds), dtype=torch.int64).to(device), len(seeds), columns,
        **{**tile.options, "BLOCK_R": down, "BLOCK_N": across}, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def randint(
    shape: Sequence[int],
    low: int,
    high: int,
    seed: int,
    stream: int | DeviceStream = 0,
    device: torch.device | str = "cpu",
    first: int = 0,
) -> torch.Tensor:
    """Return a new int64 tensor of integers in [low, high), of equal probability to within (high - low) / 2^32.

    Raises ValueError unless low < high <= low + 2^31, or for a seed or stream out of [0, 2^63).
    """
    if not low < high <= low + 2**31:
        raise ValueError(f"randint: low is {low} and high is {high}, expected low < high <= low + 2^31")
    t = torch.empty(tuple(shape), dtype=torch.int64, device=device)
    return _fill("randint", t, seed, stream, first, INTEGER, low, high - low)


def dropout(x: torch.Tensor, p: float, seed: int, stream: int | DeviceStream = 0, first: int = 0) -> torch.Tensor:
    """Return x / (1 - p) with a fraction p of the elements (also NaN) set to 0, channels-last if x is.

    The choice depends only on an element's index in x, not on the memory layout. The gradient is
    `dropout(dy, p, seed, stream, first)`. Raises TypeError for an integer tensor, ValueError for p outside [0, 1] or a
    seed or stream out of [0, 2^63).
    """
    check.floating("dropout", x=x)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p is {p}, expected a probability from 0 to 1")
    key = _key("dropout", seed, stream)
    last = memory_layout.channels_last(x)
    x = x if last else x.contiguous()
    threshold = round(p * 2**32)
    if threshold == 2**32:
        return torch.zeros_like(x)
    y = torch.empty_like(x)
    n = x.numel()
    tile = launch.tile("dropout", x.dtype, floor=4, N=n)
    launch.run(
        dropout_kernel, (launch.cdiv(n + first % 4, tile["BLOCK_N"]),), x, y, n, *key, first // 4,
        _halves(threshold)[0], _bits(1.0 / (1.0 - p)), Image(x.shape[1], x.shape[2:].numel()) if last else None,
        LEAD=first % 4, ACC=launch.acc(x.dtype), **tile.options,
    )  # fmt: skip
    return y


def _fill(op, t, seed, stream, first, kind, offset, factor):
    if kind is not INTEGER:
        check.floating(op, tensor=t)
    key = _key(op, seed, stream)
    y = t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device)
    n = t.numel()
    tile = launch.tile("random", t.dtype, floor=4, N=n)
    launch.run(
        fill_kernel, (launch.cdiv(n + first % 4, tile["BLOCK_N"]),), y, n, *key, first // 4, offset, factor,
        LEAD=first % 4, KIND=kind, ACC=launch.acc(t.dtype),
        enable_fp_fusion=False, **tile.options,
    )  # fmt: skip
    if y is not t:
        return t.copy_(y)
    torch.autograd.graph.increment_version(t)
    return t


def _key(op, seed, stream):
    """Return arguments of the kernels: the key on the device or None, then seed and stream in halves."""
    key = None
    if isinstance(stream, DeviceStream):
        key, seed, stream = stream.key, 0, stream.offset
    for name, value in (("seed", seed), ("stream", stream)):
        if not 0 <= value < 2**63:
            raise ValueError(f"{op}: {name} is {value}, expected an integer from 0 to 2^63 - 1")
    return key, *_halves(seed), *_halves(stream)


def _halves(value):
    """Return the lower and upper 32 bits of a 64-bit integer, as int32: one signature for every seed."""
    return struct.unpack("<ii", struct.pack("<q", value))


def _bits(value):
    """Return the bits of a float64 as an integer."""
    return struct.unpack("<q", struct.pack("<d", value))[0]
