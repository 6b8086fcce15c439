"""The weight gradient of a convolution as that of its mirror image: x and the output's gradient exchanged.

    dw[m, j, c] = sum over pixels of dy[n, q, m] x[n, q + j, c] = sum over pixels of x[n, p, c] dy[n, p - j, m]

Without strides this is the gradient of the weight of a convolution with the taps in reverse, of M channels to C. A form
makes tiles of so many rows and columns that one order leaves them empty and the other does not: 128->256 channels are
tiles of 128x128, and exchanged of 128x256; 128->64 fill half the rows of a tile, exchanged all.

What is then computed is a problem with a plan of its own (`plan`), whose result is turned. What a form says of an input
that is not finite is here true of the output's gradient, and the other way round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Unsupported
from minidl.kernels.conv.turned import conv_turn_kernel
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

NAME = "mirror"
LEAST = 32  # channels, on both sides
MARGIN = 1.05  # estimates are 0.9 to 1.1 of most measured times


class Mirroring(NamedTuple):
    """What turns the gradient of the mirror image."""

    turn: Copy

    def run(
        self, _: Problem, part: Any, x: torch.Tensor, dy: torch.Tensor, *nothing: None
    ) -> tuple[torch.Tensor, None]:
        """(The gradient, None), by the plan `part` of the mirror image."""
        assert not any(nothing)
        return self.turn.of(part.run(dy, x)[0]), None


def exchanged(problem: Problem) -> Problem | Unsupported:
    """The problem of the mirror image."""
    if problem.direction != GRAD_WEIGHT:
        return Unsupported("no gradient of the weight")
    if problem.mirrored:
        return Unsupported("a mirror image already")
    if not problem.paced and problem.form != NAME:
        return Unsupported("tiles whose time is not known")
    h, v, _ = problem.geometry
    if h.stride * v.stride > 1 or h.kernel * v.kernel == 1:
        return Unsupported("strides, or one tap")
    if min(problem.C, problem.M) < (LEAST if problem.paced else 1) or 0 in (problem.N, *problem.read, *problem.written):
        return Unsupported("few channels, or nothing to sum")
    axes = _exchanged(h), _exchanged(v)
    if min(axis.padding for axis in axes) < 0:
        return Unsupported("padding beyond the reach of the taps")
    return problem._replace(
        geometry=problem.geometry._replace(h=axes[0], w=axes[1]), C=problem.M, M=problem.C, form=None, mirrored=True
    )  # fmt: skip


def _exchanged(axis: Axis) -> Axis:
    return axis._replace(
        size=axis.output, output=axis.size, padding=(axis.kernel - 1) * axis.dilation - axis.padding
    )  # fmt: skip


def cost(problem: Problem, _: Problem, time: float) -> float:
    """Microseconds of turning the result, and a margin of the other's time."""
    return (MARGIN - 1) * time + of_turn(problem, problem.taps)


def of_turn(problem: Problem, taps: int) -> float:
    """Microseconds of turning a gradient of so many taps."""
    device = selection.of(problem.target)
    values = problem.groups * problem.M * problem.C * taps
    return device.launch + 2 * values * problem.dtype.itemsize / device.copy


def prepare(problem: Problem, _: Problem) -> Mirroring:
    """What turns the result."""
    return Mirroring(turn(problem, problem.taps, problem.shape))


def turn(problem: Problem, taps: int, shape: tuple[int, ...] | None = None) -> Copy:
    """From the gradient [groups * C, taps in reverse, M] of the mirror image to that of the problem, [groups * M, taps,
    C]."""
    C, M, groups = problem.C, problem.M, problem.groups
    tile = problem.tile("conv_turn", floor=1, M=M, N=C)
    grid = launch.cdiv(C, tile["BLOCK_N"]) * launch.cdiv(M, tile["BLOCK_M"]) * taps * groups
    scalars = (C, M, taps * M, 1, 0, M, 0, 0, taps - 1, -1)
    made = launch.Prepared(conv_turn_kernel, (grid,), scalars, {"JH": 1, "JW": taps, **tile.options})
    return Copy(shape or (groups * M, taps, C), made)
