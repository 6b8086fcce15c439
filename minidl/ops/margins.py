"""Distances, and losses of distances, margins and distributions, made of other operations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from minidl.ops import elementwise, unary
from minidl.ops.activation import softplus
from minidl.ops.compare import eq
from minidl.ops.conditional import clamp, where
from minidl.ops.elementwise import add, div, mul, sub
from minidl.ops.loss import named_reduction
from minidl.ops.powers import sqrt, square
from minidl.ops.reduce import mean, norm, sum
from minidl.ops.shape import to, unsqueeze
from minidl.tensors import Scalar, Tensor

__all__ = [
    "cdist", "cosine_embedding_loss", "gaussian_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "pairwise_distance", "poisson_nll_loss", "soft_margin_loss", "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
]  # fmt: skip

SQUARED = 1e-12  # added to squared lengths of `cosine_embedding_loss`


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """Return the p-norm of x1 - x2 + eps along the last dimension; both broadcast: [..., K] -> [...]."""
    return norm(add(sub(x1, x2), eps), p, -1, keepdim)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Return the p-norms of the differences of all rows: [..., P, K] and [..., R, K] -> [..., P, R].

    All differences are in memory at once, whatever the compute_mode of torch is: no distance is computed by a matrix
    product, whose result cancels. The gradient of a distance of 0 is 0. Raises ValueError for different K or fewer than
    two dimensions, or for a p below 0.
    """
    if p < 0:
        raise ValueError(f"cdist: p is {p}, expected at least 0")
    if min(x1.ndim, x2.ndim) < 2 or x1.shape[-1] != x2.shape[-1]:
        raise ValueError(
            f"cdist: x1 has shape {list(x1.shape)} and x2 {list(x2.shape)}, expected [..., P, K] and [..., R, K]"
        )
    return norm(sub(unsqueeze(x1, -2), unsqueeze(x2, -3)), p, -1)


def triplet_margin_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2, eps: float = 1e-06,
    swap: bool = False, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return max(d(anchor, positive) - d(anchor, negative) + margin, 0) with `pairwise_distance` as d.

    With `swap` the distance of positive and negative is used where it is less than that of anchor and negative (Balntas
    et al., Learning shallow convolutional feature descriptors with triplet losses, 2016). Raises ValueError for a
    margin of 0 or less, or an unknown reduction.
    """
    distance = functools.partial(pairwise_distance, p=p, eps=eps)
    reduction = named_reduction(size_average, reduce, reduction)
    return triplet_margin_with_distance_loss(
        anchor, positive, negative, distance_function=distance, margin=margin, swap=swap, reduction=reduction
    )


def triplet_margin_with_distance_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None, margin: float = 1.0, swap: bool = False,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return `triplet_margin_loss` with a distance function (default: `pairwise_distance`)."""
    if margin <= 0:
        raise ValueError(f"triplet_margin_loss: margin is {margin}, expected a number above 0")
    if not anchor.ndim == positive.ndim == negative.ndim:
        raise ValueError(f"triplet_margin_loss: got {anchor.ndim}, {positive.ndim} and {negative.ndim} dimensions")
    distance = distance_function or pairwise_distance
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = elementwise.minimum(far, distance(positive, negative))
    return _reduced("triplet_margin_loss", clamp(add(sub(near, far), margin), min=0), reduction)


def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, size_average: bool | None = None,
    reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return max(-target (input1 - input2) + margin, 0), with a target of 1 where input1 should be larger, else -1."""
    if not input1.ndim == input2.ndim == target.ndim:
        raise ValueError(f"margin_ranking_loss: got {input1.ndim}, {input2.ndim} and {target.ndim} dimensions")
    loss = clamp(add(mul(unary.neg(target), sub(input1, input2)), margin), min=0)
    return _reduced("margin_ranking_loss", loss, named_reduction(size_average, reduce, reduction))


def hinge_embedding_loss(
    input: Tensor, target: Tensor, margin: float = 1.0, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return input where target is 1, and max(margin - input, 0) where it is -1."""
    unlike = where(eq(target, 1), 0.0, clamp(add(unary.neg(input), margin), min=0))
    loss = add(unlike, where(eq(target, -1), 0.0, input))
    return _reduced("hinge_embedding_loss", loss, named_reduction(size_average, reduce, reduction))


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, size_average: bool | None = None,
    reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return 1 - cos of the rows where target is 1, and max(cos - margin, 0) where it is -1.

    Shapes: [N, D], [N, D], [N] or [D], [D], [] -> [], or the target's for reduction "none". Raises ValueError for
    another target.
    """
    if target.ndim != input1.ndim - 1:
        raise ValueError(
            f"cosine_embedding_loss: target has shape {list(target.shape)}, expected {list(input1.shape[:-1])}"
        )
    lengths = mul(*(add(sum(square(x), -1), SQUARED) for x in (input1, input2)))
    cosine = div(sum(mul(input1, input2), -1), sqrt(lengths))
    alike, unlike = sub(1, cosine), clamp(sub(cosine, margin), min=0)
    loss = where(eq(target, 1), alike, where(eq(target, -1), unlike, 0.0))
    return _reduced("cosine_embedding_loss", loss, named_reduction(size_average, reduce, reduction))


def soft_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return log(1 + e^(-target input)) with targets of 1 and -1."""
    loss = softplus(mul(unary.neg(target), input))
    return _reduced("soft_margin_loss", loss, named_reduction(size_average, reduce, reduction))


def poisson_nll_loss(
    input: Tensor, target: Tensor, log_input: bool = True, full: bool = False, size_average: bool | None = None,
    eps: float = 1e-8, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return e^input - target input, or with log_input=False input - target log(input + eps).

    `full` adds Stirling's approximation of log(target!) for targets above 1.
    """
    target = target if target.dtype.is_floating_point else to(target, input.dtype)
    if log_input:
        loss = sub(unary.exp(input), mul(target, input))
    else:
        loss = sub(input, mul(target, unary.log(add(input, eps))))
    if full:
        safe = where(target > 1, target, 1.0)
        stirling = add(sub(mul(safe, unary.log(safe)), safe), mul(unary.log(mul(safe, 2 * math.pi)), 0.5))
        loss = add(loss, where(target > 1, stirling, 0.0))
    return _reduced("poisson_nll_loss", loss, named_reduction(size_average, reduce, reduction))


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | Scalar, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Return (log var + (input - target)^2 / var) / 2, with a variance of at least eps; `full` adds log(2 pi) / 2.

    var: the shape of input, also without the last dimension, or with dimensions of 1; or a number. The limit eps does
    not change the gradient of var. Raises ValueError for another shape, or for a variance below 0.
    """
    spread = var if isinstance(var, Tensor) else Tensor(torch.full_like(input.data, float(var)))
    if bool((spread.data < 0).any()):
        raise ValueError("gaussian_nll_loss: var has a number below 0")
    if spread.shape == input.shape[:-1]:
        spread = unsqueeze(spread, -1)
    fits = len(spread.shape) == len(input.shape)
    if not fits or any(n not in (1, m) for n, m in zip(spread.shape, input.shape, strict=True)):
        raise ValueError(f"gaussian_nll_loss: var has shape {list(spread.shape)}, input {list(input.shape)}")
    limited = add(spread, clamp(sub(eps, spread.detach()), min=0))
    loss = mul(add(unary.log(limited), div(square(sub(input, target)), limited)), 0.5)
    if full:
        loss = add(loss, 0.5 * math.log(2 * math.pi))
    return _reduced("gaussian_nll_loss", loss, reduction)


def _reduced(name: str, loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction is {reduction!r}, expected 'mean', 'sum' or 'none'")
    return {"mean": mean, "sum": sum}[reduction](loss) if reduction != "none" else loss
