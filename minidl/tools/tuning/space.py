"""The candidate tiles of a family, and the distance between two tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from minidl.runtime import launch
from minidl.runtime.launch import Tile
from minidl.runtime.tile_tables import FLAGS

CPU = "cpu"  # the target of kernels that are compiled for the CPU
# Families of matrix products: tl.dot needs blocks of 16 or more, and more than 256 fills the registers.
PRODUCTS = {
    "attention_64", "attention_128", "attention_256", "attention_grad_64", "attention_grad_128", "attention_grad_256",
    "gemm", "gemm_parts", "gemm_pointer", "conv", "conv_back", "conv_banded", "conv_banded_grad_weight",
    "conv_batch", "conv_batch_grad_weight", "conv_batch_narrow", "conv_box", "conv_box_grad_weight", "conv_few",
    "conv_fft_product", "conv_flat", "conv_grad_weight", "conv_split_box", "conv_split_grad_weight",
    "conv_unfolded_grad_weight", "recurrent_fused", "recurrent_grad_fused",
}  # fmt: skip
# Families whose blocks have three axes instead of two.
CUBES = {"gemm_thin"}
# Sizes that change more than speed: whether a row fits one block, the length of a vector. Also the block that adds
# shares, with which there would be two million candidates.
FIXED = {
    "softmax": {"BLOCK_N"}, "softmax_grad": {"BLOCK_N"}, "cross_entropy": {"BLOCK_N"},
    "update": {"BLOCK_V"}, "update_measure": {"BLOCK_V"}, "conv_depthwise_grad_weight": {"OUTPUTS"},
}  # fmt: skip
LARGEST_PRODUCT = 256
ACCUMULATORS = 128 * 256  # of a product's block
LARGEST_BLOCK = 2**15  # elements of any other block on a GPU
LARGEST_INTERPRETED = 2**20  # Triton refuses larger ones
# The largest distance of a size from the current one, in powers of two.
REACH, REACH_ON_CPU = 3, 4
WARPS, MATRIX_WARPS, STAGES = (1, 2, 4, 8, 16, 32), (4, 8), (2, 3, 4, 5)


def candidates(family: str, target: str, present: Tile) -> list[Tile]:
    """Return every other tile to try instead of `present`, the nearest first.

    On a GPU, block sizes, warps, the flags of a kernel and, for products (whose loads are pipelined), stages vary. A
    CPU uses only blocks.
    """
    on_cpu = target in ("interpreted", CPU)
    ranges = [tuple(_range(family, name, size, on_cpu)) for name, size in present.sizes.items()]
    warps: Sequence[int] = WARPS
    stages: Sequence[int] = (present.num_stages,)
    if on_cpu:
        warps = (present.num_warps,)
    elif family in PRODUCTS:
        warps, stages = MATRIX_WARPS, STAGES
    elif family in CUBES:
        stages = sorted({1, *STAGES, present.num_stages})
    every = itertools.product(itertools.product(*ranges), warps, stages)
    tiles = [Tile(dict(zip(present.sizes, sizes, strict=True)), w, s) for sizes, w, s in every]
    tiles = [tile for tile in tiles if tile != present and _fits(family, tile, present, on_cpu)]
    return nearest(tiles, present)


def nearest(tiles: list[Tile], to: Tile) -> list[Tile]:
    """Return the tiles sorted by distance; equally distant tiles keep their order."""
    return sorted(tiles, key=lambda tile: distance(tile, to))


def distance(a: Tile, b: Tile) -> float:
    """Return the steps between two tiles: each doubling of a size or of the warps, each stage, each changed flag."""
    doubled = [(a[name], b[name]) for name in a.sizes if name.startswith("BLOCK")] + [(a.num_warps, b.num_warps)]
    flags = sum(a[name] != b[name] for name in a.sizes if not name.startswith("BLOCK"))
    return sum(abs(math.log2(x / y)) for x, y in doubled) + flags + abs(a.num_stages - b.num_stages)


def _range(family: str, name: str, present: int, on_cpu: bool) -> Iterator[int]:
    if name in FIXED.get(family, ()) or (on_cpu and not name.startswith("BLOCK")):
        yield present
    elif name in FLAGS:
        yield from sorted({*FLAGS[name], present})
    else:
        reach = REACH_ON_CPU if on_cpu else REACH
        least = 16 if family in PRODUCTS or family == "conv_fft" else 1
        most = LARGEST_PRODUCT if family in PRODUCTS and not on_cpu else LARGEST_INTERPRETED
        for step in range(-reach, reach + 1):
            size = int(present * 2.0**step)
            if min(least, present) <= size <= max(most, present):
                yield size


def _fits(family: str, tile: Tile, present: Tile, on_cpu: bool) -> bool:
    """Return whether the block is small enough to compile: within the limits, or no larger than the current one."""
    if on_cpu or family not in PRODUCTS:
        largest = LARGEST_INTERPRETED if on_cpu else LARGEST_BLOCK
        return _elements(family, tile) <= max(largest, _elements(family, present))
    return tile.sizes.get("BLOCK_M", 1) * tile.sizes.get("BLOCK_N", 1) <= ACCUMULATORS


def _elements(family: str, tile: Tile) -> int:
    """Return the elements of the largest block: of two sizes (or the only one), of all three for a cube."""
    blocks = sorted(size for name, size in tile.sizes.items() if name.startswith("BLOCK"))
    return math.prod(blocks if family in CUBES else blocks[-2:])


def describe(tile: Tile) -> str:
    """Return the tile as text, without warps and stages on a CPU."""
    return str(tile).partition(" warps=")[0] if launch.ON_CPU else str(tile)
