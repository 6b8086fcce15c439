"""The tile of a product and the shares of its K: those of least time, by an estimate, where the table leaves a choice.

    time = LAUNCH + waves * (PROGRAM + steps * step) + the sum of shares, and no less than reading and writing once

A step is one block of K: it takes its multiplications and a wait, or what it reads through L2. Measured on an H100 with
16-bit operands (`benchmarks/notes.md`), 887 times of 95 products with all tiles that may suit them; half of the times
are within 10 % of the estimate for boxes, within 16 % for pointers, and what is chosen takes 6 % longer than the best
in the mean, on these same shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minidl.kernels.gemm import launches
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

MOST = 8  # shares of a tile of the last round
TAIL = 1.06  # a margin: a last round in shares is taken where it is clearly faster
# Products of 16 bits with so short a K have one block, and are done by pointers: programs that are many to a processor
# write while others read. 787136x144x24 takes 123 us, 201 in boxes, 262x16264x56 6.5 and 10, 434 images of 64->64 at
# 56x56 121 and 130; but 200704x256x64 69, and 57 in boxes (H100).
SHORT, LEAST_WRITTEN = 64, 2**20
WARPS = 16  # of programs that wait at the same time
# Of float8 the larger tile is taken unless rounds of programs are left half empty, a tile costing as many values more:
# 64x128 of 512 x 4096 x 4096 in one round 20 us, 128x128 in half a round 28; 4096 x 4096 x 4096 147 and 127 (H100).
FLOAT8_TILE = 2048


class Choice(NamedTuple):
    """A tile and the shares of K: of all tiles, or only of those that fill no round (`tail`)."""

    tile: launch.Tile
    shares: int
    tail: bool = False


class Shape(NamedTuple):
    """A product [M, K] [K, N], `batch` times; units: values that are read at once of a and of b, and written of c."""

    M: int
    N: int
    K: int
    batch: int = 1
    units: tuple[int, int, int] = (8, 8, 8)


def in_one_block(dtype: torch.dtype, M: int, N: int, K: int) -> bool:
    """Whether a product in boxes is better done by pointers, in one block of K."""
    short = K < SHORT or (K == SHORT and N <= SHORT)
    return dtype.itemsize == 2 and short and M >= 256 and N >= 64 and M * N >= LEAST_WRITTEN


@launch.cached
def choose(
    family: str, dtype: torch.dtype, precision: str, shape: Shape, split: int | None, target: str, processors: int,
    tail: bool | None = None,
) -> Choice:  # fmt: skip
    """The choice of least time; no share is empty. `split` asks for a number of shares, `tail` for those of the last
    round (True) or for the same shares of all tiles (False: the sums of a row do not depend on its place)."""
    M, N, K, batch, _ = shape
    tiles = launch.tiles_for(family, dtype, floor=16, precision=precision, target_=target, M=M, N=N, K=K)
    if (len(tiles) == 1 and not tail) or dtype.itemsize == 1:
        tile = min(tiles, key=lambda tile: _rounds(dtype, shape, tile, processors))
        count = launches.tiles_of(M, N, tile) * batch
        return Choice(tile, launches.shares_of(count, K, tile, processors, split))
    _, chosen = _best(family, tiles, shape, split, processors, target, tail)
    return chosen if chosen.tail else chosen._replace(tile=_settled(shape, chosen.tile, chosen.shares, processors))


def _rounds(dtype: torch.dtype, shape: Shape, tile: launch.Tile, processors: int) -> int:
    """The time of a tile of float8, in the values that one computes."""
    count = launches.tiles_of(shape.M, shape.N, tile) * shape.batch
    rounds = launch.cdiv(count, processors * launches.at_a_time(dtype, tile))
    return rounds * (tile["BLOCK_M"] * tile["BLOCK_N"] + FLOAT8_TILE)


@launch.cached
def copies_pay(dtype: torch.dtype, shape: Shape, copied: int, target: str, processors: int) -> bool:
    """Whether a product is sooner done in boxes, of which `copied` values must first be copied, than by pointers."""
    M, N, K, *_ = shape
    pointers, boxes = (
        launch.tiles_for(family, dtype, floor=16, target_=target, M=M, N=N, K=K) for family in ("gemm_pointer", "gemm")
    )
    costs = selection.of(target).gemm
    in_boxes = _best("gemm", boxes, shape, None, processors, target)[0] + costs.copy + 4 * copied / costs.copied
    return in_boxes < _best("gemm_pointer", pointers, shape, None, processors, target)[0]


def _best(
    family: str, tiles: tuple[launch.Tile, ...], shape: Shape, split: int | None, processors: int,
    target: str, tail: bool | None = None,
) -> tuple[float, Choice]:  # fmt: skip
    every = [one for tile in tiles for one in _choices(family, shape, tile, processors, split, tail)]
    times = [microseconds(family, shape, one.tile, one.shares, processors, target, one.tail) for one in every]
    place = min(range(len(every)), key=times.__getitem__)
    return times[place], every[place]


def microseconds(
    family: str, shape: Shape, tile: launch.Tile, split: int, processors: int, target: str = "sm_90",
    tail: bool = False,
) -> float:  # fmt: skip
    """The estimate for 16-bit operands."""
    costs, (M, N, K, batch, units) = getattr(selection.of(target).gemm, family), shape
    rows, columns, depth = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    count, blocks = launches.tiles_of(M, N, tile) * batch, launch.cdiv(K, depth)
    # Rounds of programs: how many are busy in one, how many rounds, blocks of K, and bytes of a number that is written.
    steps = launch.cdiv(blocks, split)
    at_a_time = processors * (launches.at_a_time(torch.float16, tile) if family == "gemm" else 1)
    full, rest = divmod(count * split, at_a_time)
    rounds = [(at_a_time, full, steps), (rest, int(rest > 0), steps)]
    if tail:
        whole, rest = divmod(count, processors)
        full, last = divmod(rest * split, processors)
        rounds = [(processors, whole, blocks), (processors, full, steps), (last, int(last > 0), steps)]
        count = rest  # of which shares are added
    products = 2 * max(rows, 64) * max(columns, 32) * depth / costs.operations
    if family == "gemm_pointer":
        step = max(products, (rows / units[0] + columns / units[1]) * depth / 32 / costs.loads)
        written = rows * columns / (4 if split > 1 else units[2]) / costs.written
        waiting = launch.cdiv(launch.cdiv(count * split, processors), max(1, WARPS // tile.num_warps))
        time = (full + (rest > 0)) * (steps * step + written) + waiting * (costs.program + steps * costs.wait)
    else:
        read = (rows + columns) * depth * 2
        written = rows * columns / tile.num_warps * 4 * (1 + (split > 1)) / costs.written
        written *= 1 if split > 1 else 8 / units[2]
        time = 0.0
        for busy, number, steps in rounds:
            # Of two programs of a processor one waits or writes while the other works.
            together = max(1.0, busy / processors)
            alone = max(together * products, products + costs.wait, together * read / costs.l2)
            step = max(alone, read * busy / costs.l2_all)
            time += number * ((costs.program + written) / together + steps * step)
    moved = 2 * batch * (M * K + K * N + M * N) / costs.memory + costs.program
    # The two overlap, but not to the end.
    time = costs.launch + (time**4 + moved**4) ** 0.25
    summed = count * rows * columns if tail else batch * M * N
    return (TAIL if tail else 1.0) * time + (costs.sum + 4 * (split + 1) * summed / costs.shares if split > 1 else 0.0)


def _choices(
    family: str, shape: Shape, tile: launch.Tile, processors: int, split: int | None, tail: bool | None
) -> list[Choice]:
    """One share, as many as fill the device with 2 blocks of K or more each, and half; and shares of the last round."""
    blocks = launch.cdiv(shape.K, tile["BLOCK_K"])
    count = launches.tiles_of(shape.M, shape.N, tile) * shape.batch
    found = []
    if not tail:
        most = min(processors // max(count, 1), blocks // 2)
        wanted = {1, most // 2, most} if split is None else {split}
        numbers = sorted({launches.filled(blocks, max(one, 1)) for one in wanted})
        found = [Choice(tile, number) for number in numbers]
    left = count % processors
    single = family == "gemm" and launches.at_a_time(torch.float16, tile) == 1
    if tail or (tail is None and split is None and single and shape.batch == 1 and left < count):
        # So many shares are one round, two or three.
        wanted = {rounds * processors // max(left, 1) for rounds in (1, 2, 3)} if split is None else {split}
        numbers = sorted({launches.filled(blocks, max(1, min(one, MOST, blocks // 2))) for one in wanted})
        found += [Choice(tile, number, True) for number in numbers if number > 1 or tail]
    return found


def _settled(shape: Shape, tile: launch.Tile, split: int, processors: int) -> launch.Tile:
    """The tile with no more stages than a program has blocks, and nothing to flatten for one tile per program."""
    sizes = dict(tile.sizes)
    blocks = launch.cdiv(launch.cdiv(shape.K, tile["BLOCK_K"]), split)
    if "FLATTEN" in sizes:
        if launches.tiles_of(shape.M, shape.N, tile) * shape.batch * split > processors:
            return tile
        sizes["FLATTEN"] = 0
        blocks = max(blocks, 2)
    return launch.Tile(sizes, tile.num_warps, min(tile.num_stages, blocks))
