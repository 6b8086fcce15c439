"""The weight gradient in the "batch" form: a run of images at one pixel is the K of the GEMM.

A program sums one tap, or a row of three, of a block of output and input channels over its share of (pixel, run of
images). The shares are interleaved, so that concurrent programs read neighbouring pixels, and their partial sums are
added in a fixed order.

    n |  dy[n, q, m]      x[n, at(q, j), c]      K: a run of BLOCK_K images n at one pixel q, then the next pixel
      v  [ b_dy ]    T x  [ b_x ]            ->  partial[share, m, j, c]
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, tile_throughput
from minidl.kernels.conv.batch_tiled import inside
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, NO_BOXES, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Outputs, Taps
from minidl.runtime import dependent_launch, launch
from minidl.runtime.cost_model.schema import Throughput
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "batch"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_batch_grad_weight",)

# Maximum bytes of an image, or of a part of one, whose runs touch few enough pages of memory.
PART = 2**19
RUN = 64  # images, the BLOCK_K of most tiles
LEAST = 8  # minimum steps of a share


class GradWeightTile(NamedTuple):
    """BLOCK_M x BLOCK_N channels of TAPS (1 or 3) taps, in steps of BLOCK_K images, or PARTS parts of each image."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    TAPS: int
    PARTS: int
    PER_PROCESSOR: int
    ACC: Any
    PRECISION: str


@triton.jit
def conv_batch_grad_weight_kernel(
    d_dy, d_x, d_dy_parts, d_x_parts, p_partial, H, W, shares, outputs,
    taps: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write partial [shares, groups * M, J * C].

    One tap loops over the pixels that it reads; three taps loop over all pixels of a row and read zeros outside the
    image. With PARTS above 1 (one tap only) the parts of an image count as images, and inputs beyond a part are added
    from complete images at the end.
    """
    wait(EARLY)
    C: tl.constexpr = taps.C
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    TAPS: tl.constexpr = tile.TAPS
    N, QH, QW, _, _, M, GROUPS, in_h, in_w, _, _ = outputs
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    J: tl.constexpr = taps.JH * taps.JW // TAPS
    tiles_m = tl.cdiv(M, BLOCK_M)
    c = tl.program_id(0) % tiles_c * BLOCK_N
    m = tl.program_id(0) // tiles_c % tiles_m * BLOCK_M
    i_group = tl.program_id(0) // (tiles_c * tiles_m) % GROUPS
    j = tl.program_id(0) // (tiles_c * tiles_m * GROUPS) % J * TAPS
    i_share = tl.program_id(0) // (tiles_c * tiles_m * GROUPS * J)
    tap_h = in_h + j // taps.JW * taps.IN_TAP_H
    tap_w = in_w + j % taps.JW * taps.IN_TAP_W
    channels = GROUPS * C
    o_m = i_group * M + m
    o_c = i_group * C + c
    PART_QH = QH // tile.PARTS
    q_h, rows = inside(tap_h, H // tile.PARTS, taps.IN_STEP_H, PART_QH)
    if TAPS == 1:
        q_w, columns = inside(tap_w, W, taps.IN_STEP_W, QW)
    else:
        q_w = 0
        columns = QW
    runs = tl.cdiv(N * tile.PARTS, BLOCK_K)
    places = tl.maximum(rows * columns, 1)
    work = rows * columns * runs
    steps = tl.cdiv(tl.maximum(work - i_share, 0), shares)
    nothing = steps == 0  # then one step outside, which reads zeros
    steps = tl.maximum(steps, 1)
    width = columns
    columns = tl.maximum(columns, 1)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    if TAPS == 3:
        b_acc_1 = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
        b_acc_2 = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    tl.assume(steps > 0)
    for i in range(steps):
        k = i_share + i * shares
        n = tl.where(nothing, N * tile.PARTS, k // places * BLOCK_K)
        q = k % places
        h = q_h + q // columns
        w = q_w + q % columns
        b_dy = d_dy_parts.load([n, (h * QW + w) * (GROUPS * M) + o_m]).T  # [BLOCK_M, BLOCK_K]
        x_w = tap_w + w * taps.IN_STEP_W
        o_x = ((tap_h + h * taps.IN_STEP_H) * W + x_w) * channels + o_c
        if TAPS == 1:
            b_x = d_x_parts.load([n, o_x])  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
        else:
            STEP: tl.constexpr = taps.IN_TAP_W
            nowhere = H * W * channels
            b_x = d_x_parts.load([n, tl.where((x_w >= 0) & (x_w < W), o_x, nowhere)])
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
            x_w += STEP
            b_x = d_x_parts.load([n, tl.where((x_w >= 0) & (x_w < W), o_x + STEP * channels, nowhere)])
            b_acc_1 = tl.dot(b_dy, b_x, b_acc_1, input_precision=tile.PRECISION, out_dtype=tile.ACC)
            x_w += STEP
            b_x = d_x_parts.load([n, tl.where((x_w >= 0) & (x_w < W), o_x + 2 * STEP * channels, nowhere)])
            b_acc_2 = tl.dot(b_dy, b_x, b_acc_2, input_precision=tile.PRECISION, out_dtype=tile.ACC)
    if tile.PARTS > 1:
        # Rows whose input is in the previous or next part, continuing the interleaved order of shares.
        before = tap_h < 0
        edge = tl.where(before, q_h, PART_QH - q_h - rows)
        first_h = tl.where(before, PART_QH, q_h + rows)
        places = edge * (tile.PARTS - 1) * columns
        work_edge = tl.where(width == 0, 0, places * tl.cdiv(N, BLOCK_K))
        # The pipeline's prologue divides even if there is nothing to do.
        places = tl.maximum(places, 1)
        edge = tl.maximum(edge, 1)
        i_first = (i_share + shares - work % shares) % shares
        for k in range(i_first, work_edge, shares):
            q = k % places
            row = q // columns
            h = first_h + row // edge * PART_QH + row % edge
            w = q_w + q % columns
            n = k // places * BLOCK_K
            b_dy = d_dy.load([n, (h * QW + w) * (GROUPS * M) + o_m]).T
            b_x = d_x.load([n, ((tap_h + h * taps.IN_STEP_H) * W + tap_w + w * taps.IN_STEP_W) * channels + o_c])
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
    r_m = m + tl.arange(0, BLOCK_M)
    r_c = c + tl.arange(0, BLOCK_N)
    p_partial += i_share.to(tl.int64) * (GROUPS * M) * (taps.JH * taps.JW * C)
    p_partial += (i_group * M + r_m).to(tl.int64)[:, None] * (taps.JH * taps.JW * C) + j * C + r_c[None, :]
    m_mc = (r_m < M)[:, None] & (r_c < C)[None, :]
    tl.store(p_partial, b_acc, mask=m_mc)
    if TAPS == 3:
        tl.store(p_partial + C, b_acc_1, mask=m_mc)
        tl.store(p_partial + 2 * C, b_acc_2, mask=m_mc)


def able(problem: Problem) -> bool | Unsupported:
    # A group's block of channels must start at a multiple of 16 bytes.
    aligned = all(channels * problem.dtype.itemsize % 16 == 0 for channels in (problem.C, problem.M))
    row = problem.written[0] * problem.written[1] * problem.groups * problem.M
    return (aligned or Unsupported("channels of a group whose bytes are not a multiple of 16")) and (
        (problem.x_boxes and problem.boxes(row, problem.aligned)) or NO_BOXES
    )


def estimate(problem: Problem) -> float:
    return costs.launch_time(problem, cut(problem).shares.microseconds)


def tile_of(problem: Problem) -> launch.Tile:
    down, across = problem.at.down, problem.at.across
    return problem.tile(
        "conv_batch_grad_weight", M=problem.M, N=problem.C, K=problem.N, pixels=down.count * across.count
    )


def prepare(problem: Problem) -> Shares:
    (H, W), (QH, QW) = problem.read, problem.written
    N, M, C, groups = problem.N, problem.M, problem.C, problem.groups
    tile, together, parts, tiles, (shares, _) = cut(problem)
    meta = {
        "taps": Taps.of(problem),
        "tile": tile.record(GradWeightTile, TAPS=together, PARTS=parts, **problem.constants),
        **dependent_launch.options(target=problem.target), **tile.launch_options,
    }  # fmt: skip
    block_dy, block_x = (tile["BLOCK_K"], tile["BLOCK_M"]), (tile["BLOCK_K"], tile["BLOCK_N"])
    row_dy, row_x = QH * QW * groups * M, H * W * groups * C
    descriptors = (
        Box.of_rows(N, row_dy, block_dy), Box.of_rows(N, row_x, block_x),
        Box.of_rows(N * parts, row_dy // parts, block_dy), Box.of_rows(N * parts, row_x // parts, block_x),
    )  # fmt: skip
    product = launch.Prepared(
        conv_batch_grad_weight_kernel, (tiles * shares,), (H, W, shares, Outputs.of(problem)), meta, descriptors
    )
    return Shares(product, shares, problem.shape)


class Cut(NamedTuple):
    """The tile, its TAPS (`together`), parts of an image, tiles of the gradient, and the shares of their steps."""

    tile: launch.Tile
    together: int
    parts: int
    tiles: int
    shares: costs.Split


def cut(problem: Problem) -> Cut:
    """Return the decomposition with the fastest number of shares."""
    tile, taps = tile_of(problem), problem.taps
    together = tile["TAPS"] if len(problem.at.across.taps) == 3 else 1
    parts = parts_of(problem) if together == 1 else 1
    tiles = launch.cdiv(problem.C, tile["BLOCK_N"]) * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    tiles *= taps // together
    return Cut(tile, together, parts, tiles, _shares(problem, tile, together, parts, tiles))


def _shares(problem: Problem, tile: launch.Tile, together: int, parts: int, tiles: int) -> costs.Split:
    h, w = problem.geometry.h.inside(), problem.geometry.w.inside()
    runs = launch.cdiv(problem.images * parts, tile["BLOCK_K"]) / parts
    columns = sum(w) / len(w) if together == 1 else problem.at.across.count
    blocks = math.ceil(max(1.0, sum(h) / len(h) * columns) * runs)
    slots, step = tile_throughput.of_weight(problem, tile, together, "run ")
    # A lone program on a multiprocessor is faster.
    alone = costs.constants(problem).steps.alone["weight"] if tile["PER_PROCESSOR"] == 1 < slots else 1.0
    throughput = Throughput(tile["PER_PROCESSOR"], alone * step)
    steps = tile_throughput.steps(problem, blocks, tile["BLOCK_K"], boxes=True)
    values = problem.groups * problem.M * problem.taps * problem.C
    work = costs.Work(tiles, steps, throughput, "weight", values=values)
    shares = costs.in_shares(problem, work, blocks, LEAST)
    # Partial runs: 4x4 stride 2, 256->512 at 16x16, 5 images, 26 us.
    times = costs.constants(problem).steps.short if problem.images < RUN else 1.0
    return shares._replace(microseconds=shares.microseconds * times)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x, t.w, t.x)


def parts_of(problem: Problem) -> int:
    """Return the fewest parts of an image that are small and fill a run, with taps reading adjacent parts at most."""
    h, (H, W), (QH, QW) = problem.at.down, problem.read, problem.written
    reach = max(-h.in_start, h.in_start + (len(h.taps) - 1) * h.in_tap)
    parts, size = 1, max(H * W * problem.C, QH * QW * problem.M) * problem.groups * problem.dtype.itemsize
    while (size > PART * parts or problem.N * parts < RUN) and (
        QH * h.in_step == H and QH % (2 * parts) == 0 and reach <= H // (2 * parts)
    ):
        parts *= 2
    return parts
