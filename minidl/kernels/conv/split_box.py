"""The "split" form on boxes: `boxed` on float32 operands that `split` has split into two tf32 parts.

The parts of x are 2 N images and those of the weights 2 M rows; three products of their blocks are added (`split`).
"""

from __future__ import annotations

from typing import NamedTuple

from minidl.kernels.conv import boxed, costs, split
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import CORRELATIONS, Problem, Tensors, Unsupported
from minidl.runtime import launch

NAME = "split"
DIRECTIONS = CORRELATIONS
FAMILIES = ("conv_split_box", "conv_split")


class Prepared(NamedTuple):
    """The copies of x and of the weights to parts, and the product."""

    x: Copy
    w: Copy
    launch: launch.Prepared


def able(problem: Problem) -> bool | Unsupported:
    return split.able(problem, 2 * problem.N * problem.image_bytes) and boxed.able(problem)


def estimate(problem: Problem) -> float:
    weights = problem.groups * problem.M * problem.taps * problem.C * problem.dtype.itemsize
    copies = split.copy_time(problem, problem.N * problem.image_bytes) + split.copy_time(problem, weights)
    tile = boxed.tile_of(problem, split=True)
    return copies + costs.launch_time(problem, boxed.microseconds(problem, tile, split=True))


def prepare(problem: Problem) -> Prepared:
    H, W = problem.read
    row = problem.pitches[0] if problem.pitches else W * problem.groups * problem.C
    return Prepared(
        split.prepare(problem, (problem.N, H, row)),
        split.prepare(problem, (problem.groups * problem.M, problem.taps * problem.C)),
        boxed.prepare(problem, split=True),
    )


def run(prepared: Prepared, t: Tensors) -> None:
    boxed.run(prepared.launch, t._replace(x=prepared.x.run(t.x), w=prepared.w.run(t.w)))
