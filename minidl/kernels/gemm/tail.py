"""Matrix products with split-K for the last, incomplete round of tiles only (compare stream-K, arXiv 2301.03598).

    C [M, N] = act(A B + bias), by boxes

160 tiles are two rounds on 132 multiprocessors, and the second has 28 tiles. Split into 4 shares of K these become 112
work items for 132 programs, and the second round takes a quarter of the time.

    programs    0           28          56          84          112   131
    round 1    | tiles 0 to 131, all of K                                |
    round 2    | share 0   | share 1   | share 2   | share 3   |         |    of tiles 132 to 159

A second launch adds the partial products in the order of the shares, so sums do not depend on scheduling. All tiles of
a share read the same blocks of K at the same time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels.division import as_multiple
from minidl.kernels.epilogue import finish
from minidl.kernels.gemm import launches
from minidl.kernels.gemm.prepared import Product, boxes, options
from minidl.kernels.gemm.problem import Problem
from minidl.kernels.gemm.tiled import Sizes, clamped_tile, load_boxes, store_tile
from minidl.runtime import launch
from minidl.runtime.dependent_launch import wait


@triton.jit
def gemm_tail_kernel(
    d_a, d_b, p_bias, p_scale, p_c, p_z, p_partial, sizes, full_tiles, tail_tiles,
    tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the first `full_tiles` tiles of C, and for the others partial [SPLIT, tail_tiles, BLOCK_M, BLOCK_N]."""
    wait(EARLY)
    M, N = sizes.M, as_multiple(sizes.N, tile.UNIT_N)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    blocks = tl.cdiv(sizes.K, tile.BLOCK_K)
    blocks_per_split = tl.cdiv(blocks, sizes.SPLIT)
    work = full_tiles + tail_tiles * sizes.SPLIT
    for i_work in tl.range(tl.program_id(0), work, sizes.PROGRAMS, flatten=tile.FLATTEN):
        i_tile = i_work
        begin = 0
        end = blocks
        if i_work >= full_tiles:
            begin = (i_work - full_tiles) // tail_tiles * blocks_per_split
            end = tl.minimum(begin + blocks_per_split, blocks)
            i_tile = full_tiles + (i_work - full_tiles) % tail_tiles
        tl.assume(end > begin)
        low_m, low_n, m, n = clamped_tile(i_tile, M, N, tile)
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tile.ACC)
        for i_k in range(begin, end):
            b_a, b_b = load_boxes(d_a, d_b, m, n, i_k * tile.BLOCK_K, tile)
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=tile.PRECISION, out_dtype=tile.ACC)
        if i_work < full_tiles:
            store_tile(b_acc, p_bias, p_scale, p_c, p_z, m, n, M, N, epilogue, tile.PIECES, low_m, low_n)
        else:
            p_share = p_partial + (i_work - full_tiles).to(tl.int64) * (BLOCK_M * BLOCK_N)
            o_m = tl.arange(0, BLOCK_M)
            finish(b_acc, None, None, p_share, None, o_m, o_m < BLOCK_M, 0, BLOCK_N, 0, 1, None, tile.PIECES)


@triton.jit
def gemm_tail_sum_kernel(
    p_partial, p_bias, p_scale, p_c, p_z, sizes, full_tiles,
    tile: tl.constexpr, epilogue: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the shares of ROWS rows of one tail tile in their order, then apply the epilogue."""
    wait(EARLY)
    M, N = sizes.M, as_multiple(sizes.N, tile.UNIT_N)
    PARTS: tl.constexpr = tile.BLOCK_M // ROWS
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    SIZE: tl.constexpr = tile.BLOCK_M * BLOCK_N
    i_tile = tl.program_id(0) // PARTS
    row = tl.program_id(0) % PARTS * ROWS
    low_m, low_n, m, n = clamped_tile(full_tiles + i_tile, M, N, tile)
    o_mn = (row + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    p_share = p_partial + i_tile.to(tl.int64) * SIZE + o_mn
    b_acc = tl.zeros((ROWS, BLOCK_N), dtype=tile.ACC)
    for _ in tl.range(0, sizes.SPLIT, loop_unroll_factor=4):
        b_acc += tl.load(p_share)  # [ROWS, BLOCK_N]
        p_share += sizes.s_split
    store_tile(b_acc, p_bias, p_scale, p_c, p_z, m + row, n, M, N, epilogue, 1, low_m, low_n)


class Tail(Product):
    """A product in two launches; the first writes c, and the shares of its last tiles."""

    def multiply_shares(self, a: torch.Tensor, b: torch.Tensor, partial: torch.Tensor, *written: Any) -> None:
        """Write the tiles of all full rounds, and the shares of the others."""
        self.product.run(a, b, *written, partial)


def prepare(problem: Problem, tile: launch.Tile, split: int) -> Tail:
    """Prepare the product of boxes with the last tiles in `split` shares of K."""
    tiles, processors = launches.tiles_of(*problem.sizes[:2], tile), problem.processors
    tail_tiles = tiles % processors
    full_tiles = tiles - tail_tiles
    share = tail_tiles * tile["BLOCK_M"] * tile["BLOCK_N"]  # values
    programs = min(processors, full_tiles + tail_tiles * split)
    sizes = Sizes(*problem.sizes, share, split, programs)
    constants = boxes(problem, tile)
    descriptors = constants.pop("boxes")
    meta = options(problem, tile, problem.epilogue, **constants)
    product = launch.Prepared(gemm_tail_kernel, (programs,), (sizes, full_tiles, tail_tiles), meta, descriptors)
    sum_tile = launch.tile("gemm_sum", problem.dtype, target_=problem.target, S=1, total=share)
    rows = max(1, min(tile["BLOCK_M"], sum_tile["BLOCK"] // tile["BLOCK_N"]))
    grid = (tail_tiles * (tile["BLOCK_M"] // rows),)
    sum_meta = {**meta, "ROWS": rows, **sum_tile.launch_options}
    total = launch.Prepared(gemm_tail_sum_kernel, grid, (sizes, full_tiles), sum_meta)
    return Tail("tail", product, (split, share), total)
