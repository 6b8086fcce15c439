"""The "unshuffle" rewrite: a strided convolution of few channels as one of many channels with a stride of 1.

For the first layers of image networks. As in `torch.nn.PixelUnshuffle`, x [N, H, W, C] becomes [N, H', W', V] with
V = stride * stride * channels values (16 for 3 channels and strides of 2) and zeros for padding. An output then reads
S' V contiguous values of a row, and its neighbour starts V values later. This is an R' x 1 convolution over S' V
channels with overlapping pixels, which a tensor descriptor reads in place. 7x7 of 3 channels with strides of 2 reads 4
rows of 64 values for 147 products of an output; `banded` reads 7 rows, value by value.

The new problem has its own plan (`plan`). A non-finite input makes outputs NaN whose window, padded to whole strides,
reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import FORWARD, Operands, Problem, Unsupported
from minidl.kernels.conv.rewrites.rewrite import Conversion, Result, Rewrite
from minidl.runtime import dependent_launch, launch
from minidl.runtime.cost_model import selection
from minidl.runtime.dependent_launch import wait

LEAST, MOST = 8, 64  # values of an unshuffled pixel: at least 16 bytes
ROW, LONGEST = 32, 256  # values that an output reads per row: descriptor blocks have 32


@triton.jit
def conv_unshuffle_kernel(
    p_x, p_to, places, PH, PW, H, W, before_h, before_w,
    C: tl.constexpr, FILLED: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr, V: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write to [.., PH, PW, V] from x [.., H, W, C] with before_h, before_w rows and columns of zeros in front.

    An unshuffled pixel has STEP_H x STEP_W pixels of C channels padded to FILLED, and zeros up to V.
    """
    wait(EARLY)
    o_p = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_v = tl.arange(0, V)
    row = o_p // PW
    h = (row % PH * STEP_H - before_h)[:, None] + (o_v // (STEP_W * FILLED))[None, :]
    w = (o_p % PW * STEP_W - before_w)[:, None] + (o_v // FILLED % STEP_W)[None, :]
    c = o_v % FILLED
    m_v = (c < C) & (o_v < STEP_H * STEP_W * FILLED)
    m_p = (o_p < places)[:, None]
    m_x = m_p & m_v[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    o_x = (((row // PH)[:, None] * H + h) * W + w) * C + c[None, :]
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)  # [BLOCK_M, V]
    tl.store(p_to + o_p[:, None] * V + o_v[None, :], b_x, mask=m_p)


@dataclass(frozen=True)
class Unshuffling(Conversion):
    """The copies of images and of weights."""

    x: Copy
    w: Copy

    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        result: Result = plans[0].run(operands._replace(x=self.x.run(operands.x), w=self.w.run(operands.w)))
        return result


class _Side(NamedTuple):
    """One axis: zeros before the image and before the weights, strides per kernel, and unshuffled pixels of x."""

    before: int
    before_weights: int
    taps: int
    places: int


class Unshuffle(Rewrite):
    """Strides of rows and columns as channels."""

    name, families = "unshuffle", ("conv_unshuffle",)

    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        height, width, groups = problem.geometry
        if problem.direction != FORWARD or problem.pool or problem.pitches:
            return Unsupported("not forward, a pool, or an unshuffled problem")
        if not self.is_measured(problem):
            return Unsupported("no measured tiles for this dtype and target")
        if groups > 1 or max(height.dilation, width.dilation) > 1:
            return Unsupported("groups or a dilation")
        V, row = _row_values(problem)
        if V > MOST or row > LONGEST:
            return Unsupported("more values per row than a descriptor block has")
        down, across = _side(height), _side(width)
        axes = Axis(down.places, down.taps, height.output, 1, 0, 1), Axis(width.output, 1, width.output, 1, 0, 1)
        return (problem._replace(
            C=row, geometry=Geometry(*axes, 1), form=None, aligned=True, w_aligned=True,
            pitches=(_columns(width, across, row // V) * V, V),
        ),)  # fmt: skip

    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        """Add the copies; that of the weights overlaps the previous launch."""
        device = selection.of(problem.target)
        (H, W), pitch = problem.read, others[0].pitches[0]
        values = problem.N * (H * W * problem.C + others[0].read[0] * pitch)
        return times[0] + 2 * device.launch + values * problem.dtype.itemsize / (device.reached * device.copy)

    def prepare(self, problem: Problem, others: Sequence[Problem]) -> Conversion:
        (height, width, _), (H, W) = problem.geometry, problem.read
        down, across, (V, row) = _side(height), _side(width), _row_values(problem)
        columns = others[0].pitches[0] // V
        return Unshuffling(
            _copy(problem, (problem.N, down.places, columns, V), H, W, down.before, across.before),
            _copy(
                problem, (problem.M, down.taps, row // V, V), height.kernel, width.kernel, down.before_weights,
                across.before_weights,
            ),
        )  # fmt: skip


def _copy(problem: Problem, shape: tuple[int, ...], H: int, W: int, before_h: int, before_w: int) -> Copy:
    down, across, _ = problem.geometry
    count, PH, PW, V = shape
    places = count * PH * PW
    tile = problem.tile("conv_unshuffle", floor=1, M=places, N=V)
    grid = launch.cdiv(places, tile["BLOCK_M"])
    meta = {
        "C": problem.C, "FILLED": _padded_channels(problem), "STEP_H": down.stride, "STEP_W": across.stride, "V": V,
        **dependent_launch.options(grid, problem.target), **tile.options,
    }  # fmt: skip
    scalars = (places, PH, PW, H, W, before_h, before_w)
    return Copy(shape, launch.Prepared(conv_unshuffle_kernel, (grid,), scalars, meta))


def _side(axis: Axis) -> _Side:
    """Return the axis with whole strides of zeros before the image; their excess over padding precedes the weights."""
    before = launch.cdiv(axis.padding, axis.stride) * axis.stride
    more = before - axis.padding
    taps = launch.cdiv(axis.kernel + more, axis.stride)
    return _Side(before, more, taps, axis.output + taps - 1)


def _columns(axis: Axis, side: _Side, taps: int) -> int:
    """Return the unshuffled pixels of a row; it contains the last output's `taps`, padded to a block."""
    return axis.output + max(taps, side.taps) - 1


def _padded_channels(problem: Problem) -> int:
    """Return the channels, padded to a power of two."""
    return triton.next_power_of_2(problem.C)


def _row_values(problem: Problem) -> tuple[int, int]:
    """Return the values of an unshuffled pixel, and those that an output reads per row."""
    down, across, _ = problem.geometry
    V = max(LEAST, triton.next_power_of_2(down.stride * across.stride * _padded_channels(problem)))
    return V, max(ROW, triton.next_power_of_2(_side(across).taps) * V)
