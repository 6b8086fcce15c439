"""The spec of `ctc_loss`, behind log_softmax: for logarithms of probabilities its gradient is the derivative.

A step of the kernel adds the error of log_softmax and a few roundings of numbers up to the range of a_t(s) over the
positions s: at most the ranges of log_probs of all steps, and log 3 for each. So a_t(s), b_t(s) and the logarithm of
the probability have an error of `path_error`; the exponential of their sum makes it a relative one. The reference's
a_t(s) grow with t: its steps round numbers up to T times the largest log_prob.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.testing.specs import bounds, softmax
from minidl.testing.specs.base import Case, OpSpec, integers, of, outside, refuses, tensors
from minidl.testing.specs.loss import reduced, reduction
from minidl.testing.specs.make import Make

(_LOG,) = (spec for spec in softmax.SPECS if spec.name == "log_softmax")


def _loss(x: torch.Tensor, *labels: Any, **settings: Any) -> torch.Tensor:
    return F.ctc_loss(x.log_softmax(-1), *labels, **settings)


class _Errors:
    """Of a case: log_probs as [T, N, C] with their largest magnitude and error, and the sizes and errors of paths."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        x, _, _, self.labels = case.args
        self.log = x.log_softmax(-1)
        self.u = u = bounds.acc_unit(dtype)
        self.log_error = float(_LOG.bound(Case((x, -1)), self.log, dtype).max())
        T = self.steps = len(x)
        self.top = float(self.log.abs().max())
        wide = (self.log.amax(-1) - self.log.amin(-1)).reshape(T, -1)
        self.range = float(wide.amax(1).sum()) + T * math.log(3)
        self.size = T * (self.top + math.log(3)) + self.range
        rounding = u * (40 + 4 * (self.range + self.top)) + 2.0**-53 * (40 + 4 * self.size)
        self.path_error = T * (rounding + self.log_error)


def _bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    errors = _Errors(case, dtype)
    loss = _loss(*case.args, **{**case.kwargs, "reduction": "none"}).reshape(-1)
    error = torch.full_like(loss, errors.path_error + (errors.steps + 16) * errors.u * (errors.size + 1))
    labels = torch.ones(())
    if case.kwargs["reduction"] == "mean":
        labels = torch.tensor(errors.labels).clamp(min=1)
        error = error + 4 * errors.u * loss.abs()
    limit = reduced(case, loss / labels, error / labels, loss.numel(), dtype)
    return torch.where(result.isfinite(), limit.reshape(result.shape), 0.0)


def _grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    (dx,), errors, (x, *labels) = grads, _Errors(case, dtype), case.args
    log, u = errors.log.clone().requires_grad_(), errors.u
    with torch.enable_grad():
        loss = F.ctc_loss(log, *labels, **{**case.kwargs, "reduction": "none"})
        (each,) = torch.autograd.grad(loss.sum(), log)
        scale = dy.abs()
        if case.kwargs["reduction"] == "mean":
            scale = scale / loss.numel() / torch.tensor(errors.labels).clamp(min=1).view(loss.shape)
        (dlog,) = torch.autograd.grad(F.ctc_loss(log, *labels, **case.kwargs), log, dy)
    p = errors.log.exp()
    shares = (p - each).clamp(min=0)
    exponent = 2 * (2 * errors.path_error + u * (8 + 8 * errors.range)) + bounds.gamma(2 * max(errors.labels) + 5, u)
    error = p * math.expm1(errors.log_error + u * (8 + 3 * errors.top)) + shares * math.expm1(exponent)
    error = bounds.rounded(dlog, (scale.unsqueeze(-1) * error) * (1 + 8 * u) + 8 * u * dlog.abs(), dtype)
    (limit,) = _LOG.grad_bound(Case((x, -1)), dlog, (dx,), dtype)  # type: ignore[misc]
    total = limit + math.exp(errors.log_error) * (error + p * error.sum(-1, keepdim=True)) * (1 + bounds.UNIT[dtype])
    return (torch.where(dx.isfinite(), total, 0.0),)


def _inputs(make: Make) -> Case:
    """Draw padded or joined labels, or one sequence; some are too many for the steps. Padding is no class."""
    T, N, C = make.size(1, 9), make.size(1, 4), make.size(1, 7)
    S = make.size(0, 4) if C > 1 else 0
    last, zero_infinity = bool(make.integer(0, 1)), bool(make.integer(0, 1))
    settings = {"reduction": reduction(make), "zero_infinity": zero_infinity, "blank": C - 1 if last else 0}
    steps, counts = (tuple(make.integer(0, most) for _ in range(N)) for most in (T, S))
    labels = make.integers(N, S, low=0, high=max(C - 2, 0)) + (not last)
    form = make.choice(("padded", "joined", "one"))
    if form == "one":
        return Case((make.tensor(T, C, high=0.0), labels[0, : counts[0]], steps[:1], counts[:1]), settings)
    parts = [row[:count] for row, count in zip(labels, counts, strict=True)]
    if form == "joined":
        labels = torch.cat(parts)
    else:
        labels[torch.arange(S).expand(N, S) >= torch.tensor(counts)[:, None]] = -7
    return Case((make.tensor(T, N, C, high=0.0), labels, steps, counts), settings)


def _example(T: int, N: int, C: int, S: int, **settings: Any) -> Any:
    """Return sequences of T steps and fewer, with S labels and fewer, some repeated."""
    steps, counts = tuple(T - n for n in range(N)), tuple(max(S - n, 0) for n in range(N))
    labels = integers(N, S, low=1, high=C - 1)
    return tensors((T, N, C), labels, extra=(steps, counts), **{"reduction": "mean", **settings})


_TARGETS, _LENGTHS = integers(2, 3, low=2, high=2), ((5, 4), (3, 2))
SPECS = [
    OpSpec(
        name="ctc_loss",
        op=lambda x, *labels, **settings: ops.ctc_loss(ops.log_softmax(x, -1), *labels, **settings),
        reference=_loss,
        inputs=_inputs,
        bound=_bound,
        grad_bound=_grad_bound,
        differentiable=(0,),
        families=("elementwise_tile", "loss"),
        examples={
            "mean": _example(12, 5, 7, 4),
            "many classes": _example(9, 2, 700, 3, reduction="none"),
            "many labels": _example(160, 2, 40, 70, reduction="sum", zero_infinity=True),
            "no labels": _example(3, 1, 2, 0, reduction="none"),
        },
        bad=(
            refuses(TypeError, "targets has dtype torch.float64", (5, 2, 4), of(torch.float64, 2, 3), extra=_LENGTHS),
            outside("ctc_loss: targets holds 2, expected classes from 0 to 3 but 2",
                    tensors((5, 2, 4), _TARGETS, extra=_LENGTHS, blank=2)),
        ),
    ),
]  # fmt: skip
