"""3-D convolution: forward and both gradients, as convolutions of images that a volume is seen as.

    x  [N, groups * C, D, H, W]     w  [groups * M, C, Q, R, S]     y  [N, groups * M, OD, OH, OW]
    y[n, m, od, oh, ow] = act(sum of x[n, c, od stride - padding + q dilation, ...] w[m, c, q, r, s] + bias[m])

Shapes are torch's; memory is channels-last inside ([N, D, H, W, C]), as in `conv`. What the images are:

    a kernel of 1 x R x S   slices, [N * D, H, W, C]; those that a stride leaves out are not copied
    a kernel of Q x 1 x 1   one of D rows to a volume, [N, D, H * W, C]
    a kernel of 1 x 1 x 1   the same, of a copy of the voxels that it reads where it has strides
    any other               the slices that an output reads, side by side as channels: [N * OD, H, W, Q * C]

So all taps of an output are one sum in the type that is accumulated in, whatever form the plan takes, and the first two
copy nothing. The last one ("stack") writes and reads x Q times, with zeros for slices outside. Where boxes of voxels
(`cubes`) are able and estimated to take less time than that, nothing is copied either, nor where each channel or each
output has a group of its own: the depthwise form has a loop over slices.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import check, conv
from minidl.kernels.activation import Activation
from minidl.kernels.conv import cubes, cubes_grad_weight, slices, voxels
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.geometry import Axis, Phase, Volume
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem
from minidl.kernels.conv.stacks import as_they_are, stacked
from minidl.kernels.conv.voxels import Cubes
from minidl.runtime import launch
from minidl.runtime.cost_model import selection
from minidl.runtime.launch_cache.replay import replayed

# Of an estimate for slices side by side: on an H100 27 took 1.01 to 2.2 of it, 1.34 in geometric mean, boxes 1.09.
STACKED = 1.25


@replayed
def forward(
    x: torch.Tensor,
    w: torch.Tensor,
    volume: Volume,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    scale: torch.Tensor | None = None,
    preactivation: bool = False,
    form: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, z) as `conv.forward` has them. Raises as that. form: "cube" or "stack", where it is able."""
    _check(x, w)
    M, C, Q, R, S = w.shape
    epilogue = bias is not None, scale is not None, act, None, preactivation
    if volume.dense is not None:
        # Boxes read these voxels in place: 64->128 at 16x56x56, 8 volumes, stride 2, copied first 42 us, cuDNN 13.
        problem = _problem(x, w, volume, C, M // volume.groups, *epilogue)
        lies = x.is_contiguous(memory_format=torch.channels_last_3d)
        if form == "stack" or not lies or _chosen(problem, x.shape[0], volume.d, False, "cube") is None:
            x, volume = volume.read_by(x), volume.dense
        else:
            form = "cube"
    d, plane = volume
    x = conv.channels_last(x)
    problem = _problem(x, w, volume, C, M // plane.groups, *epilogue)
    boxes = None if volume.flat else _chosen(problem, x.shape[0], d, False, form)
    if boxes is not None:
        return _in_cubes(boxes, x, w, bias, scale)
    made = () if form else slices.prepare(problem, x.shape[0], volume)
    if made:
        return slices.run(made, x, w, volume, problem, bias, scale)
    if volume.flat:
        images, geometry, w = x.flatten(2, 3), volume.columns, w.reshape(M, C, Q, 1)
    else:
        images, geometry = stacked(x, d.forward(), plane.groups), plane
        w = _pictures(w.permute(0, 3, 4, 2, 1).reshape(M, R, S, Q * C))
    results = conv.forward(
        _pictures(images), w, geometry, bias, act, scale=scale, preactivation=preactivation
    )  # fmt: skip
    y, z = (None if t is None else _volumes(t, x.shape[0], d.output, plane.h.output, plane.w.output) for t in results)
    assert y is not None
    return y, z


@replayed
def grad_input(dy: torch.Tensor, w: torch.Tensor, volume: Volume, *, form: str | None = None) -> torch.Tensor:
    """The gradient [N, groups * C, D, H, W] of the input, given that of the output, dy [N, groups * M, OD, OH, OW]."""
    _check(dy, w)
    d, plane = volume
    N, groups = dy.shape[0], plane.groups
    M, C, Q, R, S = w.shape
    sizes = N, d.size, plane.h.size, plane.w.size, groups * C
    if 0 in sizes:
        return dy.new_empty(sizes).movedim(-1, 1)
    if volume.dense is not None:
        dx = torch.zeros(sizes, dtype=dy.dtype, device=dy.device).movedim(-1, 1)
        volume.read_by(dx).copy_(grad_input(dy, w, volume.dense))
        return dx
    dy = conv.channels_last(dy)
    if volume.flat:
        dx = conv.grad_input(_pictures(dy.flatten(2, 3)), w.reshape(M, C, Q, 1), volume.columns)
        return _volumes(dx, N, d.size, plane.h.size, plane.w.size)
    problem = _problem(dy, w, volume, M // groups, C)
    boxes = _chosen(problem, N, d, True, form, voxels.lie(w, groups))
    if boxes is not None:
        return _in_cubes(boxes, dy, w)[0]
    made = () if form else slices.prepare(problem._replace(direction=TRANSPOSED), N, volume)
    if made:
        return slices.run(made, dy, w, volume, problem._replace(direction=TRANSPOSED))[0]
    parts = []
    for phase in (phase.rising for phase in d.backward()):
        images = stacked(dy, phase, groups)
        step = max(1, phase.tap_step)
        taps = w[:, :, phase.taps[0] : phase.taps[-1] + 1 : step].unflatten(0, (groups, M // groups))
        # [groups, taps, M, R, S, C], as the way back reads weights in place.
        turned = taps.permute(0, 3, 1, 4, 5, 2).reshape(M * len(phase.taps), R, S, C)
        part = conv.grad_input(_pictures(images), _pictures(turned), plane)
        parts.append(_volumes(part, N, phase.count, plane.h.size, plane.w.size))
    if len(parts) == 1:
        return parts[0]
    sizes = N, d.size, plane.h.size, plane.w.size, groups * C
    dx = torch.empty(sizes, dtype=dy.dtype, device=dy.device).movedim(-1, 1)
    for phase, part in zip(d.backward(), parts, strict=True):
        dx[:, :, phase.out_start :: phase.out_step].copy_(part)
    return dx


@replayed
def grad_weight(x: torch.Tensor, dy: torch.Tensor, volume: Volume, *, form: str | None = None) -> torch.Tensor:
    """The weight gradient [groups * M, C, Q, R, S], given x [N, groups * C, D, H, W] and dy [N, groups * M, ...]."""
    _check(x, dy)
    if volume.dense is not None:
        x, volume = volume.read_by(x), volume.dense
    d, plane = volume
    x, dy = conv.channels_last(x), conv.channels_last(dy)
    Q, R, S, C = d.kernel, plane.h.kernel, plane.w.kernel, x.shape[-1] // plane.groups
    if volume.flat:
        dw = conv.grad_weight(_pictures(x.flatten(2, 3)), _pictures(dy.flatten(2, 3)), volume.columns)
        return dw.unsqueeze(-1)
    if x.numel() > 0 and dy.numel() > 0:
        problem = _problem(x, dy, volume, C, dy.shape[-1] // plane.groups)._replace(direction=GRAD_WEIGHT)
        boxes = _chosen_weight(problem, x.shape[0], d, form)
        if boxes is not None:
            return cubes_grad_weight.run(boxes, x, dy)
        deep = None if form else slices.grad_weight(problem, x.shape[0], volume)
        if deep is not None:
            return deep.run(dy, x).movedim(-1, 1)
    dw = conv.grad_weight(_pictures(stacked(x, d.forward(), plane.groups)), _pictures(dy.flatten(0, 1)), plane)
    dw = dw.permute(0, 2, 3, 1).reshape(dw.shape[0], R, S, Q, C).permute(0, 4, 3, 1, 2)
    return dw.contiguous(memory_format=torch.channels_last_3d)


def _problem(x: torch.Tensor, w: torch.Tensor, volume: Volume, C: int, M: int, *epilogue: Any) -> Problem:
    """Of slices of x [N, D, H, W, channels]: what is the same for every way to compute it."""
    aligned = x.data_ptr() % 16 == 0 == w.data_ptr() % 16
    made = Problem(FORWARD, volume.plane, x.shape[0], C, M, x.dtype, launch.precision(x.dtype), *epilogue)
    return made._replace(aligned=aligned, target=launch.target(), processors=launch.processors())


@launch.cached
def _chosen(problem: Problem, N: int, d: Axis, back: bool, form: str | None, turn: bool = False) -> Cubes | None:
    """The launch in boxes of voxels; None where these are not able or stacks are estimated to take less time."""
    axes = d, problem.geometry.h, problem.geometry.w
    made = voxels.backward(problem, N, axes, turn) if back else voxels.forward(problem, N, axes)
    if form == "stack" or not cubes.able(made):
        return None
    if form == "cube" or cubes.estimate(made) <= _of_stacks(problem, N, d, back):
        return made
    return None


@launch.cached
def _chosen_weight(problem: Problem, N: int, d: Axis, form: str | None) -> cubes_grad_weight.Weights | None:
    """The launches of the gradient of the weight in boxes of voxels, or None, as `_chosen`."""
    plane = problem.geometry
    axes = d, plane.h, plane.w
    made = voxels.forward(problem, N, axes)
    if form == "stack" or not cubes_grad_weight.able(made):
        return None
    if form != "cube":
        images = problem._replace(N=N * d.output, C=problem.C * d.kernel)
        if _of_images(images, d.forward(), d.size, plane.h.size, plane.w.size) < cubes_grad_weight.estimate(made):
            return None
    return cubes_grad_weight.prepare(made)


def _of_stacks(problem: Problem, N: int, d: Axis, back: bool) -> float:
    """Microseconds of the copies and of the images' convolutions."""
    plane, M = problem.geometry, problem.M
    device = selection.of(problem.target)
    # The weights are copied, too, in another order: 14 MB in some 24 us on an H100.
    weights = d.kernel * plane.h.kernel * plane.w.kernel * problem.groups * problem.C * M * problem.dtype.itemsize
    total = device.launch + 8 * weights / device.copy if problem.paced else 0.0
    D, h, w = (d.output, plane.h.output, plane.w.output) if back else (d.size, plane.h.size, plane.w.size)
    for phase in d.backward() if back else [d.forward()]:
        images = problem._replace(N=N * phase.count, C=problem.C * len(phase.taps))
        if back:
            turned = plane.h.kernel * plane.w.kernel * M, 1, plane.w.kernel * M, M
            images = images._replace(direction=TRANSPOSED, strides=turned)
        total += _of_images(images, phase, D, h, w)
        if d.stride > 1 and back:
            written = images.N * plane.h.size * plane.w.size * problem.groups * M * problem.dtype.itemsize
            total += device.launch + 2 * written / device.copy
    return total


def _of_images(images: Problem, phase: Phase, D: int, h: int, w: int) -> float:
    """Of the convolution of images that are stacks of slices [h, w], and of the copy that these are."""
    device, time = selection.of(images.target), plans.plan(images).microseconds
    if as_they_are(phase, D):
        return time
    # Written, and a part of it read before.
    copied = 1.5 * images.N * h * w * images.groups * images.C * images.dtype.itemsize
    return (STACKED if images.paced else 1.0) * (time + device.launch + copied / device.copy)


def _in_cubes(
    boxes: Cubes, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    problem = boxes.problem
    sizes = x.shape[0], *boxes.written, problem.groups * problem.M
    y = torch.empty(sizes, dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if problem.preactivation else None
    bias, scale = (None if t is None else t.contiguous() for t in (bias, scale))
    cubes.prepare(boxes).run(x, cubes.weights(w, boxes), bias, scale, y, z)
    return y.movedim(-1, 1), None if z is None else z.movedim(-1, 1)


def forms(x: torch.Tensor, w: torch.Tensor, volume: Volume, back: bool) -> tuple[str, ...]:
    """How y may be computed of x and w, or back dx of dy; the first one is what is taken."""
    if volume.flat or volume.dense is not None:
        # With strides forward in boxes of voxels, where they are able.
        return ("columns",)
    if as_they_are(volume.d.forward(), volume.d.size):
        return ("slices",)
    x, groups = conv.channels_last(x), volume.groups
    M, C = w.shape[0] // groups, w.shape[1]
    problem = _problem(x, w, volume, *((M, C) if back else (C, M)))
    if slices.prepare(problem._replace(direction=TRANSPOSED) if back else problem, x.shape[0], volume):
        return ("depthwise",)
    turn = back and voxels.lie(w, groups)
    made = [_chosen(problem, x.shape[0], volume.d, back, form, turn) for form in (None, "cube")]
    if made[1] is None:
        return ("stack",)
    return ("stack", "cube") if made[0] is None else ("cube", "stack")


def _pictures(x: torch.Tensor) -> torch.Tensor:
    """[N, H, W, C] as torch has the shape."""
    return x.permute(0, 3, 1, 2)


def _volumes(y: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Images of `sizes`, [N, D, H, W], as torch has the shape of volumes."""
    return y.permute(0, 2, 3, 1).reshape(*sizes, y.shape[1]).movedim(-1, 1)


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    check.floating("conv3d", x=a, w=b)
    check.same("conv3d", x=a, w=b)
