"""Records of the losses.

Cross-entropy of a row, sum_c q_c (log s - z_c), has only terms of one sign (for positive weights), so its error is a
few units for each share q_c, gamma(d) for the sums, and what `specs.softmax` finds for s. Squared error and the form
of binary cross-entropy that the kernels use have a few roundings for each element. u is the accumulate type's unit;
a compiled division is off by 4 u, a logarithm by 8 u, an exponential of -a by 8 u + 3 u a.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Bad, Case, between, bools, integers, of, records, refuses, tensors
from minidl.testing.specs.make import Make
from minidl.testing.specs.softmax import row_errors, row_tile

_OPTIONS = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "pos_weight": None}


def options(case: Case) -> dict[str, Any]:
    """The keyword arguments of a loss, with the defaults of those that are not given."""
    return {**_OPTIONS, **case.kwargs}


def _sum_chain(terms: int, dtype: torch.dtype) -> int:
    """Additions in a program's part and in the sum of the parts."""
    block = launch.tile("loss", dtype, N=terms)["BLOCK_N"]
    parts = -(-terms // block)
    return 2 * min(terms, block, block // 16 + 32) + -(-parts // block)


def reduced(
    case: Case, loss: torch.Tensor, error: torch.Tensor, divisor: float, dtype: torch.dtype, extra: int = 0
) -> torch.Tensor:
    """The bound of a loss from the errors of its terms; `extra` more additions than those of `_sum_chain`.

    A mean is divided by `divisor`.
    """
    u, reduction = bounds.acc_unit(dtype), options(case)["reduction"]
    if reduction == "none":
        return bounds.rounded(loss, error, dtype)
    divided = reduction in ("mean", "batchmean")
    divisor = divisor if divided else 1.0
    total = (loss.abs() + error).sum()
    d = _sum_chain(max(loss.numel(), 1), dtype) + extra
    off = error.sum() + bounds.gamma(d, u) * total + loss.numel() * bounds.TINY[launch.acc_torch(dtype)]
    result = loss.sum() / divisor
    # Dividing costs 4 u, and the divisor may itself be a sum of as many terms.
    off = off / divisor + (bounds.gamma(d + 4, u) * (result.abs() + off / divisor) if divided else 0.0)
    return bounds.known(bounds.rounded(result, off, dtype), total, dtype)


def _weights(case: Case, N: int) -> torch.Tensor:
    weight = options(case)["weight"]
    return torch.ones(N, dtype=case.args[0].dtype, device=case.args[0].device) if weight is None else weight


def shares_of(case: Case) -> tuple[torch.Tensor, int, torch.Tensor]:
    """q and the axis of the classes, and which rows count (as q's shape with one class)."""
    x, target = case.args
    given, axis = options(case), min(1, case.args[0].dim() - 1)
    N, smoothing = x.shape[axis], given["label_smoothing"]
    w = _weights(case, N).reshape([N if i == axis else 1 for i in range(x.dim())])
    if target.dtype.is_floating_point:
        every = torch.ones_like(x.narrow(axis, 0, 1), dtype=torch.bool)
        return w * ((1 - smoothing) * target + smoothing / N), axis, every
    kept = (target != given["ignore_index"]).unsqueeze(axis)
    index = torch.where(kept, target.unsqueeze(axis), 0)
    one = torch.zeros_like(x).scatter_(axis, index, 1.0)
    chosen = w.expand(x.shape).gather(axis, index)
    return torch.where(kept, (1 - smoothing) * one * chosen + smoothing / N * w, 0.0), axis, kept


def divisor_of(case: Case) -> float:
    x, target = case.args
    _, axis, kept = shares_of(case)
    if target.dtype.is_floating_point:
        return x.numel() / x.shape[axis]
    return float(_weights(case, x.shape[axis])[target[kept.squeeze(axis)]].sum())


def row_losses(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross-entropy of each row, and its error in the accumulate type."""
    x, _ = case.args
    u = bounds.acc_unit(dtype)
    q, axis, kept = shares_of(case)
    row = row_errors(x, axis, "cross_entropy", dtype)
    a = q.abs()
    share, log = a.sum(axis, keepdim=True), row.s.log()
    times = torch.where(a == 0, 0.0, a * row.z.abs()).sum(axis, keepdim=True)
    loss = torch.where(kept, share * log + times, 0.0)
    error = share * (row.s_error + 8 * u * log) + bounds.gamma(row.d + 20, u) * (share * log + times)
    return loss.squeeze(axis), torch.where(kept, error, 0.0).squeeze(axis)


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
    """The gradient (Q p - q) / divisor is rounded where it waits, then multiplied by dy and rounded again.

    In float16 it waits without having been divided.
    """
    (dx,) = grads
    x, _ = case.args
    if x.numel() == 0:
        return (torch.zeros_like(dx),)
    u, reduction = bounds.acc_unit(dtype), options(case)["reduction"]
    divisor = divisor_of(case) if reduction == "mean" else 1.0
    q, axis, kept = shares_of(case)
    row = row_errors(x, axis, "cross_entropy", dtype)
    rows, a = x.numel() // x.shape[axis], q.abs()
    p = a.sum(axis, keepdim=True) * row.e / row.s
    error = p * ((1 + row.e_error) * (1 + row.s_error) * (1 + bounds.gamma(row.d + 16, u)) - 1) + 8 * u * a
    dividing = bounds.gamma(_sum_chain(rows, dtype) + 8, u) if reduction == "mean" else 0.0
    later = reduction == "mean" and dtype == torch.float16
    first, second = (1.0, divisor) if later else (divisor, 1.0)
    waiting = (p + a) / abs(first)
    error = error / abs(first) + (4 * u + dividing) * waiting + bounds.TINY[launch.acc_torch(dtype)]
    factor = (dy.unsqueeze(axis) if reduction == "none" and x.dim() > 1 else dy).abs() / abs(second)
    error = factor * (bounds.rounded(waiting, error, dtype) + (4 * u + dividing) * waiting)
    return (bounds.rounded(dx, torch.where(kept, error, 0.0), dtype),)


def _soft_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """That of the logits, and that of the probabilities: a log-softmax times up to three numbers, rounded each time."""
    dx, dt = grads
    x, _ = case.args
    if x.numel() == 0:
        return torch.zeros_like(dx), torch.zeros_like(dt)
    (for_x,) = cross_entropy_grad_bound(case, dy, (dx,), dtype)
    axis, given = min(1, x.dim() - 1), options(case)
    rows = x.numel() // x.shape[axis]
    row = row_errors(x, axis, "softmax", dtype)
    log = row.s.log()
    u = bounds.acc_unit(dtype)
    error = u * row.z.abs() + row.s_error + 8 * u * log
    error = bounds.rounded(row.z - log, error + u * ((row.z - log).abs() + error), dtype)
    size = (row.z - log).abs()
    factor = torch.as_tensor((1 - given["label_smoothing"]) / (rows if given["reduction"] == "mean" else 1.0))
    w = _weights(case, x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.dim())])
    each = given["reduction"] == "none" and x.dim() > 1
    for factors in (factor, w, (dy.unsqueeze(axis) if each else dy).abs()):
        error, size = error * factors, size * factors
        error = bounds.rounded(size, error + 2 * u * size, dtype)
    return for_x, torch.where(dt == 0, bounds.rounded(dt, error, dtype), error)


def _mse_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, target = case.args
    loss = (x - target) ** 2
    error = bounds.gamma(4, bounds.acc_unit(dtype)) * loss + bounds.TINY[launch.acc_torch(dtype)]
    return reduced(case, loss, error, loss.numel(), dtype)


def _mse_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, target = case.args
    # dy / n may vanish before it meets a large difference.
    tiny = bounds.TINY[launch.acc_torch(dtype)] * (1 + 2 * (x - target).abs())
    return tuple(bounds.rounded(g, 8 * bounds.acc_unit(dtype) * g.abs() + tiny, dtype) for g in grads)


def _binary_reference(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernels' formula: torch's own cancels for x < 0, down to NaN at -inf."""
    w, v = (1.0 if t is None else t for t in (weight, pos_weight))
    size = torch.where(x < 0, -x, x)  # its derivative at 0 is 1, abs has 0 there
    factor = torch.where(x < 0, v * target, 1 - target)
    loss = w * (size * factor + (1 + (v - 1) * target) * torch.log1p(torch.exp(-size)))
    return loss if reduction == "none" else getattr(loss, reduction)()


def _binary_parts(case: Case) -> tuple[torch.Tensor, ...]:
    """x, t, w, v of one shape."""
    x, target = case.args
    given = options(case)
    one = torch.ones_like(x)
    return x, target, *(one if given[k] is None else given[k].expand(x.shape) for k in ("weight", "pos_weight"))


def _binary_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, t, w, v = _binary_parts(case)
    u, size = bounds.acc_unit(dtype), x.abs()
    line = size * torch.where(x < 0, v * t, 1 - t)
    curve = (1 + (v - 1).abs() * t) * torch.log1p(torch.exp(-size))
    loss = w * (line + curve)
    error = w * u * (8 * line + (32 + 3 * size.clamp(max=1000)) * curve)
    return reduced(case, loss, error + (1 + w) * bounds.TINY[launch.acc_torch(dtype)], loss.numel(), dtype)


def _binary_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """dx = sigmoid(x) (1 - t) - v t sigmoid(-x) and dt = (v - 1) log(1 + exp(-x)) - x, times w dy.

    The reference's own dx is off by a few units of float64, since it cancels.
    """
    x, t, w, v = _binary_parts(case)
    u, size = bounds.acc_unit(dtype), x.abs()
    if options(case)["reduction"] == "mean":
        dy = dy / max(x.numel(), 1)
    scale = dy.abs() * w
    dx = torch.sigmoid(x) * (1 - t) + v * t * torch.sigmoid(-x)
    log = torch.log1p(torch.exp(-size))
    soft = log + torch.where(x < 0, size, 0.0)
    dt = (v - 1).abs() * (log * (32 + 3 * size.clamp(max=1000)) + 12 * soft) + 12 * size
    tiny = bounds.TINY[launch.acc_torch(dtype)] * (1 + w) * (1 + size) * (1 + v)
    errors = (scale * (36 * u * dx + 8 * 2.0**-53 * (1 + v)) + tiny, scale * u * dt + tiny)
    return tuple(bounds.rounded(g, error, dtype) for g, error in zip(grads, errors, strict=True))


positive = partial(between, 0.125, 3.0)


def reduction(make: Make) -> str:
    """A reduction that every loss knows."""
    return make.choice(["mean", "sum", "none"])


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
    given: dict[str, Any] = {"reduction": reduction(make), "label_smoothing": make.choice([0.0, 0.25])}
    if make.integer(0, 1):
        given["weight"] = positive(shape[min(1, len(shape) - 1)])(make)
    return Case((make.tensor(*shape), make.tensor(*shape, low=0.125, high=1.0)), given)


def classes(*shape: int, **options: Any) -> Callable[[Make], Case]:
    """Logits and their classes."""
    return tensors(shape, integers(shape[0], *shape[2:], high=shape[1] - 1), **options)


def pair(*shape: int, **options: Any) -> Callable[[Make], Case]:
    """A tensor and one of numbers from 0 to 1."""
    return tensors(shape, between(0.0, 1.0, *shape), **options)


def _elements_inputs(make: Make) -> Case:
    shape = make.shape(0, 3, 0, 12)
    return Case((make.tensor(*shape), make.tensor(*shape)), {"reduction": reduction(make)})


def _binary_inputs(make: Make) -> Case:
    shape = make.shape(0, 3, 0, 12)
    options: dict[str, Any] = {"reduction": reduction(make)}
    for name in ("weight", "pos_weight"):
        if make.integer(0, 1):
            options[name] = positive(*shape[make.integer(0, len(shape)) :])(make)
    return Case((make.tensor(*shape), make.tensor(*shape, low=0.0, high=1.0)), options)


ELEMENT_BAD = (
    refuses(ValueError, r"target has shape \[4\], expected input's shape \[3\]", (3,), (4,)),
    refuses(TypeError, "target is torch.float64", (3,), of(torch.float64, 3)),
    Bad(pair(3, reduction="average"), ValueError, "unknown reduction 'average'"),
)
elements = records(differentiable=(0, 1), families=("loss",), bad=ELEMENT_BAD)

SPECS = [
    records()(
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
            refuses(TypeError, "target has dtype torch.bool, expected int64 or int32 classes", (4, 3), bools(4)),
            Bad(classes(4, 3, weight=positive(4)), ValueError, r"weight has shape \[4\]"),
            Bad(classes(4, 3, label_smoothing=1.5), ValueError, "label_smoothing is 1.5"),
            Bad(classes(4, 3, reduction="max"), ValueError, "unknown reduction 'max'"),
            refuses(ValueError, "at least one class", (4, 0), integers(4, high=0)),
            refuses(ValueError, "input is a scalar", (), integers(high=0)),
            refuses(ValueError, "ignore_index 1 needs targets that are classes", (4, 3), (4, 3), ignore_index=1),
        ),
    ),
    records()(
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
    elements(
        "mse_loss",
        reference=F.mse_loss,
        inputs=_elements_inputs,
        bound=_mse_bound,
        grad_bound=_mse_grad_bound,
        examples={"mean": pair(70, 43), "each": pair(1100, reduction="none")},
    ),
    elements(
        "binary_cross_entropy_with_logits",
        reference=_binary_reference,
        inputs=_binary_inputs,
        bound=_binary_bound,
        grad_bound=_binary_grad_bound,
        examples={
            "mean": pair(70, 43),
            "weighted": pair(37, 31, reduction="none", weight=positive(37, 1), pos_weight=positive(31)),
        },
        bad=(
            *ELEMENT_BAD,
            Bad(
                pair(3, weight=positive(2)),
                ValueError,
                r"weight has shape \[2\], which does not broadcast to input's \[3\]",
            ),
            Bad(pair(3, pos_weight=of(torch.float64, 3)), TypeError, "pos_weight is torch.float64"),
        ),
    ),
]
