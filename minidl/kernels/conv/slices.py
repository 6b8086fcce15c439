"""Volumes in the depthwise form: the output slices of a phase in depth are images, with a loop over input slices.

Only weights are copied. A transposed convolution with a stride in depth is one launch per phase."""

from __future__ import annotations

import torch

from minidl.kernels.conv import depthwise, depthwise_grad_weight
from minidl.kernels.conv.geometry import Axis, Phase, Volume
from minidl.kernels.conv.narrow import Depth
from minidl.kernels.conv.prepared import Product, Shares
from minidl.kernels.conv.problem import TRANSPOSED, Problem, Tensors
from minidl.kernels.conv.stacks import is_identity
from minidl.runtime import launch


def _reads_several(volume: Volume) -> bool:
    """Return whether output q reads several slices, or another slice than q."""
    return not volume.flat and not is_identity(volume.d.forward(), volume.d.size)


def _images(problem: Problem, N: int, d: Axis, phase: Phase) -> Problem:
    """Return the problem whose images are the output slices of a phase."""
    at, back = problem.geometry, problem.direction == TRANSPOSED
    images = problem._replace(N=N * phase.count)
    if back:
        C, rows = problem.M, d.kernel * at.h.kernel
        images = images._replace(strides=(rows * at.w.kernel * C, 1, at.w.kernel * C, C))
    return images


@launch.cached
def prepare(problem: Problem, N: int, volume: Volume) -> tuple[Product, ...]:
    """Return the depthwise launches, one per phase in depth; () if unsupported."""
    d, back = volume.d, problem.direction == TRANSPOSED
    if not _reads_several(volume):
        return ()
    phases = [phase.rising for phase in d.backward()] if back else [d.forward()]
    size, written = (d.output, d.size) if back else (d.size, d.output)
    images = [(_images(problem, N, d, phase), Depth(size, written, phase, d.kernel)) for phase in phases]
    if not all(depthwise.able(each) for each, _ in images):
        return ()
    return tuple(depthwise.prepare(each, depth) for each, depth in images)


@launch.cached
def grad_weight(problem: Problem, N: int, volume: Volume) -> Shares | None:
    """Return the depthwise launches of the weight gradient; None if unsupported."""
    d = volume.d
    images = _images(problem, N, d, d.forward())
    if not _reads_several(volume) or not depthwise_grad_weight.able(images):
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
