"""Products whose last round of tiles is in shares of K: whole tiles while every program has one, then the shares.

    C [M, N] = act(A B + bias), by boxes

160 tiles are two rounds for 132 multiprocessors, of which the second has 28 tiles. Cut into 4 shares these are 112 for
132 programs, and the second round takes a quarter of the time. The partial products of the shares are added in their
order by a second launch, so no sum depends on which program was first. All tiles of a share read the same blocks of K
at the same time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.gemm import launches
from minidl.kernels.gemm.tiled import epilogue, finish, inside, known
from minidl.runtime import dependent_launch, launch
from minidl.runtime.dependent_launch import wait


@triton.jit
def gemm_tail_kernel(
    d_a, d_b, p_bias, p_scale, p_c, p_z, p_partial, M, N, K, whole, SPLIT, PROGRAMS,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    UNIT_N: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The first `whole` tiles, and of the others partial [SPLIT, tiles, BLOCK_M, BLOCK_N]."""
    wait(EARLY)
    N = known(N, UNIT_N)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(steps, SPLIT)
    left = tiles - whole
    for i_work in tl.range(tl.program_id(0), whole + left * SPLIT, PROGRAMS, flatten=FLATTEN):
        i_tile = i_work
        begin = 0
        end = steps
        if i_work >= whole:
            begin = (i_work - whole) // left * share
            end = tl.minimum(begin + share, steps)
            i_tile = whole + (i_work - whole) % left
        tl.assume(end > begin)
        low_m, low_n, m, n = inside(
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
        if i_work < whole:
            epilogue(
                b_acc, p_bias, p_scale, p_c, p_z, m, n, M, N,
                HAS_BIAS, HAS_SCALE, ACT, SLOPE, SAVE_Z, PIECES, low_m, low_n,
            )  # fmt: skip
        else:
            epilogue(
                b_acc, None, None, p_partial + (i_work - whole).to(tl.int64) * (BLOCK_M * BLOCK_N), None,
                0, 0, BLOCK_M, BLOCK_N, False, False, 0, 0.0, False, PIECES,
            )  # fmt: skip


@triton.jit
def gemm_tail_sum_kernel(
    p_partial, p_bias, p_scale, p_c, p_z, M, N, whole, left, SPLIT,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, SAVE_Z: tl.constexpr,
    UNIT_N: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one of the `left` tiles: its shares in their order, then the epilogue."""
    wait(EARLY)
    N = known(N, UNIT_N)
    PARTS: tl.constexpr = BLOCK_M // ROWS
    i_tile = tl.program_id(0) // PARTS
    row = tl.program_id(0) % PARTS * ROWS
    low_m, low_n, m, n = inside(
        whole + i_tile, M, N, A_TRANSPOSED, B_TRANSPOSED, BLOCK_M, BLOCK_N, GROUP_M, UNIT_N
    )  # fmt: skip
    o_mn = (row + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    p_share = p_partial + i_tile.to(tl.int64) * (BLOCK_M * BLOCK_N) + o_mn
    b_acc = tl.zeros((ROWS, BLOCK_N), dtype=ACC)
    for _ in tl.range(0, SPLIT, loop_unroll_factor=4):
        b_acc += tl.load(p_share)  # [ROWS, BLOCK_N]
        p_share += tl.full((), BLOCK_M * BLOCK_N, tl.int64) * left
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
        """Write c, and z where it is kept."""
        partial = torch.empty(self.partial, dtype=launch.acc_torch(c.dtype), device=c.device)
        self.product.run(a, b, bias, scale, c, z, partial)
        self.sum.run(partial, bias, scale, c, z)


def prepare(
    M: int, N: int, K: int, turned: tuple[bool, bool], tile: launch.Tile, split: int, dtype: torch.dtype,
    precision: str, flags: dict[str, Any], processors: int,
) -> Tail:  # fmt: skip
    """The product of boxes of a [M, K] and b [K, N], its last tiles in `split` shares.

    flags  of the epilogue, as `launches.prepare` takes them
    """
    tiles = launches.tiles_of(M, N, tile)
    left = tiles % processors
    whole, split = tiles - left, launches.filled(launch.cdiv(K, tile["BLOCK_K"]), split)
    flags = {"HAS_SCALE": False, **flags, "UNIT_N": launches.unit(N), "ACC": launch.acc(dtype)}
    flags |= dependent_launch.options()
    turns = {"A_TRANSPOSED": turned[0], "B_TRANSPOSED": turned[1]}
    programs = min(processors, whole + left * split)
    product = launch.Prepared(
        gemm_tail_kernel,
        (programs,),
        (M, N, K, whole, split, programs),
        {**turns, "PRECISION": precision, **flags, **tile.options},
    )
    partial = split, left, tile["BLOCK_M"], tile["BLOCK_N"]
    of_sum = launch.tile("gemm_sum", dtype, S=1, total=left * tile["BLOCK_M"] * tile["BLOCK_N"])
    rows = max(1, min(tile["BLOCK_M"], of_sum["BLOCK"] // tile["BLOCK_N"]))
    sizes = {name: tile[name] for name in ("BLOCK_M", "BLOCK_N", "GROUP_M")}
    total = launch.Prepared(
        gemm_tail_sum_kernel, (left * (tile["BLOCK_M"] // rows),), (M, N, whole, left, split),
        {**turns, **flags, **sizes, "ROWS": rows, "num_warps": of_sum.num_warps, "num_stages": of_sum.num_stages},
    )  # fmt: skip
    return Tail(product, partial, total)
