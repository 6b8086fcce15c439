"""Counts that all launches of products share, and the sum of shares."""

from __future__ import annotations

import torch

from minidl.kernels.epilogue import Epilogue
from minidl.kernels.gemm.tiled import SumTile, gemm_sum_kernel
from minidl.runtime import dependent_launch, launch

# Stages that let two programs with a 128x128 tile of 16 bits share a multiprocessor: 96 KB each, and 16 KB for stores.
PAIR_STAGES = 3


def sum_of_shares(
    dtype: torch.dtype, N: int, total: int, split: int, epilogue: Epilogue, target: str, in_order: bool = False
) -> launch.Prepared:
    """Prepare the sum of partial products [split, total] in a fixed order and the epilogue on bias, scale [N], c, z.
    With `in_order` the order is that of the shares for any total."""
    tile = launch.tile("gemm_sum", dtype, target_=target, total=total, S=1 if in_order else split)
    meta = {
        "tile": tile.record(SumTile, SPLIT=split, ACC=launch.acc(dtype)), "epilogue": epilogue,
        **dependent_launch.options(target=target), **tile.launch_options,
    }  # fmt: skip
    return launch.Prepared(gemm_sum_kernel, (launch.cdiv(total, tile["BLOCK"]),), (N, total), meta)


def at_a_time(dtype: torch.dtype, tile: launch.Tile) -> int:
    """Return the programs per multiprocessor: two of four warps if their blocks fit its shared memory, else one.

    One reads while the other writes. In float8 one adds to float32 while the other multiplies.
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
