"""Cross-entropy of a linear layer's logits, computed in chunks of rows."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import check
from minidl.kernels import linear_cross_entropy as kernels
from minidl.ops.linalg import linear
from minidl.ops.loss import cross_entropy
from minidl.tensors import Tensor

__all__ = ["linear_cross_entropy"]


class LinearCrossEntropy(Function):
    seed_is_optional = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
        weight: torch.Tensor | None, *options: Any,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save(x, w, target, bias, weight)
        ctx.options, ctx.wants = options, list(ctx.needs[:3])
        # Without reduction, gradients need dy, the factor of each row's loss.
        now = [False] * 3 if options[1] == "none" else ctx.wants
        loss, *ctx.gradients = kernels.linear_cross_entropy(x, w, target, bias, weight, *options, needs_grad=now)
        return loss

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:
        # As in `CrossEntropy`: a second backward computes the gradients again.
        (gradients, divisor), ctx.gradients = ctx.gradients or ([], None), None
        if not gradients:
            rows = dy if ctx.options[1] == "none" else None
            _, gradients, divisor = kernels.linear_cross_entropy(
                *ctx.saved, *ctx.options, needs_grad=ctx.wants, dy=rows
            )
            dy = dy if rows is None else None
        dtype = ctx.saved[0].dtype
        grads = (kernels.scaled(grad, dy, divisor, dtype) for grad in gradients)
        return *(next(grads) if want else None for want in ctx.wants), *[None] * 5


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = None,
    label_smoothing: float = 0.0, options: Any = None,
) -> Tensor:  # fmt: skip
    """Return cross_entropy(linear(input, linear_weight, linear_bias), target, ...) in chunks of rows; logits
    are not stored.

    Shapes: input [K] or [R, K], linear_weight [N, K], linear_bias [N]; all else as `cross_entropy` of logits [N] or
    [R, N]. With "mean" and "sum" the gradients are computed with the loss, and the logits once; with "none" twice.
    target and weight get no gradient. Chunk sizes are automatic: torch's `options` are accepted and ignored.
    A linear_weight [N, d1, ..., K], with linear_bias [N, d1, ...], gives logits [R, N, d1, ...], which are stored.
    Raises as `cross_entropy`, and ValueError for other shapes.
    """
    for name, tensor in (("target", target), ("weight", weight)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"linear_cross_entropy: {name} requires a gradient, but gets none here; pass {name}.detach()"
            )
    index = -100 if ignore_index is None else check.integer("linear_cross_entropy", "ignore_index", ignore_index)
    if linear_weight.ndim > 2:
        _check_more(input, linear_weight, linear_bias)
        bias = None if linear_bias is None else linear_bias.reshape(-1)
        logits = linear(input, linear_weight.flatten(0, -2), bias)
        logits = logits.reshape(*input.shape[:-1], *linear_weight.shape[:-1])
        return cross_entropy(
            logits, target, weight, ignore_index=index, reduction=reduction, label_smoothing=label_smoothing
        )  # fmt: skip
    if input.ndim == 1:
        input, target, is_single = input.unsqueeze(0), target.unsqueeze(0), True
    else:
        is_single = False
    loss = LinearCrossEntropy.apply(
        input, linear_weight, linear_bias, target, weight, index, reduction, label_smoothing
    )  # fmt: skip
    return loss[0] if is_single and reduction == "none" else loss


def _check_more(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if input.ndim != 2 or input.shape[1] != weight.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy: input is {list(input.shape)} and linear_weight {list(weight.shape)}, expected "
            "[N, in_features] and [classes, ..., in_features]"
        )
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy: linear_bias has shape {list(bias.shape)}, expected {list(weight.shape[:-1])}"
        )
