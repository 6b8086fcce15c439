"""Tensor descriptors for boxes of pixels, loads of boxes, and the box shape that covers an image's outputs with the
least waste."""

import functools
from collections.abc import Sequence

import triton
import triton.language as tl

from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch
from minidl.runtime.descriptors import Box


def images_box(N: int, H: int, W: int, channels: int, block: Sequence[int], pitches: Sequence[int] = ()) -> Box:
    """Return the descriptor of x [N, H, W, channels]; `pitches`: strides of rows and pixels if not contiguous."""
    row, pixel = pitches or (W * channels, channels)
    return Box((N, H, W, channels), (H * row, row, pixel, 1), block)


def pairs_box(N: int, H: int, W: int, C: int, block: Sequence[int]) -> Box:
    """Return the descriptor of x [N, H, W / 2, 2, C]."""
    return Box((N, H, W // 2, 2, C), (H * W * C, W * C, 2 * C, C, 1), block)


def concat_pair_box(N: int, H: int, W: int, C: int, block: Sequence[int], pairs: bool = False) -> Box:
    """Return the descriptor of a `ConcatPair` [2, N, H, W, C / 2]; of pairs [2, N, H, W / 2, 2 * C / 2]."""
    row, part = W * C // 2, C // 2
    if pairs:
        W, part = W // 2, C
    return Box((2, N, H, W, part), (0, H * row, row, part, 1), (1, *block))


@triton.jit
def load_box(d_x, swapped, n, x_h, x_w, c, tile: tl.constexpr):
    """Return the inputs [BLOCK_K, BLOCK_N] of a box at (n, x_h, x_w), channels c.

    swapped: the second half of the `ConcatPair` lies first in memory. Both pixels of PAIRS then share the last axis, as
    a descriptor has at most five axes.
    """
    if tile.PART:
        half = c // tile.PART
        at_c = c - half * tile.PART
        if tile.PAIRS:
            b_box = d_x.load([half ^ swapped, n, x_h, x_w >> 1, (x_w & 1) * tile.PART + at_c])
        else:
            b_box = d_x.load([half ^ swapped, n, x_h, x_w, at_c])
    elif tile.PAIRS:
        b_box = d_x.load([n, x_h, x_w >> 1, x_w & 1, c])
    else:
        b_box = d_x.load([n, x_h, x_w, c])
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    return tl.reshape(b_box, (BLOCK_N, BLOCK_K)).T


@functools.lru_cache(maxsize=4096)
def shape_of_box(N: int, height: int, width: int, pixels: int) -> tuple[int, int, int]:
    """Return (images, rows, columns): powers of two with product `pixels` whose boxes cover the outputs best.

    Ties prefer fewer images, then the squarest box.
    """
    best: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
    sizes = [2**i for i in range(9) if 2**i <= pixels]  # maximum size of a descriptor block along an axis
    for rows in sizes:
        for columns in sizes:
            images = pixels // (rows * columns)
            if images == 0 or images > 256:
                continue
            boxes = launch.cdiv(N, images) * launch.cdiv(height, rows) * launch.cdiv(width, columns)
            key = boxes, images, max(rows, columns)
            if best is None or key < best[0]:
                best = key, (images, rows, columns)
    assert best is not None
    return best[1]


def stores_boxes(problem: Problem) -> bool:
    """Return whether boxes of outputs can be stored by a descriptor of y [N, OH, OW, groups * M]."""
    dense = problem.at.down.out_step == problem.at.across.out_step == problem.groups == 1
    return dense and problem.M * problem.result.itemsize % 16 == 0 and not problem.beside
