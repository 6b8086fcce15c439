"""The convolution as one matrix product, of the kernels of `gemm`: where every output reads a block of memory of its
own, one after another.

    y [rows, M] = act(scale x [rows, K] w [M, K]^T + bias)     dw [M, K] = dy [rows, M]^T x [rows, K]

So it is with kernels of 1x1, whose rows are the pixels and K the channels; with a kernel that covers the image, whose
rows are images and K = H W C; and with patches side by side in images of one row of patches. Nothing is copied: x and y
are seen in another shape. The rows of other forms are images, or boxes of pixels of which some are outside an image
(7x7 in boxes of 8x8); here they are filled whatever the size of the image, and have the tiles of matrix products.

The gradient of the weight has the rows as its K, in shares, which are added in a fixed order. On the way back a kernel
of 1x1 alone is taken. Rows that no boxes can be read of are read through pointers, which take any shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minidl.kernels.conv import costs
from minidl.kernels.conv.geometry import Walk
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, MANY, NO_BOXES, WALK, Problem, Tensors, Unsupported
from minidl.kernels.gemm import choice, fused_statistics, launches
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

NAME = "product"
IN_PLACE = True
FLOAT8 = True
ADDED = 8
DIRECTIONS = FORWARD, WALK, GRAD_WEIGHT
FAMILIES = ("gemm", "gemm_pointer")
# Of float8 boxes write more values than they read sooner (`costs.FLOAT8`).
WIDE_FLOAT8 = 1.15
# Rows of so few channels leave much of a tile empty: 24->144 at 56x56, 21 images, 28.9 us, and 17.8 forward; 40->240 at
# 28x28, 30 and 340 images, 11.5 and 77 us back, 1.1 and 1.9 TB/s.
FEW = *range(8, 32), *range(33, 48)
FEW_ROWS = range(8, 32)  # of the gradient of the weight, whose product has no rows of pixels
NARROWEST = 4  # of channels that are written, fewer than these in boxes: 12 launches
FEW_VALUES = 24  # of a row, fewer than these by pointers
SOONER = 0.9  # us that such a product takes less than estimated: 69 launches, most of them small
SHORT = 5.0  # us of a product that takes no longer with few
MANY_OUTPUTS = 64
# Statistics are fused (`gemm.fused_statistics`) with sums of at most so many products: a multiprocessor has two of
# their tiles, of which one is summed while the other is read. With one, 256 images on an H100, us of a convolution and
# statistics that are read from its result, and handed on: 64->256 at 56x56 417, 341; 256->128 330, 239; 128->512 at
# 28x28 216, 192; 256->1024 at 14x14 126, 118; 512->2048 at 7x7 84, 82; but 1024->256 at 14x14 74, 71; 1024->512 120,
# 132; 2048->512 at 7x7 56, 81.
MOST_HANDED = 512


class Prepared(NamedTuple):
    """The product, and the shape of its result for the gradient of the weight."""

    product: launches.Product
    shape: tuple[int, ...]


def able(problem: Problem) -> bool | Unsupported:
    return (
        (problem.pool is None or Unsupported("a pool"))
        and (problem.groups == 1 or Unsupported("more than one group"))
        and (_one_after_another(problem) or Unsupported("outputs that do not read one block of memory after another"))
        and (problem.direction != WALK or _one_tap(problem) or Unsupported("more than one tap on the way back"))
        and (0 < _rows(problem) < MANY or Unsupported("no rows, or more than 32 bits count"))
        and (problem.M > 0 or Unsupported("no channels to write"))
        and (problem.dtype.itemsize > 1 or _boxed(problem) or NO_BOXES)
        and (not _turns(problem) or Unsupported("float32 that does not lie along the rows, for tensor cores"))
    )


def estimate(problem: Problem) -> float:
    """As runs of images and boxes, with less of a factor; of few channels to read a block of 16 is computed.

    A step along K takes the interpreter half as long as a tile: 0.2 to 0.6 ms.
    """
    K = 16 * launch.cdiv(_width(problem), 16)
    products = _rows(problem) * K * (problem.M if problem.direction == GRAD_WEIGHT else costs.columns(problem))
    tile, split = _choice(problem)
    if problem.paced:
        time = choice.microseconds(*_shape(problem), tile, split, problem.processors, problem.target)
        weight, by_boxes, least = problem.direction == GRAD_WEIGHT, _by_boxes(problem), min(problem.M, _width(problem))
        by_values = least < FEW_VALUES and not by_boxes
        if weight and by_values:
            # 1x1 1120->5 at 21x21, 394 images: 236 us.
            return costs.beside_tiles(problem, "product, weight", time)
        time = costs.beside_tiles(problem, NAME, time)
        if by_values:
            time = max(selection.of(problem.target).launch, time - SOONER)
        if time > SHORT and by_boxes and not weight and problem.M < NARROWEST:
            return time * costs.relative(problem, "product, narrow")
        if time > SHORT and by_boxes and least in (FEW_ROWS if weight else FEW):
            return time * costs.relative(problem, "product, few channels")
        # Rows that begin at no multiple of 4 bytes are written value by value. 322->391 at 82x82, 65 images: 1.09 ms.
        odd = problem.direction != GRAD_WEIGHT and problem.M > MANY_OUTPUTS and problem.M % 2
        return time * (costs.relative(problem, "product, odd") if odd else 1.0)
    M, N, depth = _sizes(problem)
    programs = launches.tiles_of(M, N, tile) * (1 + launch.cdiv(depth, tile["BLOCK_K"])) / 2
    if problem.dtype.itemsize == 1 and _width(problem) < problem.M:
        products *= WIDE_FLOAT8
    return costs.microseconds(problem, NAME if _by_boxes(problem) else "product, by pointers", products, programs)


def hands_on(problem: Problem) -> int:
    """Bands of rows whose statistics tiles hand on: 0 where it takes longer, rows are left over or K is in shares."""
    tile, split = _choice(problem)
    pays = problem.dtype.itemsize == 2 and _width(problem) <= MOST_HANDED and tile["BLOCK_N"] <= fused_statistics.WIDEST
    count, left = divmod(_rows(problem), tile["BLOCK_M"])
    return count if pays and split == 1 and left == 0 else 0


def prepare(problem: Problem) -> Prepared:
    M, N, K = _sizes(problem)
    tile, split = _choice(problem)
    split = launches.non_empty(launch.cdiv(K, tile["BLOCK_K"]), split)
    # x lies along K; so do the weights, but for those of a way back that are read in place.
    turned = (True, False) if problem.direction == GRAD_WEIGHT else (False, not problem.in_place)
    made = launches.prepare(
        M, N, K, turned, _by_boxes(problem), tile, split, problem.dtype, problem.precision,
        problem.flags("POOL"), problem.target, problem.processors, problem.batch_invariant,
    )  # fmt: skip
    return Prepared(made, problem.shape)


def run(prepared: Prepared, t: Tensors) -> torch.Tensor | None:
    """The gradient of the weight, with the output's gradient in place of w; else y and z are written."""
    if t.y is None:
        dw = torch.empty(prepared.shape, dtype=t.x.dtype, device=t.x.device)
        prepared.product.run(t.w, t.x, None, None, dw, None)
        return dw
    prepared.product.run(t.x, t.w, t.bias, t.scale, t.y, t.z)
    return None


def _one_after_another(problem: Problem) -> bool:
    """Whether the inputs of an output are neighbours in memory, and after them come those of the next output."""
    h, v, (H, W), written = problem.at
    # Taps down an image stand between the columns of a row, unless there is one of these.
    lie = len(h.taps) == 1 or v.count == 1
    return lie and _side_by_side(h, H) and _side_by_side(v, W) and (h.count, v.count) == written


def _side_by_side(walk: Walk, size: int) -> bool:
    """Whether the taps of all outputs are the values of an axis in their order."""
    taps = len(walk.taps)
    steps = (taps == 1 or walk.in_tap == 1) and (walk.count == 1 or walk.in_step == taps)
    return steps and walk.in_start == 0 and walk.count * taps == size


def _one_tap(problem: Problem) -> bool:
    return problem.geometry.h.kernel == problem.geometry.w.kernel == 1


def _rows(problem: Problem) -> int:
    return problem.N * problem.at.h.count * problem.at.v.count


def _width(problem: Problem) -> int:
    """Values of x that an output reads."""
    return problem.taps * problem.C


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """M, N and K of the product."""
    rows, width = _rows(problem), _width(problem)
    return (problem.M, width, rows) if problem.direction == GRAD_WEIGHT else (rows, problem.M, width)


def _shape(problem: Problem) -> tuple[str, choice.Shape]:
    """The family of tiles and the product. What decides the order of a sum is the same for any number of images where
    that is asked for."""
    M, N, K = _sizes(problem._replace(N=problem.images))
    if _by_boxes(problem):
        return FAMILIES[0], choice.Shape(M, N, K)
    along = (M, N, N) if problem.direction == GRAD_WEIGHT else (K, K, N)
    a, b, c = map(launches.unit, along)
    return FAMILIES[1], choice.Shape(M, N, K, units=(a, b, c))


def _choice(problem: Problem) -> tuple[launch.Tile, int]:
    """The tile and the shares of K, which are those of all tiles."""
    family, shape = _shape(problem)
    chosen = choice.choose(
        family, problem.dtype, problem.precision, shape, None, problem.target, problem.processors, tail=False
    )  # fmt: skip
    return chosen.tile, chosen.shares


def _boxed(problem: Problem) -> bool:
    """Whether both operands can be read in boxes."""
    boxed = problem.boxes(_width(problem), problem.aligned)
    if problem.direction == GRAD_WEIGHT:
        return boxed and problem.boxes(problem.M, problem.aligned)
    return boxed and problem.w_boxes


def _by_boxes(problem: Problem) -> bool:
    """Whether they are; what has a short K is not, which does not depend on the images that there are."""
    M, N, K = _sizes(problem._replace(N=problem.images))
    short = problem.target != "interpreted" and choice.in_one_block(problem.dtype, M, N, K)
    return _boxed(problem) and not short


def _turns(problem: Problem) -> bool:
    """Whether a block would be turned on its way to tensor cores that read float32 along K only, which costs more than
    the product: `gemm` copies such operands."""
    compiled = problem.direction == GRAD_WEIGHT and problem.target != "interpreted"
    return compiled and problem.dtype == torch.float32 and problem.precision != "ieee"
