"""Specs of the losses of elements other than squared error and binary cross-entropy of logits, and of `nll_loss`.

Each element has a few roundings: u is the accumulate type's unit; the error of a logarithm of x or 1 - x is at most
32 u, of an exponential of t 8 u + 3 u |t|. The slopes on both sides of each kink are equal, so a difference that is
rounded to the other side costs one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Bad, Case, OpSpec, bools, integers, outside, refuses, tensors
from minidl.testing.specs.loss import ELEMENT_BAD, classes, elements, options, pair, positive, reduced, reduction
from minidl.testing.specs.make import Make


class Parts(NamedTuple):
    """The loss of each element, the sizes of both derivatives, and their errors in units of u."""

    loss: torch.Tensor
    error: torch.Tensor
    by_x: torch.Tensor
    by_x_error: torch.Tensor
    by_t: torch.Tensor
    by_t_error: torch.Tensor


def _distance(case: Case, slope: Callable[[torch.Tensor, float], torch.Tensor], op: Any, name: str) -> Parts:
    x, t = case.args
    settings = {**options(case), "reduction": "none"}
    loss = op(x, t, **{k: v for k, v in settings.items() if k in ("reduction", name)})
    slopes = slope((x - t).abs(), settings.get(name, 1.0))
    return Parts(loss, 8 * loss, slopes, 8 * slopes, slopes, 8 * slopes)


def _smooth(d: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.ones_like(d) if beta == 0 else (d / beta).clamp(max=1)


def _probability(case: Case) -> Parts:
    x, t = case.args
    weight = options(case)["weight"]
    w = torch.ones_like(x) if weight is None else weight.expand(x.shape)
    log, rest = x.log().clamp(min=-100).abs(), torch.log1p(-x).clamp(min=-100).abs()
    loss = w * (t * log + (1 - t) * rest)
    by_x = w * (x - t).abs() / (x * (1 - x)).clamp(min=1e-12)
    by_t = w * (log + rest)
    return Parts(loss, 40 * loss, by_x, 12 * by_x, by_t, 40 * by_t)


def _divergence(case: Case) -> Parts:
    x, t = case.args
    if case.kwargs.get("log_target", False):
        e, off = t.exp(), 12 + 3 * t.abs()
        size = e * (t.abs() + x.abs())
        return Parts(e * (t - x), off * size, e, off * e, size + e, off * (size + e))
    log = t.log().abs()
    error = torch.where(t == 0, 0.0, 12 * t * log) + 4 * t * x.abs()
    by_t = log + 1 + x.abs()
    return Parts(torch.xlogy(t, t) - t * x, error, t, 4 * t, by_t, 12 * by_t)


def _bound(parts: Callable[[Case], Parts]) -> Callable[..., torch.Tensor]:
    def bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        loss, error, *_ = parts(case)
        x = case.args[0]
        rows = x.shape[0] if options(case)["reduction"] == "batchmean" and x.dim() else x.numel()
        tiny = 4 * bounds.TINY[launch.acc_torch(dtype)]
        return reduced(case, loss, bounds.acc_unit(dtype) * error + tiny, rows, dtype)

    return bound


def _grad_bound(parts: Callable[[Case], Parts]) -> Callable[..., tuple[Any, ...]]:
    def bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        _, _, *sides = parts(case)
        x = case.args[0]
        kind = options(case)["reduction"]
        count = {"mean": x.numel(), "batchmean": x.shape[0] if x.dim() else 1}.get(kind, 1)
        dy, u = dy.abs() / max(count, 1), bounds.acc_unit(dtype)
        tiny = bounds.TINY[launch.acc_torch(dtype)]
        errors = [
            torch.where(dy == 0, 0.0, dy * u * (error + 6 * slopes)) + tiny * (1 + slopes)
            for slopes, error in (sides[:2], sides[2:])
        ]
        return tuple(bounds.rounded(g, error, dtype) for g, error in zip(grads, errors, strict=True))

    return bound


def _spec(name: str, parts: Callable[[Case], Parts], **fields: Any) -> OpSpec:
    return elements(name, bound=_bound(parts), grad_bound=_grad_bound(parts), **fields)


def _inputs(name: str, *choices: float) -> Callable[[Make], Case]:
    """Return the function that draws two tensors, a reduction and, if there is an option, its value."""

    def inputs(make: Make) -> Case:
        shape = make.shape(0, 3, 0, 12)
        settings = {"reduction": reduction(make), **({name: make.choice(choices)} if choices else {})}
        return Case((make.tensor(*shape), make.tensor(*shape)), settings)

    return inputs


def _probabilities(make: Make) -> Case:
    """Draw probabilities away from 0 and 1, where differences are not derivatives; the examples have 0 and 1."""
    shape = make.shape(0, 3, 0, 12)
    settings: dict[str, Any] = {"reduction": reduction(make)}
    if make.integer(0, 1):
        settings["weight"] = positive(*shape[make.integer(0, len(shape)) :])(make)
    return Case((make.tensor(*shape, low=0.0625, high=0.9375), make.tensor(*shape, low=0.0, high=1.0)), settings)


def _with_edges(make: Make) -> Case:
    x = make.tensor(37, 31, low=0.0, high=1.0).contiguous()
    x[0], x[1], x[2] = 0.0, 1.0, 0.5
    return Case((x, make.tensor(37, 31, low=0.0, high=1.0)), {"reduction": "none"})


def _probability_reference(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: str = "mean"
) -> torch.Tensor:
    """Call torch's function, with NaN for values that it rejects."""
    bad = ~((x >= 0) & (x <= 1)) | target.isnan()
    loss = F.binary_cross_entropy(torch.where(bad, 0.5, x), torch.where(bad, 0.5, target), weight, reduction="none")
    loss = torch.where(bad, torch.nan, loss)
    return loss if reduction == "none" else getattr(loss, reduction)()


def _divergences(make: Make) -> Case:
    shape = make.shape(0, 3, 0, 12)
    log_target = bool(make.integer(0, 1))
    low, high = (-10.0, 0.0) if log_target else (0.125, 1.0)
    settings = {"reduction": make.choice(["mean", "sum", "none", "batchmean"]), "log_target": log_target}
    return Case((make.tensor(*shape), make.tensor(*shape, low=low, high=high)), settings)


def _divergence_reference(
    x: torch.Tensor, target: torch.Tensor, reduction: str = "mean", log_target: bool = False
) -> torch.Tensor:
    """Call torch's function without its warning about the mean."""
    if reduction == "mean":
        return F.kl_div(x, target, reduction="none", log_target=log_target).mean()
    return F.kl_div(x, target, reduction=reduction, log_target=log_target)


def _nll_parts(case: Case) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the loss of each row, the size of its gradient, and the divisor."""
    x, target = case.args
    settings = {k: v for k, v in options(case).items() if k in ("weight", "ignore_index")}
    loss = F.nll_loss(x, target, reduction="none", **settings)
    N = x.shape[min(1, x.dim() - 1)]
    weight = torch.ones(N, dtype=x.dtype) if settings["weight"] is None else settings["weight"]
    counted = target != settings["ignore_index"]
    w = torch.where(counted, weight[torch.where(counted, target, 0)], 0.0)
    return loss, w, float(w.sum())


def _nll_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    loss, _, divisor = _nll_parts(case)
    u, tiny = bounds.acc_unit(dtype), bounds.TINY[launch.acc_torch(dtype)]
    return reduced(case, loss, 2 * u * loss.abs() + tiny, divisor, dtype)


def _nll_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    (dx,) = grads
    u, tiny = bounds.acc_unit(dtype), bounds.TINY[launch.acc_torch(dtype)]
    rows = case.args[1].numel()
    return (bounds.rounded(dx, (8 + 2 * rows) * u * dx.abs() + 8 * tiny, dtype),)


def _nll_inputs(make: Make) -> Case:
    N = make.size(1, 12)
    rows = [make.size(1, 9) for _ in range(make.integer(0, 3))]
    settings: dict[str, Any] = {"reduction": reduction(make), "ignore_index": make.choice([-100, 0])}
    if make.integer(0, 1):
        settings["weight"] = positive(N)(make)
    return Case((make.tensor(*rows[:1], N, *rows[1:]), make.integers(*rows, low=0, high=N - 1)), settings)


_EDGES = {"mean": pair(70, 43), "each": pair(1100, reduction="none")}
# Numbers that are not float32: the offline compile reports kernels that round them.
_BETA = {**_EDGES, "mean": pair(70, 43, beta=0.3)}
_DELTA = {**_EDGES, "mean": pair(70, 43, delta=0.3)}
_WEIGHTED = refuses(ValueError, "weight is not supported", (3,), (3,), weight=positive(3))

SPECS = [
    _spec(
        "l1_loss",
        lambda case: _distance(case, lambda d, _: torch.ones_like(d), F.l1_loss, ""),
        reference=F.l1_loss,
        inputs=_inputs(""),
        examples=_EDGES,
        bad=(*ELEMENT_BAD, _WEIGHTED),
    ),
    _spec(
        "smooth_l1_loss",
        lambda case: _distance(case, _smooth, F.smooth_l1_loss, "beta"),
        reference=F.smooth_l1_loss,
        inputs=_inputs("beta", 1.0, 0.25, 0.0, 3.0),
        examples=_BETA,
        bad=(*ELEMENT_BAD, Bad(pair(3, beta=-1.0), ValueError, "beta is -1.0, expected a number 0 or more")),
    ),
    _spec(
        "huber_loss",
        lambda case: _distance(case, lambda d, delta: d.clamp(max=delta), F.huber_loss, "delta"),
        reference=F.huber_loss,
        inputs=_inputs("delta", 1.0, 0.25, 3.0),
        examples=_DELTA,
        bad=(*ELEMENT_BAD, _WEIGHTED, Bad(pair(3, delta=0.0), ValueError, "delta is 0.0, expected a number above 0")),
    ),
    _spec(
        "binary_cross_entropy",
        _probability,
        reference=_probability_reference,
        inputs=_probabilities,
        examples={"mean": _probabilities, "edges": _with_edges},
    ),
    _spec(
        "kl_div",
        _divergence,
        reference=_divergence_reference,
        inputs=_divergences,
        examples={
            "batches": pair(70, 43, reduction="batchmean"),
            "logarithms": pair(37, 31, reduction="none", log_target=True),
        },
    ),
    OpSpec(
        name="nll_loss",
        op=ops.nll_loss,
        reference=F.nll_loss,
        inputs=_nll_inputs,
        bound=_nll_bound,
        grad_bound=_nll_grad_bound,
        differentiable=(0,),
        families=("loss",),
        examples={
            "mean": classes(1100, 10),
            "weighted images": classes(2, 5, 7, reduction="none", weight=positive(5)),
        },
        bad=(
            refuses(TypeError, "target has dtype torch.bool, expected int64, int32 or uint8 classes", (4, 3), bools(4)),
            refuses(ValueError, r"target has shape \[5\], expected \[4\]", (4, 3), integers(5, high=2)),
            outside("nll_loss: target holds 3", tensors((4, 3), integers(4, low=3, high=3))),
        ),
    ),
]
