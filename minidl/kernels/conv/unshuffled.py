"""A convolution of few channels with strides as one of many without: for the first layers of networks of pictures.

The values of a stride are put side by side, as `torch.nn.PixelUnshuffle` does: x [N, H, W, C] becomes [N, H', W', V] of
V = stride * stride * channels values, 16 of 3 channels and strides of 2, with zeros where padding was. What an output
reads of one such row is then one run of memory, S' V values, and that of its neighbour begins V values later. So it is
a convolution of R' x 1 over S' V channels in pixels that overlap, in boxes, whose descriptor takes such rows as they
lie. 7x7 of 3 channels with strides of 2 is 4 rows of 64 values for 147 products of an output; bands read 7 rows, value
by value.

What is then computed is a problem with a plan of its own (`plan`). An input that is not finite makes NaN of outputs
whose window, filled up to whole strides, reaches it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import FORWARD, Problem, Unsupported
from minidl.runtime import dependent_launch, launch
from minidl.runtime.cost_model import selection
from minidl.runtime.dependent_launch import wait

NAME = "unshuffle"
FAMILIES = ("conv_unshuffle",)
LEAST, MOST = 8, 64  # values of a place: 16 bytes at least
ROW, LONGEST = 32, 256  # values that an output reads of a row: boxes have blocks of 32


@triton.jit
def conv_unshuffle_kernel(
    p_x, p_to, places, PH, PW, H, W, before_h, before_w,
    C: tl.constexpr, FILLED: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr, V: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """to [.., PH, PW, V] from x [.., H, W, C], of which `before` rows and columns of zeros come first.

    A place has STEP_H x STEP_W pixels of C channels filled up to FILLED, and zeros up to V.
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


class Unshuffling(NamedTuple):
    """The copies of images and of weights."""

    x: Copy
    w: Copy

    def run(
        self, problem: Problem, part: Any, x: torch.Tensor, w: torch.Tensor, *vectors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y, z) by the plan `part` of the problem that was made; vectors: bias, scale, and what is added."""
        return part.run(self.x.of(x), self.w.of(w), *vectors)


class _Side(NamedTuple):
    """One axis: rows of zeros before the image and before the weights, strides of a kernel, and those read of x."""

    before: int
    before_weights: int
    taps: int
    places: int


def apart(problem: Problem) -> Problem | Unsupported:
    """The problem of many channels."""
    h, v, groups = problem.geometry
    if problem.direction != FORWARD or problem.pool or problem.pitches:
        return Unsupported("a way back, a pool, or a problem that was made so")
    if not problem.paced and problem.form != NAME:
        return Unsupported("the time of tiles unknown")
    if groups > 1 or max(h.dilation, v.dilation) > 1:
        return Unsupported("groups or a dilation")
    V, row = _values(problem)
    if V > MOST or row > LONGEST:
        return Unsupported("more values than a box has of a row")
    down, across = _side(h), _side(v)
    made = Axis(down.places, down.taps, h.output, 1, 0, 1), Axis(v.output, 1, v.output, 1, 0, 1)
    return problem._replace(
        C=row, geometry=Geometry(*made, 1), form=None, aligned=True, w_aligned=True,
        pitches=(_columns(v, across, row // V) * V, V),
    )  # fmt: skip


def cost(problem: Problem, made: Problem) -> float:
    """Microseconds of the copies; that of the weights begins before the last one ends."""
    device = selection.of(problem.target)
    (H, W), pitch = problem.read, made.pitches[0]
    values = problem.N * (H * W * problem.C + made.read[0] * pitch)
    return 2 * device.launch + values * problem.dtype.itemsize / (device.reached * device.copy)


def prepare(problem: Problem, made: Problem) -> Unshuffling:
    """The copies for the problem that was made."""
    (h, v, _), (H, W) = problem.geometry, problem.read
    down, across, (V, row) = _side(h), _side(v), _values(problem)
    columns = made.pitches[0] // V
    return Unshuffling(
        _copy(problem, (problem.N, down.places, columns, V), H, W, down.before, across.before),
        _copy(
            problem, (problem.M, down.taps, row // V, V), h.kernel, v.kernel, down.before_weights,
            across.before_weights,
        ),
    )  # fmt: skip


def _copy(problem: Problem, shape: tuple[int, ...], H: int, W: int, before_h: int, before_w: int) -> Copy:
    h, v, _ = problem.geometry
    count, PH, PW, V = shape
    places = count * PH * PW
    tile = problem.tile("conv_unshuffle", floor=1, M=places, N=V)
    grid = launch.cdiv(places, tile["BLOCK_M"])
    meta = {
        "C": problem.C, "FILLED": _filled(problem), "STEP_H": h.stride, "STEP_W": v.stride, "V": V,
        **dependent_launch.options(grid, problem.target), **tile.options,
    }  # fmt: skip
    scalars = (places, PH, PW, H, W, before_h, before_w)
    return Copy(shape, launch.Prepared(conv_unshuffle_kernel, (grid,), scalars, meta))


def _side(axis: Axis) -> _Side:
    """Whole strides of zeros are before the image; what of them is no padding is before the weights."""
    before = launch.cdiv(axis.padding, axis.stride) * axis.stride
    more = before - axis.padding
    taps = launch.cdiv(axis.kernel + more, axis.stride)
    return _Side(before, more, taps, axis.output + taps - 1)


def _columns(axis: Axis, side: _Side, taps: int) -> int:
    """Places of a row, so that the last output's `taps`, filled up to a block, end in it."""
    return axis.output + max(taps, side.taps) - 1


def _filled(problem: Problem) -> int:
    """Channels, filled up to a power of two."""
    return triton.next_power_of_2(problem.C)


def _values(problem: Problem) -> tuple[int, int]:
    """Those of a place, and those that an output reads of a row of places."""
    h, v, _ = problem.geometry
    V = max(LEAST, triton.next_power_of_2(h.stride * v.stride * _filled(problem)))
    return V, max(ROW, triton.next_power_of_2(_side(v).taps) * V)
