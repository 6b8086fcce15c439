"""Matrix products with split-K for the last, incomplete round of tiles only (compare stream-K, arXiv 2301.03598).

    C [M, N] = act(A B + bias), by boxes

160 tiles are two rounds on 132 multiprocessors, and the second has 28 tiles. Split into 4 shares of K these become 112
work items for 132 programs, and the second round takes a quarter of the time. A second launch adds the partial products
in the order of the shares, so sums do not depend on scheduling. All tiles of a share read the same blocks of K at the
same time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.division import as_multiple
from minidl.kernels.gemm import launches
from minidl.kernels.gemm.tiled import clamped_tile, epilogue, finish
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait


@triton.jit
def gemm_tail_kernel(
    d_a, d_b, p_bias, p_scale, p_c, p_z, p_partial, M, N, K, full_tiles, SPLIT, PROGRAMS,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    UNIT_N: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Write the first `full_tiles` tiles of C, and for the others partial [SPLIT, tail_tiles, BLOCK_M, BLOCK_N]."""
    wait(EARLY)
    N = as_multiple(N, UNIT_N)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(K, BLOCK_K)
    blocks_per_split = tl.cdiv(blocks, SPLIT)
    tail_tiles = tiles - full_tiles
    for i_work in tl.range(tl.program_id(0), full_tiles + tail_tiles * SPLIT, PROGRAMS, flatten=FLATTEN):
        i_tile = i_work
        begin = 0
        end = blocks
        if i_work >= full_tiles:
            begin = (i_work - full_tiles) // tail_tiles * blocks_per_split
            end = tl.minimum(begin + blocks_per_split, blocks)
            i_tile = full_tiles + (i_work - full_tiles) % tail_tiles
        tl.assume(end > begin)
        low_m, low_n, m, n = clamped_tile(
            i_tile, M, N, A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N, GROUP_M, UNIT_N
        )  # fmt: skip
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for i_k in range(begin, end):
            k = i_k * BLOCK_K
            if A_TRANSPOSED:
                b_a = d_a.load([k, m]).T  # [BLOCK_M, BLOCK_K]
            else:
                b_a = d_a.load([m, k])
            if B_TRANSPOSED:
                b_b = d_b.load([n, k]).T  # [BLOCK_K, BLOCK_N]
            else:
                b_b = d_b.load([k, n])
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, out_dtype=ACC)
        if i_work < full_tiles:
            epilogue(
                b_acc, p_bias, p_scale, p_c, p_z, m, n, M, N,
                HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES, low_m, low_n,
            )  # fmt: skip
        else:
            epilogue(
                b_acc, None, None, p_partial + (i_work - full_tiles).to(tl.int64) * (BLOCK_M * BLOCK_N), None,
                0, 0, BLOCK_M, BLOCK_N, False, False, 0, 0.0, False, PIECES,
            )  # fmt: skip


@triton.jit
def gemm_tail_sum_kernel(
    p_partial, p_bias, p_scale, p_c, p_z, M, N, full_tiles, tail_tiles, SPLIT,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    UNIT_N: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the shares of ROWS rows of one tail tile in their order, then apply the epilogue."""
    wait(EARLY)
    N = as_multiple(N, UNIT_N)
    PARTS: tl.constexpr = BLOCK_M // ROWS
    i_tile = tl.program_id(0) // PARTS
    row = tl.program_id(0) % PARTS * ROWS
    low_m, low_n, m, n = clamped_tile(
        full_tiles + i_tile, M, N, A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N, GROUP_M, UNIT_N
    )  # fmt: skip
    o_mn = (row + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    p_share = p_partial + i_tile.to(tl.int64) * (BLOCK_M * BLOCK_N) + o_mn
    b_acc = tl.zeros((ROWS, BLOCK_N), dtype=ACC)
    for _ in tl.range(0, SPLIT, loop_unroll_factor=4):
        b_acc += tl.load(p_share)  # [ROWS, BLOCK_N]
        p_share += tl.full((), BLOCK_M * BLOCK_N, tl.int64) * tail_tiles
    finish(
        b_acc, p_bias, p_scale, p_c, p_z, m + row, n, M, N,
        HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, low_m, low_n,
    )  # fmt: skip


class Tail(NamedTuple):
    """The launches of a product, and the shape of the partial products of its last tiles."""

    product: launch.Prepared
    partial: tuple[int, ...]
    sum: launch.Prepared

    def run(
        self, a: Any, b: Any, bias: torch.Tensor | None, scale: torch.Tensor | None, c: torch.Tensor,
        z: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write c, and z if it is saved."""
        partial = torch.empty(self.partial, dtype=launch.acc_torch(c.dtype), device=c.device)
        self.product.run(a, b, bias, scale, c, z, partial)
        self.sum.run(partial, bias, scale, c, z)


def prepare(
    M: int, N: int, K: int, transposed: tuple[bool, bool], tile: launch.Tile, split: int, dtype: torch.dtype,
    precision: str, flags: dict[str, Any], processors: int,
) -> Tail:  # fmt: skip
    """Prepare the product of boxes of a [M, K] and b [K, N], with the last tiles in `split` shares of K.

    flags  of the epilogue, as for `launches.prepare`
    """
    tiles = launches.tiles_of(M, N, tile)
    tail_tiles = tiles % processors
    full_tiles, split = tiles - tail_tiles, launches.non_empty(launch.cdiv(K, tile["BLOCK_K"]), split)
    flags = {"HAS_SCALE": False, **flags, "UNIT_N": launches.unit(N), "ACC": launch.acc(dtype)}
    flags |= dependent_launch.options()
    layout = {"A_TRANSPOSED": transposed[0], "B_TRANSPOSED": transposed[1]}
    programs = min(processors, full_tiles + tail_tiles * split)
    product = launch.Prepared(
        gemm_tail_kernel,
        (programs,),
        (M, N, K, full_tiles, split, programs),
        {**layout, "PRECISION": precision, **flags, **tile.options},
    )
    partial = split, tail_tiles, tile["BLOCK_M"], tile["BLOCK_N"]
    sum_tile = launch.tile("gemm_sum", dtype, S=1, total=tail_tiles * tile["BLOCK_M"] * tile["BLOCK_N"])
    rows = max(1, min(tile["BLOCK_M"], sum_tile["BLOCK"] // tile["BLOCK_N"]))
    sizes = {name: tile[name] for name in ("BLOCK_M", "BLOCK_N", "GROUP_M")}
    total = launch.Prepared(
        gemm_tail_sum_kernel, (tail_tiles * (tile["BLOCK_M"] // rows),), (M, N, full_tiles, tail_tiles, split),
        {**layout, **flags, **sizes, "ROWS": rows, "num_warps": sum_tile.num_warps, "num_stages": sum_tile.num_stages},
    )  # fmt: skip
    return Tail(product, partial, total)
