"""Separable resampling of images: interpolation and padding, as weighted sums of a few rows and columns.

    y[i, j] = sum over p, q of r[i, p] c[j, q] x[at_r[i, p], at_c[j, q]]

    x [N, C, H, W], contiguous or channels-last  ->  y [N, C, OH, OW] in the same layout

`Taps` list for each row of y the rows of x and their weights, and the same for columns: one row for nearest neighbour
and padding by reflection, two for bilinear and four for bicubic interpolation, none in a margin of zeros. The gradient
of x is the same sum with the transposed taps: for each row of x, the rows of y that read it. So one kernel computes
both, and gradients are added in a fixed order. Missing taps are not read, so infinities elsewhere have no effect.
"""

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import check, memory_layout
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed


class Sizes(NamedTuple):
    """n elements of y [planes, OH, OW, S], from x [planes, H, W, S]; S: channels if they are last, else 1."""

    n: int
    H: int
    W: int
    OH: int
    OW: int
    S: int


@triton.jit
def resample_kernel(
    p_x, p_y, p_row, p_row_share, p_column, p_column_share, sizes,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FILL: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N elements of y; FILL where there is no tap."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < sizes.n
    o_s = o % sizes.S
    o_pixel = o // sizes.S
    o_j = o_pixel % sizes.OW
    o_row = o_pixel // sizes.OW
    o_i = o_row % sizes.OH
    o_plane = (o_row // sizes.OH) * sizes.H
    b_y = tl.zeros((BLOCK_N,), ACC)
    for p in range(ROWS):
        b_i = tl.load(p_row + o_i * ROWS + p, mask=m, other=-1)  # [BLOCK_N]
        b_r = tl.load(p_row_share + o_i * ROWS + p, mask=m, other=0.0)
        o_x = ((o_plane + b_i) * sizes.W) * sizes.S + o_s
        b_line = tl.zeros((BLOCK_N,), ACC)
        for q in range(COLUMNS):
            b_j = tl.load(p_column + o_j * COLUMNS + q, mask=m, other=-1)  # [BLOCK_N]
            b_c = tl.load(p_column_share + o_j * COLUMNS + q, mask=m, other=0.0)
            m_x = m & (b_i >= 0) & (b_j >= 0)
            b_x = tl.load(p_x + o_x + b_j * sizes.S, mask=m_x, other=0.0).to(ACC)  # [BLOCK_N]
            b_line += b_x * b_c
        b_y += b_line * b_r
    if FILL != 0.0:
        b_i = tl.load(p_row + o_i * ROWS, mask=m, other=-1)
        b_j = tl.load(p_column + o_j * COLUMNS, mask=m, other=-1)
        b_y = tl.where((b_i >= 0) & (b_j >= 0), b_y, tl.full((BLOCK_N,), FILL, ACC))
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


Shares = tuple[tuple[int, float], ...]  # (input, weight) of each input of an output


class Taps:
    """The shares of each output along an axis of `size` inputs.

    Taps are cached with their tables on the device, which captured CUDA graphs read.
    """

    def __init__(self, size: int, shares: tuple[Shares, ...]) -> None:
        self.size, self.shares = size, shares
        self.most = max(map(len, shares), default=0)
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @functools.cached_property
    def back(self) -> "Taps":
        """The transposed taps: for each input, (output, share)."""
        result: list[list[tuple[int, float]]] = [[] for _ in range(self.size)]
        for output, taps in enumerate(self.shares):
            for index, share in taps:
                result[index].append((output, share))
        return Taps(len(self.shares), tuple(map(tuple, result)))

    def tables(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [outputs, most], -1 for none, and shares."""
        tables = self._tables.get((dtype, device))
        if tables is None:
            most = max(self.most, 1)
            rows = [(*row, *([(-1, 0.0)] * (most - len(row)))) for row in self.shares]
            indices = torch.tensor([[index for index, _ in row] for row in rows], dtype=torch.int32)
            shares = torch.tensor([[share for _, share in row] for row in rows], dtype=torch.float64)
            tables = indices.view(-1, most).to(device), shares.view(-1, most).to(device, dtype)
            self._tables[dtype, device] = tables
        return tables


def _to_float32(value: float) -> float:
    """Return a number rounded to float32."""
    return ctypes.c_float(value).value


@functools.cache
def nearest(size: int, outputs: int, scale: float | None = None, middle: bool = False) -> Taps:
    """Return taps of input floor(o * step) for output o, step in float32 as in torch: size / outputs, or 1 / scale.

    With `middle` (torch's "nearest-exact") the input is floor((o + 1/2) * step).
    """
    step = _to_float32(size / outputs if scale is None else 1 / scale)
    indices = [min(math.floor(_to_float32((o + 0.5 * middle) * step)), size - 1) for o in range(outputs)]
    return Taps(size, tuple(((index, 1.0),) for index in indices))


def _position(o: int, size: int, outputs: int, scale: float | None, align_corners: bool) -> float:
    """Return the position of output o among the inputs: (o + 1/2) step - 1/2, or o step with aligned corners."""
    if align_corners:
        return o * (size - 1) / (outputs - 1) if outputs > 1 else 0.0
    return (o + 0.5) * (size / outputs if scale is None else 1 / scale) - 0.5


@functools.cache
def bilinear(size: int, outputs: int, scale: float | None = None, align_corners: bool = False) -> Taps:
    """Return taps of the two inputs around each output's position, clamped to the edge."""
    taps: list[Shares] = []
    for o in range(outputs):
        position = max(_position(o, size, outputs, scale, align_corners), 0.0)
        low = min(math.floor(position), size - 1)
        share = position - low if low < size - 1 else 0.0
        taps.append(((low, 1 - share), (low + 1, share)) if share > 0 else ((low, 1.0),))
    return Taps(size, tuple(taps))


@functools.cache
def bicubic(size: int, outputs: int, scale: float | None = None, align_corners: bool = False) -> Taps:
    """Return taps of the four inputs around each output's position, clamped to the edge, by Keys' cubic convolution
    (IEEE ASSP 29, 1981) with a = -3/4."""

    def share(distance: float) -> float:
        d, a = abs(distance), -0.75
        return ((a + 2) * d - (a + 3)) * d * d + 1 if d <= 1 else ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    result = []
    for o in range(outputs):
        position = _position(o, size, outputs, scale, align_corners)
        taps: dict[int, float] = {}
        for index in range(math.floor(position) - 1, math.floor(position) + 3):
            clamped = min(max(index, 0), size - 1)
            taps[clamped] = taps.get(clamped, 0.0) + share(position - index)
        result.append(tuple(taps.items()))
    return Taps(size, tuple(result))


@functools.cache
def padded(size: int, before: int, after: int, mode: str = "constant") -> Taps:
    """Return taps of the inputs with margins: no tap ("constant"), mirrored at the edge ("reflect"), the edge
    ("replicate") or the other end ("circular"). A margin may be negative."""
    taps: list[Shares] = []
    for index in range(-before, size + after):
        inside = 0 <= index < size
        if mode == "reflect" and not inside:
            index = -index if index < 0 else 2 * (size - 1) - index
        elif mode == "replicate":
            index = min(max(index, 0), size - 1)
        elif mode == "circular":  # period: the inputs that negative margins leave
            first, last = max(-before, 0), size - max(-after, 0)
            index = first + (index - first) % (last - first)
        taps.append(((index, 1.0),) if inside or mode != "constant" else ())
    return Taps(size, tuple(taps))


def taps_of(mode: str, size: int, outputs: int, scale: float | None, flag: bool) -> Taps:
    """Return the taps of a mode of `ops.interpolate`; flag: align_corners, or whether nearest is exact."""
    function = nearest if mode.startswith("nearest") else bicubic if mode == "bicubic" else bilinear
    return function(size, outputs, scale, flag)


def resample(x: torch.Tensor, rows: Taps, columns: Taps, fill: float = 0.0, last: bool | None = None) -> torch.Tensor:
    """Return x [N, C, H, W] resampled along H by `rows` and along W by `columns`, in x's dtype.

    The result has x's memory layout, or is channels-last if `last` is True, contiguous if False. A pixel whose row or
    column has no tap is `fill`.
    """
    check.floating("resample", x=x)
    tables = [table for taps in (rows, columns) for table in taps.tables(launch.acc_torch(x.dtype), x.device)]
    sizes = rows.size, columns.size, len(rows.shares), len(columns.shares)
    last = memory_layout.channels_last(x) if last is None else last
    return _resampled(x, *tables, sizes, (max(rows.most, 1), max(columns.most, 1)), float(fill), last)


@replayed
def _resampled(x: torch.Tensor, *how: Any) -> torch.Tensor:
    *tables, (H, W, OH, OW), (taps_in_rows, taps_in_columns), fill, last = how
    N, C = x.shape[:2]
    memory_format = torch.channels_last if last else torch.contiguous_format
    x = x.contiguous(memory_format=memory_format)
    y = torch.empty(N, C, OH, OW, dtype=x.dtype, device=x.device, memory_format=memory_format)
    n = y.numel()
    tile = launch.tile("elementwise", x.dtype, N=n)
    launch.run(
        resample_kernel, (launch.cdiv(n, tile["BLOCK_N"]),), x, y, *tables, Sizes(n, H, W, OH, OW, C if last else 1),
        ROWS=taps_in_rows, COLUMNS=taps_in_columns, FILL=fill, ACC=launch.acc(x.dtype), **tile.options,
    )  # fmt: skip
    return y
