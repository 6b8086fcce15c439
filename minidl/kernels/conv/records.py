"""Argument records that the forms of a convolution share: which inputs an output reads, and where it is stored.

    x [N, H, W, GROUPS * C]                      y [N, OH, OW, GROUPS * M]
    in + q IN_STEP + j IN_TAP, taps j  ------->  out + q OUT_STEP              along each axis

q counts the outputs of a phase (`geometry.Phase`). All fields of `Taps` are constants; those of `Outputs` and `Weights`
are run-time numbers. An example: the gradient of the input of a 3x3 convolution with padding 1, by weights [C, R, S, M]
in place, has the taps (2, 1, 0) along each axis, so Weights(8 M, -3 M, -M) and Outputs.in_h = -1.
"""

from __future__ import annotations

from typing import NamedTuple

from minidl.kernels.conv.problem import Problem


class Taps(NamedTuple):
    """Constants: C channels of a group at JH x JW taps, and the distances between inputs and between outputs."""

    C: int
    JH: int
    JW: int
    IN_STEP_H: int
    IN_STEP_W: int
    IN_TAP_H: int
    IN_TAP_W: int
    OUT_STEP_H: int
    OUT_STEP_W: int

    @staticmethod
    def of(problem: Problem) -> Taps:
        """Return the taps of a problem's pair of phases."""
        down, across = problem.at.down, problem.at.across
        return Taps(
            problem.C, len(down.taps), len(across.taps), down.in_step, across.in_step, down.in_tap, across.in_tap,
            down.out_step, across.out_step,
        )  # fmt: skip


class Outputs(NamedTuple):
    """QH x QW outputs of N images with M channels in each of GROUPS groups; the first reads (in_h, in_w) and is pixel
    (out_h, out_w) of OH x OW."""

    N: int
    QH: int
    QW: int
    OH: int
    OW: int
    M: int
    GROUPS: int
    in_h: int
    in_w: int
    out_h: int
    out_w: int

    @staticmethod
    def of(problem: Problem) -> Outputs:
        """Return the outputs of a problem's pair of phases."""
        down, across = problem.at.down, problem.at.across
        return Outputs(
            problem.N, down.count, across.count, *problem.written, problem.M, problem.groups,
            down.in_start, across.in_start, down.out_start, across.out_start,
        )  # fmt: skip


class Weights(NamedTuple):
    """In values, the offset of the first tap in a row of w and the distances to the next tap down and across.

    w is [groups * C, R, S, M] if read in place, else [groups * M, JH, JW, C], where kernels ignore them.
    """

    start: int
    tap_h: int
    tap_w: int

    @staticmethod
    def of(problem: Problem) -> Weights:
        """Return the offset and the distances of a problem's pair of phases."""
        down, across, M = problem.at.down, problem.at.across, problem.M
        row = (problem.geometry.w.kernel if problem.in_place else len(across.taps)) * M
        return Weights(down.taps[0] * row + across.taps[0] * M, down.tap_step * row, across.tap_step * M)
