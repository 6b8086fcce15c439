"""The "fft" form, for large kernels and on request only: a convolution is a product per frequency.

    y = F^-1( sum over c of F(x_c) conj(F(w_c)) )      on tiles of T x T points, T = 16 or 32

Tiles overlap (overlap-save): a tile's first T - R + 1 rows and columns are outputs; the others wrap around and are
dropped. Filters that leave too few outputs are split into blocks of T/2 x T/2 taps. The output tile at (i, j) then
adds, for the block (a, b), the input tile at (i + a, j + b), so one set of input tiles serves all blocks.

The kernels that compute and multiply spectra are in `spectra`.

Everything inside is float32. Of an FFT of n points the error is a few log2(n) units of roundoff times the norm (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 24.2); these products with the matrix G of `spectra`,
which are two steps of radix T, are each proved to at most (T + 1) sqrt(T) units, in the norm of the tile, and measured
far below. A convolution then is off by at most

    ((1 + e)^2 (1 + sqrt(2) d) (1 + sqrt(10) g(K + 4)) - 1) * sum over c of ||x_c|| ||w_c||_1

per tile in the 2-norm, where g(n) = n u / (1 - n u), d = (1 + g(T + 1))^2 (1 + u) - 1, K is the number of products
added, and e = (1 + sqrt(T) g(T + 1))^2 (1 + u) - 1. This bounds the norm: a small output among large ones has the error
of the large ones, and a non-finite value makes its tile invalid.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minidl.kernels.conv import costs
from minidl.kernels.conv.problem import CORRELATIONS, Problem, Tensors, Unsupported
from minidl.kernels.conv.spectra import (
    conv_fft_inverse_kernel,
    conv_fft_kernel,
    conv_fft_matrix_kernel,
    conv_fft_product_kernel,
)
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

NAME = "fft"
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_fft", "conv_fft_product")

POINTS = (16, 32)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Maximum bytes of spectra in memory at once; more images take several passes.
WORKSPACE = 2**30


@dataclass(frozen=True)
class Cut:
    """One axis in tiles: `tiles` tiles of `step` outputs each, from `blocks` blocks of at most `taps` taps."""

    step: int
    taps: int
    blocks: int
    tiles: int

    @property
    def inputs(self) -> int:
        """Return the number of input tiles."""
        return self.tiles + self.blocks - 1


@dataclass(frozen=True)
class Cuts:
    """Tiles of points x points, vertically (h) and horizontally (w)."""

    points: int
    h: Cut
    w: Cut


def cuts(outputs: int, kernel: int, points: int) -> list[Cut]:
    """Return the possible cuts of an axis: the complete filter in every tile, or blocks of half a tile."""
    options = []
    if kernel <= points // 2 or points - kernel >= points // 4:
        step = points - kernel + 1
        options.append(Cut(step, kernel, 1, launch.cdiv(outputs, step)))
    if kernel > points // 2:
        step = points // 2
        options.append(Cut(step, step, launch.cdiv(kernel, step), launch.cdiv(outputs, step)))
    return options


@functools.lru_cache(maxsize=4096)
def cheapest(outputs: tuple[int, int], kernel: tuple[int, int], C: int, M: int, points: int | None = None) -> Cuts:
    """Return the cheapest cut of a convolution of C to M channels, optionally with tiles of `points`.

    Moving a value of a spectrum to memory and back costs as much as 32 complex products.
    """
    best = None
    for size in (points,) if points else POINTS:
        for h in cuts(outputs[0], kernel[0], size):
            for w in cuts(outputs[1], kernel[1], size):
                moved = h.inputs * w.inputs * C + h.tiles * w.tiles * M
                products = h.tiles * w.tiles * M * C * h.blocks * w.blocks
                cost = size * size * (32 * moved + products)
                if best is None or cost < best[0]:
                    best = cost, Cuts(size, h, w)
    assert best is not None
    return best[1]


def able(problem: Problem) -> bool | Unsupported:
    """Return whether the problem is supported: requested, with a stride and dilation of 1."""
    down, across = problem.at.down, problem.at.across
    plain = all(phase.in_step == phase.in_tap == phase.out_step == 1 for phase in (down, across))
    return (
        (problem.form == NAME or Unsupported("used on request only: its error bound is one of norms"))
        and (plain or Unsupported("a stride or dilation"))
        and ((problem.groups == 1 and problem.M > 0 and problem.C > 0) or Unsupported("more than one group"))
        and (problem.pool is None or Unsupported("a pool"))
        and (problem.dtype in DTYPES or Unsupported("a dtype other than float32, float16 and bfloat16"))
    )


def estimate(problem: Problem) -> float:
    """Estimate microseconds with three real products per complex one, and 32 for each value of a spectrum."""
    cut, device = _cut(problem), costs.constants(problem)
    moved = cut.h.inputs * cut.w.inputs * problem.C + cut.h.tiles * cut.w.tiles * problem.M
    products = cut.h.tiles * cut.w.tiles * problem.M * problem.C * cut.h.blocks * cut.w.blocks
    rate = selection.rate(problem.target, problem.dtype, problem.precision)
    return device.launch + 3 * problem.N * cut.points**2 * (products + 32 * moved) / rate


def _cut(problem: Problem, points: int | None = None) -> Cuts:
    down, across = problem.at.down, problem.at.across
    return cheapest((down.count, across.count), (len(down.taps), len(across.taps)), problem.C, problem.M, points)


class Pass(NamedTuple):
    """A range of images: the launches over their tiles, and the shapes of the spectra of x and y."""

    first: int
    images: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    transform: launch.Prepared
    product: launch.Prepared
    inverse: launch.Prepared


class Prepared(NamedTuple):
    """The matrix, the spectra of the weights, and the passes over the images."""

    points: int
    matrix: launch.Prepared
    w: tuple[int, ...]
    weights: launch.Prepared
    passes: tuple[Pass, ...]


def prepare(problem: Problem, points: int | None = None) -> Prepared:
    """Prepare the launches on tiles of 16 or 32 `points`, None for the cheaper. Raises ValueError for other values."""
    if points not in (None, *POINTS):
        raise ValueError(f"fft: got tiles of {points} points, expected one of {POINTS}")
    N, C, M = problem.N, problem.C, problem.M
    down, across = problem.at.down, problem.at.across
    cut = _cut(problem, points)
    T, F = cut.points, cut.points**2 // 2
    taps = cut.h.blocks * cut.w.blocks
    inputs, tiles = cut.h.inputs * cut.w.inputs, cut.h.tiles * cut.w.tiles
    images = max(1, WORKSPACE // (8 * F * (inputs * C + tiles * M)))
    passes = []
    for first in range(0, N, images):
        n = min(images, N - first)
        tile = problem.tile("conv_fft_product", M=tiles * n, N=M, K=C)
        grid = F * launch.cdiv(tiles * n, tile["BLOCK_M"]) * launch.cdiv(M, tile["BLOCK_N"])
        scalars = (tiles * n, n, M, C, cut.w.tiles, cut.w.inputs, inputs * n, (taps, cut.w.blocks))
        product = launch.Prepared(
            conv_fft_product_kernel, (grid,), scalars, {"F": F, "PRECISION": problem.precision, **tile.options}
        )
        tile = _tile(problem, n * M, T)
        inverse = launch.Prepared(
            conv_fft_inverse_kernel, (tiles * launch.cdiv(n * M, tile["BLOCK_V"] // T**2),),
            (n * M, M, (down.count, across.count), (cut.h.step, cut.w.step), cut.w.tiles, tiles * n * M),
            {"T": T, "PRECISION": problem.precision, "epilogue": problem.epilogue, **tile.options},
        )  # fmt: skip
        transform = _transform(
            problem, cut, (n, *problem.read, C), (cut.h.inputs, cut.w.inputs), (T, T), (down.in_start, across.in_start)
        )
        passes.append(Pass(first, n, (2, F, inputs, n, C), (2, F, tiles, n, M), transform, product, inverse))
    shape = M, len(down.taps), len(across.taps), C
    blocks, taps_of_block = (cut.h.blocks, cut.w.blocks), (cut.h.taps, cut.w.taps)
    return Prepared(
        T, launch.Prepared(conv_fft_matrix_kernel, (1,), (), {"T": T, "num_warps": 4}), (2, F, taps, M, C),
        _transform(problem, cut, shape, blocks, taps_of_block, (0, 0)), tuple(passes),
    )  # fmt: skip


def run(prepared: Prepared, t: Tensors) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=t.x.device)

    assert t.y is not None  # only GRAD_WEIGHT has none
    g = empty(prepared.points, prepared.points)
    prepared.matrix.run(g)
    w_f = empty(*prepared.w)
    prepared.weights.run(t.w, g, w_f)
    for part in prepared.passes:
        images = slice(part.first, part.first + part.images)
        x_f, y_f = empty(*part.x), empty(*part.y)
        part.transform.run(t.x[images], g, x_f)
        part.product.run(x_f, w_f, y_f)
        part.inverse.run(y_f, g, t.bias, t.scale, t.y[images], None if t.z is None else t.z[images])


def _transform(
    problem: Problem, cut: Cuts, sizes: tuple[int, ...], tiles: tuple[int, int], taps: tuple[int, int],
    start: tuple[int, int],
) -> launch.Prepared:  # fmt: skip
    """Return the launch that transforms tiles of images of `sizes` [N, H, W, C] to spectra [2, F, tiles, N, C].

    Each tile has `taps` points; the first one starts at `start`."""
    N, H, W, C = sizes
    tile = _tile(problem, N * C, cut.points)
    grid = math.prod(tiles) * launch.cdiv(N * C, tile["BLOCK_V"] // cut.points**2)
    scalars = (N * C, H, W, C, start, (cut.h.step, cut.w.step), taps, tiles[1], math.prod(tiles) * N * C)
    meta = {"T": cut.points, "PRECISION": problem.precision, **tile.options}
    return launch.Prepared(conv_fft_kernel, (grid,), scalars, meta)


def _tile(problem: Problem, lines: int, points: int) -> launch.Tile:
    """Return the tile with BLOCK_V values: a multiple of points x points."""
    return problem.tile("conv_fft", floor=points**2, V=lines * points**2)
