"""Specs of cross-entropy.

Cross-entropy of a row, sum_c q_c (log s - z_c), has only terms of one sign (for positive weights), so its error is a
few units for each share q_c, gamma(d) for the sums, and the error of s in `specs.softmax`. u as in `specs.loss`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Bad, Case, bools, integers, refuses, spec_factory
from minidl.testing.specs.loss import classes, options, pair, positive, reduced, reduction, sum_chain
from minidl.testing.specs.make import Make
from minidl.testing.specs.softmax import row_errors, row_tile


def _weights(case: Case, N: int) -> torch.Tensor:
    weight = options(case)["weight"]
    return torch.ones(N, dtype=case.args[0].dtype, device=case.args[0].device) if weight is None else weight


def shares_of(case: Case) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return q, the axis of the classes, and the rows that count (in q's shape with one class)."""
    x, target = case.args
    settings, axis = options(case), min(1, case.args[0].dim() - 1)
    N, smoothing = x.shape[axis], settings["label_smoothing"]
    w = _weights(case, N).reshape([N if i == axis else 1 for i in range(x.dim())])
    if target.dtype.is_floating_point:
        all_rows = torch.ones_like(x.narrow(axis, 0, 1), dtype=torch.bool)
        return w * ((1 - smoothing) * target + smoothing / N), axis, all_rows
    counted = (target != settings["ignore_index"]).unsqueeze(axis)
    index = torch.where(counted, target.unsqueeze(axis), 0)
    one = torch.zeros_like(x).scatter_(axis, index, 1.0)
    chosen = w.expand(x.shape).gather(axis, index)
    return torch.where(counted, (1 - smoothing) * one * chosen + smoothing / N * w, 0.0), axis, counted


def divisor_of(case: Case) -> float:
    x, target = case.args
    _, axis, counted = shares_of(case)
    if target.dtype.is_floating_point:
        return x.numel() / x.shape[axis]
    return float(_weights(case, x.shape[axis])[target[counted.squeeze(axis)]].sum())


def row_losses(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of each row, and its error in the accumulate type."""
    x, _ = case.args
    u = bounds.acc_unit(dtype)
    q, axis, counted = shares_of(case)
    row = row_errors(x, axis, "cross_entropy", dtype)
    a = q.abs()
    share, log = a.sum(axis, keepdim=True), row.s.log()
    times = torch.where(a == 0, 0.0, a * row.z.abs()).sum(axis, keepdim=True)
    loss = torch.where(counted, share * log + times, 0.0)
    error = share * (row.s_error + 8 * u * log) + bounds.gamma(row.d + 20, u) * (share * log + times)
    return loss.squeeze(axis), torch.where(counted, error, 0.0).squeeze(axis)


def _cross_entropy_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, _ = case.args
    if x.numel() == 0:
        return torch.zeros_like(result)
    N = x.shape[min(1, x.dim() - 1)]
    tile = row_tile("cross_entropy", x.numel() // N, N, dtype)
    return reduced(case, *row_losses(case, dtype), divisor_of(case), dtype, tile["BLOCK_M"])


def cross_entropy_grad_bound(
    case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype
) -> tuple[Any, ...]:
    """Return the bound of a gradient (Q p - q) / divisor that is stored, multiplied by dy and rounded again.

    In float16 it is stored before the division.
    """
    (dx,) = grads
    x, _ = case.args
    if x.numel() == 0:
        return (torch.zeros_like(dx),)
    u, reduction = bounds.acc_unit(dtype), options(case)["reduction"]
    divisor = divisor_of(case) if reduction == "mean" else 1.0
    q, axis, counted = shares_of(case)
    row = row_errors(x, axis, "cross_entropy", dtype)
    rows, a = x.numel() // x.shape[axis], q.abs()
    p = a.sum(axis, keepdim=True) * row.e / row.s
    error = p * ((1 + row.e_error) * (1 + row.s_error) * (1 + bounds.gamma(row.d + 16, u)) - 1) + 8 * u * a
    dividing = bounds.gamma(sum_chain(rows, dtype) + 8, u) if reduction == "mean" else 0.0
    divides_later = reduction == "mean" and dtype == torch.float16
    first, second = (1.0, divisor) if divides_later else (divisor, 1.0)
    stored = (p + a) / abs(first)
    error = error / abs(first) + (4 * u + dividing) * stored + bounds.TINY[launch.acc_torch(dtype)]
    factor = (dy.unsqueeze(axis) if reduction == "none" and x.dim() > 1 else dy).abs() / abs(second)
    error = factor * (bounds.rounded(stored, error, dtype) + (4 * u + dividing) * stored)
    return (bounds.rounded(dx, torch.where(counted, error, 0.0), dtype),)


def _soft_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bounds for logits and probabilities: a log-softmax times up to three numbers, each time rounded."""
    dx, dt = grads
    x, _ = case.args
    if x.numel() == 0:
        return torch.zeros_like(dx), torch.zeros_like(dt)
    (dx_bound,) = cross_entropy_grad_bound(case, dy, (dx,), dtype)
    axis, settings = min(1, x.dim() - 1), options(case)
    rows = x.numel() // x.shape[axis]
    row = row_errors(x, axis, "softmax", dtype)
    log = row.s.log()
    u = bounds.acc_unit(dtype)
    error = u * row.z.abs() + row.s_error + 8 * u * log
    error = bounds.rounded(row.z - log, error + u * ((row.z - log).abs() + error), dtype)
    size = (row.z - log).abs()
    factor = torch.as_tensor((1 - settings["label_smoothing"]) / (rows if settings["reduction"] == "mean" else 1.0))
    w = _weights(case, x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.dim())])
    by_row = settings["reduction"] == "none" and x.dim() > 1
    for factors in (factor, w, (dy.unsqueeze(axis) if by_row else dy).abs()):
        error, size = error * factors, size * factors
        error = bounds.rounded(size, error + 2 * u * size, dtype)
    return dx_bound, torch.where(dt == 0, bounds.rounded(dt, error, dtype), error)


def _cross_entropy_inputs(make: Make) -> Case:
    N = make.size(1, 40)
    rows = [make.size(0, 20) for _ in range(make.integer(0, 3))]
    x = make.tensor(*rows[:1], N, *rows[1:])
    options: dict[str, Any] = {"reduction": reduction(make), "label_smoothing": make.choice([0.0, 0.1, 1.0])}
    if make.integer(0, 1):
        options["weight"] = positive(N)(make)
    if make.integer(0, 3) == 0:
        return Case((x, make.tensor(*x.shape, low=0.125, high=1.0)), options)
    options["ignore_index"] = make.choice([-100, 0])
    return Case((x, make.integers(*rows, low=0, high=N - 1)), options)


def _soft_inputs(make: Make) -> Case:
    shape = [make.size(1, 9) for _ in range(make.integer(1, 3))]
    settings: dict[str, Any] = {"reduction": reduction(make), "label_smoothing": make.choice([0.0, 0.25])}
    if make.integer(0, 1):
        settings["weight"] = positive(shape[min(1, len(shape) - 1)])(make)
    return Case((make.tensor(*shape), make.tensor(*shape, low=0.125, high=1.0)), settings)


SPECS = [
    spec_factory()(
        "cross_entropy",
        reference=F.cross_entropy,
        inputs=_cross_entropy_inputs,
        bound=_cross_entropy_bound,
        grad_bound=cross_entropy_grad_bound,
        differentiable=(0,),
        families=("cross_entropy", "cross_entropy_loop", "loss"),
        examples={
            "few classes": classes(70, 10),
            "one block": classes(5, 300, reduction="sum", label_smoothing=0.1),
            "images": classes(2, 5, 7, reduction="none"),
            "probabilities": pair(3, 40, weight=positive(40)),
            "many classes": classes(2, 9001),
            "many smoothed": classes(2, 9001, label_smoothing=0.1, weight=positive(9001)),
        },
        bad=(
            refuses(
                ValueError, r"target has shape \[5\], expected \[4\] for input \[4, 3\]", (4, 3), integers(5, high=2)
            ),
            refuses(ValueError, r"target of probabilities has shape \[4, 2\]", (4, 3), (4, 2)),
            refuses(TypeError, "target has dtype torch.bool, expected int64, int32 or uint8 classes", (4, 3), bools(4)),
            Bad(classes(4, 3, weight=positive(4)), ValueError, r"weight has shape \[4\]"),
            Bad(classes(4, 3, label_smoothing=1.5), ValueError, "label_smoothing is 1.5"),
            Bad(classes(4, 3, reduction="max"), ValueError, "unknown reduction 'max'"),
            refuses(ValueError, "at least one class", (4, 0), integers(4, high=0)),
            refuses(ValueError, "input is a scalar", (), integers(high=0)),
            refuses(ValueError, "ignore_index 1 needs targets that are classes", (4, 3), (4, 3), ignore_index=1),
        ),
    ),
    spec_factory()(
        "cross_entropy_of_probabilities",
        op=ops.cross_entropy,
        reference=F.cross_entropy,
        inputs=_soft_inputs,
        bound=_cross_entropy_bound,
        grad_bound=_soft_grad_bound,
        differentiable=(0, 1),
        families=("cross_entropy", "cross_entropy_loop", "loss"),
        examples={"weighted": pair(3, 40, weight=positive(40)), "images": pair(2, 5, 7, reduction="none")},
        bad=(refuses(ValueError, r"target of probabilities has shape \[4, 2\]", (4, 3), (4, 2)),),
    ),
]
