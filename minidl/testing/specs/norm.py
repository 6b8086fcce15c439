"""Specs of batch norm.

Per channel, R = max |x - x_0|, x_0 its first value, s^2 = var, u the unit of the accumulate type. The error of x - x_0
is u R. A lane's mean of n of them has the errors of its steps, each of a mean (u R) and of a step to the next value
(5 u 2 R / k in step k), of which later steps keep a part: (n / 2 + 12) u R. Lanes and bands are joined by sums in
float64: together D = u R (17 + depth), where a band's depth is n and 2 roundings, or for float64 n, its lanes and the
bands. In one launch a lane's n values are added: n u R of its mean. Then x_0 is added in float64, and the mean is
rounded.

The sum of squares uses distances from such a mean. An error of D in distances of mean square s^2 changes it by at most
2 D s + D^2; both factors of a lane's product have the error D, distances of lanes from a band and of bands from all
twice D: 12 D s + 12 D^2 covers them. The sum itself adds gamma(depth + 8) s^2. With E for all of this, rstd lies
between its values for var + E and var - E (or 0). So the condition of rstd is R / s, and of x - mean it is
mean / deviation, by the rounding of the mean alone.

z = (x - mean) rstd weight + bias follows with a rounding for each operation, act(z) as in its spec. The
gradient multiplies dy by act'(z): an error e of z changes act' by at most e (no smooth activation here is steeper), and
at a kink by its step if |z| <= e. Its sums and dx follow by the rules for sums and products.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels import activation, norm, reduce
from minidl.kernels.activation import Activation
from minidl.runtime import launch
from minidl.tensors import Tensor
from minidl.testing.specs import base, bounds
from minidl.testing.specs.activation import DERIVATIVE_UNITS, apply, derivative, output_error
from minidl.testing.specs.base import Case, OpSpec, distinct, integers, refuses, tensors
from minidl.testing.specs.make import Make
from minidl.testing.specs.products import gradient_bounds

# The error, in units of 1, of derivatives of bounded activations computed from z.
BOUNDED_UNITS = 24
# The error of a few operations in float64.
DOUBLE = 8 * 2.0**-53


def _arguments(*args: Any) -> Any:
    """Return the arguments of batch_norm by name, and `running`, the pair of running statistics."""
    bound = inspect.signature(ops.batch_norm).bind(*args)
    bound.apply_defaults()
    arguments = SimpleNamespace(**bound.arguments)
    arguments.running = arguments.running_mean, arguments.running_var
    return arguments


def _with_statistics(x: Tensor, mean: Tensor | None, var: Tensor | None, *rest: Any, **named: Any) -> tuple[Any, ...]:
    """Return the result of ops.batch_norm, and copies of the running statistics after the call."""
    mean, var = (None if statistic is None else Tensor(statistic.data.clone()) for statistic in (mean, var))
    return ops.batch_norm(x, mean, var, *rest, **named), mean, var


def _reference(*args: Any) -> torch.Tensor:
    """Compute the formula as written: torch expands the product first, which cancels and turns infinities into NaN."""
    arguments = _arguments(*args)
    rows = _rows(arguments.input)
    if arguments.training:
        mean, var = rows.mean(0), rows.var(0, correction=0)
    else:
        mean, var = arguments.running
    scale = 1 / torch.sqrt(var + arguments.eps)
    z = (rows - mean) * (scale if arguments.weight is None else scale * arguments.weight)
    return _as_image(apply(z if arguments.bias is None else z + arguments.bias, arguments.act), arguments.input)


def _running_reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = _arguments(*args)
    mean, var = (statistic.clone() for statistic in arguments.running)
    F.batch_norm(arguments.input, mean, var, None, None, True, arguments.momentum, arguments.eps)
    return mean, var


WithError = tuple[torch.Tensor, torch.Tensor]


class Errors(NamedTuple):
    """Rows [M, C] of x - mean and z; rstd, |factor| of x - mean and the used mean and var, [C]; with their errors."""

    d: WithError
    z: WithError
    rstd: WithError
    scale: WithError
    mean: WithError
    var: WithError


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def _as_image(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return rows.reshape(like.movedim(1, -1).shape).movedim(-1, 1)


def _finite_bound(error: torch.Tensor, *sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error, infinite if it is NaN or if a value of these sizes may overflow."""
    limit = torch.finfo(launch.acc_torch(dtype)).max / 4
    for size in sizes:
        error = torch.where(size < limit, error, math.inf)
    return error.nan_to_num(nan=math.inf, posinf=math.inf)


def _errors(arguments: Any, dtype: torch.dtype) -> Errors:
    u, tiny = bounds.acc_unit(dtype), bounds.TINY[launch.acc_torch(dtype)]
    x = _rows(arguments.input)
    if arguments.training:
        mean, var = x.mean(0), x.var(0, correction=0)
        depth = norm.depth(arguments.input.shape, dtype, "norm_stats")
        if dtype == torch.float64:
            depth += norm.bands(arguments.input.shape, dtype, "norm_stats")
        largest = (x - x[0]).abs().amax(0)
        lane_error = _finite_bound(u * largest * (17 + depth) + tiny, 4 * len(x) * largest, dtype=dtype)
        var_error = 12 * lane_error * var.sqrt() + 12 * lane_error**2 + bounds.gamma(depth + 8, u) * var + 8 * tiny
        var_error = _finite_bound(var_error, 4 * len(x) * largest**2, dtype=dtype)
        mean_error = lane_error + (u + DOUBLE) * (mean.abs() + lane_error) + tiny
    else:
        mean, var = arguments.running
        mean_error, var_error = torch.zeros_like(mean), torch.zeros_like(var)
    rstd = 1 / torch.sqrt(var + arguments.eps)
    high = 1 / torch.sqrt((var - var_error).clamp(min=0) + arguments.eps)
    low = 1 / torch.sqrt(var + var_error + arguments.eps)
    rstd_error = torch.maximum(high - rstd, rstd - low) + (2 * u + DOUBLE) * high
    weight = torch.ones_like(mean) if arguments.weight is None else arguments.weight
    bias = torch.zeros_like(mean) if arguments.bias is None else arguments.bias
    scale = rstd * weight.abs()
    scale_error = weight.abs() * (rstd_error + u * (rstd + rstd_error)) + tiny
    d = x - mean
    d_error = mean_error + u * (d.abs() + mean_error)
    size = (d.abs() + d_error) * (scale + scale_error)
    z_error = d.abs() * scale_error + d_error * (scale + scale_error) + 2 * u * (size + bias.abs()) + tiny
    z_error = _finite_bound(z_error, size, size + bias.abs(), x.abs() + mean.abs(), dtype=dtype)
    z = d * rstd * weight + bias, z_error
    return Errors((d, d_error), z, (rstd, rstd_error), (scale, scale_error), (mean, mean_error), (var, var_error))


def _bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    arguments = _arguments(*case.args)
    if arguments.input.numel() == 0:
        return torch.zeros_like(arguments.input)
    z, z_error = _errors(arguments, dtype).z
    error = _finite_bound(output_error(z, z_error, arguments.act, dtype), z.abs() + z_error, dtype=dtype)
    return bounds.rounded(result, _as_image(error, result), dtype)


def _running_bound(case: Case, result: tuple[torch.Tensor, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    arguments = _arguments(*case.args)
    *_, (mean, mean_error), (var, var_error) = _errors(arguments, dtype)
    M = arguments.input.numel() // arguments.input.shape[1]
    share, correction = arguments.momentum, M / (M - 1)
    old_mean, old_var = arguments.running
    mean_error = share * mean_error + DOUBLE * ((1 - share) * old_mean.abs() + share * mean.abs())
    var_error = share * correction * var_error + DOUBLE * ((1 - share) * old_var.abs() + share * correction * var)
    return (
        bounds.rounded(result[0], _finite_bound(mean_error, 4 * mean.abs(), dtype=dtype), dtype),
        bounds.rounded(result[1], _finite_bound(var_error, dtype=dtype), dtype),
    )


def _derivative(z: torch.Tensor, z_error: torch.Tensor, act: Activation, dtype: torch.dtype) -> WithError:
    """Return act'(z) and its error."""
    name, slope = activation.parse(act)
    p, u = derivative(z, act), bounds.acc_unit(dtype)
    if name is None:
        return p, torch.zeros_like(p)
    if name in ("relu", "leaky_relu"):
        low = slope if name == "leaky_relu" else 0.0
        return p, torch.where(z.abs() <= z_error, abs(1 - low), 0.0) + 2 * u * low
    if name == "relu6":
        return p, torch.where(torch.minimum(z.abs(), (z - 6).abs()) <= z_error, 1.0, 0.0)
    return p, z_error + u * DERIVATIVE_UNITS.get(name, BOUNDED_UNITS)


def _grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    arguments = _arguments(*case.args)
    if arguments.input.numel() == 0:
        return tuple(None if g is None else torch.zeros_like(g) for g in grads)
    u, tiny = bounds.acc_unit(dtype), bounds.TINY[launch.acc_torch(dtype)]
    (d, d_error), (z, z_error), (rstd, rstd_error), (scale, scale_error), *_ = _errors(arguments, dtype)
    dy, r = _rows(dy), rstd + rstd_error
    M, C = dy.shape
    p, p_error = _derivative(z, z_error, arguments.act, dtype)
    dz = dy * p
    dz_error = dy.abs() * p_error + u * dy.abs() * (p.abs() + p_error) + tiny
    dz_error = torch.where(dy == 0, 0.0, dz_error)
    shape = arguments.input.shape
    chain = norm.depth(shape, dtype, "norm_sums") + reduce.depth(2 * C, norm.bands(shape, dtype, "norm_sums"), dtype)
    db_size = (dz.abs() + dz_error).sum(0)
    db_error = dz_error.sum(0) + bounds.gamma(chain, u) * db_size
    sizes = (dz.abs() + dz_error) * (d.abs() + d_error)
    t_error = (dz_error * (d.abs() + d_error) + dz.abs() * d_error).sum(0) + M * tiny
    t_error = t_error + bounds.gamma(chain + 3, u) * sizes.sum(0)
    dw_error = t_error * r + sizes.sum(0) * (rstd_error + 2 * u * r) + tiny
    dw_size = sizes.sum(0) * r
    g, g_error = dz.abs(), dz_error
    if arguments.training:
        db, dw = dz.sum(0).abs(), (dz * d).sum(0).abs() * rstd
        along = (d.abs() + d_error) * r
        g = g + (db + dw * d.abs() * rstd) / M
        g_error = g_error + (db_error + 6 * u * db) / M + tiny
        g_error = g_error + (along * (dw_error + 6 * u * dw) + dw * (d_error * r + d.abs() * rstd_error)) / M
        g_error = g_error + 3 * u * (g + g_error)
    factor = scale + scale_error
    dx_error = g_error * factor + g * scale_error + u * (g + g_error) * factor
    # A value that underflows may then be multiplied by rstd up to three times.
    dx_error = dx_error + 16 * tiny * (1 + r * r) * (1 + d.abs()) * (1 + factor)
    full = db_size, sizes.sum(0), dw_size, dy.abs(), z.abs() + z_error
    dx_error = _finite_bound(dx_error, *full, (g + g_error) * factor, dtype=dtype)
    affine = [_finite_bound(e, *full[:3], full[4].amax(0), dy.abs().amax(0), dtype=dtype) for e in (dw_error, db_error)]
    return gradient_bounds(grads, (_as_image(dx_error, arguments.input), *affine), dtype)


_ACTS: tuple[Activation, ...] = (None, None, "relu", ("leaky_relu", 0.25), *activation.NAMES)


def _inputs(make: Make) -> Case:
    training = bool(make.integer(0, 1))
    shape = (make.size(2 if training else 0, 40), make.size(1, 40), *make.shape(0, 2, 1, 5))
    x = base.in_either_order(make, distinct(make.tensor(*shape)))
    C = shape[1]
    running: tuple[Any, Any] = make.tensor(C), make.tensor(C, low=0.0)
    running = (None, None) if training and make.integer(0, 3) == 0 else running
    affine = [make.tensor(C) if make.integer(0, 3) else None for _ in range(2)]
    return Case((x, *running, *affine, training, make.choice([0.1, 0.5, 1.0]), make.choice([1e-5, 1e-3, 0.1]),
                 make.choice(_ACTS)))  # fmt: skip


def _running_inputs(make: Make) -> Case:
    C = make.size(1, 40)
    x = base.in_either_order(make, make.tensor(make.size(2, 40), C, *make.shape(0, 2, 1, 5)))
    return Case((x, make.tensor(C), make.tensor(C, low=0.0), None, None, True, make.choice([0.1, 0.5, 1.0])))


def _of(*shape: int, training: bool = True, act: Activation = None, constant: bool = False) -> Callable[[Make], Case]:
    def case(make: Make) -> Case:
        C = shape[1]
        x = make.tensor(*[1 if constant and i != 1 else size for i, size in enumerate(shape)]).expand(shape)
        vectors = make.tensor(C), make.tensor(C, low=0.0), make.tensor(C), make.tensor(C)
        return Case((x, *vectors, training, 0.1, 1e-5, act))

    return case


CONSTANT = _of(6, 5, 3, 3, constant=True)
STATISTICS = "norm_alone", "norm_join", "norm_planes", "norm_stats"
SPECS = [
    OpSpec(
        name="batch_norm",
        op=lambda *args, **named: _with_statistics(*args, **named)[0],
        reference=_reference,
        inputs=_inputs,
        bound=_bound,
        grad_bound=_grad_bound,
        differentiable=(0, 3, 4),
        families=("norm", "norm_fold", "norm_grad", "norm_sums", *STATISTICS),
        examples=base.in_both_orders({
            "training": _of(6, 33, 7, 5, act="relu"),
            "rows": _of(70, 3, act="gelu"),
            "bands": _of(40, 5, 13, 11, act="sigmoid"),
            "wide": _of(9, 130, 3),
            "running": _of(6, 33, 7, 5, training=False, act="silu"),
            "running, plain": _of(6, 2, 3, 3, training=False),
            "constant": CONSTANT,
            "without weights": tensors((5, 7, 3, 3), *[None] * 4, extra=(True, 0.1, 1e-5, "tanh")),
        }),
        bad=(
            refuses(TypeError, "x has dtype torch.int64", integers(4, 2), None, None, training=True),
            refuses(ValueError, r"input has shape \[4\], expected \[N, C\]", (4,), None, None, training=True),
            refuses(ValueError, r"weight has shape \[4\], expected \[3\]", (2, 3), (3,), (3,), (4,), training=True),
            refuses(ValueError, "one of running_mean and running_var", (2, 3), None, (3,), training=True),
            refuses(ValueError, "running_mean and running_var are None", (2, 3), None, None, training=False),
            refuses(ValueError, r"than 1 value per channel .* input size \[1, 3\]", (1, 3), (3,), (3,), training=True),
            refuses(ValueError, "eps is -1.0, expected 0 or more", (2, 3), (3,), (3,), training=True, eps=-1.0),
            refuses(ValueError, "unknown activation 'swish'", (2, 3), (3,), (3,), training=True, act="swish"),
            refuses(ValueError, "which needs num_batches_tracked", (2, 3), (3,), (3,), training=True, momentum=None),
        ),
    ),
    OpSpec(
        name="batch_norm, running statistics",
        op=lambda *args, **named: _with_statistics(*args, **named)[1:],
        reference=_running_reference,
        inputs=_running_inputs,
        bound=_running_bound,
        families=STATISTICS,
        examples=base.in_both_orders({"images": _of(6, 33, 7, 5), "bands": _of(40, 5, 13, 11), "constant": CONSTANT}),
        bad=(refuses(ValueError, r"running_var has shape \[4\], expected \[3\]", (2, 3), (3,), (4,), training=True),),
        # An infinite value makes a channel's mean NaN, which is infinite in torch.
        specials=False,
    ),
]  # fmt: skip
