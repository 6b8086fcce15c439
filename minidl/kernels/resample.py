"""Images whose pixels are sums of a few others, row by row and column by column: enlarging, shrinking and padding.

    y[i, j] = sum over p, q of r[i, p] c[j, q] x[at_r[i, p], at_c[j, q]]

    x [N, C, H, W] in either order of memory  ->  y [N, C, OH, OW] in the same

`Taps` say for each row of y which rows of x it takes and how much of each, and so for columns: one row for the nearest
neighbour and for padding by reflection, two for bilinear interpolation, four for bicubic, none in a margin of zeros.
The gradient of x is the same sum with the taps turned round: for each row of x, the rows of y that take it. So one
kernel goes both ways, and every gradient is added in one order. A tap that is none is not read: an infinity beside it
stays out.
"""

import ctypes
import functools
import math

import torch
import triton
import triton.language as tl

from minidl.kernels import check, memory_layout
from minidl.runtime import launch


@triton.jit
def resample_kernel(
    p_x, p_y, p_row, p_row_share, p_column, p_column_share, n, H, W, OH, OW, S,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, FILL: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N elements of y [planes, OH, OW, S], from x [planes, H, W, S]; FILL where no tap is."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < n
    o_s = o % S
    o_pixel = o // S
    o_j = o_pixel % OW
    o_row = o_pixel // OW
    o_i = o_row % OH
    o_plane = (o_row // OH) * H
    b_y = tl.zeros((BLOCK_N,), ACC)
    for p in range(ROWS):
        b_i = tl.load(p_row + o_i * ROWS + p, mask=m, other=-1)  # [BLOCK_N]
        b_r = tl.load(p_row_share + o_i * ROWS + p, mask=m, other=0.0)
        o_x = ((o_plane + b_i) * W) * S + o_s
        b_line = tl.zeros((BLOCK_N,), ACC)
        for q in range(COLUMNS):
            b_j = tl.load(p_column + o_j * COLUMNS + q, mask=m, other=-1)  # [BLOCK_N]
            b_c = tl.load(p_column_share + o_j * COLUMNS + q, mask=m, other=0.0)
            m_x = m & (b_i >= 0) & (b_j >= 0)
            b_x = tl.load(p_x + o_x + b_j * S, mask=m_x, other=0.0).to(ACC)  # [BLOCK_N]
            b_line += b_x * b_c
        b_y += b_line * b_r
    if FILL != 0.0:
        b_i = tl.load(p_row + o_i * ROWS, mask=m, other=-1)
        b_j = tl.load(p_column + o_j * COLUMNS, mask=m, other=-1)
        b_y = tl.where((b_i >= 0) & (b_j >= 0), b_y, tl.full((BLOCK_N,), FILL, ACC))
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


Shares = tuple[tuple[int, float], ...]  # (input, how much of it) of each input that an output takes


class Taps:
    """For each of the outputs along an axis of `size` inputs, its shares.

    Those of a size are made once and kept, with their tables on the device, which graphs of captured steps read.
    """

    def __init__(self, size: int, of: tuple[Shares, ...]) -> None:
        self.size, self.of = size, of
        self.most = max(map(len, of), default=0)
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @functools.cached_property
    def back(self) -> "Taps":
        """For each input, (output, share)."""
        found: list[list[tuple[int, float]]] = [[] for _ in range(self.size)]
        for output, taps in enumerate(self.of):
            for place, share in taps:
                found[place].append((output, share))
        return Taps(len(self.of), tuple(map(tuple, found)))

    def tables(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs [outputs, most], -1 for none, and shares."""
        known = self._tables.get((dtype, device))
        if known is None:
            most = max(self.most, 1)
            filled = [(*row, *([(-1, 0.0)] * (most - len(row)))) for row in self.of]
            places = torch.tensor([[place for place, _ in row] for row in filled], dtype=torch.int32)
            shares = torch.tensor([[share for _, share in row] for row in filled], dtype=torch.float64)
            known = places.view(-1, most).to(device), shares.view(-1, most).to(device, dtype)
            self._tables[dtype, device] = known
        return known


def _single(value: float) -> float:
    """A number rounded to float32."""
    return ctypes.c_float(value).value


@functools.cache
def nearest(size: int, outputs: int, scale: float | None = None, middle: bool = False) -> Taps:
    """Output o takes the input floor(o * step), step in float32 as torch has it: size / outputs, or 1 / scale.

    With `middle`, torch's "nearest-exact", it is floor((o + 1/2) * step).
    """
    step = _single(size / outputs if scale is None else 1 / scale)
    places = [min(math.floor(_single((o + 0.5 * middle) * step)), size - 1) for o in range(outputs)]
    return Taps(size, tuple(((place, 1.0),) for place in places))


def _place(o: int, size: int, outputs: int, scale: float | None, align_corners: bool) -> float:
    """Where output o lies among the inputs: (o + 1/2) step - 1/2, or o step between the corners."""
    if align_corners:
        return o * (size - 1) / (outputs - 1) if outputs > 1 else 0.0
    return (o + 0.5) * (size / outputs if scale is None else 1 / scale) - 0.5


@functools.cache
def bilinear(size: int, outputs: int, scale: float | None = None, align_corners: bool = False) -> Taps:
    """Output o takes the two inputs around its place, beyond the edge the last one."""
    found: list[Shares] = []
    for o in range(outputs):
        at = max(_place(o, size, outputs, scale, align_corners), 0.0)
        low = min(math.floor(at), size - 1)
        share = at - low if low < size - 1 else 0.0
        found.append(((low, 1 - share), (low + 1, share)) if share > 0 else ((low, 1.0),))
    return Taps(size, tuple(found))


@functools.cache
def bicubic(size: int, outputs: int, scale: float | None = None, align_corners: bool = False) -> Taps:
    """Output o takes the four inputs around its place, by Keys' cubic convolution (IEEE ASSP 29, 1981) with a = -3/4;
    beyond the edge they are the last one."""

    def share(distance: float) -> float:
        d, a = abs(distance), -0.75
        return ((a + 2) * d - (a + 3)) * d * d + 1 if d <= 1 else ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    found = []
    for o in range(outputs):
        at = _place(o, size, outputs, scale, align_corners)
        taps: dict[int, float] = {}
        for place in range(math.floor(at) - 1, math.floor(at) + 3):
            inside = min(max(place, 0), size - 1)
            taps[inside] = taps.get(inside, 0.0) + share(at - place)
        found.append(tuple(taps.items()))
    return Taps(size, tuple(found))


@functools.cache
def padded(size: int, before: int, after: int, mode: str = "constant") -> Taps:
    """The inputs with margins: nothing, or those mirrored at the edge ("reflect"), the edge itself ("replicate") or
    the other end ("circular"). A margin may be negative."""
    found: list[Shares] = []
    for place in range(-before, size + after):
        inside = 0 <= place < size
        if mode == "reflect" and not inside:
            place = -place if place < 0 else 2 * (size - 1) - place
        elif mode == "replicate":
            place = min(max(place, 0), size - 1)
        elif mode == "circular":  # of what negative margins leave
            first, last = max(-before, 0), size - max(-after, 0)
            place = first + (place - first) % (last - first)
        found.append(((place, 1.0),) if inside or mode != "constant" else ())
    return Taps(size, tuple(found))


def resample(x: torch.Tensor, rows: Taps, columns: Taps, fill: float = 0.0, last: bool | None = None) -> torch.Tensor:
    """x [N, C, H, W] with the rows and columns that the taps make of H and W, in x's dtype; in x's order in memory, or
    with channels `last`.

    A pixel whose row or column has no tap is `fill`.
    """
    check.floating("resample", x=x)
    N, C = x.shape[:2]
    H, W, OH, OW = rows.size, columns.size, len(rows.of), len(columns.of)
    last = memory_layout.channels_last(x) if last is None else last
    lie = torch.channels_last if last else torch.contiguous_format
    x = x.contiguous(memory_format=lie)
    y = torch.empty(N, C, OH, OW, dtype=x.dtype, device=x.device, memory_format=lie)
    n = y.numel()
    acc = launch.acc_torch(x.dtype)
    tables = [table for taps in (rows, columns) for table in taps.tables(acc, x.device)]
    tile = launch.tile("elementwise", x.dtype, N=n)
    launch.run(
        resample_kernel, (launch.cdiv(n, tile["BLOCK_N"]),), x, y, *tables, n, H, W, OH, OW, C if last else 1,
        ROWS=max(rows.most, 1), COLUMNS=max(columns.most, 1), FILL=float(fill), ACC=launch.acc(x.dtype), **tile.options,
    )  # fmt: skip
    return y
