"""2-D convolution: forward, gradient of the input, gradient of the weight, each in the form that suits its shape.

    x  [N, groups * C, H, W]     w  [groups * M, C, R, S]     y  [N, groups * M, OH, OW]
    y[n, m, oh, ow] = act(sum over c, r, s of x[n, c, oh stride - padding + r dilation, ...] w[m, c, r, s] + bias[m])

Shapes are torch's; memory is channels-last inside ([N, H, W, C]): a tensor in `torch.channels_last` is used as it is,
any other is copied once, and results are channels-last. The gradient of the input is the transposed convolution, whose
own gradients are the convolution and, input and output exchanged, the gradient of the weight.

A call is described by a `Problem` (problem.py); `plan` (plan.py) finds the form that is estimated to take the least
time, once per problem, and its form runs. `batch` is for many images and channels, `pair` for many images and some
channels, `box` for few images or large ones, `product` for kernels of 1x1, `banded` for few channels, `few` for few
channels of a transposed convolution and `merge` for some, `depthwise` for channels with a group of their own, `pixel`
for every shape; `fft` where it is asked for. `fill`, `columns` and `taps` do it by another convolution. `explain`
tells what was chosen and why; with MINIDL_EXPLAIN=1 in the environment it is logged for every new problem.
"""

from typing import Any

import torch

from minidl.kernels import check
from minidl.kernels.activation import Activation
from minidl.kernels.conv import fft, filled, tap_sums, unshuffled
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.epilogue import POOLS
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.plan import UnableError, explain
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem
from minidl.runtime import launch
from minidl.runtime.descriptors import FAR, ConcatPair
from minidl.runtime.launch_cache.replay import replayed

__all__ = [
    "FAMILIES", "FORMS", "Problem", "UnableError", "channels_last", "explain", "forward", "grad_input", "grad_weight",
    "reads_concat_pair", "transposed",
]  # fmt: skip

FORMS = plans.names()
_MADE = filled, tap_sums, unshuffled
FAMILIES = tuple(dict.fromkeys(family for form in (*plans.FORMS, *_MADE) for family in form.FAMILIES))


@replayed
def forward(
    x: torch.Tensor | ConcatPair,
    w: torch.Tensor,
    geometry: Geometry,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    scale: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    pool: str | None = None,
    preactivation: bool = False,
    form: str | None = None,
    precision: str | None = None,
    batch_invariant: bool = False,
    statistics: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, z): z is the value before the activation where `preactivation` is set, else None.

    scale and bias [groups * M]: y = act(scale * conv(x, w) + bias), as a folded batch norm has it; together they may
    have the dtype in which x is accumulated. added, like the result and in x's dtype, is added before the activation:
    in the same kernel, where the sum is not rounded in between, or in one of its own where that is estimated to take
    less time. pool "max" or "avg" takes the maximum or the mean of 2x2 windows (stride 2, incomplete windows left out)
    after the activation: in the same kernel, or in one of its own where that is estimated to take less time. blind:
    form and tile are the same for any number of images. With `statistics`, for which nothing may follow the bias, z are
    those of bands of as many pixels each, [bands, 2, M] as `gemm.fused_statistics` has them, or None where reading y
    takes less time. x may be a `ConcatPair`, [N, C / 2, H, W] each, where `reads_concat_pair` of these arguments.
    Raises ValueError for shapes that do not fit, a form that cannot take the shape, or more than one of pool,
    preactivation and added.
    """
    like = x.first if isinstance(x, ConcatPair) else x
    check_arguments("conv2d", like, w, bias, scale)
    check_form(form)
    if pool not in POOLS:
        raise ValueError(f"conv2d: unknown pool {pool!r}, expected 'max', 'avg' or None")
    if pool and preactivation:
        raise ValueError("conv2d: preactivation has no meaning for pooled outputs; pool afterwards")
    if statistics and not (scale is act is pool is added is None and not preactivation):
        raise ValueError("conv2d: statistics are of the sum and bias; nothing may follow these")
    if added is not None:
        _check_added(like, added, (like.shape[0], len(w), geometry.h.output, geometry.w.output), pool or preactivation)
        added = channels_last(added)
    x, w = _rows(x), channels_last(w)
    if w.shape[-1] == 0 and isinstance(x, torch.Tensor):
        # No channels: one of zeros, so that the sum is empty and the epilogue still runs.
        x, w = x.new_zeros(*x.shape[:3], geometry.groups), w.new_zeros(*w.shape[:3], 1)
    problem = _forward(
        x, w, geometry, bias, scale, added, statistics, act=act, precision=precision or _precision(like, form),
        pool=pool, preactivation=preactivation, form=form, batch_invariant=batch_invariant,
    )  # fmt: skip
    if problem.concat_pair and not plans.plan(problem).problem.concat_pair:
        raise ValueError("conv2d: x is halves, which the form for the shape does not read; join them")
    return _run(problem, x, w, bias, scale, added)


def reads_concat_pair(
    x: ConcatPair,
    w: torch.Tensor,
    geometry: Geometry,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    scale: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    preactivation: bool = False,
    statistics: bool = False,
) -> bool:
    """Whether `forward` reads halves where they lie, for these arguments: by the form that is best for both joined, or
    by one that takes less time than that and a copy. To the bit it is what that form makes of both joined."""
    if not _is_concat_pair(x):
        return False
    problem = _forward(
        _rows(x), channels_last(w), geometry, bias, scale, added, statistics, act=act,
        precision=launch.precision(w.dtype), preactivation=preactivation,
    )  # fmt: skip
    return plans.plan(problem).problem.concat_pair


def _is_concat_pair(x: ConcatPair) -> bool:
    """Whether two tensors [N, C, H, W] lie alike, channels-last, and where a descriptor can be told."""
    first, second = x
    alike = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
    last = all(t.movedim(1, -1).is_contiguous() and t.data_ptr() % 16 == 0 for t in x)
    return alike and last and x.distance > 0 and (launch.INTERPRETED or x.distance < FAR)


def _rows(x: torch.Tensor | ConcatPair) -> torch.Tensor | ConcatPair:
    """x, or both halves, as `channels_last` has it."""
    return ConcatPair(*map(channels_last, x)) if isinstance(x, ConcatPair) else channels_last(x)


def _forward(
    x: torch.Tensor | ConcatPair, w: torch.Tensor, geometry: Geometry, bias: torch.Tensor | None,
    scale: torch.Tensor | None, added: torch.Tensor | None, statistics: bool, **more: Any,
) -> Problem:  # fmt: skip
    """The problem of x [N, H, W, groups * C], or halves of it, and w [groups * M, R, S, C]."""
    like = x.first if isinstance(x, ConcatPair) else x
    return Problem(
        FORWARD, geometry, like.shape[0], w.shape[-1], len(w) // geometry.groups, like.dtype, bias=bias is not None,
        scale=scale is not None, aligned=like.data_ptr() % 16 == 0, w_aligned=w.data_ptr() % 16 == 0,
        target=launch.target(), processors=launch.processors(), added=added is not None, statistics=statistics,
        concat_pair=like is not x, **more,
    )  # fmt: skip


@replayed
def transposed(
    x: torch.Tensor,
    w: torch.Tensor,
    geometry: Geometry,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    scale: torch.Tensor | None = None,
    preactivation: bool = False,
    form: str | None = None,
    precision: str | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, z) of the transposed convolution of x [N, groups * M, OH, OW]: y [N, groups * C, H, W], z as in `forward`.

    geometry and w [groups * M, C, R, S] are those of the convolution from y to x, whose gradient of the input this is;
    bias and scale [groups * C] are applied as in `forward`.
    """
    check_arguments("conv_transpose2d", x, w, bias, scale)
    check_form(form)
    groups = geometry.groups
    C, M, R, S = w.shape
    x = channels_last(x)
    if C == 0:
        C, x, w = groups, x.new_zeros(*x.shape[:3], groups), w.new_zeros(groups, M, R, S)
    problem = Problem(
        TRANSPOSED, geometry, x.shape[0], C // groups, M, x.dtype, precision or _precision(x, form),
        bias is not None, scale is not None, act, None, preactivation, x.data_ptr() % 16 == 0, w.data_ptr() % 16 == 0,
        w.stride(), form, batch_invariant, launch.target(), launch.processors(),
    )  # fmt: skip
    return _run(problem, x, w, bias, scale)


def grad_input(
    dy: torch.Tensor, w: torch.Tensor, geometry: Geometry, *, form: str | None = None, precision: str | None = None
) -> torch.Tensor:
    """The gradient [N, groups * C, H, W] of the input, given that of the output, dy [N, groups * M, OH, OW]."""
    return transposed(dy, w, geometry, form=form, precision=precision)[0]


@replayed
def grad_weight(
    x: torch.Tensor | ConcatPair,
    dy: torch.Tensor,
    geometry: Geometry,
    *,
    form: str | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """The weight gradient [groups * M, C, R, S], given x [N, groups * C, H, W] and dy [N, groups * M, OH, OW].

    x may be `ConcatPair`, [N, C / 2, H, W] each, which are joined where the plan does not read them.
    """
    like = x.first if isinstance(x, ConcatPair) else x
    check.floating("conv2d", x=like, dy=dy)
    check.same("conv2d", x=like, dy=dy)
    check_form(form)
    groups = geometry.groups
    C, M = like.shape[1] * (1 if like is x else 2) // groups, dy.shape[1]
    if like.numel() == 0 or dy.numel() == 0:
        return torch.zeros(M, C, geometry.h.kernel, geometry.w.kernel, dtype=dy.dtype, device=dy.device)
    dy = channels_last(dy)
    problem = Problem(
        GRAD_WEIGHT, geometry, like.shape[0], C, M // groups, dy.dtype, precision or launch.precision(dy.dtype),
        aligned=like.data_ptr() % 16 == 0 == dy.data_ptr() % 16, form=form, target=launch.target(),
        processors=launch.processors(), concat_pair=isinstance(x, ConcatPair) and _is_concat_pair(x),
    )  # fmt: skip
    plan = plans.plan(problem)
    if isinstance(x, ConcatPair) and not plan.problem.concat_pair:
        x = torch.cat(x, 1)
    return plan.run(_rows(x), dy)[0].permute(0, 3, 1, 2)


def _run(
    problem: Problem, x: torch.Tensor | ConcatPair, w: torch.Tensor, bias: torch.Tensor | None,
    scale: torch.Tensor | None, added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Both results of a problem, as torch has their shapes."""
    y, z = plans.plan(problem).run(x, w, _contiguous(bias), _contiguous(scale), added)
    if problem.statistics:
        return y.permute(0, 3, 1, 2), z
    return y.permute(0, 3, 1, 2), None if z is None else z.permute(0, 3, 1, 2)


def _check_added(x: torch.Tensor, added: torch.Tensor, shape: tuple[int, ...], more: object) -> None:
    check.same("conv2d", x=x, added=added)
    if tuple(added.shape) != shape:
        raise ValueError(f"conv2d: added has shape {list(added.shape)}, expected {list(shape)}")
    if more:
        raise ValueError("conv2d: added cannot be given with a pool or preactivation")


def _precision(x: torch.Tensor, form: str | None) -> str:
    """Spectra are float32, whatever x is."""
    return launch.float32_precision() if form == fft.NAME else launch.precision(x.dtype)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """x [N, C, H, W] as a contiguous [N, H, W, C]: a view where it is channels-last, else a copy. So for more axes."""
    return x.movedim(1, -1).contiguous()


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def check_form(form: str | None) -> None:
    """Here and not in the plan: what is no string need not be hashable."""
    if form is not None and form not in FORMS:
        raise ValueError(f"conv2d: unknown form {form!r}; known: {', '.join(FORMS)}")


def check_arguments(
    op: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
) -> None:
    """Raises TypeError and ValueError for dtypes and devices that do not fit together."""
    check.floating(op, x=x, w=w)
    check.same(op, x=x, w=w)
    if bias is None and scale is None:
        return
    wide = scale is not None and (scale.dtype, scale.device) == (launch.acc_torch(x.dtype), x.device)
    vectors = {name: vector for name, vector in (("scale", scale), ("bias", bias)) if vector is not None}
    check.floating(op, **vectors)
    check.same(op, **({} if wide else {"x": x}), **vectors)
