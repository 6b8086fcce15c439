"""The "mirror" rewrite: the weight gradient with x and dy exchanged.

    dw[m, j, c] = sum over pixels of dy[n, q, m] x[n, q + j, c] = sum over pixels of x[n, p, c] dy[n, p - j, m]

With a stride of 1 this is the weight gradient of a convolution with reversed taps, of M channels to C. One of the two
orders may fill tiles better: 128->256 channels use tiles of 128x128, exchanged 128x256; 128->64 fill half the rows of a
tile, exchanged all of them.

The mirrored problem has its own plan (`plan`), whose result is transposed. Statements of forms about non-finite inputs
apply to dy instead, and vice versa.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.phase_weights import conv_turn_kernel
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Unsupported
from minidl.runtime import launch
from minidl.runtime.cost_model import selection

NAME = "mirror"
LEAST = 32  # minimum channels, C and M
MARGIN = 1.05  # estimates are 0.9 to 1.1 times most measured times


class Mirroring(NamedTuple):
    """The copy that transposes the gradient of the mirrored problem."""

    transpose: Copy

    def run(
        self, _: Problem, part: Any, x: torch.Tensor, dy: torch.Tensor, *nothing: None
    ) -> tuple[torch.Tensor, None]:
        """Return (gradient, None) by the plan `part` of the mirrored problem."""
        assert not any(nothing)
        return self.transpose.of(part.run(dy, x)[0]), None


def rewrite(problem: Problem) -> Problem | Unsupported:
    """Return the mirrored problem."""
    if problem.direction != GRAD_WEIGHT:
        return Unsupported("not a gradient of the weight")
    if problem.mirrored:
        return Unsupported("a mirror image already")
    if not problem.paced and problem.form != NAME:
        return Unsupported("a target without measured tiles")
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
    """Return the microseconds of transposing the result, and a margin of the mirrored problem's time."""
    return (MARGIN - 1) * time + transpose_time(problem, problem.taps)


def transpose_time(problem: Problem, taps: int) -> float:
    """Return the microseconds of transposing a gradient with `taps` taps."""
    device = selection.of(problem.target)
    values = problem.groups * problem.M * problem.C * taps
    return device.launch + 2 * values * problem.dtype.itemsize / device.copy


def prepare(problem: Problem, _: Problem) -> Mirroring:
    """Return the copy that transposes the result."""
    return Mirroring(transpose(problem, problem.taps, problem.shape))


def transpose(problem: Problem, taps: int, shape: tuple[int, ...] | None = None) -> Copy:
    """Return the copy from the mirrored gradient [groups * C, reversed taps, M] to [groups * M, taps, C]."""
    C, M, groups = problem.C, problem.M, problem.groups
    tile = problem.tile("conv_turn", floor=1, M=M, N=C)
    grid = launch.cdiv(C, tile["BLOCK_N"]) * launch.cdiv(M, tile["BLOCK_M"]) * taps * groups
    scalars = (C, M, taps * M, 1, 0, M, 0, 0, taps - 1, -1)
    launch_ = launch.Prepared(conv_turn_kernel, (grid,), scalars, {"JH": 1, "JW": taps, **tile.options})
    return Copy(shape or (groups * M, taps, C), launch_)
