"""The weight gradient in boxes: the K of the GEMM is a box of pixels, of one image or of several.

    dw[m, j, c] = sum over pixels of dy[n, q, m] x[n, at(q, j), c]

The inputs that a tap multiplies with the output's gradient at TILE_N x TILE_H x TILE_W neighbouring pixels are a box,
with zeros outside the image. So a batch need be no multiple of a run, and where images are large a box lies in few
pages of memory: runs of images take one for each image. It takes strides of 1. The gradient is the left operand and
read through pointers (Triton 3.6 computes one that is a reshaped box wrongly).

A program sums one tap of a block of output and input channels over its share of the boxes. Shares are interleaved, so
that programs running together read one neighbourhood; their partial sums are added in order. Zeros outside the image
are multiplied with the output's gradient: one that is not finite makes NaN of border taps. An input that is not finite
makes NaN of taps whose boxes reach it beyond the outputs.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, pace
from minidl.kernels.conv.boxed import images_box, shape_of_box
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, MANY, NO_BOXES, No, Problem, Tensors
from minidl.runtime import early, launch
from minidl.runtime.early import wait

NAME = "box"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_box_grad_weight",)
LEAST = 8  # boxes of a share


@triton.jit
def conv_box_grad_weight_kernel(
    p_dy, d_x, p_partial, boxes, N, QH, QW, M, GROUPS, in_h, in_w, SHARES,
    C: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr, IN_TAP_H: tl.constexpr, IN_TAP_W: tl.constexpr,
    EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE_N: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr,
):  # fmt: skip
    """partial [shares, groups * M, JH * JW * C]: a tap of BLOCK_M x BLOCK_N channels, a box of pixels a step."""
    wait(EARLY)
    PIXELS: tl.constexpr = TILE_N * TILE_H * TILE_W
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    J: tl.constexpr = JH * JW
    tiles_m = tl.cdiv(M, BLOCK_M)
    c = tl.program_id(0) % tiles_c * BLOCK_N
    m = tl.program_id(0) // tiles_c % tiles_m * BLOCK_M
    i_group = tl.program_id(0) // (tiles_c * tiles_m) % GROUPS
    j = tl.program_id(0) // (tiles_c * tiles_m * GROUPS) % J
    i_share = tl.program_id(0) // (tiles_c * tiles_m * GROUPS * J)
    tap_h = in_h + j // JW * IN_TAP_H
    tap_w = in_w + j % JW * IN_TAP_W
    o_c = i_group * C + c
    tiles_w = tl.cdiv(QW, TILE_W)
    tiles_h = tl.cdiv(QH, TILE_H)
    # The pixels of a box, and where they lie from its first one.
    o_p = tl.arange(0, PIXELS)
    p_n = o_p // (TILE_H * TILE_W)
    p_h = o_p // TILE_W % TILE_H
    p_w = o_p % TILE_W
    o_dy = (p_n * QH + p_h) * QW + p_w
    r_m = m + tl.arange(0, BLOCK_M)
    p_dy += i_group * M
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    tl.assume(i_share < boxes)
    for i in range(i_share, boxes, SHARES):
        q_w = i % tiles_w * TILE_W
        row = i // tiles_w
        q_h = row % tiles_h * TILE_H
        n = row // tiles_h * TILE_N
        m_dy = (n + p_n < N) & (q_h + p_h < QH) & (q_w + p_w < QW)
        o_row = (n.to(tl.int64) * QH + q_h) * QW + q_w + o_dy
        b_dy = tl.load(
            p_dy + (o_row * (GROUPS * M))[:, None] + r_m[None, :], mask=m_dy[:, None] & (r_m < M)[None, :], other=0.0
        )  # [PIXELS, BLOCK_M]
        b_x = tl.reshape(d_x.load([n, tap_h + q_h, tap_w + q_w, o_c]), (PIXELS, BLOCK_N))
        b_acc = tl.dot(b_dy.T, b_x, b_acc, input_precision=PRECISION, out_dtype=ACC)
    r_c = c + tl.arange(0, BLOCK_N)
    p_partial += i_share.to(tl.int64) * (GROUPS * M) * (J * C)
    p_partial += (i_group * M + r_m).to(tl.int64)[:, None] * (J * C) + j * C + r_c[None, :]
    tl.store(p_partial, b_acc, mask=(r_m < M)[:, None] & (r_c < C)[None, :])


def able(problem: Problem) -> bool | No:
    h, v, size = problem.at.h, problem.at.v, problem.dtype.itemsize
    return (
        (size == 2 or problem.target == "interpreted" or No("float32 that does not lie along the pixels"))
        and (h.in_step == v.in_step == 1 or No("a stride"))
        and (all(channels * size % 16 == 0 for channels in (problem.C, problem.M))
             or No("channels of a group whose bytes are not a multiple of 16"))
        and ((problem.x_boxes and problem.M > 0) or NO_BOXES)
        and (cut(problem).box[0] * h.count * v.count < MANY or No("a box whose pixels 32 bits do not count"))
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    """With the pixels of boxes that are outside of an image."""
    at = cut(problem)
    if problem.paced:
        return costs.at_least(problem, at.shares.microseconds)
    return costs.microseconds(problem, NAME, costs.dense(problem), at.tiles * at.shares.count)


def prepare(problem: Problem) -> Shares:
    h, v = problem.at.h, problem.at.v
    (H, W), (QH, QW) = problem.read, problem.written
    N, M, C, groups = problem.N, problem.M, problem.C, problem.groups
    tile, box, boxes, tiles, (shares, _) = cut(problem)
    options = tile.options
    del options["BLOCK_K"], options["PER_PROCESSOR"]
    read = problem.taps_read
    scalars = (boxes, N, QH, QW, M, groups, h.in_start, v.in_start, shares)
    meta = {
        **{name: read[name] for name in ("C", "JH", "JW", "IN_TAP_H", "IN_TAP_W")}, **problem.constants,
        **early.options(target=problem.target), "TILE_N": box[0], "TILE_H": box[1], "TILE_W": box[2], **options,
    }  # fmt: skip
    of_boxes = (None, images_box(N, H, W, groups * C, [*box, tile["BLOCK_N"]]))
    made = launch.Prepared(conv_box_grad_weight_kernel, (tiles * shares,), scalars, meta, of_boxes)
    return Shares(made, shares, problem.shape)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)


class Cut(NamedTuple):
    """A box of pixels and how many there are, tiles of the gradient, and the shares of the boxes."""

    tile: launch.Tile
    box: tuple[int, int, int]
    boxes: int
    tiles: int
    shares: pace.Shares


def cut(problem: Problem) -> Cut:
    """How the gradient is cut."""
    h, v = problem.at.h, problem.at.v
    tile = problem.tile("conv_box_grad_weight", M=problem.M, N=problem.C)
    box = shape_of_box(problem.N, h.count, v.count, tile["BLOCK_K"])
    sizes = problem.N, h.count, v.count
    boxes = math.prod(launch.cdiv(size, extent) for size, extent in zip(sizes, box, strict=True))
    tiles = launch.cdiv(problem.C, tile["BLOCK_N"]) * launch.cdiv(problem.M, tile["BLOCK_M"]) * problem.groups
    tiles *= problem.taps
    if not problem.paced:
        shares = max(1, min(tile["PER_PROCESSOR"] * problem.processors // tiles, boxes // LEAST))
        return Cut(tile, box, boxes, tiles, pace.Shares(shares, 0.0))
    values = problem.groups * problem.M * problem.taps * problem.C
    tempo = pace.of_programs(tile, 1)
    shares = pace.in_shares(tiles, boxes, tile["BLOCK_K"], tempo, problem.processors, values, 1.0, LEAST)
    return Cut(tile, box, boxes, tiles, shares)
