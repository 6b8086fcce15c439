"""The "pair" form on boxes: two adjacent pixels are one output of twice the channels, for few channels, large images.

With 64 channels half of a tile is empty, and each input is read once per tap. As a pair, outputs 2q and 2q + 1 read
S + 1 columns of inputs once: their weights are a band [2 M, R, S + 1, C], with a column of zeros for each of the two.
So tiles are full, and a pair reads S + 1 inputs in place of 2 S, at the cost of (S + 1) / S times the products. The
columns of a box of pairs are two apart: x is viewed as [N, H, W / 2, 2, C], read through a tensor descriptor with zeros
outside the image. `boxed` computes the product.
"""

from minidl.kernels.conv import bands, boxed, costs
from minidl.kernels.conv.epilogue import repeated
from minidl.kernels.conv.geometry import Phase
from minidl.kernels.conv.prepared import Product
from minidl.kernels.conv.problem import CORRELATIONS, NO_BOXES, PHASE, Phases, Problem, Tensors, Unsupported

NAME = "pair"
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_box", "conv_band")
# Maximum output channels; two pixels then fill a tile.
MOST = 64


def able(problem: Problem) -> bool | Unsupported:
    down, across = problem.at.down, problem.at.across
    return (
        (problem.groups == 1 or Unsupported("more than one group"))
        and (problem.pool is None or Unsupported("a pool"))
        and (down.in_step == across.in_step == across.in_tap == down.out_step == across.out_step == 1
             or Unsupported("a stride or dilation"))
        and (problem.read[1] % 2 == across.count % 2 == 0 or Unsupported("an odd number of columns"))
        and (len(across.taps) > 1 or Unsupported("one column of taps"))
        and ((problem.C % 32 == 0 and problem.C * problem.dtype.itemsize % 16 == 0)
             or Unsupported("input channels that are not a multiple of 32"))
        and (0 < problem.M <= MOST or Unsupported("output channels that fill a tile"))
        and ((problem.x_boxes and problem.boxes((len(across.taps) + 1) * problem.C)) or NO_BOXES)
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    pairs = _pairs(problem)
    band = 2 * problem.M * len(problem.at.down.taps) * (len(problem.at.across.taps) + 1) * problem.C
    return costs.launch_time(problem, boxed.microseconds(pairs, boxed.tile_of(pairs))) + costs.band_time(problem, band)


def prepare(problem: Problem) -> Product:
    reach = (len(problem.at.across.taps) + 1) * problem.C
    band = bands.prepare(problem, 2, reach, 2 * problem.M, transposed=True)
    return Product(band, boxed.prepare(_pairs(problem), pairs=True))


def reads_concat_pair(problem: Problem) -> bool:
    return boxed.reads_concat_pair(_pairs(problem))


def run(prepared: Product, t: Tensors) -> None:
    assert prepared.weights is not None
    doubled = t._replace(w=prepared.weights.run(t.w), bias=repeated(t.bias), scale=repeated(t.scale))
    boxed.run(prepared.launch, doubled)


def _pairs(problem: Problem) -> Problem:
    """Return the problem whose outputs are pairs of twice the channels, with phases of its own; inputs are single
    pixels."""
    down, across, read, (OH, OW) = problem.at
    pairs = Phase(0, 1, across.count // 2, across.in_start, 1, 1, tuple(range(len(across.taps) + 1)))
    phases = Phases(down, pairs, read, (OH, OW // 2))
    return problem._replace(direction=PHASE, M=2 * problem.M, strides=(), phases=phases)
