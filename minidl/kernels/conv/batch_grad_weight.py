"""The weight gradient in the batch-tiled form: the run of images is the K of the GEMM.

One program sums one tap, or a row of three, of a block of output and input channels over its share of (pixel, run of
images). The shares are interleaved, so that programs running together read one neighbourhood (an H200 at 56x56, 64
channels: 81 us in place of 88), and their partial sums are added in order.
"""

import torch
import triton
import triton.language as tl

from minidl.kernels import early, gemm, launch
from minidl.kernels.conv import even_grad_weight
from minidl.kernels.conv.batch_tiled import boxes_of, has_boxes, inside
from minidl.kernels.conv.geometry import Geometry, Walk
from minidl.kernels.early import wait

# Bytes of an image, or of a part of one, whose runs lie in few enough pages of memory.
PART = 2**19
RUN = 64  # images, the BLOCK_K of most tiles
ROW_OF_TAPS = 128  # up to so many channels tiles have three taps


@triton.jit
def conv_batch_grad_weight_kernel(
    d_dy, d_x, d_dy_parts, d_x_parts, p_partial, N, H, W, QH, QW, M, GROUPS, in_h, in_w, SHARES,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TAPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """partial [shares, groups * M, J * C]: TAPS (1 or 3) taps of a row, BLOCK_M x BLOCK_N channels, BLOCK_K images.

    With one tap only the pixels that it reads are walked; three taps walk all pixels of a row, and a tap outside the
    image reads a box of zeros. With PARTS above 1 (one tap only) the parts of an image count as images, and what a tap
    reads beyond its part is added from whole images.
    """
    wait(EARLY)
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
    channels = GROUPS * C
    o_m = i_group * M + m
    o_c = i_group * C + c
    PART_QH = QH // PARTS
    q_h, rows = inside(tap_h, H // PARTS, IN_STEP_H, PART_QH)
    if TAPS == 1:
        q_w, columns = inside(tap_w, W, IN_STEP_W, QW)
    else:
        q_w = 0
        columns = QW
    runs = tl.cdiv(N * PARTS, BLOCK_K)
    places = tl.maximum(rows * columns, 1)
    work = rows * columns * runs
    steps = tl.cdiv(tl.maximum(work - i_share, 0), SHARES)
    nothing = steps == 0  # one step outside then: its boxes are zeros
    steps = tl.maximum(steps, 1)
    width = columns
    columns = tl.maximum(columns, 1)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    if TAPS == 3:
        b_acc_1 = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        b_acc_2 = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    tl.assume(steps > 0)
    for i in range(steps):
        k = i_share + i * SHARES
        n = tl.where(nothing, N * PARTS, k // places * BLOCK_K)
        q = k % places
        h = q_h + q // columns
        w = q_w + q % columns
        b_dy = d_dy_parts.load([n, (h * QW + w) * (GROUPS * M) + o_m]).T  # [BLOCK_M, BLOCK_K]
        x_w = tap_w + w * IN_STEP_W
        o_x = ((tap_h + h * IN_STEP_H) * W + x_w) * channels + o_c
        if TAPS == 1:
            b_x = d_x_parts.load([n, o_x])  # [BLOCK_K, BLOCK_N]
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
        else:
            STEP: tl.constexpr = IN_TAP_W
            nowhere = H * W * channels
            b_x = d_x_parts.load([n, tl.where((x_w >= 0) & (x_w < W), o_x, nowhere)])
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
            x_w += STEP
            b_x = d_x_parts.load([n, tl.where((x_w >= 0) & (x_w < W), o_x + STEP * channels, nowhere)])
            b_acc_1 = tl.dot(b_dy, b_x, b_acc_1, input_precision=PRECISION, out_dtype=ACC)
            x_w += STEP
            b_x = d_x_parts.load([n, tl.where((x_w >= 0) & (x_w < W), o_x + 2 * STEP * channels, nowhere)])
            b_acc_2 = tl.dot(b_dy, b_x, b_acc_2, input_precision=PRECISION, out_dtype=ACC)
    if PARTS > 1:
        # Rows whose input is in the part before or after. The share whose turn it is goes first.
        before = tap_h < 0
        edge = tl.where(before, q_h, PART_QH - q_h - rows)
        first_h = tl.where(before, PART_QH, q_h + rows)
        places = edge * (PARTS - 1) * columns
        work_edge = tl.where(width == 0, 0, places * tl.cdiv(N, BLOCK_K))
        # The pipeline's first steps divide even where there is nothing to do.
        places = tl.maximum(places, 1)
        edge = tl.maximum(edge, 1)
        i_first = (i_share + SHARES - work % SHARES) % SHARES
        for k in range(i_first, work_edge, SHARES):
            q = k % places
            row = q // columns
            h = first_h + row // edge * PART_QH + row % edge
            w = q_w + q % columns
            n = k // places * BLOCK_K
            b_dy = d_dy.load([n, (h * QW + w) * (GROUPS * M) + o_m]).T
            b_x = d_x.load([n, ((tap_h + h * IN_STEP_H) * W + tap_w + w * IN_STEP_W) * channels + o_c])
            b_acc = tl.dot(b_dy, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
    r_m = m + tl.arange(0, BLOCK_M)
    r_c = c + tl.arange(0, BLOCK_N)
    p_partial += i_share.to(tl.int64) * (GROUPS * M) * (JH * JW * C)
    p_partial += (i_group * M + r_m).to(tl.int64)[:, None] * (JH * JW * C) + j * C + r_c[None, :]
    m_mc = (r_m < M)[:, None] & (r_c < C)[None, :]
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
    parts = parts_of(x, dy, h) if together == 1 else 1
    # Without tensor cores the registers would not hold it.
    if tile["EVEN"] and together == parts == 1 and (x.dtype, precision) != (torch.float32, "ieee"):
        found = even_grad_weight.grad_weight(x, dy, geometry, precision, tile)
        if found is not None:
            return found
    tiles = launch.cdiv(C, tile["BLOCK_N"]) * launch.cdiv(M, tile["BLOCK_M"]) * groups * (taps // together)
    work = max(1, max(geometry.h.inside()) * max(geometry.w.inside())) * launch.cdiv(N, tile["BLOCK_K"])
    shares = max(1, min(tile["PER_PROCESSOR"] * launch.processors() // tiles, work // 8))
    partial = torch.empty(shares, groups * M, taps * C, dtype=launch.acc_torch(x.dtype), device=x.device)
    sizes = {**tile.options, "TAPS": together, "PARTS": parts}
    del sizes["PER_PROCESSOR"], sizes["EVEN"]
    block_dy, block_x = (tile["BLOCK_K"], tile["BLOCK_M"]), (tile["BLOCK_K"], tile["BLOCK_N"])
    launch.run(
        conv_batch_grad_weight_kernel, (tiles * shares,), boxes_of(dy, *block_dy), boxes_of(x, *block_x),
        boxes_of(_cut(dy, parts), *block_dy), boxes_of(_cut(x, parts), *block_x), partial,
        N, H, W, h.count, v.count, M, groups, h.in_start, v.in_start, shares,
        C=C, JH=len(h.taps), JW=len(v.taps),
        IN_STEP_H=h.in_step, IN_STEP_W=v.in_step, IN_TAP_H=h.in_tap, IN_TAP_W=v.in_tap,
        ACC=launch.acc(x.dtype), PRECISION=precision, **early.options(), **sizes,
    )  # fmt: skip
    total = gemm.sum_shares(partial.view(shares, -1), x.dtype)
    return total.view(groups * M, len(h.taps), len(v.taps), C)


def rows_of(x: torch.Tensor, dy: torch.Tensor, h: Walk, groups: int) -> int:
    """The number of images, or of parts of them where as many channels as these have tiles of one tap."""
    return x.shape[0] * (parts_of(x, dy, h) if x.shape[3] // groups > ROW_OF_TAPS else 1)


def parts_of(x: torch.Tensor, dy: torch.Tensor, h: Walk) -> int:
    """How many parts an image is cut into: the fewest that are small and fill a run, where no tap reads beyond a
    neighbour."""
    N, H, QH = x.shape[0], x.shape[1], dy.shape[1]
    reach = max(-h.in_start, h.in_start + (len(h.taps) - 1) * h.in_tap)
    parts, size = 1, max(t[0].numel() * t.element_size() for t in (x, dy))
    while (size > PART * parts or N * parts < RUN) and (
        QH * h.in_step == H and QH % (2 * parts) == 0 and reach <= H // (2 * parts)
    ):
        parts *= 2
    return parts


def _cut(x: torch.Tensor, parts: int) -> torch.Tensor:
    """x [N, H, W, channels] as [N * parts, H / parts, W, channels]."""
    N, H, W, channels = x.shape
    return x.view(N * parts, H // parts, W, channels)
