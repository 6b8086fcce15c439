"""The "product" form: the convolution as one matrix product by `gemm`, if outputs read consecutive blocks of memory.

    y [rows, M] = act(scale x [rows, K] w [M, K]^T + bias)     dw [M, K] = dy [rows, M]^T x [rows, K]

This applies to 1x1 kernels (rows are pixels, K = C), to a kernel that covers the image (rows are images, K = H W C),
and to adjacent patches in images of one row of patches. Nothing is copied: x and y are reshaped views. Tiles are full
for every image size, whereas boxes of pixels may partly lie outside the image (7x7 in boxes of 8x8).

The gradient of the weight has the rows as its K, split into shares that are added in a fixed order. Backward phases
support 1x1 kernels only. Operands without a tensor descriptor are read through pointers, which support any shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minidl.kernels import gemm
from minidl.kernels.conv.geometry import Phase
from minidl.kernels.conv.problem import (
    FORWARD,
    GRAD_WEIGHT,
    INT32_LIMIT,
    NO_BOXES,
    PHASE,
    Problem,
    Tensors,
    Unsupported,
)
from minidl.kernels.gemm import choice, fused_statistics, launches
from minidl.kernels.gemm.operands import Operand, unit
from minidl.kernels.gemm.plan import tiled
from minidl.kernels.gemm.prepared import Product
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

NAME = "product"
DIRECTIONS = FORWARD, PHASE, GRAD_WEIGHT
FAMILIES = ("gemm", "gemm_pointer")
FEW = *range(8, 32), *range(33, 48)  # channels that leave much of a tile empty
FEW_ROWS = range(8, 32)  # the same for the gradient of the weight, whose product has no rows of pixels
HALF_EMPTY, SHORT = 1.45, 5.0  # their factor on products of more than SHORT us
FASTER, SOONER = 0.9, 0.3  # time relative to the estimate of `gemm`, less SOONER us: drawn layers on an H200
# Statistics are fused (`gemm.fused_statistics`) if K is at most this: two tiles then share a multiprocessor, and one is
# summed while the other is read.
MOST_FUSED = 512


class Prepared(NamedTuple):
    """The matrix product, and the shape of its result for the gradient of the weight."""

    product: Product
    shape: tuple[int, ...]


def able(problem: Problem) -> bool | Unsupported:
    return (
        (problem.pool is None or Unsupported("a pool"))
        and (problem.groups == 1 or Unsupported("more than one group"))
        and (_reads_in_order(problem) or Unsupported("outputs that do not read one block of memory after another"))
        and (problem.direction != PHASE or _one_tap(problem) or Unsupported("a backward phase with more than one tap"))
        and (0 < _rows(problem) < INT32_LIMIT or Unsupported("no rows, or more than 32 bits count"))
        and (problem.M > 0 or Unsupported("no channels to write"))
        and (problem.dtype.itemsize > 1 or _has_descriptors(problem) or NO_BOXES)
        and (not _needs_transpose(problem) or Unsupported("float32 that does not lie along the rows, for tensor cores"))
    )


def estimate(problem: Problem) -> float:
    tile, split = _choice(problem)
    time = microseconds(problem, *_shape(problem), tile, split)
    least, weight = min(problem.M, _width(problem)), problem.direction == GRAD_WEIGHT
    few = least in (FEW_ROWS if weight else FEW) and time > SHORT and _by_descriptors(problem)
    return time * (HALF_EMPTY if few else 1.0)


def microseconds(problem: Problem, family: str, shape: choice.Shape, tile: launch.Tile, split: int = 1) -> float:
    """Return the microseconds of a product."""
    target, processors = problem.target, problem.processors
    time = choice.microseconds(
        family, shape, tile, split, processors, target, dtype=problem.dtype, precision=problem.precision
    )  # fmt: skip
    splits = selection.of(target).steps.splits["product"] if problem.splits else 1.0
    return FASTER * splits * time - SOONER


def programs(problem: Problem) -> float:
    """Return the number of programs in the interpreter; a step along K takes half as long as one."""
    (M, N, K), tile = _sizes(problem), _choice(problem)[0]
    return launches.tiles_of(M, N, tile) * (1 + launch.cdiv(K, tile["BLOCK_K"])) / 2


def statistics_bands(problem: Problem) -> int:
    """Return the number of row bands with fused statistics; 0 if slower, with leftover rows, or with K in shares."""
    tile, split = _choice(problem)
    pays = problem.dtype.itemsize == 2 and _width(problem) <= MOST_FUSED and tile["BLOCK_N"] <= fused_statistics.WIDEST
    count, left = divmod(_rows(problem), tile["BLOCK_M"])
    return count if pays and split == 1 and left == 0 else 0


def prepare(problem: Problem) -> Prepared:
    M, N, K = _sizes(problem)
    if problem.direction == GRAD_WEIGHT:
        a, b = Operand(M, K, (1, M)), Operand(K, N, (N, 1))
    else:
        # x is contiguous along K; so are the weights, unless backward weights are read in place.
        a, b = Operand(M, K, (K, 1)), Operand(K, N, (N, 1) if problem.in_place else (1, K))
    described = gemm.Problem(
        a, b, problem.dtype, problem.precision, problem.epilogue, in_order=problem.batch_invariant,
        target=problem.target, processors=problem.processors,
    )  # fmt: skip
    return Prepared(tiled(described, NAME, _by_descriptors(problem), *_choice(problem)), problem.shape)


def run(prepared: Prepared, t: Tensors) -> torch.Tensor | None:
    """Return the gradient of the weight from x and dy (passed as w), or write y and z."""
    if t.y is None:
        dw = torch.empty(prepared.shape, dtype=t.x.dtype, device=t.x.device)
        prepared.product.run(t.w, t.x, None, None, dw, None)
        return dw
    prepared.product.run(t.x, t.w, t.bias, t.scale, t.y, t.z)
    return None


def _reads_in_order(problem: Problem) -> bool:
    """Return whether the inputs of an output are contiguous, directly followed by those of the next output."""
    down, across, (H, W), written = problem.at
    # Several rows of taps interleave with the columns of an image, unless there is a single column of outputs.
    in_order = len(down.taps) == 1 or across.count == 1
    return in_order and _is_contiguous(down, H) and _is_contiguous(across, W) and (down.count, across.count) == written


def _is_contiguous(phase: Phase, size: int) -> bool:
    """Return whether the taps of consecutive outputs cover an axis in order."""
    taps = len(phase.taps)
    steps = (taps == 1 or phase.in_tap == 1) and (phase.count == 1 or phase.in_step == taps)
    return steps and phase.in_start == 0 and phase.count * taps == size


def _one_tap(problem: Problem) -> bool:
    return problem.geometry.h.kernel == problem.geometry.w.kernel == 1


def _rows(problem: Problem) -> int:
    return problem.N * problem.at.down.count * problem.at.across.count


def _width(problem: Problem) -> int:
    """Return the number of values of x that an output reads."""
    return problem.taps * problem.C


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Return M, N and K of the product."""
    rows, width = _rows(problem), _width(problem)
    return (problem.M, width, rows) if problem.direction == GRAD_WEIGHT else (rows, problem.M, width)


def _shape(problem: Problem) -> tuple[str, choice.Shape]:
    """Return the tile family and the product's shape; for batch-invariant problems independent of N."""
    M, N, K = _sizes(problem._replace(N=problem.images))
    if _by_descriptors(problem):
        return FAMILIES[0], choice.Shape(M, N, K)
    along = (M, N, N) if problem.direction == GRAD_WEIGHT else (K, K, N)
    a, b, c = map(unit, along)
    return FAMILIES[1], choice.Shape(M, N, K, units=(a, b, c))


def _choice(problem: Problem) -> tuple[launch.Tile, int]:
    """Return the tile and the number of shares of K."""
    family, shape = _shape(problem)
    chosen = choice.choose(
        family, problem.dtype, problem.precision, shape, None, problem.target, problem.processors, tail=False
    )  # fmt: skip
    return chosen.tile, chosen.shares


def _has_descriptors(problem: Problem) -> bool:
    """Return whether both operands can have a tensor descriptor."""
    x_descriptor = problem.boxes(_width(problem), problem.aligned)
    if problem.direction == GRAD_WEIGHT:
        return x_descriptor and problem.boxes(problem.M, problem.aligned)
    return x_descriptor and problem.w_boxes


def _by_descriptors(problem: Problem) -> bool:
    """Return whether descriptors are used; not for a short K, a choice that does not depend on N."""
    M, N, K = _sizes(problem._replace(N=problem.images))
    short = problem.target != "interpreted" and choice.in_one_block(problem.dtype, M, N, K)
    return _has_descriptors(problem) and not short


def _needs_transpose(problem: Problem) -> bool:
    """Return whether float32 blocks would need a transpose, as tensor cores read float32 along K only.

    It costs more than the product; `gemm` copies such operands."""
    compiled = problem.direction == GRAD_WEIGHT and problem.target != "interpreted"
    return compiled and problem.dtype == torch.float32 and problem.precision != "ieee"
