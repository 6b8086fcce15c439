"""Choose the tile of a product and the number of shares of K that an estimate finds fastest.

    time = LAUNCH + waves * (PROGRAM + steps * step) + sum of shares, and at least the time to read and write once

A step is one block of K: the time of its multiplications and a wait, or of its reads through L2. The constants were
fitted to 887 times of 95 products of 16 bits on an H100 (`benchmarks/notes.md`). On these shapes half of the times are
within 10 % of the estimate for boxes, within 16 % for pointers, and the choice is 6 % slower than the best on average.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minidl.kernels.gemm import launches
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

MOST = 8  # shares of a tile of the last round
TAIL = 1.06  # margin: split the last round only if the estimate is clearly lower
# 16-bit products with K this short have one block and use pointers: several programs share a multiprocessor, and some
# write while others read.
SHORT, LEAST_WRITTEN = 64, 2**20
WARPS = 16  # warps of a multiprocessor that wait at the same time
# Time of a step of tf32x3 in wgmma that reads less than 16 bytes at once, relative to its estimate.
UNALIGNED = 3.5
# float8 uses the larger tile unless rounds stay half empty; each tile counts as this many extra values.
FLOAT8_TILE = 2048


class Choice(NamedTuple):
    """A tile and its shares of K, for all tiles or only for those of the last, incomplete round (`tail`)."""

    tile: launch.Tile
    shares: int
    tail: bool = False


class Shape(NamedTuple):
    """A product [M, K] [K, N], `batch` times; units: values per vector access of a and b (loads) and c (stores)."""

    M: int
    N: int
    K: int
    batch: int = 1
    units: tuple[int, int, int] = (8, 8, 8)


def in_one_block(dtype: torch.dtype, M: int, N: int, K: int) -> bool:
    """Whether a product that boxes can read is faster by pointers, in one block of K."""
    short = K < SHORT or (K == SHORT and N <= SHORT)
    return dtype.itemsize == 2 and short and M >= 256 and N >= 64 and M * N >= LEAST_WRITTEN


@launch.cached
def choose(
    family: str, dtype: torch.dtype, precision: str, shape: Shape, split: int | None, target: str, processors: int,
    tail: bool | None = None,
) -> Choice:  # fmt: skip
    """Return the fastest choice; no share is empty. `split` fixes the number of shares. `tail` restricts them to the
    last round (True) or applies them to all tiles (False: a row's sums do not depend on its position)."""
    M, N, K, batch, _ = shape
    tiles = launch.tiles_for(family, dtype, floor=16, precision=precision, target_=target, M=M, N=N, K=K)
    estimated = len(tiles) > 1 or tail or (family == "gemm" and precision == "tf32x3" and target == "sm_90")
    if not estimated or dtype.itemsize == 1:
        tile = min(tiles, key=lambda tile: _rounds(dtype, shape, tile, processors))
        count = launches.tiles_of(M, N, tile) * batch
        return Choice(tile, launches.shares_of(count, K, tile, processors, split))
    _, chosen = _best(family, tiles, shape, split, processors, target, tail, dtype, precision)
    return chosen if chosen.tail else chosen._replace(tile=_trimmed(shape, chosen.tile, chosen.shares, processors))


def _rounds(dtype: torch.dtype, shape: Shape, tile: launch.Tile, processors: int) -> int:
    """Return the time of a float8 tile, measured in computed values."""
    count = launches.tiles_of(shape.M, shape.N, tile) * shape.batch
    rounds = launch.cdiv(count, processors * launches.at_a_time(dtype, tile))
    return rounds * (tile["BLOCK_M"] * tile["BLOCK_N"] + FLOAT8_TILE)


@launch.cached
def copies_pay(dtype: torch.dtype, precision: str, shape: Shape, copied: int, target: str, processors: int) -> bool:
    """Whether copying `copied` values and reading boxes is faster than reading by pointers."""
    M, N, K, *_ = shape
    times = []
    for family in ("gemm", "gemm_pointer"):
        tiles = launch.tiles_for(family, dtype, floor=16, precision=precision, target_=target, M=M, N=N, K=K)
        times.append(_best(family, tiles, shape, None, processors, target, None, dtype, precision)[0])
    costs = selection.of(target).gemm
    return times[0] + costs.copy + 2 * dtype.itemsize * copied / costs.copied < times[1]


def _best(
    family: str, tiles: tuple[launch.Tile, ...], shape: Shape, split: int | None, processors: int,
    target: str, tail: bool | None = None, dtype: torch.dtype = torch.float16, precision: str = "ieee",
) -> tuple[float, Choice]:  # fmt: skip
    choices = [one for tile in tiles for one in _choices(family, shape, tile, processors, split, tail)]
    times = [
        microseconds(family, shape, one.tile, one.shares, processors, target, one.tail, dtype, precision)
        for one in choices
    ]
    index = min(range(len(choices)), key=times.__getitem__)
    return times[index], choices[index]


def microseconds(
    family: str, shape: Shape, tile: launch.Tile, split: int, processors: int, target: str = "sm_90",
    tail: bool = False, dtype: torch.dtype = torch.float16, precision: str = "ieee",
) -> float:  # fmt: skip
    """Return the estimated time in microseconds."""
    costs, (M, N, K, batch, units) = getattr(selection.of(target).gemm, family), shape
    operations = costs.operations if dtype.itemsize == 2 else selection.rate(target, dtype, precision) / processors
    rows, columns, depth = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    count, blocks = launches.tiles_of(M, N, tile) * batch, launch.cdiv(K, depth)
    # Rounds: (busy programs, number of rounds, blocks of K).
    steps = launch.cdiv(blocks, split)
    at_a_time = processors * (launches.at_a_time(torch.float16, tile) if family == "gemm" else 1)
    full, rest = divmod(count * split, at_a_time)
    rounds = [(at_a_time, full, steps), (rest, int(rest > 0), steps)]
    if tail:
        full_rounds, rest = divmod(count, processors)
        full, last = divmod(rest * split, processors)
        rounds = [(processors, full_rounds, blocks), (processors, full, steps), (last, int(last > 0), steps)]
        count = rest  # tiles whose shares are added
    products = 2 * max(rows, 64) * max(columns, 32) * depth / operations
    if family == "gemm_pointer":
        step = max(products, (rows / units[0] + columns / units[1]) * depth / 32 / costs.loads)
        step *= UNALIGNED if precision == "tf32x3" and rows >= 64 and min(units[:2]) < 4 else 1.0
        written = rows * columns / (4 if split > 1 else units[2]) / costs.written
        waiting = launch.cdiv(launch.cdiv(count * split, processors), max(1, WARPS // tile.num_warps))
        time = (full + (rest > 0)) * (steps * step + written) + waiting * (costs.program + steps * costs.wait)
    else:
        read = (rows + columns) * depth * dtype.itemsize
        written = rows * columns / tile.num_warps * 4 * (1 + (split > 1)) / costs.written
        written *= 1 if split > 1 else 8 / units[2]
        time = 0.0
        for busy, number, steps in rounds:
            # With two programs on a multiprocessor, one waits or writes while the other computes.
            concurrent = max(1.0, busy / processors)
            single = max(concurrent * products, products + costs.wait, concurrent * read / costs.l2)
            step = max(single, read * busy / costs.l2_all)
            time += number * ((costs.program + written) / concurrent + steps * step)
    moved = dtype.itemsize * batch * (M * K + K * N + M * N) / costs.memory + costs.program
    # Computation and memory traffic overlap, but not completely.
    time = costs.launch + (time**4 + moved**4) ** 0.25
    summed = count * rows * columns if tail else batch * M * N
    return (TAIL if tail else 1.0) * time + (costs.sum + 4 * (split + 1) * summed / costs.shares if split > 1 else 0.0)


def _choices(
    family: str, shape: Shape, tile: launch.Tile, processors: int, split: int | None, tail: bool | None
) -> list[Choice]:
    """Return candidates: one share, as many as fill the device with >= 2 blocks of K each, half; and tail shares."""
    blocks = launch.cdiv(shape.K, tile["BLOCK_K"])
    count = launches.tiles_of(shape.M, shape.N, tile) * shape.batch
    choices = []
    if not tail:
        most = min(processors // max(count, 1), blocks // 2)
        candidates = {1, most // 2, most} if split is None else {split}
        numbers = sorted({launches.non_empty(blocks, max(number, 1)) for number in candidates})
        choices = [Choice(tile, number) for number in numbers]
    left = count % processors
    single = family == "gemm" and launches.at_a_time(torch.float16, tile) == 1
    if tail or (tail is None and split is None and single and shape.batch == 1 and left < count):
        # These numbers of shares fill one, two or three rounds.
        candidates = {rounds * processors // max(left, 1) for rounds in (1, 2, 3)} if split is None else {split}
        numbers = sorted({launches.non_empty(blocks, max(1, min(number, MOST, blocks // 2))) for number in candidates})
        choices += [Choice(tile, number, True) for number in numbers if number > 1 or tail]
    return choices


def _trimmed(shape: Shape, tile: launch.Tile, split: int, processors: int) -> launch.Tile:
    """Return the tile with at most as many stages as a program has blocks; FLATTEN is off for one tile per program."""
    sizes = dict(tile.sizes)
    blocks = launch.cdiv(launch.cdiv(shape.K, tile["BLOCK_K"]), split)
    if "FLATTEN" in sizes:
        if launches.tiles_of(shape.M, shape.N, tile) * shape.batch * split > processors:
            return tile
        sizes["FLATTEN"] = 0
        blocks = max(blocks, 2)
    return launch.Tile(sizes, tile.num_warps, min(tile.num_stages, blocks))
