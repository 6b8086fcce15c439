"""Bounds of the norms of rows, for `row_norm`'s specs.

u is the accumulate type's unit, d the depth of a sum over a row. A mean is off by gamma(d + 2) mean |x|, a deviation
D = x - mean by that and a rounding, e; the mean square of deviations by mean (2 |D| e + e^2) and gamma(d + 4) of it. So
rstd lies between its values for the variance and this more or less, and 8 u. v = D rstd, y and the gradients, which are
sums and products of these, follow with a rounding for each operation. A sum that is normalised is rounded first: e.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minidl.kernels import row_norm as kernels
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Case


class Rows(NamedTuple):
    """A call: x, weight and bias as rows [R, L] (weights broadcast), eps, and the kernels' rows; `summed` if x is a
    sum, which is rounded."""

    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor
    eps: float
    rms: bool
    rows: kernels.Rows
    shape: torch.Size
    summed: bool = False


def layers(x: torch.Tensor, shape: Any, w: Any = None, b: Any = None, eps: float = 1e-5, rms: bool = False) -> Rows:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    _, rows = kernels.layers(x, len(sizes))
    flat = x.reshape(rows.total, rows.sizes.L)
    w, b = (torch.full_like(flat, v) if t is None else t.reshape(1, -1).expand_as(flat) for t, v in ((w, 1), (b, 0)))
    return Rows(flat, w, b, eps, rms, rows, x.shape)


def rms(x: torch.Tensor, shape: Any, w: Any = None, eps: float = 2.0**-20) -> Rows:
    return layers(x, shape, w, None, eps, True)


def sums(x: torch.Tensor, residual: torch.Tensor, shape: Any, w: Any = None, eps: float = 2.0**-20) -> Rows:
    return rms(x + residual, shape, w, eps)._replace(summed=True)


def groups(x: torch.Tensor, groups: int, w: Any = None, b: Any = None, eps: float = 1e-5) -> Rows:
    _, rows = kernels.groups(x.contiguous(), groups)
    flat = x.reshape(rows.total, rows.sizes.L)
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    w, b = (
        torch.full_like(flat, v) if t is None else t.view(shape).expand(x.shape).reshape(flat.shape)
        for t, v in ((w, 1), (b, 0))
    )
    return Rows(flat, w, b, eps, False, rows, x.shape)


def instances(
    x: torch.Tensor, mean: None = None, var: None = None, w: Any = None, b: Any = None, *rest: Any, eps: float = 1e-5
) -> Rows:
    return groups(x, x.shape[1], w, b, eps)


def reference(parse: Callable[..., Rows]) -> Callable[..., torch.Tensor]:
    """Return the norm of the rows of a call."""

    def normed(*args: Any, **named: Any) -> torch.Tensor:
        at = parse(*args, **named)
        d = at.x if at.rms else at.x - at.x.mean(1, keepdim=True)
        rstd = 1 / torch.sqrt(d.square().mean(1, keepdim=True) + at.eps)
        return (d * rstd * at.w + at.b).reshape(at.shape)

    return normed


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
    if at.summed:
        e = (bounds.UNIT[dtype] + 2 * u) * x.abs() + bounds.TINY[dtype]
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


def bound(parse: Callable[..., Rows]) -> Callable[..., torch.Tensor]:
    """Return the bound of a result, for a spec."""

    def error(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        at = parse(*case.args, **case.kwargs)
        if at.x.numel() == 0:
            return torch.zeros_like(result)
        u, tiny = bounds.acc_unit(dtype), bounds.TINY[launch.acc_torch(dtype)]
        v, v_error, *_, size = _errors(at, dtype)
        product = at.w.abs() * (v.abs() + v_error)
        off = at.w.abs() * v_error + 2 * u * (product + at.b.abs()) + 2 * tiny
        off = _finite(off, dtype, size.expand_as(off), product + at.b.abs())
        return bounds.rounded(result, off.reshape(at.shape), dtype)

    return error


def grad_bound(parse: Callable[..., Rows]) -> Callable[..., tuple[Any, ...]]:
    """Return the bound of the gradients, for a spec."""

    def errors(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
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
        all_errors: list[torch.Tensor | None] = [None if grads[0] is None else dx.reshape(at.shape)]
        count = at.rows.images * at.rows.sizes.S
        for k, (term, term_error) in enumerate(((dy * V, dy * v_error), (dy, torch.zeros_like(dy)))):
            if k + 1 >= len(grads) or grads[k + 1] is None:
                all_errors.append(None)
                continue
            total = _channels(at, term)
            off = _channels(at, term_error) + bounds.gamma(count + 4, u) * total + 2 * count * tiny
            top = size.max().expand_as(total)
            all_errors.append(_finite(off, dtype, total, top).reshape(grads[k + 1].shape))
        return tuple(
            None if g is None or e is None else bounds.rounded(g, e, dtype)
            for g, e in zip(grads, all_errors[: len(grads)], strict=True)
        )

    return errors


def bound_of_sum(case: Case, results: tuple[torch.Tensor, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    total = results[1].abs()
    error = bounds.or_infinite(2 * bounds.acc_unit(dtype) * total, total, dtype)
    return bound(sums)(case, results[0], dtype), bounds.rounded(results[1], error, dtype)


def grad_bound_of_sum(case: Case, dy: Any, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bound of the gradients: the kernel adds those of the norm and of the sum, and rounds once more."""
    x, residual, weight = grads
    total = next((grad for grad in (x, residual) if grad is not None), None)
    of_norm = None if total is None else total - dy[1]
    error, weight_error = grad_bound(sums)(case, dy[0], (of_norm, weight), dtype)
    if total is not None and of_norm is not None:
        error = bounds.rounded(total, error + 2 * bounds.acc_unit(dtype) * (of_norm.abs() + dy[1].abs()), dtype)
    return None if x is None else error, None if residual is None else error, weight_error


def _channels(at: Rows, terms: torch.Tensor) -> torch.Tensor:
    """Return the sums over images and the elements of each channel."""
    rows = at.rows
    return terms.reshape(rows.images, rows.sizes.G * rows.sizes.CHANNELS, rows.sizes.S).sum((0, 2))
