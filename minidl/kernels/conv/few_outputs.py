"""The "few" form, for few output channels of a transposed convolution, as in the last layer of a generator.

With a stride of 2 an output of 3 channels uses a quarter of the taps: four phases of small products, each of which
reads all of x and writes a quarter of every row. Here a cell is a block of stride x stride outputs, and one column of
the product is a group of GH x GW adjacent cells. It reads the window of (GH + RH - 1) x (GW + RW - 1) pixels that
contribute to any of its outputs, so that

    y[n, group, (a, b, m)] = sum over pixels d of the window, channels c of band[(a, b, m), (d, c)] x[n, group + d, c]
    band[(a, b, m), (d, c)] = w[c, m, r, s] with r = a + padding - (low + d_h) stride, s alike,  0 beyond the filter

It multiplies zeros on matrix units that would be idle otherwise; in exchange x is read once for all outputs of a cell,
and outputs are contiguous in rows. Pixel d of the windows of neighbouring groups is a descriptor block of x viewed as
[N, H / GH, GH, W / GW, GW * C], with zeros outside the image. A non-finite input makes outputs NaN in every group whose
window it is in.

The band is the left operand, so the accumulator is [outputs of a group, groups]. (Triton 3.6 miscomputes a left operand
that is a reshaped descriptor block.)
"""

import functools
import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.pixel_boxes import shape_of_box
from minidl.kernels.conv.prepared import Copy, Product
from minidl.kernels.conv.problem import NO_BOXES, TRANSPOSED, Problem, Tensors, Unsupported
from minidl.runtime import launch
from minidl.runtime.descriptors import Box

NAME = "few"
DIRECTIONS = (TRANSPOSED,)
FAMILIES = ("conv_few", "conv_band")

# Maximum output channels; other forms are faster with more.
MOST = 4
# Maximum outputs of a group.
LARGEST = 64
NARROWEST = 16  # minimum rows of a band


class Cells(NamedTuple):
    """Groups of GH x GW cells, which are ROWS x COLUMNS outputs, with windows of WINDOW_H x WINDOW_W pixels.

    The window of group (0, 0) starts LOW pixels into the group FIRST.
    """

    C: int
    M: int
    ROWS: int
    COLUMNS: int
    STEP_H: int
    STEP_W: int
    GH: int
    GW: int
    WINDOW_H: int
    WINDOW_W: int
    FIRST_H: int
    FIRST_W: int
    LOW_H: int
    LOW_W: int


class FewTile(NamedTuple):
    """NP outputs of BLOCK_N = TILE_N x TILE_H x TILE_W groups, in steps of BLOCK_K values of a window."""

    NP: int
    BLOCK_N: int
    BLOCK_K: int
    TILE_N: int
    TILE_H: int
    TILE_W: int
    ACC: Any
    PRECISION: str


@triton.jit
def conv_few_band_kernel(
    p_w, p_band, total, K, C, M, R, S, strides, first, cells: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write band [NP, K] of w [C, M, R, S]: row (a, b, m) for output (a, b) of a group, column (d_h, d_w, c).

    Output (0, 0) and pixel (0, 0) of a window belong to tap `first`.
    """
    s_c, s_m, s_r, s_s = strides
    first_r, first_s = first
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    output = o // K
    k = o % K
    d = k // C
    a = output // (cells.COLUMNS * M)
    r = first_r + a - d // cells.WINDOW_W * cells.STEP_H
    s = first_s + output // M % cells.COLUMNS - d % cells.WINDOW_W * cells.STEP_W
    m_w = (o < total) & (a < cells.ROWS) & (r >= 0) & (r < R) & (s >= 0) & (s < S)
    b_w = tl.load(
        p_w + (k % C).to(tl.int64) * s_c + output % M * s_m + r * s_r + s * s_s, mask=m_w, other=0.0
    )  # [BLOCK]
    tl.store(p_band + o, b_w, mask=o < total)


@triton.jit
def conv_few_kernel(
    d_x, d_band, p_bias, p_scale, p_y, p_z, N, OH, OW, tiles_h, tiles_w,
    cells: tl.constexpr, epilogue: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute a box of groups."""
    GROUPS: tl.constexpr = tile.BLOCK_N
    NP: tl.constexpr = tile.NP
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    C: tl.constexpr = cells.C
    M: tl.constexpr = cells.M
    ROW: tl.constexpr = cells.GW * C
    WINDOW_W: tl.constexpr = cells.WINDOW_W
    COLUMNS: tl.constexpr = cells.COLUMNS
    g_w = tl.program_id(0) % tiles_w * tile.TILE_W
    g_h = tl.program_id(0) // tiles_w % tiles_h * tile.TILE_H
    n = tl.program_id(0) // (tiles_w * tiles_h) * tile.TILE_N
    b_acc = tl.zeros((NP, GROUPS), dtype=tile.ACC)
    for k in range(0, cells.WINDOW_H * WINDOW_W * C, BLOCK_K):
        h = cells.LOW_H + k // (WINDOW_W * C)
        w = cells.LOW_W * C + k % (WINDOW_W * C)
        b_band = d_band.load([0, k])  # [NP, BLOCK_K]
        x_h = g_h + cells.FIRST_H + h // cells.GH
        b_x = d_x.load([n, x_h, h % cells.GH, g_w + cells.FIRST_W + w // ROW, w % ROW])
        b_x = tl.reshape(b_x, (GROUPS, BLOCK_K)).T  # [BLOCK_K, GROUPS]
        b_acc = tl.dot(b_band, b_x, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
    b_acc = b_acc.T
    o_g = tl.arange(0, GROUPS)
    o_n = n + o_g // (tile.TILE_H * tile.TILE_W)
    o_h = (g_h + o_g // tile.TILE_W % tile.TILE_H) * cells.ROWS
    o_w = (g_w + o_g % tile.TILE_W) * (COLUMNS * M)
    o_a = tl.arange(0, NP) // (COLUMNS * M)
    o_bm = tl.arange(0, NP) % (COLUMNS * M)
    if p_scale is not None:
        b_acc *= tl.load(p_scale + o_bm % M).to(tile.ACC)[None, :]
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_bm % M).to(tile.ACC)[None, :]
    m_y = ((o_n < N)[:, None] & (o_a < cells.ROWS)[None, :]) & (o_h[:, None] + o_a[None, :] < OH)
    m_y = m_y & (o_w[:, None] + o_bm[None, :] < OW * M)
    o_y = ((o_n.to(tl.int64) * OH + o_h) * (OW * M) + o_w)[:, None] + (o_a * (OW * M) + o_bm)[None, :]
    if epilogue.SAVE_Z:
        tl.store(p_z + o_y, b_acc.to(p_z.dtype.element_ty), mask=m_y)
    tl.store(p_y + o_y, activate(b_acc, epilogue.ACT, epilogue.SLOPE).to(p_y.dtype.element_ty), mask=m_y)


def able(problem: Problem) -> bool | Unsupported:
    down, across, groups = problem.geometry
    return (
        (groups == down.dilation == across.dilation == 1 or Unsupported("more than one group, or a dilation"))
        and (
            (1 <= problem.M <= MOST and problem.M * down.stride * across.stride <= LARGEST)
            or Unsupported("too many output channels")
        )
        and (problem.C % 16 == 0 or Unsupported("input channels that are not a multiple of 16"))
        and (problem.x_boxes or NO_BOXES)
    )


def estimate(problem: Problem) -> float:
    groups = _groups(problem)
    cells = problem.N * groups.number[0] * groups.number[1]
    tile = problem.tile("conv_few", N=cells, K=problem.C & -problem.C, M=problem.M)
    block = problem.block(tile)
    steps = tile_throughput.steps(problem, groups.K / block, block, boxes=True)
    throughput = tile_throughput.of_pixels(problem, tile["BLOCK_N"], groups.NP, kind="few")
    work = costs.Work(launch.cdiv(cells, tile["BLOCK_N"]), steps, throughput, "box")
    return costs.launch_time(problem, costs.microseconds(problem, work)) + costs.band_time(
        problem, groups.NP * groups.K
    )


class Groups(NamedTuple):
    """Groups of GH x GW cells, `number` down and across an image; the band is [NP, K]."""

    GH: int
    GW: int
    window: tuple[int, int]
    number: tuple[int, int]
    NP: int
    K: int


def _groups(problem: Problem) -> Groups:
    down, across, _ = problem.geometry
    cells = -(-down.size // down.stride), -(-across.size // across.stride)
    reach = window(down)[1], window(across)[1]
    GH, GW = group((down.output, across.output), reach, cells, LARGEST // (problem.M * down.stride * across.stride))
    window_size = GH + reach[0] - 1, GW + reach[1] - 1
    NP = max(NARROWEST, triton.next_power_of_2(GH * down.stride * GW * across.stride * problem.M))
    number = -(-cells[0] // GH), -(-cells[1] // GW)
    return Groups(GH, GW, window_size, number, NP, window_size[0] * window_size[1] * problem.C)


def prepare(problem: Problem) -> Product:
    down, across, _ = problem.geometry
    N, C, M = problem.N, problem.C, problem.M
    H, W = problem.read
    chosen = problem.tile(
        "conv_few", N=problem.images * -(-down.size // down.stride) * -(-across.size // across.stride), K=C & -C, M=M
    )
    GH, GW, window_size, number, NP, K = _groups(problem)
    low_h, low_w = window(down)[0], window(across)[0]
    cells = Cells(
        C, M, GH * down.stride, GW * across.stride, down.stride, across.stride, GH, GW, *window_size,
        FIRST_H=low_h // GH, FIRST_W=low_w // GW, LOW_H=low_h % GH, LOW_W=low_w % GW,
    )  # fmt: skip
    first = down.padding - low_h * down.stride, across.padding - low_w * across.stride
    block = problem.tile("conv_band", floor=1, total=NP * K)
    band = launch.Prepared(
        conv_few_band_kernel, (launch.cdiv(NP * K, block["BLOCK"]),),
        (NP * K, K, C, M, down.kernel, across.kernel, problem.strides, first), {"cells": cells, **block.options},
    )  # fmt: skip
    box = shape_of_box(N, *number, chosen["BLOCK_N"])
    tiles = [launch.cdiv(size, extent) for size, extent in zip((N, *number), box, strict=True)]
    block_k = problem.block(chosen)
    tile = chosen.record(
        FewTile, NP=NP, BLOCK_K=block_k, TILE_N=box[0], TILE_H=box[1], TILE_W=box[2], **problem.constants
    )
    meta = {"cells": cells, "epilogue": problem.epilogue, "tile": tile, **chosen.launch_options}
    strides = (H * W * C, GH * W * C, W * C, GW * C, 1)
    boxes = (
        Box((N, H // GH, GH, W // GW, GW * C), strides, (box[0], box[1], 1, box[2], block_k)),
        Box.of_rows(NP, K, (NP, block_k)),
    )
    scalars = N, down.size, across.size, *tiles[1:]
    return Product(Copy((NP, K), band), launch.Prepared(conv_few_kernel, (math.prod(tiles),), scalars, meta, boxes))


def run(prepared: Product, t: Tensors) -> None:
    prepared.run(t)


def window(axis: Axis) -> tuple[int, int]:
    """Return (low, reach): a cell q of outputs depends on exactly the `reach` inputs from q + low on."""
    low = -((axis.kernel - 1 - axis.padding) // axis.stride)
    return low, (axis.stride - 1 + axis.padding) // axis.stride - low + 1


@functools.lru_cache(maxsize=4096)
def group(size: tuple[int, int], reach: tuple[int, int], cells: tuple[int, int], most: int) -> tuple[int, int]:
    """Return (rows, columns) of a group of at most `most` cells with the fewest inputs read per cell.

    Both are powers of two that divide `size`, the inputs. Ties prefer fewer groups, then the widest.
    """
    best: tuple[tuple[float, int, int], tuple[int, int]] | None = None
    powers = [1, 2, 4, 8, 16]
    for GH in powers:
        for GW in powers:
            if most >= GH * GW and size[0] % GH == size[1] % GW == 0:
                read = (GH + reach[0] - 1) * (GW + reach[1] - 1) / (GH * GW)
                key = read, -(-cells[0] // GH) * -(-cells[1] // GW), -GW
                if best is None or key < best[0]:
                    best = key, (GH, GW)
    assert best is not None
    return best[1]
