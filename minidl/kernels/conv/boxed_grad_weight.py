"""The weight gradient in the "box" form: the K of the GEMM is a box of pixels of one or several images.

    dw[m, j, c] = sum over pixels of dy[n, q, m] x[n, at(q, j), c]

For one tap, the inputs of dy at TILE_N x TILE_H x TILE_W neighbouring pixels are one descriptor block. So any batch
size fills the blocks, and in large images a box touches few pages of memory, whereas runs of images touch one page per
image. If H is the number of outputs times the stride, the rows of all images form one axis (MERGED): boxes of 16 x 4
fill 21 images of 28x28 completely, and leave an eighth empty per image otherwise. With strides x is viewed as
[.., H / stride, stride, W / stride, stride * channels], in which a tap's inputs are a block, too. dy is the left
operand and read through pointers (Triton 3.6 miscomputes a reshaped descriptor block there); its rows are zero where a
tap is outside the image. A `ConcatPair` is read in place, as in `boxed`; a tile with channels of both halves is summed
in two parts.

The boxes of all tiles form a sequence, divided equally among programs (`even_parts`). A non-finite input gives NaN for
taps whose boxes reach it beyond the outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import box_line, costs
from minidl.kernels.conv.even_parts import Prepared, slots_of, step_at
from minidl.kernels.conv.geometry import Phase
from minidl.kernels.conv.pixel_boxes import shape_of_box
from minidl.kernels.conv.problem import GRAD_WEIGHT, INT32_LIMIT, NO_BOXES, Problem, Tensors, Unsupported
from minidl.kernels.division import fast_divide, reciprocal
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "box"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_box_grad_weight",)
MOST = 256  # maximum size of a descriptor block along an axis
# Factors for pixels of at most 32 bytes (1x1 16->984 at 225x225, 12 images, 1138 us for 393), and for outputs that fill
# half a tile (7x7 192->32 at 98x98, 197 images, 10413 for 6601; 3x3 360->32 at 74x74, 453, 5093 for 3182).
THIN_X, THIN_Y = 2.9, 1.6
MANY_GROUPS = 4  # from this many groups on, blocks are far apart in memory


@triton.jit(do_not_specialize=["boxes", "N", "H", "W", "QH", "QW", "in_h", "in_w", "first_h", "first_w", "Q", "turned"])
def conv_box_grad_weight_kernel(
    p_dy, d_x, p_partial, turned, boxes, N, H, W, QH, QW, M, GROUPS, in_h, in_w, first_h, first_w, by_rows, Q, PAUSE,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    MERGED: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAPS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write partial [slots, groups * M, JH * JW * C]: the sums of this program's Q steps, for each tile they are in.

    first_h, first_w: in_h and in_w plus a multiple of the stride, so that they are not negative. With PART > 0, the
    channels of a half, d_x has an axis for the halves, exchanged if `turned`.
    """
    wait(EARLY)
    PIXELS: tl.constexpr = TILE_N * TILE_H * TILE_W
    STRIDED: tl.constexpr = IN_STEP_H > 1 or IN_STEP_W > 1
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    J: tl.constexpr = JH * JW // TAPS
    SPLIT: tl.constexpr = 2 if PART and PART < BLOCK_N else 1
    WIDTH: tl.constexpr = BLOCK_N // SPLIT
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_w = tl.cdiv(QW, TILE_W)
    tiles_h = tl.cdiv(QH, TILE_H)
    # The pixels of a box.
    o_p = tl.arange(0, PIXELS)
    p_n = o_p // (TILE_H * TILE_W)
    p_h = o_p // TILE_W % TILE_H
    p_w = o_p % TILE_W
    o_dy = ((p_n * QH + p_h) * QW + p_w) * (GROUPS * M)
    steps = boxes + PAUSE
    start = tl.program_id(0) * Q
    end = tl.minimum(start + Q, tiles_c * tiles_m * GROUPS * J * steps)
    i_tile = start // steps
    first = i_tile * steps
    while first < end:
        c = i_tile % tiles_c * BLOCK_N
        m = i_tile // tiles_c % tiles_m * BLOCK_M
        i_group = i_tile // (tiles_c * tiles_m) % GROUPS
        j = i_tile // (tiles_c * tiles_m * GROUPS) * TAPS
        tap_h = j // JW * IN_TAP_H
        tap_w = j % JW * IN_TAP_W
        o_c = i_group * C + c
        # In the strided view of x: the box's first row, and its remainder.
        x_h = (first_h + tap_h) // IN_STEP_H + (in_h - first_h) // IN_STEP_H
        phase = (first_h + tap_h) % IN_STEP_H
        r_m = m + tl.arange(0, BLOCK_M)
        before, slots, opening, closing = slots_of(first + PAUSE, boxes, Q)
        slot = tl.program_id(0) - before
        begin = tl.maximum(start, first + PAUSE) - start
        stop = tl.minimum(first + steps, end) - start
        b_accs = ()
        for _ in tl.static_range(TAPS * SPLIT):
            b_accs += (tl.zeros((BLOCK_M, WIDTH), dtype=ACC),)
        for step in range(begin, stop):
            i = step_at(step, slot, slots, opening, closing)
            q_w = i % tiles_w * TILE_W
            n = 0
            q_h = i // tiles_w * TILE_H
            if MERGED:
                o_h = q_h + p_h
                o_n = fast_divide(o_h, QH, by_rows, tl.int32)
                o_h -= o_n * QH
            else:
                q_h = i // tiles_w % tiles_h * TILE_H
                n = i // (tiles_w * tiles_h) * TILE_N
                o_h = q_h + p_h
                o_n = n + p_n
            i_h = in_h + o_h * IN_STEP_H + tap_h
            m_dy = (o_n < N) & (o_h < QH) & (q_w + p_w < QW) & (i_h >= 0) & (i_h < H)
            if not WHOLE:
                i_w = in_w + (q_w + p_w) * IN_STEP_W + tap_w
                m_dy &= (i_w >= 0) & (i_w < W)
            # Offsets within a box need 32 bits only.
            p_box = p_dy + ((tl.cast(n, tl.int64) * QH + q_h) * QW + q_w) * (GROUPS * M) + i_group * M
            b_dy = tl.load(
                p_box + o_dy[:, None] + r_m[None, :], mask=m_dy[:, None] & (r_m < M)[None, :], other=0.0
            )  # [PIXELS, BLOCK_M]
            b_next = ()
            for t in tl.static_range(TAPS * SPLIT):
                at_w = first_w + tap_w + t // SPLIT * IN_TAP_W
                x_w = at_w // IN_STEP_W + (in_w - first_w) // IN_STEP_W + q_w
                if STRIDED:
                    b_x = d_x.load([n, x_h + q_h, phase, x_w, at_w % IN_STEP_W * (GROUPS * C) + o_c])
                elif PART:
                    half = (o_c + t % SPLIT * WIDTH) // PART
                    b_x = d_x.load([half ^ turned, n, x_h + q_h, x_w, o_c + t % SPLIT * WIDTH - half * PART])
                else:
                    b_x = d_x.load([n, x_h + q_h, x_w, o_c])
                b_x = tl.reshape(b_x, (PIXELS, WIDTH))
                b_next += (tl.dot(b_dy.T, b_x, b_accs[t], input_precision=PRECISION, out_dtype=ACC),)
            b_accs = b_next
        r_c = c + tl.arange(0, WIDTH)
        p_tile = p_partial + slot.to(tl.int64) * (GROUPS * M) * (JH * JW * C)
        p_tile += (i_group * M + r_m).to(tl.int64)[:, None] * (JH * JW * C) + j * C + r_c[None, :]
        for t in tl.static_range(TAPS * SPLIT):
            further = t % SPLIT * WIDTH
            m_tile = (r_m < M)[:, None] & (r_c + further < C)[None, :] & (begin < stop)
            tl.store(p_tile + t // SPLIT * C + further, b_accs[t], mask=m_tile)
        first += steps
        i_tile += 1


def able(problem: Problem) -> bool | Unsupported:
    size = problem.dtype.itemsize
    return (
        (size == 2 or problem.target == "interpreted" or Unsupported("float32 that is not contiguous along the pixels"))
        and (all(channels * size % 16 == 0 for channels in (problem.C, problem.M))
             or Unsupported("channels of a group whose bytes are not a multiple of 16"))
        and ((problem.x_boxes and problem.M > 0) or NO_BOXES)
        and _fits(problem)
    )  # fmt: skip


def _fits(problem: Problem) -> bool | Unsupported:
    """Return whether 32 bits count pixels and steps, and no box reads beyond the end of x."""
    h, v, at = problem.at.h, problem.at.v, cut(problem)
    images = 1 + at.box[1] // h.count if at.merged else at.box[0]
    reach = images * h.count * v.count * problem.groups * problem.M
    counted = max(problem.N * h.count, reach, at.line.total)
    return (counted < INT32_LIMIT or Unsupported("more rows, steps or values of a box than 32 bits count")) and (
        (_stays_inside(h, problem.read[0], at.box[1]) and _stays_inside(v, problem.read[1], at.box[2])
         and (at.divisible or problem.C % at.line.tile["BLOCK_N"] == 0))
        or Unsupported("a stride that does not divide an image, so that boxes read beyond a row")
    )  # fmt: skip


def _stays_inside(phase: Phase, size: int, extent: int) -> bool:
    """Return whether boxes of `extent` outputs never read the part of the strided view's last row that exceeds x."""
    if size % phase.in_step == 0:
        return True
    last = launch.cdiv(phase.count, extent) * extent - 1
    for tap in range(len(phase.taps)):
        start = phase.in_start + tap * phase.in_tap
        remainder = start % phase.in_step
        beyond = (size - remainder + phase.in_step - 1) // phase.in_step  # the first invalid index
        if beyond < launch.cdiv(size, phase.in_step) and start // phase.in_step + last >= beyond:
            return False
    return True


def estimate(problem: Problem) -> float:
    """Estimate microseconds, including the pixels of boxes that lie outside an image."""
    at = cut(problem)
    if problem.paced:
        # 1x4 in 5120 groups, 27 images of 2048: 947 us; 1x31 1544->276 in 4 groups, 21 images of 2189: 2.5 ms.
        many = costs.relative(problem, "weight, box, groups") if problem.groups >= MANY_GROUPS else 1.0
        return costs.at_least(problem, many * narrow_factor(problem) * box_line.microseconds(at.line))
    return costs.microseconds(problem, NAME, costs.dense(problem), at.line.tiles + at.line.programs)


def narrow_factor(problem: Problem) -> float:
    """Return the factor for few channels."""
    return THIN_X if problem.C < 32 else THIN_Y if problem.M <= 32 else 1.0


class Cut(NamedTuple):
    """The shape of boxes, whether the rows of all images are `merged`, whether the stride divides W, and the line."""

    box: tuple[int, int, int]
    merged: bool
    divisible: bool
    line: box_line.Line


def cut(problem: Problem) -> Cut:
    """Return the decomposition with the fastest tile."""
    tiles = problem.tiles("conv_box_grad_weight", M=problem.M, N=problem.C, T=len(problem.at.v.taps))
    options = [_cut(problem, tile) for tile in tiles]
    return min(options, key=lambda at: box_line.microseconds(at.line)) if problem.paced else options[0]


def _cut(problem: Problem, tile: launch.Tile) -> Cut:
    h, v, N, (H, W) = problem.at.h, problem.at.v, problem.N, problem.read
    divisible = W % v.in_step == 0
    taps = tile["TAPS"] if divisible and len(v.taps) % tile["TAPS"] == 0 else 1
    merged = divisible and h.count * h.in_step == H
    sizes = (N, h.count, v.count)
    box, boxes = _box_shape(sizes, tile["BLOCK_K"])
    if merged:
        other = _box_shape((1, N * h.count, v.count), tile["BLOCK_K"], tall=True)
        merged = other[1] <= boxes
        box, boxes = other if merged else (box, boxes)
    return Cut(box, merged, divisible, box_line.in_line(problem, tile, boxes, problem.taps, taps))


def _box_shape(sizes: tuple[int, int, int], pixels: int, tall: bool = False) -> tuple[tuple[int, int, int], int]:
    """Return the shape and number of boxes of `pixels` pixels; tall ones have two columns in place of four.

    512->512 at 28x28, 21 images, 131 us in place of 136; 512->1024 2x2 stride 2 at 56x56, 55 images, 271 for 310.
    """
    box = shape_of_box(*sizes, pixels)
    if tall and box[2] == 4 and box[1] <= MOST // 2:
        box = box[0], 2 * box[1], 2
    return box, math.prod(launch.cdiv(size, extent) for size, extent in zip(sizes, box, strict=True))


def prepare(problem: Problem) -> Prepared:
    h, v = problem.at.h, problem.at.v
    (H, W), (QH, QW) = problem.read, problem.written
    N, M, groups, at = problem.N, problem.M, problem.groups, cut(problem)
    line, box = at.line, at.box
    firsts = (phase.in_start + max(0, -(phase.in_start // phase.in_step)) * phase.in_step for phase in (h, v))
    scalars = (
        line.boxes, N, H, W, QH, QW, M, groups, h.in_start, v.in_start, *firsts, reciprocal(QH), line.each,
        box_line.PAUSE,
    )  # fmt: skip
    meta = {
        **problem.taps_read, **problem.constants, **dependent_launch.options(target=problem.target), **line.blocks,
        "MERGED": at.merged, "WHOLE": at.divisible, "TILE_N": box[0], "TILE_H": box[1], "TILE_W": box[2],
        "PART": problem.part, "num_warps": line.tile.num_warps, "num_stages": line.tile.num_stages,
    }  # fmt: skip
    block = line.tile["BLOCK_N"]
    product = launch.Prepared(
        conv_box_grad_weight_kernel, (line.programs,), scalars, meta,
        (None, _descriptor(problem, at.merged, box, min(block, problem.part or block))),
    )  # fmt: skip
    total_sum = box_line.prepare_slot_sum(problem, problem.taps, line)
    return Prepared(product, (line.slots, math.prod(problem.shape)), total_sum, problem.shape)


def _descriptor(problem: Problem, merged: bool, box: tuple[int, int, int], channels: int) -> Box:
    """Return the descriptor of x for blocks of `channels` channels."""
    h, v, N, (H, W) = problem.at.h.in_step, problem.at.v.in_step, problem.N, problem.read
    width = problem.groups * problem.C
    sizes, pitch = (N, launch.cdiv(H, h)), H * W * width
    if merged:
        sizes, pitch = (1, N * H // h), N * H * W * width
    if problem.concat_pair:
        return Box((2, *sizes, W, width // 2), (0, pitch // 2, W * width // 2, width // 2, 1), (1, *box, channels))
    if h == v == 1:
        return Box((*sizes, W, width), (pitch, W * width, width, 1), (*box, channels))
    return Box(
        (*sizes, h, launch.cdiv(W, v), v * width), (pitch, h * W * width, W * width, v * width, 1),
        (box[0], box[1], 1, box[2], channels),
    )  # fmt: skip


def run(prepared: Prepared, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x, t.swapped)


def reads_concat_pair(problem: Problem) -> bool:
    """Return whether a tile's channels are of one half, or all of both; requires a stride of 1 (at most five axes)."""
    block = cut(problem).line.tile["BLOCK_N"]
    one_half = problem.part % block == 0 or 2 * problem.part == block
    return problem.groups == 1 and problem.at.h.in_step == problem.at.v.in_step == 1 and one_half
