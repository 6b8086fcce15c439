"""2-D convolution: forward, gradient of the input and gradient of the weight, in several kernels ("forms").

    x  [N, groups * C, H, W]     w  [groups * M, C, R, S]     y  [N, groups * M, OH, OW]
    y[n, m, oh, ow] = act(sum over c, r, s of x[n, c, oh stride - padding + r dilation, ...] w[m, c, r, s] + bias[m])

Shapes are torch's. Memory is channels-last ([N, H, W, C]): a tensor in `torch.channels_last` is used directly, any
other is copied once, and results are channels-last. The gradient of the input is the transposed convolution. The
gradients of a transposed convolution are the convolution and the gradient of the weight with x and dy exchanged.

A call is described by a `Problem` (problem.py). `plan` (plan.py) chooses the form or rewrite with the lowest estimated
time, once per problem. Forms: `batch` for many images and channels; `box` for few or large images; `pair` for up to 64
output channels; `product` for 1x1 kernels; `banded` for few input channels; `few` for few output channels of a
transposed convolution; `depthwise` for groups of one or a few channels; `unfolded` for weight gradients; `pixel` for
every shape; `fft` on request only. The rewrites `fill`, `taps`, `columns` and `unshuffle` compute the problem by
another convolution. `explain` reports each estimate and the choice; MINIDL_EXPLAIN=1 in the environment logs this
report for every new problem.

Read geometry, problem, records, forms and plan, then pixel_tiled, batch_tiled and boxed, then rewrites. costs and
tile_throughput have the estimates.
"""

import itertools
from typing import Any

import torch

from minidl.kernels import activation, check
from minidl.kernels.activation import Activation
from minidl.kernels.conv import fft, forms
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.epilogue import POOLS
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.plan import UnableError, explain
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Operands, Problem
from minidl.runtime import launch
from minidl.runtime.descriptors import FAR, ConcatPair
from minidl.runtime.launch_cache.replay import replayed

__all__ = [
    "FAMILIES", "FORMS", "Problem", "UnableError", "channels_last", "explain", "forward", "grad_input", "grad_weight",
    "reads_concat_pair", "transposed",
]  # fmt: skip

FORMS = forms.names()
_OF_FORMS = (*(form.FAMILIES for form in forms.FORMS), *(rewrite.families for rewrite in forms.REWRITES))
FAMILIES = tuple(dict.fromkeys(itertools.chain(*_OF_FORMS)))


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
    """Return (y, z); z is the value before the activation if `preactivation` is set, else None.

    scale, bias [groups * M]  y = act(scale * conv(x, w) + bias), as for a folded batch norm; if both are passed, they
                     may have the dtype in which x is accumulated
    added            shape of the result, dtype of x: added before the activation
    pool             "max" or "avg": pools 2x2 windows after the activation (stride 2, incomplete windows dropped)
    batch_invariant  uses the same form and tile for any number of images
    statistics       z holds statistics of bands with equal numbers of pixels, [bands, 2, M] as in
                     `gemm.fused_statistics`, or None if reading y is faster; only a bias may follow the sum
    `added` and `pool` run in the same kernel or in a second one, whichever is estimated to be faster; in the same
    kernel the sum is not rounded first. x may be a `ConcatPair` of [N, C / 2, H, W] if `reads_concat_pair` is true.
    Raises ValueError if shapes do not match, if `form` does not support the shape, or for more than one of pool,
    preactivation and added.
    """
    like = x.first if isinstance(x, ConcatPair) else x
    check_arguments("conv2d", like, w, bias, scale)
    check_form(form)
    if pool not in POOLS:
        raise ValueError(f"conv2d: unknown pool {pool!r}, expected 'max', 'avg' or None")
    if pool and preactivation:
        raise ValueError("conv2d: preactivation cannot be combined with pool; pool afterwards")
    if statistics and (preactivation or any(value is not None for value in (scale, act, pool, added))):
        raise ValueError("conv2d: statistics requires an epilogue of at most a bias")
    if added is not None:
        _check_added(like, added, (like.shape[0], len(w), geometry.h.output, geometry.w.output), pool or preactivation)
        added = channels_last(added)
    x, w = _rows(x), channels_last(w)
    if w.shape[-1] == 0 and isinstance(x, torch.Tensor):
        # Without channels, add one channel of zeros so that the epilogue still runs.
        x, w = x.new_zeros(*x.shape[:3], geometry.groups), w.new_zeros(*w.shape[:3], 1)
    problem = _forward(
        x, w, geometry, bias, scale, added, statistics, act=act, precision=precision or _precision(like, form),
        pool=pool, preactivation=preactivation, form=form, batch_invariant=batch_invariant,
    )  # fmt: skip
    if problem.concat_pair and not plans.plan(problem).problem.concat_pair:
        raise ValueError("conv2d: x is a ConcatPair, which the plan for this shape does not read; pass torch.cat(x, 1)")
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
    """Return whether `forward` reads the pair in place for these arguments, which is faster than concatenating it.

    The result is bitwise equal to that of the same form on the concatenated tensor."""
    if not _is_concat_pair(x):
        return False
    problem = _forward(
        _rows(x), channels_last(w), geometry, bias, scale, added, statistics, act=act,
        precision=launch.precision(w.dtype), preactivation=preactivation,
    )  # fmt: skip
    return plans.plan(problem).problem.concat_pair


def _is_concat_pair(x: ConcatPair) -> bool:
    """Return whether two tensors [N, C, H, W] match, are channels-last and can share a tensor descriptor."""
    first, second = x
    same_type = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
    channels_last_ = all(t.movedim(1, -1).is_contiguous() and t.data_ptr() % 16 == 0 for t in x)
    return same_type and channels_last_ and x.distance > 0 and (launch.INTERPRETED or x.distance < FAR)


def _rows(x: torch.Tensor | ConcatPair) -> torch.Tensor | ConcatPair:
    """Return x, or both halves of it, as [N, H, W, C]."""
    return ConcatPair(*map(channels_last, x)) if isinstance(x, ConcatPair) else channels_last(x)


def _forward(
    x: torch.Tensor | ConcatPair, w: torch.Tensor, geometry: Geometry, bias: torch.Tensor | None,
    scale: torch.Tensor | None, added: torch.Tensor | None, statistics: bool, **options: Any,
) -> Problem:  # fmt: skip
    """Return the problem of x [N, H, W, groups * C], or a pair of it, and w [groups * M, R, S, C]."""
    like = x.first if isinstance(x, ConcatPair) else x
    return Problem(
        FORWARD, geometry, like.shape[0], w.shape[-1], len(w) // geometry.groups, like.dtype, bias=bias is not None,
        scale=scale is not None, aligned=like.data_ptr() % 16 == 0, w_aligned=w.data_ptr() % 16 == 0,
        target=launch.target(), processors=launch.processors(), added=added is not None, statistics=statistics,
        concat_pair=like is not x, **options,
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
    """Return (y, z) of the transposed convolution of x [N, groups * C, OH, OW]: y [N, groups * M, H, W].

    C channels are read and M are written, as in every `Problem`. geometry and w [groups * C, M, R, S] belong to the
    convolution from y to x, whose input gradient this is. z, and bias and scale [groups * M], are as in `forward`.
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
        bias=bias is not None, scale=scale is not None, act=act, preactivation=preactivation,
        aligned=x.data_ptr() % 16 == 0, w_aligned=w.data_ptr() % 16 == 0, strides=w.stride(), form=form,
        batch_invariant=batch_invariant, target=launch.target(), processors=launch.processors(),
    )  # fmt: skip
    return _run(problem, x, w, bias, scale)


def grad_input(
    dy: torch.Tensor, w: torch.Tensor, geometry: Geometry, *, form: str | None = None, precision: str | None = None
) -> torch.Tensor:
    """Return the gradient of the input, [N, groups * C, H, W], from that of the output, dy [N, groups * M, OH, OW]."""
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
    """Return the weight gradient [groups * M, C, R, S] from x [N, groups * C, H, W] and dy [N, groups * M, OH, OW].

    x may be a `ConcatPair` of [N, C / 2, H, W], which is concatenated if the plan cannot read it in place.
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
    return plan.run(Operands(_rows(x), dy))[0].permute(0, 3, 1, 2)


def _run(
    problem: Problem, x: torch.Tensor | ConcatPair, w: torch.Tensor, bias: torch.Tensor | None,
    scale: torch.Tensor | None, added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Run a problem and return (y, z) in torch's shapes."""
    activation.parse(problem.act)  # before the problem is hashed
    y, z = plans.plan(problem).run(Operands(x, w, _contiguous(bias), _contiguous(scale), added))
    if problem.statistics:
        return y.permute(0, 3, 1, 2), z
    return y.permute(0, 3, 1, 2), None if z is None else z.permute(0, 3, 1, 2)


def _check_added(x: torch.Tensor, added: torch.Tensor, shape: tuple[int, ...], conflicts: object) -> None:
    check.same("conv2d", x=x, added=added)
    if tuple(added.shape) != shape:
        raise ValueError(f"conv2d: added has shape {list(added.shape)}, expected {list(shape)}")
    if conflicts:
        raise ValueError("conv2d: added cannot be combined with pool or preactivation")


def _precision(x: torch.Tensor, form: str | None) -> str:
    """Return the precision of products; spectra (fft) are float32 for every dtype of x."""
    return launch.float32_precision() if form == fft.NAME else launch.precision(x.dtype)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, C, ...] as a contiguous [N, ..., C]: a view if it is channels-last, else a copy."""
    return x.movedim(1, -1).contiguous()


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def check_form(form: str | None) -> None:
    """Raise ValueError for an unknown form, before it is hashed as part of a problem."""
    if form is not None and form not in FORMS:
        raise ValueError(f"conv2d: unknown form {form!r}; known: {', '.join(FORMS)}")


def check_arguments(
    op: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
) -> None:
    """Raise TypeError or ValueError if dtypes or devices do not match."""
    kind = x.dtype, x.device
    is_alike = (w.dtype, w.device) == kind and (bias is None or (bias.dtype, bias.device) == kind)
    if scale is None and is_alike and x.dtype in check.FLOATING:
        return
    check.floating(op, x=x, w=w)
    check.same(op, x=x, w=w)
    if bias is None and scale is None:
        return
    wide = scale is not None and (scale.dtype, scale.device) == (launch.acc_torch(x.dtype), x.device)
    vectors = {name: vector for name, vector in (("scale", scale), ("bias", bias)) if vector is not None}
    check.floating(op, **vectors)
    check.same(op, **({} if wide else {"x": x}), **vectors)
