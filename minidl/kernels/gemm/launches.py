"""Prepare the launches of a tiled product from shapes and strides alone, so that they can be cached without tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from minidl.kernels import activation
from minidl.kernels.gemm.tiled import gemm_pointer_kernel, gemm_sum_kernel, gemm_tma_kernel
from minidl.runtime import dependent_launch, launch
from minidl.runtime.descriptors import Box

# Stages that let two programs with a 128x128 tile of 16 bits share a multiprocessor: 96 KB each, and 16 KB for stores.
PAIR_STAGES = 3


class Product(NamedTuple):
    """The launch of a product of two contiguous matrices, and the sum of its shares if K has more than one.

    partial  shape of the shares, [shares, M, N]
    """

    product: launch.Prepared
    partial: tuple[int, int, int]
    sum: launch.Prepared | None

    def run(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None, c: torch.Tensor,
        z: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Write c, and z if it is saved; the kernel views a and b with the sizes passed to `prepare`."""
        # The box kernel also takes p_wild, the flag of the parts form.
        flag = (None,) if self.product.kernel is gemm_tma_kernel else ()
        if self.sum is None:
            self.product.run(a, b, bias, scale, c, z, *flag)
            return
        partial = torch.empty(self.partial, dtype=launch.acc_torch(c.dtype), device=c.device)
        self.product.run(a, b, None, None, partial, None, *flag)
        self.sum.run(partial, bias, scale, c, z)


def prepare(
    M: int, N: int, K: int, transposed: tuple[bool, bool], boxed: bool, tile: launch.Tile, split: int,
    dtype: torch.dtype, precision: str, flags: dict[str, Any], target: str, processors: int, in_order: bool = False,
) -> Product:  # fmt: skip
    """Prepare the product of a [M, K] and b [K, N]; each is contiguous, or its transpose is if `transposed` is set.

    flags     of the epilogue: HAS_BIAS, HAS_SCALE if a scale is possible, ACT, SLOPE and SAVE_Z
    in_order  as in `summed`
    """
    flags = {**flags, "SPLIT": split, "ACC": launch.acc(dtype)}
    inner = flags if split == 1 else bare(flags)
    (a_rows, a_row), (b_rows, b_row) = ((K, M) if transposed[0] else (M, K)), ((N, K) if transposed[1] else (K, N))
    tiles = tiles_of(M, N, tile)
    if boxed:
        block_a, block_b = (tile["BLOCK_M"], tile["BLOCK_K"]), (tile["BLOCK_K"], tile["BLOCK_N"])
        boxes = (
            Box.of_rows(a_rows, a_row, block_a[::-1] if transposed[0] else block_a),
            Box.of_rows(b_rows, b_row, block_b[::-1] if transposed[1] else block_b),
        )
        programs = min(tiles * split, processors * at_a_time(dtype, tile))
        product = by_boxes(M, N, K, transposed, programs, tile, precision, inner, boxes, target)
    else:
        a, b = (1, a_row) if transposed[0] else (a_row, 1), (1, b_row) if transposed[1] else (b_row, 1)
        strides = 0, *a, 0, *b
        product = by_pointers(
            M, N, K, strides, M * N, tiles, tile, precision, dtype.itemsize, inner, target
        )  # fmt: skip
    total = summed(dtype, N, M * N, flags, target, in_order) if split > 1 else None
    return Product(product, (split, M, N), total)


def by_boxes(
    M: int, N: int, K: int, transposed: tuple[bool, bool], programs: int, tile: launch.Tile, precision: str,
    flags: dict[str, Any], boxes: tuple[Box | None, ...] = (), target: str | None = None,
) -> launch.Prepared:  # fmt: skip
    """Prepare a launch on a, b, bias, scale, c, z and p_wild; without `boxes`, a and b are descriptors."""
    meta = {
        "A_TRANSPOSED": transposed[0], "B_TRANSPOSED": transposed[1], "PRECISION": precision, "UNIT_N": unit(N),
        "HAS_SCALE": False, **dependent_launch.options(target=target), **flags, **tile.options,
    }  # fmt: skip
    scalars = M, N, K, M * N, programs, meta.pop("SPLIT")
    return launch.Prepared(gemm_tma_kernel, (programs,), scalars, meta, boxes)


def by_pointers(
    M: int, N: int, K: int, strides: tuple[int, ...], s_split: int, tiles: int, tile: launch.Tile, precision: str,
    itemsize: int, flags: dict[str, Any], target: str | None = None,
) -> launch.Prepared:  # fmt: skip
    """Prepare a launch on a, b, bias, scale, c and z. strides: batch, M, K of a, and batch, K, N of b."""
    _, *a_strides, _, s_bk, s_bn = strides
    units = tuple(map(unit, (M, N, K, *a_strides, s_bk, s_bn)))
    narrow = itemsize * min(at_once(M, K, *a_strides), at_once(N, K, s_bn, s_bk)) < 4
    # Prefetched blocks must fit the registers. On sm_80 some do not (not measured).
    fits = tile["BLOCK_M"] >= 64 and (tile.num_warps == 8 or tile["BLOCK_N"] < 64)
    meta = {
        "AHEAD": narrow and fits and launch.boxes(target), "UNITS": units, "PRECISION": precision, "HAS_SCALE": False,
        **dependent_launch.options(tiles * flags["SPLIT"], target), **flags, **tile.options,
    }  # fmt: skip
    split = meta.pop("SPLIT")
    return launch.Prepared(gemm_pointer_kernel, (tiles, split), (M, N, K, *strides, s_split, split), meta)


def summed(
    dtype: torch.dtype, N: int, total: int, flags: dict[str, Any], target: str | None = None, in_order: bool = False
) -> launch.Prepared:  # fmt: skip
    """Prepare the sum of partial products [shares, total] in a fixed order and the epilogue on bias, scale [N], c, z.
    With `in_order` the order is that of the shares for any total."""
    tile = launch.tile("gemm_sum", dtype, target_=target, total=total, S=1 if in_order else flags["SPLIT"])
    meta = {"HAS_SCALE": False, **flags, **dependent_launch.options(target=target), **tile.options}
    return launch.Prepared(gemm_sum_kernel, (launch.cdiv(total, tile["BLOCK"]),), (N, total), meta)


def bare(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of a share, without the epilogue, which follows the sum."""
    shared = {name: value for name, value in flags.items() if name != "HAS_SCALE"}
    return {**shared, "HAS_BIAS": False, "ACT": activation.NONE, "SAVE_Z": False}


def unit(extent: int) -> int:
    """Return the largest of 1, 2, 4 and 8 that divides `extent`: the values of one vector access (8 are 16 bytes)."""
    return math.gcd(extent, 8)


def at_once(M: int, K: int, s_m: int, s_k: int) -> int:
    """Return how many values of an operand [M, K] one load can take along its contiguous axis."""
    if s_k == 1:
        return unit(K) if M == 1 else math.gcd(unit(K), s_m)
    if s_m == 1:
        return unit(M) if K == 1 else math.gcd(unit(M), s_k)
    return 1


def at_a_time(dtype: torch.dtype, tile: launch.Tile) -> int:
    """Return the programs per multiprocessor: two of four warps if their blocks fit its shared memory, else one.

    One reads while the other writes: 802816x256x64 with an addition in float16 takes 362 us, 479 with one program. In
    float8 one adds to float32 while the other multiplies: 4096 x 4096 x 4096 takes 127 us, 157 with one (H100).
    """
    pair = dtype.itemsize == 1 or (dtype.itemsize == 2 and tile["BLOCK_M"] == 128 and tile.num_stages <= PAIR_STAGES)
    return 2 if pair and tile.num_warps == 4 else 1


def tiles_of(M: int, N: int, tile: launch.Tile) -> int:
    return launch.cdiv(M, tile["BLOCK_M"]) * launch.cdiv(N, tile["BLOCK_N"])


def shares_of(
    tiles: int, K: int, tile: launch.Tile, processors: int, split: int | None = None, least: int = 8
) -> int:  # fmt: skip
    """Return the number of shares of K, none empty: `split`, or enough to fill the device with at least `least` blocks
    each (with fewer, adding the shares costs more)."""
    blocks = launch.cdiv(K, tile["BLOCK_K"])
    return non_empty(blocks, split or max(1, min(processors // max(tiles, 1), blocks // least)))


def non_empty(blocks: int, split: int) -> int:
    """Return the number of shares, at most `split`, that have equally many blocks with none empty."""
    return launch.cdiv(blocks, launch.cdiv(blocks, split))
