"""3-D convolution: forward and both gradients, as 2-D convolutions of views or copies, or with boxes of voxels.

    x  [N, groups * C, D, H, W]     w  [groups * M, C, Q, R, S]     y  [N, groups * M, OD, OH, OW]
    y[n, m, od, oh, ow] = act(sum of x[n, c, od stride - padding + q dilation, ...] w[m, c, q, r, s] + bias[m])

Shapes are torch's; memory is channels-last ([N, D, H, W, C]), as in `conv`. The images of the 2-D convolution are

    for a kernel of 1 x R x S   slices, [N * D, H, W, C], without those that a stride skips
    for a kernel of Q x 1 x 1   one image of D rows per volume, [N, D, H * W, C]
    for a kernel of 1 x 1 x 1   the same; with strides, of a copy of the voxels that are read
    otherwise ("stack")         the slices that an output reads, as channels: [N * OD, H, W, Q * C]

So the taps of an output are a single sum in the accumulator's dtype with every form. The first two copy nothing.
"stack" writes and reads x Q times, with zeros for slices outside. Boxes of voxels ("cube", `cubes`) copy nothing and
are used if they support the problem and are estimated to be faster. Depthwise convolutions loop over slices instead
(`slices`).
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import check, conv
from minidl.kernels.activation import Activation
from minidl.kernels.conv import costs, cubes, cubes_grad_weight, slices, voxels
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.geometry import Axis, Phase, Volume
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem
from minidl.kernels.conv.stacks import is_identity, stack_slices
from minidl.kernels.conv.voxels import Cubes
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

# Factor on the estimate of "stack": on an H100 27 took 1.01 to 2.2 times it, 1.34 in geometric mean, boxes 1.09.
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
    """Return (y, z) as `conv.forward` does, with the same exceptions. form: "cube", if supported, or "stack"."""
    _check(x, w)
    M, C, Q, R, S = w.shape
    epilogue = bias is not None, scale is not None, act, None, preactivation
    if volume.dense is not None:
        # "cube" reads the voxels in place: 64->128 at 16x56x56, 8 volumes, stride 2, copied first 42 us, cuDNN 13.
        problem = _problem(x, w, volume, C, M // volume.groups, *epilogue)
        contiguous = x.is_contiguous(memory_format=torch.channels_last_3d)
        if form == "stack" or not contiguous or _chosen(problem, x.shape[0], volume.d, False, "cube") is None:
            x, volume = volume.read_by(x), volume.dense
        else:
            form = "cube"
    d, plane = volume
    x = conv.channels_last(x)
    problem = _problem(x, w, volume, C, M // plane.groups, *epilogue)
    boxes = None if volume.flat else _chosen(problem, x.shape[0], d, False, form)
    if boxes is not None:
        return _run_cubes(boxes, x, w, bias, scale)
    launches = () if form else slices.prepare(problem, x.shape[0], volume)
    if launches:
        return slices.run(launches, x, w, volume, problem, bias, scale)
    if volume.flat:
        images, geometry, w = x.flatten(2, 3), volume.columns, w.reshape(M, C, Q, 1)
    else:
        images, geometry = stack_slices(x, d.forward(), plane.groups), plane
        w = _pictures(w.permute(0, 3, 4, 2, 1).reshape(M, R, S, Q * C))
    results = conv.forward(
        _pictures(images), w, geometry, bias, act, scale=scale, preactivation=preactivation
    )  # fmt: skip
    y, z = (None if t is None else _volumes(t, x.shape[0], d.output, plane.h.output, plane.w.output) for t in results)
    assert y is not None
    return y, z


@replayed
def grad_input(dy: torch.Tensor, w: torch.Tensor, volume: Volume, *, form: str | None = None) -> torch.Tensor:
    """Return the gradient of the input, [N, groups * C, D, H, W], from dy [N, groups * M, OD, OH, OW]."""
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
    boxes = _chosen(problem, N, d, True, form, voxels.weights_in_place(w, groups))
    if boxes is not None:
        return _run_cubes(boxes, dy, w)[0]
    launches = () if form else slices.prepare(problem._replace(direction=TRANSPOSED), N, volume)
    if launches:
        return slices.run(launches, dy, w, volume, problem._replace(direction=TRANSPOSED))[0]
    parts = []
    for phase in (phase.rising for phase in d.backward()):
        images = stack_slices(dy, phase, groups)
        step = max(1, phase.tap_step)
        taps = w[:, :, phase.taps[0] : phase.taps[-1] + 1 : step].unflatten(0, (groups, M // groups))
        # [groups, taps, M, R, S, C], which backward kernels read in place.
        reordered = taps.permute(0, 3, 1, 4, 5, 2).reshape(M * len(phase.taps), R, S, C)
        part = conv.grad_input(_pictures(images), _pictures(reordered), plane)
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
    """Return the weight gradient [groups * M, C, Q, R, S] from x [N, groups * C, D, H, W] and dy."""
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
    dw = conv.grad_weight(_pictures(stack_slices(x, d.forward(), plane.groups)), _pictures(dy.flatten(0, 1)), plane)
    dw = dw.permute(0, 2, 3, 1).reshape(dw.shape[0], R, S, Q, C).permute(0, 4, 3, 1, 2)
    return dw.contiguous(memory_format=torch.channels_last_3d)


def _problem(x: torch.Tensor, w: torch.Tensor, volume: Volume, C: int, M: int, *epilogue: Any) -> Problem:
    """Return the problem of slices of x [N, D, H, W, channels], as the common base of all forms."""
    aligned = x.data_ptr() % 16 == 0 == w.data_ptr() % 16
    problem = Problem(FORWARD, volume.plane, x.shape[0], C, M, x.dtype, launch.precision(x.dtype), *epilogue)
    return problem._replace(aligned=aligned, target=launch.target(), processors=launch.processors())


@launch.cached
def _chosen(problem: Problem, N: int, d: Axis, back: bool, form: str | None, turn: bool = False) -> Cubes | None:
    """Return the launch with boxes of voxels; None if unsupported or estimated to be slower than stacks."""
    axes = d, problem.geometry.h, problem.geometry.w
    launch_ = voxels.backward(problem, N, axes, turn) if back else voxels.forward(problem, N, axes)
    if form == "stack" or not cubes.able(launch_):
        return None
    if form == "cube" or cubes.estimate(launch_) <= _stack_time(problem, N, d, back):
        return launch_
    return None


@launch.cached
def _chosen_weight(problem: Problem, N: int, d: Axis, form: str | None) -> cubes_grad_weight.Weights | None:
    """Return the weight gradient's launches with boxes of voxels, or None, as `_chosen` does."""
    plane = problem.geometry
    axes = d, plane.h, plane.w
    launch_ = voxels.forward(problem, N, axes)
    if form == "stack" or not cubes_grad_weight.able(launch_):
        return None
    if form != "cube":
        images = problem._replace(N=N * d.output, C=problem.C * d.kernel)
        if _images_time(images, d.forward(), d.size, plane.h.size, plane.w.size) < cubes_grad_weight.estimate(launch_):
            return None
    return cubes_grad_weight.prepare(launch_)


def _stack_time(problem: Problem, N: int, d: Axis, back: bool) -> float:
    """Return the microseconds of the copies and convolutions of "stack"."""
    plane, M = problem.geometry, problem.M
    # The weights are reordered, too: 14 MB in some 24 us on an H100.
    weights = d.kernel * plane.h.kernel * plane.w.kernel * problem.groups * problem.C * M * problem.dtype.itemsize
    total = costs.copy_time(problem, 8 * weights)
    D, h, w = (d.output, plane.h.output, plane.w.output) if back else (d.size, plane.h.size, plane.w.size)
    for phase in d.backward() if back else [d.forward()]:
        images = problem._replace(N=N * phase.count, C=problem.C * len(phase.taps))
        if back:
            strides = plane.h.kernel * plane.w.kernel * M, 1, plane.w.kernel * M, M
            images = images._replace(direction=TRANSPOSED, strides=strides)
        total += _images_time(images, phase, D, h, w)
        if d.stride > 1 and back:
            written = images.N * plane.h.size * plane.w.size * problem.groups * M * problem.dtype.itemsize
            total += costs.copy_time(problem, 2 * written)
    return total


def _images_time(images: Problem, phase: Phase, D: int, h: int, w: int) -> float:
    """Return the microseconds of a convolution of stacked slices [h, w], including their copy."""
    time = plans.plan(images).microseconds
    if is_identity(phase, D):
        return time
    # Bytes written, and partly read.
    copied = 1.5 * images.N * h * w * images.groups * images.C * images.dtype.itemsize
    return STACKED * (time + costs.copy_time(images, copied))


def _run_cubes(
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
    """Return the forms that can compute y from x and w (with `back` dx from dy); the first one is chosen."""
    if volume.flat or volume.dense is not None:
        # A strided forward pass uses boxes of voxels if supported.
        return ("columns",)
    if is_identity(volume.d.forward(), volume.d.size):
        return ("slices",)
    x, groups = conv.channels_last(x), volume.groups
    M, C = w.shape[0] // groups, w.shape[1]
    problem = _problem(x, w, volume, *((M, C) if back else (C, M)))
    if slices.prepare(problem._replace(direction=TRANSPOSED) if back else problem, x.shape[0], volume):
        return ("depthwise",)
    turn = back and voxels.weights_in_place(w, groups)
    launches = [_chosen(problem, x.shape[0], volume.d, back, form, turn) for form in (None, "cube")]
    if launches[1] is None:
        return ("stack",)
    return ("stack", "cube") if launches[0] is None else ("cube", "stack")


def _pictures(x: torch.Tensor) -> torch.Tensor:
    """Return [N, H, W, C] in torch's shape."""
    return x.permute(0, 3, 1, 2)


def _volumes(y: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return images as volumes of `sizes`, [N, D, H, W], in torch's shape."""
    return y.permute(0, 2, 3, 1).reshape(*sizes, y.shape[1]).movedim(-1, 1)


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    check.floating("conv3d", x=a, w=b)
    check.same("conv3d", x=a, w=b)
