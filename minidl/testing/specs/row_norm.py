"""Specs of the norms of rows.

u is the accumulate type's unit, d the depth of a sum over a row. A mean is off by gamma(d + 2) mean |x|, a deviation
D = x - mean by that and a rounding, e; the mean square of deviations by mean (2 |D| e + e^2) and gamma(d + 4) of it. So
rstd lies between its values for the variance and this more or less, and 8 u. v = D rstd, y and the gradients, which are
sums and products of these, follow with a rounding for each operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minidl import ops
from minidl.kernels import row_norm as kernels
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Bad, Case, OpSpec, distinct, integers, refuses, tensors
from minidl.testing.specs.make import Make


class Rows(NamedTuple):
    """A call: x, weight and bias as rows [R, L] (weights broadcast), eps, and the kernels' rows."""

    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor
    eps: float
    rms: bool
    rows: kernels.Rows
    shape: torch.Size


def _layers(x: torch.Tensor, shape: Any, w: Any = None, b: Any = None, eps: float = 1e-5, rms: bool = False) -> Rows:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    _, rows = kernels.layers(x, len(sizes))
    flat = x.reshape(rows.total, rows.sizes.L)
    w, b = (torch.full_like(flat, v) if t is None else t.reshape(1, -1).expand_as(flat) for t, v in ((w, 1), (b, 0)))
    return Rows(flat, w, b, eps, rms, rows, x.shape)


def _rms(x: torch.Tensor, shape: Any, w: Any = None, eps: float = 2.0**-20) -> Rows:
    return _layers(x, shape, w, None, eps, True)


def _groups(x: torch.Tensor, groups: int, w: Any = None, b: Any = None, eps: float = 1e-5) -> Rows:
    _, rows = kernels.groups(x.contiguous(), groups)
    flat = x.reshape(rows.total, rows.sizes.L)
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    w, b = (
        torch.full_like(flat, v) if t is None else t.view(shape).expand(x.shape).reshape(flat.shape)
        for t, v in ((w, 1), (b, 0))
    )
    return Rows(flat, w, b, eps, False, rows, x.shape)


def _instances(
    x: torch.Tensor, mean: None = None, var: None = None, w: Any = None, b: Any = None, *rest: Any, eps: float = 1e-5
) -> Rows:
    return _groups(x, x.shape[1], w, b, eps)


def _reference(parse: Callable[..., Rows]) -> Callable[..., torch.Tensor]:
    def reference(*args: Any, **named: Any) -> torch.Tensor:
        at = parse(*args, **named)
        d = at.x if at.rms else at.x - at.x.mean(1, keepdim=True)
        rstd = 1 / torch.sqrt(d.square().mean(1, keepdim=True) + at.eps)
        return (d * rstd * at.w + at.b).reshape(at.shape)

    return reference


class Errors(NamedTuple):
    """Deviations times rstd, and rstd [R, 1], each with its error; and the sizes that may overflow."""

    v: torch.Tensor
    v_error: torch.Tensor
    rstd: torch.Tensor
    rstd_error: torch.Tensor
    size: torch.Tensor


def _errors(at: Rows, dtype: torch.dtype) -> Errors:
    u, tiny = bounds.acc_unit(dtype), bounds.TINY[launch.acc_torch(dtype)]
    d = kernels.depth(at.rows, dtype)
    x = at.x
    off = torch.zeros_like(x[:, :1])
    D, e = x, torch.zeros_like(x)
    if not at.rms:
        D = x - x.mean(1, keepdim=True)
        off = bounds.gamma(d + 6, u) * x.abs().mean(1, keepdim=True) + tiny
        e = off + u * (D.abs() + off)
    var = D.square().mean(1, keepdim=True)
    var_error = (2 * D.abs() * e + e.square()).mean(1, keepdim=True)
    var_error = var_error + bounds.gamma(d + 8, u) * (var + var_error) + 8 * tiny
    rstd = 1 / torch.sqrt(var + at.eps)
    high = 1 / torch.sqrt((var - var_error).clamp(min=0) + at.eps)
    low = 1 / torch.sqrt(var + var_error + at.eps)
    rstd_error = torch.maximum(high - rstd, rstd - low) + 8 * u * high
    v = D * rstd
    v_error = D.abs() * rstd_error + e * (rstd + rstd_error) + 2 * u * v.abs() + tiny
    size = (x.square().sum(1, keepdim=True) + x.abs().sum(1, keepdim=True)) * 4
    return Errors(v, v_error, rstd, rstd_error, size)


def _finite(error: torch.Tensor, dtype: torch.dtype, *sizes: torch.Tensor) -> torch.Tensor:
    for size in sizes:
        error = bounds.or_infinite(error, size, dtype)
    return error.nan_to_num(nan=math.inf, posinf=math.inf)


def _bound(parse: Callable[..., Rows]) -> Callable[..., torch.Tensor]:
    def bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        at = parse(*case.args, **case.kwargs)
        if at.x.numel() == 0:
            return torch.zeros_like(result)
        u, tiny = bounds.acc_unit(dtype), bounds.TINY[launch.acc_torch(dtype)]
        v, v_error, *_, size = _errors(at, dtype)
        product = at.w.abs() * (v.abs() + v_error)
        error = at.w.abs() * v_error + 2 * u * (product + at.b.abs()) + 2 * tiny
        error = _finite(error, dtype, size.expand_as(error), product + at.b.abs())
        return bounds.rounded(result, error.reshape(at.shape), dtype)

    return bound


def _grad_bound(parse: Callable[..., Rows], *positions: int) -> Callable[..., tuple[Any, ...]]:
    def bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        at = parse(*case.args, **case.kwargs)
        if at.x.numel() == 0:
            return tuple(None if g is None else torch.zeros_like(g) for g in grads)
        u, tiny = bounds.acc_unit(dtype), bounds.TINY[launch.acc_torch(dtype)]
        d, (v, v_error, rstd, rstd_error, size) = kernels.depth(at.rows, dtype), _errors(at, dtype)
        dy = dy.reshape(at.x.shape).abs()
        g, V = at.w.abs() * dy, v.abs() + v_error
        c1 = torch.zeros_like(rstd) if at.rms else g.mean(1, keepdim=True)
        c1_error = bounds.gamma(d + 8, u) * c1 + tiny
        c2 = (g * V).mean(1, keepdim=True)
        c2_error = (g * v_error).mean(1, keepdim=True) + bounds.gamma(d + 12, u) * c2 + 2 * tiny
        # The exact value has signs and may be smaller: the gradient of a row of two numbers is nearly 0.
        terms_sum = g + V * c2 + c1
        error = v_error * c2 + V * c2_error + c1_error + 6 * u * terms_sum + 4 * tiny
        exact = torch.zeros_like(terms_sum) if grads[0] is None else grads[0].reshape(at.x.shape).abs() / rstd
        dx = error * (rstd + rstd_error) + exact * rstd_error + 2 * u * exact * rstd + 2 * tiny
        dx = _finite(
            dx, dtype, size.expand_as(dx), terms_sum, terms_sum * (rstd + rstd_error), dy * V * at.rows.sizes.L
        )
        errors: list[torch.Tensor | None] = [None if grads[0] is None else dx.reshape(at.shape)]
        count = at.rows.images * at.rows.sizes.S
        for k, (term, term_error) in enumerate(((dy * V, dy * v_error), (dy, torch.zeros_like(dy)))):
            if k + 1 >= len(grads) or grads[k + 1] is None:
                errors.append(None)
                continue
            total = _channels(at, term)
            off = _channels(at, term_error) + bounds.gamma(count + 4, u) * total + 2 * count * tiny
            top = size.max().expand_as(total)
            errors.append(_finite(off, dtype, total, top).reshape(grads[k + 1].shape))
        return tuple(
            None if g is None or e is None else bounds.rounded(g, e, dtype)
            for g, e in zip(grads, errors[: len(grads)], strict=True)
        )

    return bound


def _channels(at: Rows, terms: torch.Tensor) -> torch.Tensor:
    """Return the sums over images and the elements of each channel."""
    rows = at.rows
    return terms.reshape(rows.images, rows.sizes.G * rows.sizes.CHANNELS, rows.sizes.S).sum((0, 2))


def _parameters(make: Make, *shape: int) -> tuple[Any, Any]:
    return tuple(make.tensor(*shape) if make.integer(0, 2) else None for _ in range(2))  # type: ignore[return-value]


def _layer_inputs(make: Make) -> Case:
    shape = [make.size(1, 12) for _ in range(make.integer(1, 3))]
    dims = shape[make.integer(0, len(shape) - 1) :]
    x = distinct(make.tensor(*shape))
    return Case((x, dims, *_parameters(make, *dims), make.choice([1e-5, 0.25])))


def _rms_inputs(make: Make) -> Case:
    shape = [make.size(1, 12) for _ in range(make.integer(1, 3))]
    dims = shape[make.integer(0, len(shape) - 1) :]
    return Case((distinct(make.tensor(*shape)), dims, _parameters(make, *dims)[0], make.choice([1e-5, 0.25])))


def _group_inputs(make: Make) -> Case:
    groups, each = make.integer(1, 4), make.integer(1, 4)
    shape = make.size(0, 5), groups * each, *(make.size(1, 7) for _ in range(make.integer(0, 2)))
    x = distinct(make.tensor(*shape))
    if x.dim() == 4 and make.integer(0, 1):
        x = x.contiguous(memory_format=torch.channels_last)
    return Case((x, groups, *_parameters(make, groups * each)))


def _instance_inputs(make: Make) -> Case:
    shape = make.size(1, 5), make.integer(1, 6), make.size(2, 7), make.size(1, 7)
    x = distinct(make.tensor(*shape))
    return Case((x, None, None, *_parameters(make, shape[1])))


def _affine(*shape: int, rest: tuple[Any, ...], C: int, last: bool = False) -> Callable[[Make], Case]:
    def case(make: Make) -> Case:
        x = make.tensor(*shape)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        return Case((x, *rest, make.tensor(C), make.tensor(C)))

    return case


def _spec(name: str, parse: Callable[..., Rows], differentiable: tuple[int, ...], **fields: Any) -> OpSpec:
    return OpSpec(
        name=name,
        op=getattr(ops, name),
        reference=_reference(parse),
        bound=_bound(parse),
        grad_bound=_grad_bound(parse, *differentiable),
        differentiable=differentiable,
        families=("row_norm", "row_norm_grad"),
        **fields,
    )


_FLOATING = r"input has dtype torch.int64, expected a floating type"

SPECS = [
    _spec(
        "layer_norm",
        _layers,
        (0, 2, 3),
        inputs=_layer_inputs,
        examples={
            "short": _affine(70, 37, rest=([37],), C=37),
            "long": _affine(3, 9001, rest=([9001],), C=9001),
            "plain": lambda make: Case((make.tensor(17, 130), 130, None, None)),
        },
        bad=(
            refuses(TypeError, _FLOATING, integers(3, 4), extra=([4],)),
            Bad(lambda make: Case((make.tensor(3, 4), [3])), ValueError, r"expected one that ends in \[3\]"),
            Bad(_affine(3, 4, rest=([4],), C=3), ValueError, r"weight has shape \[3\], expected \[4\]"),
        ),
    ),
    _spec(
        "rms_norm",
        _rms,
        (0, 2),
        inputs=_rms_inputs,
        examples={
            "short": lambda make: Case((make.tensor(70, 37), [37], make.tensor(37), 1e-5)),
            "long": lambda make: Case((make.tensor(3, 9001), [9001], make.tensor(9001), 1e-5)),
        },
        bad=(refuses(TypeError, _FLOATING, integers(3, 4), extra=([4],)),),
    ),
    _spec(
        "group_norm",
        _groups,
        (0, 2, 3),
        inputs=_group_inputs,
        examples={
            "images": _affine(3, 12, 5, 7, rest=(3,), C=12),
            "channels last": _affine(3, 12, 5, 7, rest=(3,), C=12, last=True),
            "long": _affine(2, 4, 70, 70, rest=(2,), C=4),
            "long, channels last": _affine(2, 4, 70, 70, rest=(2,), C=4, last=True),
        },
        bad=(
            Bad(
                lambda make: Case((make.tensor(3, 4), 3)), ValueError, "4 channels cannot be shared out to num_groups 3"
            ),
            refuses(ValueError, r"input has shape \[3\], expected \[N, C, ...\]", (3,), extra=(1,)),
            refuses(TypeError, _FLOATING, integers(3, 4), extra=(2,)),
        ),
    ),
    _spec(
        "instance_norm",
        _instances,
        (0, 3, 4),
        inputs=_instance_inputs,
        examples={
            "images": tensors((3, 5, 6, 7), None, None, None, None),
            "affine": _affine(3, 5, 6, 7, rest=(None, None), C=5),
            "side by side": _affine(3, 32, 9, 5, rest=(None, None), C=32, last=True),
            "long, side by side": _affine(2, 64, 35, 31, rest=(None, None), C=64, last=True),
        },
        bad=(
            refuses(ValueError, r"running_mean has shape \[4\], expected \[5\]", (3, 5, 6), (4,), (4,)),
            refuses(ValueError, "more than 1 value per channel", (3, 4, 1)),
        ),
    ),
]
