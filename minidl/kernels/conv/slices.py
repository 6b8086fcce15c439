"""Volumes in the depthwise form: the output slices of a phase in depth are images, with a loop over input slices.

Only weights are copied. A transposed convolution with a stride in depth is one launch per phase."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels.conv import depthwise, depthwise_grad_weight, stacks
from minidl.kernels.conv.narrow import Depth
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Tensors
from minidl.kernels.conv.voxels import VolumeProblem

NAME = "depthwise"


def _images(problem: VolumeProblem) -> list[tuple[Problem, Depth]]:
    """Return the problem whose images are the output slices of a phase, and its depth, for all phases in depth."""
    of_slices, d, sizes = problem.problem, problem.d, (problem.read[0], problem.written[0])
    if problem.back:
        h, w, _ = of_slices.geometry
        strides = d.kernel * h.kernel * w.kernel * of_slices.M, 1, w.kernel * of_slices.M, of_slices.M
        of_slices = of_slices._replace(strides=strides)
    return [
        (of_slices._replace(N=of_slices.N * phase.count), Depth(*sizes, phase, d.kernel))
        for phase in problem.depth_phases
    ]  # fmt: skip


def _form(problem: VolumeProblem) -> Any:
    return depthwise_grad_weight if problem.problem.direction == GRAD_WEIGHT else depthwise


def able(problem: VolumeProblem) -> bool:
    """Return whether groups are narrow enough, and an output reads several slices or another slice than its own."""
    return stacks.name(problem) == "stack" and all(_form(problem).able(images) for images, _ in _images(problem))


def prepare(problem: VolumeProblem) -> list[Any]:
    """Return the depthwise launches, one per phase in depth."""
    return [_form(problem).prepare(images, depth) for images, depth in _images(problem)]


def run(problem: VolumeProblem, prepared: list[Any], t: Tensors) -> torch.Tensor | None:
    """Write y, and z if there is one; for GRAD_WEIGHT return dw [groups * M, Q, R, S, C]."""
    if problem.problem.direction == GRAD_WEIGHT:
        dw: torch.Tensor = prepared[0].run(t.w, t.x)
        return dw
    t = t._replace(w=t.w.permute(0, 2, 3, 4, 1).contiguous())
    for each in prepared:
        each.run(t)
    return None
