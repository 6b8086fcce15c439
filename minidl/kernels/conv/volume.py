"""3-D convolution: forward and both gradients, as convolutions of images that a volume is seen as.

    x  [N, groups * C, D, H, W]     w  [groups * M, C, Q, R, S]     y  [N, groups * M, OD, OH, OW]
    y[n, m, od, oh, ow] = act(sum of x[n, c, od stride - padding + q dilation, ...] w[m, c, q, r, s] + bias[m])

Shapes are torch's; memory is channels-last inside ([N, D, H, W, C]), as in `conv`. What the images are:

    a kernel of 1 x R x S   slices, [N * D, H, W, C]; those that a stride leaves out are not copied
    a kernel of Q x 1 x 1   one of D rows to a volume, [N, D, H * W, C]
    any other               the slices that an output reads, side by side as channels: [N * OD, H, W, Q * C]

So all taps of an output are one sum in the type that is accumulated in, whatever form the plan takes, and the first two
copy nothing. The last one ("stack") writes and reads x Q times, with zeros for slices outside. Where boxes of voxels
(`cubes`) are able and estimated to take less time than that, nothing is copied either.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import conv
from minidl.kernels.activation import Activation
from minidl.kernels.conv import costs, cubes
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.cubes import Cubes
from minidl.kernels.conv.geometry import Axis, Geometry, Walk
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import FORWARD, MANY, TRANSPOSED, Problem
from minidl.runtime import check, early, launch
from minidl.runtime.early import wait


class Volume(NamedTuple):
    """A 3-D convolution: the axis of depth, and those of the slices."""

    d: Axis
    plane: Geometry

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return self.d, self.plane.h, self.plane.w

    @property
    def groups(self) -> int:
        return self.plane.groups

    @property
    def flat(self) -> bool:
        """Whether each pixel of a slice reads the same pixel of others."""
        return all((a.kernel, a.stride, a.padding) == (1, 1, 0) and a.size == a.output for a in self.axes[1:])

    @property
    def columns(self) -> Geometry:
        """The convolution of images [D, H * W] that a flat one is."""
        pixels = self.plane.h.size * self.plane.w.size
        return Geometry(self.d, Axis(pixels, 1, pixels, 1, 0, 1), self.plane.groups)


@triton.jit
def conv_stack_kernel(
    p_x, p_to, rows, D, pixels, count, in_start, in_step, in_tap,
    C: tl.constexpr, J: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """to [N, count, pixels, GROUPS, J, C] = x [N, D, pixels, GROUPS, C] at depth in_start + q in_step + j in_tap."""
    wait(EARLY)
    tiles_c: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    i_first = tl.program_id(0) // tiles_c * BLOCK_M
    if WIDE:
        i_first = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_M
    o_row = i_first + tl.arange(0, BLOCK_M)
    o_c = tl.program_id(0) % tiles_c * BLOCK_N + tl.arange(0, BLOCK_N)
    o_group = o_row // J
    o_pixel = o_group // GROUPS
    o_image = o_pixel // pixels
    n = o_image // count
    d = in_start + (o_image - n * count) * in_step + o_row % J * in_tap
    m_row = (o_row < rows) & (d >= 0) & (d < D)
    o_x = ((n * D + d) * pixels + o_pixel % pixels) * (GROUPS * C) + o_group % GROUPS * C
    m_c = o_c < C
    b_x = tl.load(p_x + o_x[:, None] + o_c[None, :], mask=m_row[:, None] & m_c[None, :], other=0.0)
    tl.store(p_to + (o_row * C)[:, None] + o_c[None, :], b_x, mask=(o_row < rows)[:, None] & m_c[None, :])


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
    d, plane = volume
    M, C, Q, R, S = w.shape
    x = conv.channels_last(x)
    epilogue = bias is not None, scale is not None, act, None, preactivation
    problem = _problem(x, w, volume, C, M // plane.groups, *epilogue)
    launches = None if volume.flat else _chosen(problem, x.shape[0], d, False, form)
    if launches is not None:
        return _in_cubes(launches, x, w, plane.groups, False, bias, scale)
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


def grad_input(dy: torch.Tensor, w: torch.Tensor, volume: Volume, *, form: str | None = None) -> torch.Tensor:
    """The gradient [N, groups * C, D, H, W] of the input, given that of the output, dy [N, groups * M, OD, OH, OW]."""
    _check(dy, w)
    d, plane = volume
    N, groups = dy.shape[0], plane.groups
    M, C, Q, R, S = w.shape
    dy = conv.channels_last(dy)
    if volume.flat:
        dx = conv.grad_input(_pictures(dy.flatten(2, 3)), w.reshape(M, C, Q, 1), volume.columns)
        return _volumes(dx, N, d.size, plane.h.size, plane.w.size)
    problem = _problem(dy, w, volume, M // groups, C)
    launches = _chosen(problem, N, d, True, form)
    if launches is not None:
        return _in_cubes(launches, dy, w, groups, True)[0]
    parts = []
    for walk in map(_rising, d.backward()):
        images = stacked(dy, walk, groups)
        step = max(1, walk.tap_step)
        taps = w[:, :, walk.taps[0] : walk.taps[-1] + 1 : step].unflatten(0, (groups, M // groups))
        # [groups, taps, M, R, S, C], as the way back reads weights in place.
        turned = taps.permute(0, 3, 1, 4, 5, 2).reshape(M * len(walk.taps), R, S, C)
        part = conv.grad_input(_pictures(images), _pictures(turned), plane)
        parts.append(_volumes(part, N, walk.count, plane.h.size, plane.w.size))
    if len(parts) == 1:
        return parts[0]
    sizes = N, d.size, plane.h.size, plane.w.size, groups * C
    dx = torch.empty(sizes, dtype=dy.dtype, device=dy.device).movedim(-1, 1)
    for walk, part in zip(d.backward(), parts, strict=True):
        dx[:, :, walk.out_start :: walk.out_step].copy_(part)
    return dx


def grad_weight(x: torch.Tensor, dy: torch.Tensor, volume: Volume) -> torch.Tensor:
    """The weight gradient [groups * M, C, Q, R, S], given x [N, groups * C, D, H, W] and dy [N, groups * M, ...]."""
    _check(x, dy)
    d, plane = volume
    x, dy = conv.channels_last(x), conv.channels_last(dy)
    Q, R, S, C = d.kernel, plane.h.kernel, plane.w.kernel, x.shape[-1] // plane.groups
    if volume.flat:
        dw = conv.grad_weight(_pictures(x.flatten(2, 3)), _pictures(dy.flatten(2, 3)), volume.columns)
        return dw.unsqueeze(-1)
    dw = conv.grad_weight(_pictures(stacked(x, d.forward(), plane.groups)), _pictures(dy.flatten(0, 1)), plane)
    dw = dw.permute(0, 2, 3, 1).reshape(dw.shape[0], R, S, Q, C).permute(0, 4, 3, 1, 2)
    return dw.contiguous(memory_format=torch.channels_last_3d)


def _problem(x: torch.Tensor, w: torch.Tensor, volume: Volume, C: int, M: int, *epilogue: Any) -> Problem:
    """Of slices of x [N, D, H, W, channels]: what is the same for every way to compute it."""
    aligned = x.data_ptr() % 16 == 0 == w.data_ptr() % 16
    made = Problem(FORWARD, volume.plane, x.shape[0], C, M, x.dtype, launch.precision(x.dtype), *epilogue)
    return made._replace(aligned=aligned, target=launch.target(), processors=launch.processors())


@launch.cached
def _chosen(problem: Problem, N: int, d: Axis, back: bool, form: str | None) -> tuple[Cubes, ...] | None:
    """The launches in boxes of voxels; None where these are not able or stacks are estimated to take less time."""
    plane = problem.geometry
    axes = d, plane.h, plane.w
    large, small = tuple(axis.size for axis in axes), tuple(axis.output for axis in axes)
    read, written = (small, large) if back else (large, small)
    walks = [[_rising(walk) for walk in axis.backward()] if back else [axis.forward()] for axis in axes]
    made = tuple(Cubes(problem, N, each, read, written) for each in itertools.product(*walks))
    if form == "stack" or not all(map(cubes.able, made)):
        return None
    if form == "cube" or sum(map(cubes.estimate, made)) <= _of_stacks(problem, N, d, back):
        return made
    return None


def _of_stacks(problem: Problem, N: int, d: Axis, back: bool) -> float:
    """Microseconds of the copies and of the images' convolutions."""
    plane, M = problem.geometry, problem.M
    device, total = costs.DEVICES[problem.target], 0.0
    h, w = (plane.h.output, plane.w.output) if back else (plane.h.size, plane.w.size)
    for walk in d.backward() if back else [d.forward()]:
        C = problem.C * len(walk.taps)
        images = problem._replace(N=N * walk.count, C=C)
        if back:
            turned = plane.h.kernel * plane.w.kernel * M, 1, plane.w.kernel * M, M
            images = images._replace(direction=TRANSPOSED, strides=turned)
        # Written, and a part of it read before.
        values = 1.5 * images.N * h * w * problem.groups * C
        if d.stride > 1 and back:
            values += 2 * images.N * plane.h.size * plane.w.size * problem.groups * M
        total += plans.plan(images).microseconds + device.launch + values * problem.dtype.itemsize / device.copy
    return total


def _in_cubes(
    launches: tuple[Cubes, ...], x: torch.Tensor, w: torch.Tensor, groups: int, back: bool,
    bias: torch.Tensor | None = None, scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    problem = launches[0].problem
    y = torch.empty(x.shape[0], *launches[0].written, groups * problem.M, dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if problem.preactivation else None
    bias, scale = (None if t is None else t.contiguous() for t in (bias, scale))
    for each in launches:
        taps = cubes.weights(w, each.walks, groups, back)
        cubes.prepare(each).run(x, taps, bias, scale, y, z)
    return y.movedim(-1, 1), None if z is None else z.movedim(-1, 1)


def forms(x: torch.Tensor, w: torch.Tensor, volume: Volume, back: bool) -> tuple[str, ...]:
    """How y may be computed of x and w, or back dx of dy; the first one is what is taken."""
    if volume.flat:
        return ("columns",)
    if _as_they_are(volume.d.forward(), volume.d.size):
        return ("slices",)
    x, groups = conv.channels_last(x), volume.groups
    M, C = w.shape[0] // groups, w.shape[1]
    problem = _problem(x, w, volume, *((M, C) if back else (C, M)))
    made = [_chosen(problem, x.shape[0], volume.d, back, form) for form in (None, "cube")]
    if made[1] is None:
        return ("stack",)
    return ("stack", "cube") if made[0] is None else ("cube", "stack")


def stacked(x: torch.Tensor, walk: Walk, groups: int) -> torch.Tensor:
    """[N * count, H, W, groups * taps * C] of x [N, D, H, W, groups * C]: what each output of the walk reads in depth.

    Zeros where that is outside. A view where every output reads the slice of its own place.
    """
    N, D, H, W, channels = x.shape
    J = len(walk.taps)
    if _as_they_are(walk, D):
        return x.flatten(0, 1)
    shape = N * walk.count, H, W, channels * J
    return _stacking(shape, D, walk, groups, x.dtype, launch.target()).of(x)


@launch.cached
def _stacking(
    shape: tuple[int, int, int, int], D: int, walk: Walk, groups: int, dtype: torch.dtype, target: str
) -> Copy:
    J = len(walk.taps)
    C = shape[3] // (J * groups)
    rows = math.prod(shape[:3]) * groups * J
    tile = launch.tile("conv_fill", dtype, floor=1, target_=target, M=rows, N=C)
    options = tile.options
    block = options["BLOCK_M"] * options["BLOCK_N"]
    options["BLOCK_N"] = min(options["BLOCK_N"], 1 << max(0, C - 1).bit_length())
    options["BLOCK_M"] = block // options["BLOCK_N"]
    grid = launch.cdiv(rows, options["BLOCK_M"]) * launch.cdiv(C, options["BLOCK_N"])
    volumes = shape[0] // max(walk.count, 1)
    largest = max(math.prod(shape), volumes * (D + abs(walk.in_start)) * shape[1] * shape[2] * groups * C)
    scalars = rows, D, shape[1] * shape[2], walk.count, walk.in_start, walk.in_step, walk.in_tap
    meta = {
        "C": C, "J": J, "GROUPS": groups, "WIDE": largest >= MANY, **early.options(grid, target), **options,
    }  # fmt: skip
    return Copy(shape, launch.Prepared(conv_stack_kernel, (grid,), scalars, meta))


def _as_they_are(walk: Walk, D: int) -> bool:
    """Whether every output reads the slice of its own place."""
    return (len(walk.taps), walk.in_start, walk.in_step, walk.count) == (1, 0, 1, D)


def _rising(walk: Walk) -> Walk:
    """The same with its taps in the order of the weights."""
    if len(walk.taps) == 1:
        return walk
    last = len(walk.taps) - 1
    return dataclasses.replace(
        walk, in_start=walk.in_start + last * walk.in_tap, in_tap=-walk.in_tap, taps=walk.taps[::-1]
    )


def _pictures(x: torch.Tensor) -> torch.Tensor:
    """[N, H, W, C] as torch has the shape."""
    return x.permute(0, 3, 1, 2)


def _volumes(y: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Images of `sizes`, [N, D, H, W], as torch has the shape of volumes."""
    return y.permute(0, 2, 3, 1).reshape(*sizes, y.shape[1]).movedim(-1, 1)


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    check.floating("conv3d", x=a, w=b)
    check.same("conv3d", x=a, w=b)
