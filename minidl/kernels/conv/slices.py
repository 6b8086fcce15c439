"""Volumes in the depthwise form: the slices that outputs of a walk in depth are, as images, and a loop over the slices
that they read. Nothing is copied but weights. A way back with a stride in depth is a launch for each walk."""

from __future__ import annotations

import torch

from minidl.kernels.conv import depthwise, depthwise_grad_weight
from minidl.kernels.conv.geometry import Axis, Phase, Volume
from minidl.kernels.conv.narrow import Depth
from minidl.kernels.conv.prepared import Product, Shares
from minidl.kernels.conv.problem import TRANSPOSED, Problem, Tensors
from minidl.kernels.conv.stacks import as_they_are
from minidl.runtime import launch


def _needed(volume: Volume) -> bool:
    """Whether outputs read several slices, or others than that of their own place."""
    return not volume.flat and not as_they_are(volume.d.forward(), volume.d.size)


def _images(problem: Problem, N: int, d: Axis, phase: Phase) -> Problem:
    """Of the slices of a walk's outputs as images."""
    at, back = problem.geometry, problem.direction == TRANSPOSED
    found = problem._replace(N=N * phase.count)
    if back:
        C, rows = problem.M, d.kernel * at.h.kernel
        found = found._replace(strides=(rows * at.w.kernel * C, 1, at.w.kernel * C, C))
    return found


@launch.cached
def prepare(problem: Problem, N: int, volume: Volume) -> tuple[Product, ...]:
    """The launches in the depthwise form, one for each walk in depth; none where that is not able."""
    d, back = volume.d, problem.direction == TRANSPOSED
    if not _needed(volume):
        return ()
    phases = [phase.rising for phase in d.backward()] if back else [d.forward()]
    size, written = (d.output, d.size) if back else (d.size, d.output)
    made = [(_images(problem, N, d, phase), Depth(size, written, phase, d.kernel)) for phase in phases]
    if not all(depthwise.able(each) for each, _ in made):
        return ()
    return tuple(depthwise.prepare(each, depth) for each, depth in made)


@launch.cached
def grad_weight(problem: Problem, N: int, volume: Volume) -> Shares | None:
    """The launches of the gradient of the weight in the depthwise form; None where that is not able."""
    d = volume.d
    images = _images(problem, N, d, d.forward())
    if not _needed(volume) or not depthwise_grad_weight.able(images):
        return None
    return depthwise_grad_weight.prepare(images, Depth(d.size, d.output, d.forward(), d.kernel))


def run(
    slices: tuple[Product, ...], x: torch.Tensor, w: torch.Tensor, volume: Volume, problem: Problem,
    bias: torch.Tensor | None = None, scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    back = problem.direction == TRANSPOSED
    written = (axis.size if back else axis.output for axis in volume.axes)
    y = torch.empty(x.shape[0], *written, problem.groups * problem.M, dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if problem.preactivation else None
    bias, scale = (None if t is None else t.contiguous() for t in (bias, scale))
    ordered = w.permute(0, 2, 3, 4, 1).contiguous()
    for each in slices:
        each.run(Tensors(x, ordered, y, bias, scale, z))
    return y.movedim(-1, 1), None if z is None else z.movedim(-1, 1)
