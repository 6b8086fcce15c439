"""The layout of the copies of a "split" weight gradient's operands, and the number of images that it copies at once."""

from __future__ import annotations

from typing import NamedTuple

from minidl.kernels.conv.problem import Problem
from minidl.runtime import launch

MOST = 2**31  # maximum bytes of the parts of a convolution, or of a slice of its images


class Places(NamedTuple):
    """The layout of pixels [N, H, W] of GROUPS groups of C channels in parts [1 or 2, remainders, GROUPS, columns, C,
    places].

    The place (n, h, w), of N x height x width, of remainder a and column j is the pixel (n, first_h + a + h step_h,
    first_w + j tap_w + w step_w), or zero if there is none. Rows of places are `pitch` values apart.
    """

    N: int
    H: int
    W: int
    GROUPS: int
    C: int
    height: int
    width: int
    first_h: int
    step_h: int
    remainders: int
    first_w: int
    step_w: int
    tap_w: int
    columns: int
    pitch: int

    @property
    def rows(self) -> int:
        """Return the number of rows of one part."""
        return self.remainders * self.GROUPS * self.columns * self.C

    @property
    def length(self) -> int:
        """Return the number of places of a row."""
        return self.N * self.height * self.width


def parts(problem: Problem) -> int:
    """Return the number of parts of an operand: hi alone for the precision "tf32"."""
    return 1 if problem.precision == "tf32" else 2


def slice_of(problem: Problem) -> tuple[Problem, bool]:
    """Return the problem of as many images as have copies of at most `MOST` bytes, and whether dy and x are
    exchanged."""
    across, down = problem.at.across, problem.at.down
    alike = problem.taps == 1 and problem.read == problem.written and across.in_step == down.in_step == 1
    larger = problem.C > problem.M or not in_place(problem, problem.M)
    transposed = alike and larger and in_place(problem, problem.C)
    if transposed:
        problem = problem._replace(C=problem.M, M=problem.C)
    images = problem.N * MOST // max(MOST, written(problem))
    return problem._replace(N=max(min(problem.N, 1), images)), transposed


def in_place(problem: Problem, channels: int) -> bool:
    """Return whether blocks of a group's channels can be read where they lie."""
    return problem.boxes(channels, problem.aligned)


def written(problem: Problem) -> int:
    """Return the bytes of the copies."""
    x, dy = places_of(problem)
    return parts(problem) * problem.dtype.itemsize * (x.rows + (dy.rows if dy else 0)) * x.pitch


def places_of(problem: Problem) -> tuple[Places, Places | None]:
    """Return the places of x and of dy; None for dy in place."""
    down, across = problem.at.down, problem.at.across
    (H, W), (OH, OW) = problem.read, problem.written
    alone = len(down.taps) == 1
    # A single row of taps has one remainder, in which x begins.
    first, remainders = (down.in_start % down.in_step, 1) if alone else (0, down.in_step)
    starts = [down.in_start - first + j * down.in_tap for j in range(len(down.taps))]
    above, below = min(starts) // down.in_step, max(starts) // down.in_step
    height = max(launch.cdiv(H - first, down.in_step) - min(above, 0), OH + max(below, 0))
    width = launch.cdiv(OW, 4) * 4
    reads_dy = alone and in_place(problem, problem.M)
    if reads_dy:  # the places are the pixels of dy
        first, height, width = down.in_start, OH, OW
    pitch = launch.cdiv(problem.N * height * width, 4) * 4
    x = Places(
        problem.N, H, W, problem.groups, problem.C, height, width, first, down.in_step, remainders,
        across.in_start, across.in_step, across.in_tap, len(across.taps), pitch,
    )  # fmt: skip
    dy = Places(problem.N, OH, OW, problem.groups, problem.M, height, width, 0, 1, 1, 0, 1, 1, 1, pitch)
    return x, None if reads_dy else dy
