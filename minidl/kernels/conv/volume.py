"""3-D convolution: forward and both gradients, with boxes of voxels or as convolutions of images.

    x  [N, groups * C, D, H, W]     w  [groups * M, C, Q, R, S]     y  [N, groups * M, OD, OH, OW]
    y[n, m, od, oh, ow] = act(sum of x[n, c, od stride - padding + q dilation, ...] w[m, c, q, r, s] + bias[m])

Shapes are torch's; memory is channels-last ([N, D, H, W, C]), as in `conv`. `plan` chooses a form, once per problem:

    "columns"     a kernel of Q x 1 x 1: images [D, H * W] (`stacks`)
    "depthwise"   groups of one or a few channels: a loop over slices (`slices`)
    "cube"        boxes of voxels (`cubes`, `cubes_grad_weight`)
    "unfold"      few input channels: images of the taps along depth and width (`volume_unfold`)
    "stack"       images of the slices that an output reads, or "slices" for a kernel of 1 x R x S (`stacks`)

The last three, where supported, are chosen by estimate.

All taps of an output are a single sum in the accumulator's dtype with every form. A strided 1 x 1 x 1 kernel is a cube,
or "columns" of a copy of the voxels that it reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minidl.kernels import conv
from minidl.kernels.activation import Activation
from minidl.kernels.conv import cubes, cubes_grad_weight, slices, stacks, volume_unfold
from minidl.kernels.conv.geometry import Volume
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem, Tensors
from minidl.kernels.conv.voxels import VolumeProblem
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed


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
    """Return (y, z) as `conv.forward` does, with the same exceptions. form: "cube", "unfold" or "stack", if able."""
    conv.check_arguments("conv3d", x, w, bias, scale)
    epilogue = {"bias": bias is not None, "scale": scale is not None, "act": act, "preactivation": preactivation}
    problem = problem_of(FORWARD, x, w, volume, form, **epilogue)
    # A cube reads the voxels of a strided 1 x 1 x 1 kernel in place.
    in_place = form != "stack" and x.is_contiguous(memory_format=torch.channels_last_3d)
    if volume.dense is not None and not (in_place and cubes.able(problem)):
        x, volume = volume.read_by(x), volume.dense
    x = conv.channels_last(x)
    y, z = plan(problem_of(FORWARD, x, w, volume, form, **epilogue)).run(x, w, bias, scale)
    return y.movedim(-1, 1), None if z is None else z.movedim(-1, 1)


@replayed
def transposed(
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
    """Return (y, z) of the transposed convolution of x [N, groups * M, OD, OH, OW]: y [N, groups * C, D, H, W].

    volume and w [groups * M, C, Q, R, S] belong to the convolution from y to x, as in `conv.transposed`.
    """
    conv.check_arguments("conv_transpose3d", x, w, bias, scale)
    sizes = x.shape[0], *(axis.size for axis in volume.axes), volume.groups * w.shape[1]
    if 0 in sizes:
        y = x.new_empty(sizes).movedim(-1, 1)
        return y, torch.empty_like(y) if preactivation else None
    plain = bias is None and scale is None and act is None and not preactivation
    if volume.dense is not None and plain:
        y = torch.zeros(sizes, dtype=x.dtype, device=x.device).movedim(-1, 1)
        volume.read_by(y).copy_(transposed(x, w, volume.dense)[0])
        return y, None
    epilogue = {"bias": bias is not None, "scale": scale is not None, "act": act, "preactivation": preactivation}
    x = conv.channels_last(x)
    y, z = plan(problem_of(TRANSPOSED, x, w, volume, form, **epilogue)).run(x, w, bias, scale)
    return y.movedim(-1, 1), None if z is None else z.movedim(-1, 1)


def grad_input(dy: torch.Tensor, w: torch.Tensor, volume: Volume, *, form: str | None = None) -> torch.Tensor:
    """Return the gradient of the input, [N, groups * C, D, H, W], from dy [N, groups * M, OD, OH, OW]."""
    return transposed(dy, w, volume, form=form)[0]


@replayed
def grad_weight(x: torch.Tensor, dy: torch.Tensor, volume: Volume, *, form: str | None = None) -> torch.Tensor:
    """Return the weight gradient [groups * M, C, Q, R, S] from x [N, groups * C, D, H, W] and dy."""
    conv.check_arguments("conv3d", x, dy, None)
    if volume.dense is not None:
        x, volume = volume.read_by(x), volume.dense
    if x.numel() == 0 or dy.numel() == 0:
        shape = dy.shape[1], x.shape[1] // volume.groups, *(axis.kernel for axis in volume.axes)
        return torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    x, dy = conv.channels_last(x), conv.channels_last(dy)
    return plan(problem_of(GRAD_WEIGHT, x, dy, volume, form)).run(x, dy)[0].movedim(-1, 1)


class Plan(NamedTuple):
    """The form that computes a problem, and its launches, which do not depend on addresses (None for `stacks`)."""

    problem: VolumeProblem
    form: Any
    prepared: Any

    def run(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (y, z), channels-last, for channels-last x; for GRAD_WEIGHT w is dy and the result (dw, None)."""
        problem = self.problem.problem
        bias, scale = (None if vector is None else vector.contiguous() for vector in (bias, scale))
        if self.form in (stacks, volume_unfold):
            run: tuple[torch.Tensor, torch.Tensor | None]
            run = self.form.run(self.problem, self.prepared, Tensors(x, w, None, bias, scale))
            return run
        if problem.direction == GRAD_WEIGHT:
            return self.form.run(self.problem, self.prepared, Tensors(x, w)), None
        y = torch.empty(self.problem.shape, dtype=x.dtype, device=x.device)
        z = torch.empty_like(y) if problem.preactivation else None
        self.form.run(self.problem, self.prepared, Tensors(x, w, y, bias, scale, z))
        return y, z


@launch.cached
def plan(problem: VolumeProblem) -> Plan:
    """Return the plan of a problem: the first of `candidates`."""
    form = candidates(problem)[0]
    return Plan(problem, form, None if form is stacks else form.prepare(problem))


def candidates(problem: VolumeProblem) -> tuple[Any, ...]:
    """Return the forms among which a plan chooses, the chosen one first."""
    if problem.volume.flat:
        return (stacks,)
    if problem.form is None and slices.able(problem):
        return slices, stacks
    if problem.form == "stack":
        return (stacks,)
    cube = cubes_grad_weight if problem.problem.direction == GRAD_WEIGHT else cubes
    able = [*(form for form in (cube, volume_unfold) if form.able(problem)), stacks]
    first = "cube" if problem.volume.dense is not None else problem.form
    if len(able) > 1:
        able.sort(key=lambda form: (getattr(form, "NAME", "stack") != first, form.estimate(problem)))
    return tuple(able)


def forms(problem: VolumeProblem) -> tuple[str, ...]:
    """Return the names of `candidates`."""
    return tuple(stacks.name(problem) if form is stacks else form.NAME for form in candidates(problem))


def problem_of(
    direction: str, x: torch.Tensor, w: torch.Tensor, volume: Volume, form: str | None = None, **epilogue: Any
) -> VolumeProblem:
    """Return the problem of x [N, D, H, W, channels] and w, for GRAD_WEIGHT dy in place of w."""
    groups = volume.groups
    C, M = w.shape[1], w.shape[0] // groups
    if direction == GRAD_WEIGHT:
        C, M = x.shape[-1] // groups, w.shape[-1] // groups
    if direction == TRANSPOSED:
        C, M = M, C
    problem = Problem(
        direction, volume.plane, x.shape[0], C, M, x.dtype, launch.precision(x.dtype), **epilogue,
        aligned=x.data_ptr() % 16 == 0 == w.data_ptr() % 16, target=launch.target(), processors=launch.processors(),
    )  # fmt: skip
    return VolumeProblem(problem, volume.d, direction == TRANSPOSED and _in_place(w), form)


def _in_place(w: torch.Tensor) -> bool:
    """Return whether backward weights can be read in place: tensor cores read 16-bit operands in either order."""
    any_order = w.dtype.itemsize == 2 or launch.INTERPRETED
    ordered = w.is_contiguous(memory_format=torch.channels_last_3d)
    return ordered and any_order and w.shape[1] % 8 == 0 and w.data_ptr() % 16 == 0
