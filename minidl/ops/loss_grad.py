"""Gradients of losses by recorded operations, for gradients of every order."""

from __future__ import annotations

from typing import Any

import torch

from minidl.ops import unary
from minidl.ops.activation import log_softmax, sigmoid
from minidl.ops.conditional import clamp, where
from minidl.ops.shape import to
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations


def cross_entropy(ctx: Any, dy: Tensor) -> Any:
    """Return the gradients of `CrossEntropy`."""
    x, target, weight = ctx.saved
    ignored, reduction, smoothing = ctx.options
    axis = min(1, x.ndim - 1)
    classes = x.shape[axis]
    along = [-1 if i == axis else 1 for i in range(x.ndim)]
    weights = 1 if weight is None else weight.reshape(along)
    if target.dtype.is_floating_point:
        share = target * (1 - smoothing) + smoothing / classes
        count: Any = max(x.numel() // classes, 1)
    else:
        labels = target.data.unsqueeze(axis)
        off = Tensor(labels == ignored)
        hit = Tensor(labels == torch.arange(classes, device=labels.device).view(along)).to(x.dtype)
        hit = where(off, 0, hit)
        share = where(off, 0, hit * (1 - smoothing) + smoothing / classes)
        count = (hit * weights).sum()
    each = dy.unsqueeze(axis) if reduction == "none" else dy / count if reduction == "mean" else dy
    log = log_softmax(x, axis)
    dlog = -(each * share * weights)
    dx = dlog - log.exp() * dlog.sum(axis, keepdim=True)
    dt = target_probabilities(x, weight, dy, ctx.options) if ctx.needs[1] else None
    return dx, dt, None, None, None, None


def target_probabilities(x: Any, weight: Tensor | None, dy: Tensor | None, options: tuple[int, str, float]) -> Tensor:
    """Return the gradient of the target probabilities of `CrossEntropy`, for a gradient dy of the loss, None for 1.

    It is -(1 - smoothing) weight log_softmax(x) dy, divided by the number of rows for "mean".
    """
    _, reduction, smoothing = options
    axis = min(1, x.ndim - 1)
    count = x.numel() // x.shape[axis] if reduction == "mean" else 1
    dt = log_softmax(x, axis) * ((smoothing - 1.0) / max(count, 1))
    if weight is not None:
        dt = dt * weight.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    if dy is None:
        return dt
    return dt * (dy.unsqueeze(axis) if dy.ndim else dy)  # with reduction "none", dy has an element for each row


def element_loss(ctx: Any, dy: Tensor) -> Any:
    """Return the gradients of `ElementLoss`. Raises RuntimeError for one by a target that has no second derivative."""
    x, target, weight, positive = ctx.saved
    options, wants_target = ctx.options, ctx.needs[1]
    away = x - target
    if options.op == "mse_loss":
        dx = away * 2
    elif options.op == "l1_loss" or (options.op == "smooth_l1_loss" and options.beta == 0):
        dx = unary.sign(away)
    elif options.op in ("smooth_l1_loss", "huber_loss"):
        size = unary.abs(away)
        end, slope = (1.0, 1 / options.beta) if options.op == "smooth_l1_loss" else (options.beta, 1.0)
        # NaN, which is neither within beta nor beyond it, stays NaN, and has a slope of 0 as in torch.
        within = to(size < options.beta, away.dtype) * slope
        dx = where(size >= options.beta, unary.sign(away) * end, away * within)
    elif wants_target:
        raise RuntimeError(
            f"create_graph=True needs a second derivative of {options.op} by its target, which minidl does not have; "
            "write the loss with log and exp, or pass target.detach()"
        )
    elif options.op == "binary_cross_entropy_with_logits":
        dx = sigmoid(x) - target
        if positive is not None:
            dx = sigmoid(x) * (1 + (positive - 1) * target) - positive * target
    elif options.op == "binary_cross_entropy":
        dx = away / clamp(x * (1 - x), 1e-12, None)
    else:
        dx = -(unary.exp(target) if options.log_target else target)  # kl_div
    each = dy if options.each else dy / options.count(x.data)
    each = each if weight is None else each * weight
    return each * dx, -(each * dx) if wants_target else None, *(None for _ in ctx.needs[2:])
