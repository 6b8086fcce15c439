"""Specs of the losses.

Squared error and the form of binary cross-entropy that the kernels use have a few roundings for each element. u is the
accumulate type's unit; a compiled division is off by 4 u, a logarithm by 8 u, an exponential of -a by 8 u + 3 u a.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import Bad, Case, between, integers, of, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make

_OPTIONS = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "pos_weight": None}


def options(case: Case) -> dict[str, Any]:
    """Return the keyword arguments of a loss, with defaults for missing arguments."""
    return {**_OPTIONS, **case.kwargs}


def sum_chain(terms: int, dtype: torch.dtype) -> int:
    """Return the number of additions in a program's part and in the sum of the parts."""
    block = launch.tile("loss", dtype, N=terms)["BLOCK_N"]
    parts = -(-terms // block)
    return 2 * min(terms, block, block // 16 + 32) + -(-parts // block)


def reduced(
    case: Case, loss: torch.Tensor, error: torch.Tensor, divisor: float, dtype: torch.dtype, extra: int = 0
) -> torch.Tensor:
    """Return the bound of a loss from the errors of its terms; `extra` is the number of additions beyond `sum_chain`.

    A mean is divided by `divisor`.
    """
    u, reduction = bounds.acc_unit(dtype), options(case)["reduction"]
    if reduction == "none":
        return bounds.rounded(loss, error, dtype)
    divided = reduction in ("mean", "batchmean")
    divisor = divisor if divided else 1.0
    total = (loss.abs() + error).sum()
    d = sum_chain(max(loss.numel(), 1), dtype) + extra
    off = error.sum() + bounds.gamma(d, u) * total + loss.numel() * bounds.TINY[launch.acc_torch(dtype)]
    result = loss.sum() / divisor
    # Dividing costs 4 u, and the divisor may itself be a sum of as many terms.
    off = off / divisor + (bounds.gamma(d + 4, u) * (result.abs() + off / divisor) if divided else 0.0)
    return bounds.or_infinite(bounds.rounded(result, off, dtype), total, dtype)


def _mse_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, target = case.args
    loss = (x - target) ** 2
    error = bounds.gamma(4, bounds.acc_unit(dtype)) * loss + bounds.TINY[launch.acc_torch(dtype)]
    return reduced(case, loss, error, loss.numel(), dtype)


def _mse_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    x, target = case.args
    # dy / n may underflow before the product with a large difference.
    tiny = bounds.TINY[launch.acc_torch(dtype)] * (1 + 2 * (x - target).abs())
    return tuple(bounds.rounded(g, 8 * bounds.acc_unit(dtype) * g.abs() + tiny, dtype) for g in grads)


def _binary_reference(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the kernels' formula: torch's own cancels for x < 0, down to NaN at -inf."""
    w, v = (1.0 if t is None else t for t in (weight, pos_weight))
    size = torch.where(x < 0, -x, x)  # its derivative at 0 is 1, abs has 0 there
    factor = torch.where(x < 0, v * target, 1 - target)
    loss = w * (size * factor + (1 + (v - 1) * target) * torch.log1p(torch.exp(-size)))
    return loss if reduction == "none" else getattr(loss, reduction)()


def _binary_parts(case: Case) -> tuple[torch.Tensor, ...]:
    """Return x, t, w and v of one shape."""
    x, target = case.args
    settings = options(case)
    one = torch.ones_like(x)
    return x, target, *(one if settings[k] is None else settings[k].expand(x.shape) for k in ("weight", "pos_weight"))


def _binary_bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x, t, w, v = _binary_parts(case)
    u, size = bounds.acc_unit(dtype), x.abs()
    line = size * torch.where(x < 0, v * t, 1 - t)
    curve = (1 + (v - 1).abs() * t) * torch.log1p(torch.exp(-size))
    loss = w * (line + curve)
    error = w * u * (8 * line + (32 + 3 * size.clamp(max=1000)) * curve)
    return reduced(case, loss, error + (1 + w) * bounds.TINY[launch.acc_torch(dtype)], loss.numel(), dtype)


def _binary_grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bounds of dx = sigmoid(x) (1 - t) - v t sigmoid(-x) and dt = (v - 1) log(1 + exp(-x)) - x, times w dy.

    The reference's dx has an error of a few units of float64, since it cancels.
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
    """Return a reduction that every loss knows."""
    return make.choice(["mean", "sum", "none"])


def classes(*shape: int, **options: Any) -> Callable[[Make], Case]:
    """Draw logits and their classes."""
    return tensors(shape, integers(shape[0], *shape[2:], high=shape[1] - 1), **options)


def pair(*shape: int, **options: Any) -> Callable[[Make], Case]:
    """Return a tensor and one of numbers from 0 to 1."""
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
elements = spec_factory(differentiable=(0, 1), families=("loss",), bad=ELEMENT_BAD)

SPECS = [
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
