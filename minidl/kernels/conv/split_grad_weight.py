"""The "split" weight gradient: float32 in tf32 parts, of which channels are rows and pixels the K of a GEMM.

    dy  [parts, M, places]            x  [parts, columns of taps * C, places]
    m | .. dy(place) .. |   x   (j_w, c) | .. x(place, shifted by j_w; + j_h rows) .. |^T   ->   partial[share, m, j, c]

Tensor cores read tf32 along K alone, so the copies that split (`split`) also put the pixels of a channel side by side,
in places that are the same for x and dy. Boxes begin at a multiple of 16 bytes: x is copied once for each column of
taps, and a row of taps is a distance of whole rows, whose lengths are multiples of 4. An image has as many rows of
zeros as taps reach beyond it. With a stride s down, x is also copied once for each remainder of its rows modulo s.
Such zeros are multiplied by x, so a non-finite pixel of the first or last rows or columns gives NaN for its channel.

Copies of more than `split_places.MOST` bytes are made in slices of the images, one after another. The precision "tf32"
has one part, the nearest tf32 numbers. With a single row of taps dy is read where it lies, as blocks of pixels that are
split and transposed in registers; in a product of pixels (1x1) x is if it has more channels, and the result is
transposed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv import costs, split, tile_throughput
from minidl.kernels.conv.prepared import Copy, Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, NO_BOXES, Problem, Tensors, Unsupported
from minidl.kernels.conv.records import Taps
from minidl.kernels.conv.split import not_finite, split_product
from minidl.kernels.conv.split_places import MOST, parts, places_of, slice_of, written
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait
from minidl.runtime.descriptors import Box

NAME = "split"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = ("conv_split_grad_weight", "conv_split_across")

LEAST = 8  # minimum steps of a share
COPIES = 2**16 - 1  # the second axis of a grid
# Copies of other numbers of channels than multiples of LANES, or of groups, take SCATTERED times as long (measured on
# an H200: 2.1 to 3.5); the launches that wait for one another take LAUNCHES us more.
LANES, SCATTERED, LAUNCHES = 32, 2.5, 4.0
HALF = 2048  # accumulators of a warp that take half of its registers
FAR = tl.constexpr(2**16)  # strides added to a tap's distance, so that its division rounds down


class Grid(NamedTuple):
    """M output channels in each of GROUPS groups; rows of `width` places; `steps` of a share; the first row `in_h` of
    taps, and the remainders of rows."""

    M: int
    GROUPS: int
    width: int
    steps: int
    in_h: int
    remainders: int


class SplitTile(NamedTuple):
    """BLOCK_M output channels x BLOCK_N columns of taps and channels, in steps of BLOCK_K places; PARTS of operands.

    IN_PLACE    whether dy is [places, GROUPS * M]
    TRANSPOSED  whether dy and x are exchanged, so that the result is transposed
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    ACC: Any
    PARTS: Any
    IN_PLACE: Any
    TRANSPOSED: Any


@triton.jit
def _load_rows(d_dy, o_m, lo_m, o_k, tile: tl.constexpr):
    """Return hi and lo of dy [BLOCK_M, BLOCK_K]."""
    if tile.IN_PLACE:
        b_hi, b_lo = split.split(d_dy.load([o_k, o_m]))
        return b_hi.T, b_lo.T
    else:
        b_hi = d_dy.load([o_m, o_k])
        return b_hi, b_hi if tile.PARTS == 1 else d_dy.load([lo_m + o_m, o_k])


@triton.jit
def _add_product(b_acc, b_dy, b_x, one, tile: tl.constexpr):
    """Return the accumulator [M, N] plus dy [M, K] times x [K, N].

    Triton would leave a product of registers in flight while the next block is loaded to these registers. It does not
    if the product is another tensor than the accumulator, which a factor of `one`, unknown to it, ensures.
    """
    if tile.IN_PLACE:
        return b_acc + tl.dot(b_dy, b_x, input_precision="tf32", out_dtype=tile.ACC) * one
    else:
        return tl.dot(b_dy, b_x, b_acc, input_precision="tf32", out_dtype=tile.ACC)


@triton.jit
def conv_split_grad_weight_kernel(
    d_dy, d_x, p_partial, grid, taps: tl.constexpr, tile: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Write partial [shares, groups * M, JH * JW * C]."""
    wait(EARLY)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    JH: tl.constexpr = taps.JH
    N: tl.constexpr = taps.JW * taps.C
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEP: tl.constexpr = taps.IN_STEP_H
    M, GROUPS, width, steps, in_h, remainders = grid
    tiles_m = tl.cdiv(M, BLOCK_M)
    j = tl.program_id(0) % JH
    n = tl.program_id(0) // JH % tiles_n * BLOCK_N
    m = tl.program_id(0) // (JH * tiles_n) % tiles_m * BLOCK_M
    i_group = tl.program_id(0) // (JH * tiles_n * tiles_m) % GROUPS
    i_share = tl.program_id(0) // (JH * tiles_n * tiles_m * GROUPS)
    tap = in_h + j * taps.IN_TAP_H + FAR * STEP
    k = i_share * steps * BLOCK_K
    k_x = k + (tap // STEP - FAR) * width
    o_m = i_group * M + m
    o_n = (tap % STEP * GROUPS + i_group) * N + n
    lo_m = GROUPS * M
    lo_n = remainders * GROUPS * N
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
    one = (steps > 0).to(tile.ACC)
    # With an operand in place in two parts, Triton 3.6 spills registers under this assumption.
    if not (tile.IN_PLACE and tile.PARTS == 2):
        tl.assume(steps > 0)
    for i in range(steps):
        b_dy, b_dy_lo = _load_rows(d_dy, o_m, lo_m, k + i * BLOCK_K, tile)  # [BLOCK_M, BLOCK_K]
        b_x = d_x.load([o_n, k_x + i * BLOCK_K]).T  # [BLOCK_K, BLOCK_N]
        if tile.PARTS == 1:
            b_acc = _add_product(b_acc, b_dy, b_x, one, tile)
        else:
            b_x_lo = d_x.load([lo_n + o_n, k_x + i * BLOCK_K]).T
            b_acc = split_product(b_dy, b_dy_lo, b_x, b_x_lo, b_acc, tile.ACC)
    if tile.PARTS == 2:
        b_hi = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
        for i in range(steps * not_finite(b_acc)):
            b_dy, _ = _load_rows(d_dy, o_m, lo_m, k + i * BLOCK_K, tile)
            b_x = d_x.load([o_n, k_x + i * BLOCK_K]).T
            b_hi = _add_product(b_hi, b_dy, b_x, one, tile)
        b_acc = tl.where(tl.abs(b_acc) < split.INFINITY, b_acc, b_hi)
    r_m = m + tl.arange(0, BLOCK_M)
    r_n = n + tl.arange(0, BLOCK_N)
    p_partial += i_share.to(tl.int64) * (GROUPS * M) * (JH * N)
    if tile.TRANSPOSED:
        p_partial += (i_group * N + r_n).to(tl.int64)[None, :] * M + r_m[:, None]
    else:
        p_partial += (i_group * M + r_m).to(tl.int64)[:, None] * (JH * N) + j * N + r_n[None, :]
    tl.store(p_partial, b_acc, mask=(r_m < M)[:, None] & (r_n < N)[None, :])


class Prepared(NamedTuple):
    """The copies of dy (None in place) and of x to parts, exchanged if `transposed`, and the product, for slices of
    `images`; `last` is that of the last slice if it has fewer."""

    dy: Copy | None
    x: Copy
    product: Shares
    images: int
    transposed: bool
    last: Prepared | None = None

    def of(self, images: int) -> Prepared:
        """Return what computes a slice."""
        return self if self.last is None or images == self.images else self.last


def able(problem: Problem) -> bool | Unsupported:
    part, _ = slice_of(problem)
    x, _ = places_of(part)
    return (
        split.able(part, written(part))
        and (problem.boxes(x.pitch) or NO_BOXES)
        and (x.remainders * x.columns <= COPIES or Unsupported("more copies than a grid has rows"))
        and (_partial_bytes(problem, part) <= MOST or Unsupported("partial sums of more than 2 GiB"))
    )


def _partial_bytes(problem: Problem, part: Problem) -> int:
    shares = launch.cdiv(problem.N, max(1, part.N)) * _cut(part).shares
    return shares * math.prod(problem.shape) * launch.acc_torch(problem.dtype).itemsize


def estimate(problem: Problem) -> float:
    images = problem.N
    problem, _ = slice_of(problem)
    copied = written(problem)
    in_place = 0 if places_of(problem)[1] else costs.written(problem)
    copies = costs.copy_time(problem, copied) + costs.copy_time(problem, costs.moved(problem) - in_place)
    odd = problem.groups > 1 or problem.C % LANES or problem.M % LANES
    copies = copies * (SCATTERED if odd else 1.0) + LAUNCHES
    product = costs.launch_time(problem, _cut(problem).microseconds, copied + in_place)
    return images / max(1, problem.N) * (copies + product)


def prepare(problem: Problem) -> Prepared:
    part, transposed = slice_of(problem)
    images = problem.N % part.N if part.N else 0
    last = _prepare(part._replace(N=images), problem.shape, transposed) if images else None
    return _prepare(part, problem.shape, transposed)._replace(last=last)


def _prepare(problem: Problem, shape: tuple[int, ...], transposed: bool) -> Prepared:
    """Return the launches for one slice, `problem`, of a gradient of this shape."""
    x, dy = places_of(problem)
    tile, shares, count = tile_of(problem), _cut(problem).shares, parts(problem)
    steps = launch.cdiv(launch.cdiv(x.length, tile["BLOCK_K"]), shares)
    grid = Grid(problem.M, problem.groups, x.width, steps, problem.at.down.in_start - x.first_h, x.remainders)
    record = tile.record(
        SplitTile, ACC=launch.acc(problem.dtype), PARTS=count, IN_PLACE=dy is None, TRANSPOSED=transposed
    )  # fmt: skip
    meta = {
        "taps": Taps.of(problem), "tile": record, **dependent_launch.options(target=problem.target),
        **tile.launch_options,
    }  # fmt: skip
    channels = problem.groups * problem.M
    boxes = (
        Box((x.length, channels), (channels, 1), (tile["BLOCK_K"], tile["BLOCK_M"]))
        if dy is None
        else Box((count * dy.rows, dy.length), (dy.pitch, 1), (tile["BLOCK_M"], tile["BLOCK_K"])),
        Box((count * x.rows, x.length), (x.pitch, 1), (tile["BLOCK_N"], tile["BLOCK_K"])),
    )
    product = launch.Prepared(conv_split_grad_weight_kernel, (_tiles(problem, tile) * shares,), (grid,), meta, boxes)
    of_dy = dy and split.prepare_across(problem, dy)
    return Prepared(of_dy, split.prepare_across(problem, x), Shares(product, shares, shape), problem.N, transposed)


def run(prepared: Prepared, t: Tensors) -> torch.Tensor:
    operands = (t.x, t.w) if prepared.transposed else (t.w, t.x)
    pairs = list(zip(*(each.split(max(1, prepared.images)) for each in operands), strict=True))
    shares = [prepared.of(len(dy)).product.number for dy, _ in pairs]
    partial = prepared.product.partial(t.w.dtype, t.w.device, sum(shares))
    for (dy, x), part in zip(pairs, partial.split(shares), strict=True):
        of_dy, of_x, product, *_ = prepared.of(len(dy))
        product.launch.run(dy if of_dy is None else of_dy.run(dy), of_x.run(x), part)
    return prepared.product.total(partial, t.w.dtype)


def tile_of(problem: Problem) -> launch.Tile:
    """Return the fastest of the tiles for a problem, by estimate."""
    columns = len(problem.at.across.taps) * problem.C
    rows = max(problem.M, tile_throughput.WGMMA_ROWS)
    tiles = problem.tiles("conv_split_grad_weight", M=rows, N=max(columns, tile_throughput.LEAST_COLUMNS))
    if places_of(problem)[1] is None:  # two accumulators
        fits = tuple(tile for tile in tiles if tile["BLOCK_M"] * tile["BLOCK_N"] <= HALF * tile.num_warps)
        tiles = fits or tiles[-1:]
    return min(tiles, key=lambda tile: _shares(problem, tile).microseconds)


def _tiles(problem: Problem, tile: launch.Tile) -> int:
    columns = len(problem.at.across.taps) * problem.C
    tiles = launch.cdiv(problem.M, tile["BLOCK_M"]) * launch.cdiv(columns, tile["BLOCK_N"])
    return tiles * len(problem.at.down.taps) * problem.groups


def _cut(problem: Problem) -> costs.Split:
    """Return the fastest number of shares of the fastest tile."""
    return _shares(problem, tile_of(problem))


def _shares(problem: Problem, tile: launch.Tile) -> costs.Split:
    """Return the fastest number of shares of a tile."""
    blocks = launch.cdiv(places_of(problem)[0].length, tile["BLOCK_K"])
    steps = tile_throughput.steps(problem, blocks, tile["BLOCK_K"], boxes=True)
    values = problem.groups * problem.M * problem.taps * problem.C
    throughput = tile_throughput.of_split(problem, tile)
    work = costs.Work(_tiles(problem, tile), steps, throughput, "weight", values=values)
    return costs.in_shares(problem, work, blocks, LEAST)
