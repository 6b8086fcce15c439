"""The weight gradient in the "pixel" form, for every shape.

    dw[m, j, c] = sum over pixels of dy[n, q, m] x[n, at(q, j), c]

dy  [N, QH, QW, groups * M]     x  [N, H, W, groups * C]     dw  [groups * M, J, C], J = JH * JW taps

          m              j, c               j, c      A program computes BLOCK_M x BLOCK_N values of dw at each of TAPS
      | b_dy |       | b_x b_x |        m | dw dw     taps. It goes along its share of the pixels in blocks of BLOCK_K;
  n,q |  |   |   n,q |  |   |  |          |           the taps use the same block of dy, and a row of x is at(q, j).
      |  v   |       |  v   v  |

The pixels are the K of the GEMM, addressed as in `pixel_tiled`. Partial sums are added in a fixed order.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, pixel_choice, tile_throughput
from minidl.kernels.conv.pixel_steps import PixelTile, pixel
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, INT32_LIMIT, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Taps
from minidl.kernels.division import fast_divide, reciprocal
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = "pixel"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_grad_weight",)
LEAST = 4
FEW = 32  # maximum rows of a tile without wgmma


class GradWeightSizes(NamedTuple):
    """Run-time numbers: outputs of all images, size of an image, input of the first output, and pixels of a share.

    by_image, by_row  reciprocals of the outputs of an image and of a row, for `fast_divide`
    """

    pixels: int
    H: int
    W: int
    in_h: int
    in_w: int
    by_image: int
    by_row: int
    share: int


@triton.jit(do_not_specialize=["QH", "QW"])
def conv_pixel_grad_weight_kernel(
    p_dy, p_x, p_partial, QH, QW, sizes, taps: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr
):
    """Write partial [shares, groups * M, J * C]: the sum over a share of the pixels."""
    wait(EARLY)
    C: tl.constexpr = taps.C
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    TAPS: tl.constexpr = tile.TAPS
    J: tl.constexpr = taps.JH * taps.JW
    K: tl.constexpr = J * C
    BLOCKS_C: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    tiles_c: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N if tile.FLAT else (J + TAPS - 1) // TAPS * BLOCKS_C
    i_c = tl.program_id(0) % tiles_c
    i_group = tl.program_id(0) // tiles_c % tile.GROUPS
    o_m = tl.program_id(0) // (tiles_c * tile.GROUPS) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < tile.M
    if tile.FLAT:
        o_k = i_c * BLOCK_N + tl.arange(0, BLOCK_N)
        j = o_k // C
        o_c = o_k % C
        m_c = o_k < K
    else:
        j = i_c // BLOCKS_C * TAPS
        o_c = i_c % BLOCKS_C * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = j * C + o_c
        m_c = o_c < C
    p_x += i_group * C
    p_dy += i_group * tile.M
    first = tl.program_id(1) * sizes.share
    if tile.WIDE:
        first = tl.program_id(1).to(tl.int64) * sizes.share
    end = tl.minimum(first + sizes.share, sizes.pixels)
    b_accs = ()
    for _ in tl.static_range(TAPS):
        b_accs += (tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC),)
    tl.assume(sizes.share > 0)
    for k in range(0, sizes.share, BLOCK_K):
        i_first = first + k
        if tile.WIDE:
            n, q_h, q_w = pixel(i_first, BLOCK_K, QH, QW, False, tile.LONG)
        else:
            o = i_first + tl.arange(0, BLOCK_K)
            n = fast_divide(o, QH * QW, sizes.by_image, tl.int32)
            o -= n * (QH * QW)
            q_h = fast_divide(o, QW, sizes.by_row, tl.int32)
            q_w = o - q_h * QW
        m_row = i_first + tl.arange(0, BLOCK_K) < end
        o_row = i_first + tl.arange(0, BLOCK_K)
        if tile.WIDE:
            o_row = o_row.to(tl.int64)
        x_h = sizes.in_h + q_h * taps.IN_STEP_H
        x_w = sizes.in_w + q_w * taps.IN_STEP_W
        o_x = ((n * sizes.H + x_h) * sizes.W + x_w) * tile.CHANNELS
        o_dy = o_row * (tile.GROUPS * tile.M)
        m_dy = m_row[:, None] & m_m[None, :]
        b_dy = tl.load(p_dy + (o_dy[:, None] + o_m[None, :]), mask=m_dy, other=0.0)  # [BLOCK_K, BLOCK_M]
        b_next = ()
        for t in tl.static_range(TAPS):
            t_h = (j + t) // taps.JW * taps.IN_TAP_H
            t_w = (j + t) % taps.JW * taps.IN_TAP_W
            o_tap = (t_h * sizes.W + t_w).to(o_x.dtype) * tile.CHANNELS + o_c
            if tile.FLAT:
                h = x_h[:, None] + t_h[None, :]
                w = x_w[:, None] + t_w[None, :]
                m_x = m_row[:, None] & (h >= 0) & (h < sizes.H) & (w >= 0) & (w < sizes.W) & m_c[None, :]
            elif tile.INSIDE:
                m_x = m_row[:, None] & m_c[None, :]
            else:
                h = x_h + t_h
                w = x_w + t_w
                m_x = (m_row & (h >= 0) & (h < sizes.H) & (w >= 0) & (w < sizes.W))[:, None] & m_c[None, :]
            if J % TAPS != 0:
                m_x &= j + t < J
            b_x = tl.load(p_x + (o_x[:, None] + o_tap[None, :]), mask=m_x, other=0.0)  # [BLOCK_K, BLOCK_N]
            b_next += (tl.dot(b_dy.T, b_x, b_accs[t], input_precision=tile.PRECISION, out_dtype=tile.ACC),)
        b_accs = b_next
    o_m += i_group * tile.M
    p_partial += tl.program_id(1).to(tl.int64) * (tile.GROUPS * tile.M) * K
    o_w = o_m.to(tl.int64)[:, None] * K + o_k[None, :]
    for t in tl.static_range(TAPS):
        m_t = m_c if tile.FLAT else m_c & (j + t < J)
        tl.store(p_partial + o_w + t * C, b_accs[t], mask=m_m[:, None] & m_t[None, :])


def able(problem: Problem) -> bool | Unsupported:
    return True


def estimate(problem: Problem) -> float:
    return costs.launch_time(problem, chosen(problem).microseconds)


class Chosen(NamedTuple):
    """The tile, its TAPS, channels and columns of taps and whether these are one axis (`joined`), the number of tiles,
    the pixels of a share, and the number of shares."""

    tile: launch.Tile
    TAPS: int
    C: int
    JW: int
    joined: bool
    tiles: int
    share: int
    shares: int
    microseconds: float


def chosen(problem: Problem) -> Chosen:
    """Return the decomposition of the gradient."""
    C, JW = pixel_choice.run_of_taps(problem)
    taps = len(problem.at.down.taps) * JW
    joined = pixel_choice.flat(C, taps)
    pixels = problem.N * problem.at.down.count * problem.at.across.count
    N = taps * C if joined else C
    # Three taps at once spill with rows not aligned to 8 bytes, 2 KB with odd ones: 33->9 in 8 groups, 12 images of
    # 11x11, 304 us.
    row = C * problem.dtype.itemsize
    one_tap = joined or row % 4 > 0 or (row % 8 > 0 and problem.M <= FEW)
    tile = problem.tile("conv_grad_weight", M=problem.M, N=N, K=pixels, T=1 if one_tap else taps)
    TAPS = 1 if one_tap else min(tile["TAPS"], taps)
    if TAPS == 3 and taps % 3 and taps % 2 == 0:
        TAPS = 2
    tiles = launch.cdiv(N, tile["BLOCK_N"]) * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    tiles *= 1 if joined else launch.cdiv(taps, TAPS)
    block = tile["BLOCK_K"]
    blocks = launch.cdiv(pixels, block)
    # Narrow rows take longer, but few channels are read.
    dy_time = tile_throughput.narrow(problem, problem.M) * min(problem.M, tile["BLOCK_M"])
    x_time = tile_throughput.narrow(problem, C) * min(C, tile["BLOCK_N"]) * TAPS
    narrow = max(1.0, (dy_time + x_time) / (tile["BLOCK_M"] + tile["BLOCK_N"] * TAPS))
    loads = _patch_factor(problem, tile, C, N) if joined else narrow
    throughput = tile_throughput.of_weight(problem, tile, TAPS, loads=loads)
    work = costs.Work(
        tiles, tile_throughput.steps(problem, blocks, block), throughput, "flat" if joined else "weight",
        values=problem.groups * problem.M * problem.taps * problem.C,
    )  # fmt: skip
    split = costs.in_shares(problem, work, blocks, LEAST)
    return Chosen(tile, TAPS, C, JW, joined, tiles, *_shares(blocks, block, split.shares), split.microseconds)


def _patch_factor(problem: Problem, tile: launch.Tile, C: int, values: int) -> float:
    """Return the factor for patches of `values` values, addressed one by one, relative to contiguous channels."""
    times, rows, columns = costs.constants(problem).steps, tile["BLOCK_M"], tile["BLOCK_N"]
    patches = values > columns >= 128 and C * problem.dtype.itemsize % 8 > 0
    size = math.sqrt(columns / 128) * (rows / 128) ** 0.25
    return times.flat_weight * size * (times.patches if patches else 1.0)


def prepare(problem: Problem) -> Shares:
    down, across = problem.at.down, problem.at.across
    H, W = problem.read
    at = chosen(problem)
    image = down.count * across.count
    pixels = problem.N * image
    sizes = GradWeightSizes(
        pixels, H, W, down.in_start, across.in_start, reciprocal(min(image, INT32_LIMIT)), reciprocal(across.count),
        at.share,
    )  # fmt: skip
    tile = at.tile.record(
        PixelTile, GROUPS=problem.groups, M=problem.M, CHANNELS=problem.groups * problem.C,
        WIDE=pixel_choice.wide(problem) or pixels * problem.groups * problem.M >= INT32_LIMIT,
        LONG=image >= INT32_LIMIT, FLAT=at.joined, INSIDE=down.all_inside(H) and across.all_inside(W),
        **problem.constants, TAPS=at.TAPS,
    )  # fmt: skip
    constants = {"taps": Taps.of(problem)._replace(C=at.C, JW=at.JW), "tile": tile}
    options = {**dependent_launch.options(target=problem.target), **at.tile.launch_options}
    grid = at.tiles, at.shares
    product = launch.Prepared(
        conv_pixel_grad_weight_kernel, grid, (down.count, across.count, sizes), constants | options
    )
    return Shares(product, at.shares, problem.shape)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)


def _shares(blocks: int, block: int, count: int) -> tuple[int, int]:
    """Return (pixels of a share, a multiple of `block`; number of shares), for about `count` shares."""
    share = max(1, launch.cdiv(blocks, count))
    return share * block, max(1, launch.cdiv(blocks, share))
