"""The weight gradient in the batch-tiled form: the run of images is the K of the GEMM.

One program sums one tap, or a row of three, of a block of output and input channels over its share of (pixel, run of
images). The shares are interleaved, so that programs running together read one neighbourhood (an H200 at 56x56, 64
channels: 81 us in place of 88), and their partial sums are added in order.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import gemm, launch
from minidl.kernels.conv.batch_tiled import boxes_of, has_boxes, inside
from minidl.kernels.conv.geometry import Axis, Geometry


@triton.jit
def conv_batch_grad_weight_kernel(
    d_dy, d_x, p_partial, N, H, W, QH, QW, M, GROUPS, in_h, in_w, SHARES,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TAPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """partial [shares, groups * M, J * C]: TAPS (1 or 3) taps of a row, BLOCK_M x BLOCK_N channels, BLOCK_K images.

    With one tap only the pixels that it reads are walked; three taps walk all pixels of a row, and a tap outside the
    image reads a box of zeros. With PIXELS 2 a step takes two neighbours, which share boxes of x (strides of 1).
    """
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    J: tl.constexpr = JH * JW // TAPS
    tiles_m = tl.cdiv(M, BLOCK_M)
    c = tl.program_id(0) % tiles_c * BLOCK_N
    m = tl.program_id(0) // tiles_c % tiles_m * BLOCK_M
    i_group = tl.program_id(0) // (tiles_c * tiles_m) % GROUPS
    j = tl.program_id(0) // (tiles_c * tiles_m * GROUPS) % J * TAPS
    i_share = tl.program_id(0) // (tiles_c * tiles_m * GROUPS * J)
    tap_h = in_h + j // JW * IN_TAP_H
    tap_w = in_w + j % JW * IN_TAP_W
    q_h, rows = inside(tap_h, H, IN_STEP_H, QH)
    if TAPS == 1:
        q_w, columns = inside(tap_w, W, IN_STEP_W, QW)
    else:
        q_w = 0
        columns = QW // PIXELS
    runs = tl.cdiv(N, BLOCK_K)
    channels = GROUPS * C
    places = tl.maximum(rows * columns, 1)
    work = rows * columns * runs
    steps = tl.cdiv(tl.maximum(work - i_share, 0), SHARES)
    nothing = steps == 0  # one step outside then: its boxes are zeros
    steps = tl.maximum(steps, 1)
    columns = tl.maximum(columns, 1)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    if TAPS == 3:
        b_acc_1 = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        b_acc_2 = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    tl.assume(steps > 0)
    for i in range(steps):
        k = i_share + i * SHARES
        n = tl.where(nothing, N, k // places * BLOCK_K)
        q = k % places
        h = q_h + q // columns
        w = q_w + q % columns * PIXELS
        b_dy = d_dy.load([n, (h * QW + w) * (GROUPS * M) + i_group * M + m]).T  # [BLOCK_M, BLOCK_K]
        x_w = tap_w + w * IN_STEP_W
        o_x = ((tap_h + h * IN_STEP_H) * W + x_w) * channels + i_group * C + c
        if TAPS == 1:
            b_x = d_x.load([n, o_x])  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
        else:
            STEP: tl.constexpr = IN_TAP_W
            nowhere = H * W * channels
            b_x = d_x.load([n, tl.where((x_w >= 0) & (x_w < W), o_x, nowhere)])
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
            x_w += STEP
            b_x_1 = d_x.load([n, tl.where((x_w >= 0) & (x_w < W), o_x + STEP * channels, nowhere)])
            b_acc_1 = tl.dot(b_dy, b_x_1, b_acc_1, input_precision=PRECISION, out_dtype=ACC)
            x_w += STEP
            b_x_2 = d_x.load([n, tl.where((x_w >= 0) & (x_w < W), o_x + 2 * STEP * channels, nowhere)])
            b_acc_2 = tl.dot(b_dy, b_x_2, b_acc_2, input_precision=PRECISION, out_dtype=ACC)
            if PIXELS == 2:
                x_w += STEP
                b_x_3 = d_x.load([n, tl.where((x_w >= 0) & (x_w < W), o_x + 3 * STEP * channels, nowhere)])
                b_dy = d_dy.load([n, (h * QW + w + 1) * (GROUPS * M) + i_group * M + m]).T
                b_acc = tl.dot(b_dy, b_x_1, b_acc, input_precision=PRECISION, out_dtype=ACC)
                b_acc_1 = tl.dot(b_dy, b_x_2, b_acc_1, input_precision=PRECISION, out_dtype=ACC)
                b_acc_2 = tl.dot(b_dy, b_x_3, b_acc_2, input_precision=PRECISION, out_dtype=ACC)
    o_m = m + tl.arange(0, BLOCK_M)
    o_c = c + tl.arange(0, BLOCK_N)
    p_partial += i_share.to(tl.int64) * (GROUPS * M) * (JH * JW * C)
    p_partial += (i_group * M + o_m).to(tl.int64)[:, None] * (JH * JW * C) + j * C + o_c[None, :]
    m_mc = (o_m < M)[:, None] & (o_c < C)[None, :]
    tl.store(p_partial, b_acc, mask=m_mc)
    if TAPS == 3:
        tl.store(p_partial + C, b_acc_1, mask=m_mc)
        tl.store(p_partial + 2 * C, b_acc_2, mask=m_mc)


def takes(x: torch.Tensor, dy: torch.Tensor, groups: int) -> bool:
    """Whether the form can find the weight gradient of x [N, H, W, groups * C] and dy [N, OH, OW, groups * M]."""
    # A block of channels of one group starts at a multiple of 16 bytes.
    whole = all(t.shape[3] // groups * t.element_size() % 16 == 0 for t in (x, dy))
    return whole and has_boxes(x) and has_boxes(dy)


def grad_weight(x: torch.Tensor, dy: torch.Tensor, geometry: Geometry, precision: str) -> torch.Tensor:
    """The weight gradient [groups * M, R, S, C] of a convolution of x [N, H, W, groups * C] with output gradient dy."""
    N, H, W, channels = x.shape
    h, v, groups = geometry.h.forward(), geometry.w.forward(), geometry.groups
    C, M = channels // groups, dy.shape[3] // groups
    tile = launch.tile(
        "conv_batch_grad_weight", x.dtype, floor=16, precision=precision, M=M, N=C, K=N, pixels=h.count * v.count
    )
    taps = len(h.taps) * len(v.taps)
    together = tile["TAPS"] if len(v.taps) == 3 else 1
    pixels = tile["PIXELS"] if (together, v.in_step, v.in_tap, v.count % 2) == (3, 1, 1, 0) else 1
    tiles = triton.cdiv(C, tile["BLOCK_N"]) * triton.cdiv(M, tile["BLOCK_M"]) * groups * (taps // together)
    work = _steps(geometry.h) * _steps(geometry.w) * triton.cdiv(N, tile["BLOCK_K"])
    shares = max(1, min(tile["PER_PROCESSOR"] * launch.processors() // tiles, work // 8))
    partial = torch.empty(shares, groups * M, taps * C, dtype=launch.acc_torch(x.dtype), device=x.device)
    sizes = {**tile.options, "TAPS": together, "PIXELS": pixels}
    del sizes["PER_PROCESSOR"]
    launch.run(
        conv_batch_grad_weight_kernel, (tiles * shares,), boxes_of(dy, tile["BLOCK_K"], tile["BLOCK_M"]),
        boxes_of(x, tile["BLOCK_K"], tile["BLOCK_N"]), partial,
        N, H, W, h.count, v.count, M, groups, h.in_start, v.in_start, shares,
        C=C, JH=len(h.taps), JW=len(v.taps),
        IN_STEP_H=h.in_step, IN_STEP_W=v.in_step, IN_TAP_H=h.in_tap, IN_TAP_W=v.in_tap,
        ACC=launch.acc(x.dtype), PRECISION=precision, **sizes,
    )  # fmt: skip
    total = gemm.sum_shares(partial.view(shares, -1), x.dtype)
    return total.view(groups * M, len(h.taps), len(v.taps), C)


def _steps(axis: Axis) -> int:
    """The outputs that the middle tap of an axis visits: what a share of the work is counted by."""
    tap = axis.kernel // 2 * axis.dilation - axis.padding
    return max(1, sum(0 <= tap + o * axis.stride < axis.size for o in range(axis.output)))
