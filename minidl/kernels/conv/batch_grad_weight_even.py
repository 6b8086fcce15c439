"""The weight gradient in the batch-tiled form, one tap a tile, with even shares of the work.

All steps of all tiles (tap, block of output and input channels) stand in one line, which is cut into one piece of the
same length for each program. A piece may end within a tile and begin within another, so that a tile is the sum of the
pieces that meet it, in order. No multiprocessor waits for others where tiles and their number do not go together (72
tiles for 132 of them: 512 channels at 7x7 on an H200).

The programs read distant neighbourhoods, so this is for tensors that the L2 cache holds.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import launch
from minidl.kernels.conv.batch_tiled import boxes_of, inside
from minidl.kernels.conv.geometry import Axis, Geometry


@triton.jit
def steps_of_tap(
    j, H, W, QH, QW, runs, in_h, in_w, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
):  # fmt: skip
    """(first row, first column, columns, steps) of the outputs that read inside the image by tap j."""
    q_h, rows = inside(in_h + j // JW * IN_TAP_H, H, IN_STEP_H, QH)
    q_w, columns = inside(in_w + j % JW * IN_TAP_W, W, IN_STEP_W, QW)
    return q_h, q_w, columns, rows * columns * runs


@triton.jit
def conv_batch_even_kernel(
    d_dy, d_x, p_pieces, N, H, W, QH, QW, M, GROUPS, in_h, in_w, share, total,
    C: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """pieces [programs + tiles, BLOCK_M, BLOCK_N]: steps [share * program, ... + share) of the line.

    The piece of program p in tile t stands at p + t: from one piece to the next either p or t grows, so no two meet.
    """
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_c * tl.cdiv(M, BLOCK_M) * GROUPS  # of one tap
    runs = tl.cdiv(N, BLOCK_K)
    channels = GROUPS * C
    u = tl.program_id(0) * share
    stop = tl.minimum(u + share, total)
    o_block = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    while u < stop:
        j = 0
        first = 0
        q_h, q_w, columns, steps = steps_of_tap(
            j, H, W, QH, QW, runs, in_h, in_w, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W
        )
        while first + steps * tiles <= u:
            first += steps * tiles
            j += 1
            q_h, q_w, columns, steps = steps_of_tap(
                j, H, W, QH, QW, runs, in_h, in_w, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W
            )
        i_tile = (u - first) // steps
        k = (u - first) % steps
        here = tl.minimum(steps - k, stop - u)
        c = i_tile % tiles_c * BLOCK_N
        m = i_tile // tiles_c % tl.cdiv(M, BLOCK_M) * BLOCK_M
        i_group = i_tile // (tiles_c * tl.cdiv(M, BLOCK_M))
        tap_h = in_h + j // JW * IN_TAP_H
        tap_w = in_w + j % JW * IN_TAP_W
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        tl.assume(here > 0)
        for i in range(here):
            n = (k + i) % runs * BLOCK_K
            q = (k + i) // runs
            h = q_h + q // columns
            w = q_w + q % columns
            b_dy = d_dy.load([n, (h * QW + w) * (GROUPS * M) + i_group * M + m]).T  # [BLOCK_M, BLOCK_K]
            o_x = ((tap_h + h * IN_STEP_H) * W + tap_w + w * IN_STEP_W) * channels + i_group * C + c
            b_x = d_x.load([n, o_x])  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
        piece = (tl.program_id(0) + j * tiles + i_tile).to(tl.int64)
        tl.store(p_pieces + piece * (BLOCK_M * BLOCK_N) + o_block, b_acc)
        u += here


@triton.jit
def conv_batch_even_sum_kernel(
    p_pieces, p_dw, N, H, W, QH, QW, M, GROUPS, in_h, in_w, share,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw [groups * M, JH * JW, C]: BLOCK elements of one tile, summed over its pieces in order."""
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_c * tl.cdiv(M, BLOCK_M) * GROUPS
    runs = tl.cdiv(N, BLOCK_K)
    blocks: tl.constexpr = BLOCK_M * BLOCK_N // BLOCK
    tile = tl.program_id(0) // blocks
    o_block = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    j = tile // tiles
    i_tile = tile % tiles
    first = 0
    for i in range(j):
        _, _, _, steps = steps_of_tap(i, H, W, QH, QW, runs, in_h, in_w, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W)
        first += steps * tiles
    _, _, _, steps = steps_of_tap(j, H, W, QH, QW, runs, in_h, in_w, JW, IN_STEP_H, IN_STEP_W, IN_TAP_H, IN_TAP_W)
    first += i_tile * steps
    b_sum = tl.zeros((BLOCK,), dtype=ACC)
    last = tl.where(steps > 0, (first + steps - 1) // share + 1, first // share)
    for program in range(first // share, last):
        b_sum += tl.load(p_pieces + (program + tile).to(tl.int64) * (BLOCK_M * BLOCK_N) + o_block)
    o_c = i_tile % tiles_c * BLOCK_N + o_block % BLOCK_N
    o_m = i_tile // tiles_c % tl.cdiv(M, BLOCK_M) * BLOCK_M + o_block // BLOCK_N
    i_group = i_tile // (tiles_c * tl.cdiv(M, BLOCK_M))
    o_dw = ((i_group * M + o_m).to(tl.int64) * (JH * JW) + j) * C + o_c
    tl.store(p_dw + o_dw, b_sum.to(p_dw.dtype.element_ty), mask=(o_m < M) & (o_c < C))


def grad_weight(
    x: torch.Tensor, dy: torch.Tensor, geometry: Geometry, precision: str, tile: launch.Tile
) -> torch.Tensor:
    """The weight gradient [groups * M, R, S, C] of a convolution of x [N, H, W, groups * C] with output gradient dy."""
    N, H, W, channels = x.shape
    h, v, groups = geometry.h.forward(), geometry.w.forward(), geometry.groups
    C, M = channels // groups, dy.shape[3] // groups
    block_m, block_n, block_k = (tile[f"BLOCK_{name}"] for name in "MNK")
    taps = len(h.taps) * len(v.taps)
    tiles = triton.cdiv(C, block_n) * triton.cdiv(M, block_m) * groups
    total = _outputs_inside(geometry.h) * _outputs_inside(geometry.w) * triton.cdiv(N, block_k) * tiles
    share = max(8, triton.cdiv(total, max(1, tile["PER_PROCESSOR"]) * launch.processors()))
    programs = triton.cdiv(total, share)
    acc = launch.acc(x.dtype)
    pieces = torch.empty(
        programs + taps * tiles, block_m, block_n, dtype=launch.acc_torch(x.dtype), device=x.device
    )  # fmt: skip
    dw = torch.empty(groups * M, len(h.taps), len(v.taps), C, dtype=x.dtype, device=x.device)
    steps = {
        "IN_STEP_H": h.in_step, "IN_STEP_W": v.in_step, "IN_TAP_H": h.in_tap, "IN_TAP_W": v.in_tap,
        "JW": len(v.taps), "C": C, "ACC": acc, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k,
    }  # fmt: skip
    places = (N, H, W, h.count, v.count, M, groups, h.in_start, v.in_start, share)
    launch.run(
        conv_batch_even_kernel, (programs,), boxes_of(dy, block_k, block_m), boxes_of(x, block_k, block_n), pieces,
        *places, total, PRECISION=precision, **steps, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    adding = launch.tile("conv_batch_even_sum", x.dtype, total=block_m * block_n)
    block = min(adding["BLOCK"], block_m * block_n)
    launch.run(
        conv_batch_even_sum_kernel, (taps * tiles * (block_m * block_n // block),), pieces, dw, *places,
        JH=len(h.taps), **steps, **{**adding.options, "BLOCK": block},
    )  # fmt: skip
    return dw


def _outputs_inside(axis: Axis) -> int:
    """Pairs of an output and a tap that reads inside, on one axis."""
    return sum(
        0 <= o * axis.stride - axis.padding + r * axis.dilation < axis.size
        for o in range(axis.output) for r in range(axis.kernel)
    )  # fmt: skip
