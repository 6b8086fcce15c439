"""Boxes of pixels as tensor descriptors take them, and the shape that covers an image's outputs with least waste."""

import functools
from collections.abc import Sequence

from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch
from minidl.runtime.descriptors import Box


def images_box(N: int, H: int, W: int, channels: int, block: Sequence[int], pitches: Sequence[int] = ()) -> Box:
    """Boxes of x [N, H, W, channels], with `pitches` of a row and a pixel where it is not contiguous."""
    row, pixel = pitches or (W * channels, channels)
    return Box((N, H, W, channels), (H * row, row, pixel, 1), block)


def pairs_box(N: int, H: int, W: int, C: int, block: Sequence[int]) -> Box:
    """Boxes of x [N, H, W / 2, 2, C]."""
    return Box((N, H, W // 2, 2, C), (H * W * C, W * C, 2 * C, C, 1), block)


def concat_pair_box(N: int, H: int, W: int, C: int, block: Sequence[int], pairs: bool = False) -> Box:
    """Boxes of x [2, N, H, W, C / 2], two tensors; of pairs [2, N, H, W / 2, 2 * C / 2]."""
    row, part = W * C // 2, C // 2
    if pairs:
        W, part = W // 2, C
    return Box((2, N, H, W, part), (0, H * row, row, part, 1), (1, *block))


@functools.lru_cache(maxsize=4096)
def shape_of_box(N: int, height: int, width: int, pixels: int) -> tuple[int, int, int]:
    """Images, rows and columns, powers of two of product `pixels`, whose boxes cover the outputs with least waste.

    Of equals the one with most pixels of one image, and of those the squarest.
    """
    best: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
    sizes = [2**i for i in range(9) if 2**i <= pixels]  # a side of a box is 256 at most
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
    """Whether a box of outputs is one of y [N, OH, OW, groups * M], and can be stored as such."""
    alike = problem.at.h.out_step == problem.at.v.out_step == problem.groups == 1
    return alike and problem.M * problem.result.itemsize % 16 == 0 and not problem.beside
