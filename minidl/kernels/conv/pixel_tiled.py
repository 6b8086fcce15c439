"""The "pixel" form: an implicit GEMM whose rows are output pixels of all images; supports every shape.

    y[n, q, m] = act(scale[m] * sum over taps j and channels c of x[n, at(q, j), c] w[m, j, c] + bias[m])

x  [N, H, W, groups * C]     w  [groups * M, J, C], J = JH * JW taps; backward weights may be read in place
y  [N, OH, OW, groups * M]   bias, scale  [groups * M]

         j, c                       m                       m       A program computes BLOCK_M rows of y, neighbouring
     | b_x  ->          j, c | b_w              | b_acc             pixels, and BLOCK_N channels. It goes along j and c
 n,q | [ - - - - - ]         |  |           n,q | [     ]           in blocks of BLOCK_K; a row of x is at(q, j).
     |                       |  v               |

at(q, j) = in_start + q in_step + j in_tap along each axis (`geometry.Phase`). Patches are never written to memory: the
row addresses are computed once, with a bit per tap that says whether its input is inside the image, and each tap adds
one offset to all of them. With few channels, where one tap would leave most of a K block empty, taps and channels form
a single axis (FLAT), at the cost of index arithmetic per element. If there are few tiles, K is split into shares that
are added in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.activation import activate
from minidl.kernels.conv import pixel_choice
from minidl.kernels.conv.epilogue import pool_quads
from minidl.kernels.conv.pixel_steps import PixelSizes, PixelTile, Rows, add_blocks, add_flat, inside_bits, pixel
from minidl.kernels.conv.problem import CORRELATIONS, INT32_LIMIT, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Taps
from minidl.kernels.epilogue import Epilogue, affine, finish
from minidl.kernels.gemm import launches
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait

NAME = pixel_choice.NAME
DIRECTIONS = CORRELATIONS
FAMILIES = (*pixel_choice.FAMILIES, "conv_reorder")


@triton.jit
def conv_pixel_tile(
    i_tile, i_split, p_x, p_w, p_bias, p_scale, p_y, p_z, QH, QW, JH, JW, sizes,
    taps: tl.constexpr, tile: tl.constexpr, epilogue: tl.constexpr,
):  # fmt: skip
    """Compute one tile of QH x QW outputs per image with JH x JW taps; with shares, their sums [SPLIT, pixels, M]."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    tiles_n = tl.cdiv(tile.M, BLOCK_N)
    i_group = i_tile // tiles_n % tile.GROUPS
    i_first = i_tile // (tiles_n * tile.GROUPS) * BLOCK_M
    if tile.WIDE:
        i_first = (i_tile // (tiles_n * tile.GROUPS)).to(tl.int64) * BLOCK_M
    o_m = i_tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < tile.M
    n, q_h, q_w = pixel(i_first, BLOCK_M, QH, QW, epilogue.POOL, tile.LONG)
    m_row = i_first + tl.arange(0, BLOCK_M) < sizes.pixels
    x_h = sizes.in_h + q_h * taps.IN_STEP_H
    x_w = sizes.in_w + q_w * taps.IN_STEP_W
    if not tile.WIDE:
        n = n.to(tl.int32)
    o_x = ((n * sizes.H + x_h) * sizes.W + x_w) * tile.CHANNELS
    if tile.W_IN_PLACE:
        p_w += i_group * taps.C * (tile.W_TAPS * tile.M)
        o_w = o_m.to(tl.int64)
    else:
        o_w = (i_group * tile.M + o_m).to(tl.int64) * (tile.W_TAPS * taps.C)
    p_x += i_group * taps.C
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    in_rows = 0
    in_columns = 0
    if not tile.FLAT and tile.MARKED and not tile.INSIDE:
        in_rows = tl.where(m_row, inside_bits(x_h, sizes.H, taps.IN_TAP_H, taps.JH), 0)
        in_columns = inside_bits(x_w, sizes.W, taps.IN_TAP_W, taps.JW)
    rows = Rows(p_x, o_x, m_row, x_h, x_w, in_rows, in_columns)
    if tile.FLAT:
        VALUES: tl.constexpr = taps.JH * taps.JW * taps.C
        if not tile.PHASES and tile.SPLIT == 1 and VALUES <= tile.BLOCK_K:
            # Tap offsets are constants. Two or more blocks would spill, as loads of the next block precede the products
            # of this one.
            b_acc = add_flat(b_acc, 0, rows, p_w, o_w, m_m, JW, VALUES, sizes, taps, tile)
        else:
            steps = tl.cdiv(sizes.depth, tile.BLOCK_K)
            share = tl.cdiv(steps, tile.SPLIT)
            start = i_split * share
            end = tl.minimum(start + share, steps)
            if not tile.EMPTY:  # with at least one step, ptxas keeps matrix instructions in flight
                tl.assume(start < end)
            for i in range(start, end):
                b_acc = add_flat(b_acc, i, rows, p_w, o_w, m_m, JW, sizes.depth, sizes, taps, tile)
    else:
        BLOCKS: tl.constexpr = taps.C // tile.BLOCK_K
        if BLOCKS > 0:
            share = tl.cdiv(JH * JW * BLOCKS, tile.SPLIT)
            if not tile.EMPTY:
                tl.assume(i_split * share < JH * JW * BLOCKS)
            b_acc = add_blocks(
                b_acc, i_split * share, tl.minimum(i_split * share + share, JH * JW * BLOCKS), rows, p_w, o_w, m_m,
                JH, JW, sizes, taps, tile, 0, BLOCKS, tile.BLOCK_K,
            )  # fmt: skip
        if taps.C % tile.BLOCK_K > 0:
            share = tl.cdiv(JH * JW, tile.SPLIT)
            if tile.SPLIT == 1 and not tile.EMPTY:
                tl.assume(i_split * share < JH * JW)
            b_acc = add_blocks(
                b_acc, i_split * share, tl.minimum(i_split * share + share, JH * JW), rows, p_w, o_w, m_m,
                JH, JW, sizes, taps, tile, BLOCKS * tile.BLOCK_K, 1, tile.BLOCK_REST,
            )  # fmt: skip
    m = i_tile % tiles_n * BLOCK_N
    if epilogue.POOL:
        b_acc = affine(b_acc, p_bias, p_scale, m, tile.M, i_group)
        b_y = pool_quads(activate(b_acc, epilogue.ACT, epilogue.SLOPE), epilogue.POOL)  # [BLOCK_M // 4, BLOCK_N]
        o_row = (i_first // 4).to(tl.int64) + tl.arange(0, BLOCK_M // 4)
        m_y = (o_row < sizes.pixels // 4)[:, None] & m_m[None, :]
        o_y = (o_row * (tile.GROUPS * tile.M))[:, None] + (i_group * tile.M + o_m)[None, :]
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)
    else:
        o_h = n.to(tl.int64) * sizes.OH + sizes.out_h + q_h * taps.OUT_STEP_H
        o_row = o_h * sizes.OW + sizes.out_w + q_w * taps.OUT_STEP_W
        if tile.SPLIT > 1:
            p_y += i_split.to(tl.int64) * sizes.s_split
        finish(
            b_acc, p_bias, p_scale, p_y, p_z, o_row, m_row, m, tile.M, i_group, tile.GROUPS, epilogue, tile.PIECES
        )  # fmt: skip


# Triton 3.6 computes wrong addresses if QW is specialised to 1 (128x128x64, 8 warps, dilation 2).
@triton.jit(do_not_specialize=["QH", "QW"])
def conv_pixel_kernel(
    p_x, p_w, p_bias, p_scale, p_y, p_z, QH, QW, sizes,
    taps: tl.constexpr, tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile, or one of its shares: the second axis of the grid."""
    wait(EARLY)
    conv_pixel_tile(
        tl.program_id(0), tl.program_id(1), p_x, p_w, p_bias, p_scale, p_y, p_z, QH, QW, taps.JH, taps.JW, sizes,
        taps, tile, epilogue,
    )  # fmt: skip


class Prepared(NamedTuple):
    """A launch; if it computes shares, their shape [shares, values] and the launch that adds them."""

    launch: launch.Prepared
    partial: tuple[int, int]
    sum: launch.Prepared | None


def able(problem: Problem) -> bool | Unsupported:
    return True


def estimate(problem: Problem) -> float:
    return pixel_choice.estimate(problem)


def prepare(problem: Problem) -> Prepared:
    down, across = problem.at.down, problem.at.across
    (H, W), (OH, OW) = problem.read, problem.written
    at, in_place = pixel_choice.chosen(problem), problem.in_place
    taps = Taps.of(problem)._replace(C=at.C, JW=at.JW)
    first_tap, row_taps = (0, at.JW, 1), taps.JH * at.JW
    if in_place:
        S = problem.geometry.w.kernel
        first_tap, row_taps = (
            (down.taps[0] * S + across.taps[0], down.tap_step * S, across.tap_step),
            problem.geometry.h.kernel * S,
        )
    pixels = problem.N * pixel_choice.image(problem)
    total = pixels * problem.groups * problem.M
    sizes = PixelSizes(
        pixels, H, W, OH, OW, down.in_start, across.in_start, down.out_start, across.out_start, *first_tap, total,
        taps.JH * at.JW * at.C,
    )  # fmt: skip
    tile = tile_of(
        problem, at, taps, W_IN_PLACE=in_place, W_TAPS=row_taps, WIDE=pixel_choice.wide(problem),
        LONG=down.count * across.count >= INT32_LIMIT, INSIDE=down.all_inside(H) and across.all_inside(W),
        MARKED=max(taps.JH, at.JW) <= pixel_choice.BITS, TAPS_INNER=pixel_choice.taps_inner(problem), SPLIT=at.split,
    )  # fmt: skip
    tiles_n = launch.cdiv(problem.M, tile.BLOCK_N) * problem.groups
    product = launch.Prepared(
        conv_pixel_kernel, (launch.cdiv(pixels, tile.BLOCK_M) * tiles_n, at.split), (down.count, across.count, sizes),
        {
            "taps": taps, "tile": tile, "epilogue": problem.epilogue if at.split == 1 else Epilogue(),
            **dependent_launch.options(target=problem.target), **at.tile.launch_options,
        },
    )  # fmt: skip
    if at.split == 1:
        return Prepared(product, (1, total), None)
    width, epilogue = problem.groups * problem.M, problem.epilogue._replace(POOL=0)
    total_sum = launches.sum_of_shares(
        problem.dtype, width, total, at.split, epilogue, problem.target, problem.batch_invariant
    )  # fmt: skip
    return Prepared(product, (at.split, total), total_sum)


def tile_of(problem: Problem, at: pixel_choice.Chosen, taps: Taps, **constants: Any) -> PixelTile:
    """Return the constants of a launch with a chosen tile."""
    # Rows not aligned to 16 bytes are stored value by value, whose addresses take many registers.
    piece = 64 if problem.M * problem.dtype.itemsize % 16 == 0 else 16
    return at.tile.record(
        PixelTile, GROUPS=problem.groups, M=problem.M, CHANNELS=problem.groups * problem.C,
        FLAT=pixel_choice.flat(taps.C, taps.JH * taps.JW), **problem.constants,
        BLOCK_REST=pixel_choice.rest_of(taps.C, at.tile),
        PIECES=1 if problem.target == "interpreted" else max(1, at.tile["BLOCK_N"] // piece), **constants,
    )  # fmt: skip


def run(prepared: Prepared, t: Tensors) -> None:
    if prepared.sum is None:
        prepared.launch.run(t.x, t.w, t.bias, t.scale, t.y, t.z)
        return
    partial = torch.empty(prepared.partial, dtype=launch.acc_torch(t.x.dtype), device=t.x.device)
    prepared.launch.run(t.x, t.w, None, None, partial, None)
    prepared.sum.run(partial, t.bias, t.scale, t.y, t.z)
