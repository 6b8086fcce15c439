"""Cross-entropy of a linear layer's logits, which are never all stored."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import check
from minidl.kernels import linear_cross_entropy as kernels
from minidl.tensors import Tensor

__all__ = ["linear_cross_entropy"]


class LinearCrossEntropy(Function):
    none_is_one = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
        weight: torch.Tensor | None, *options: Any,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save(x, w, target, bias, weight)
        ctx.options, ctx.wanted = options, list(ctx.needs[:3])
        # Gradients of each row's loss have to wait for how much each counts.
        now = [False] * 3 if options[1] == "none" else ctx.wanted
        loss, *ctx.made = kernels.linear_cross_entropy(x, w, target, bias, weight, *options, wanted=now)
        return loss

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:
        # As in `CrossEntropy`: what is given away is made again for a second backward.
        (made, divisor), ctx.made = ctx.made or ([], None), None
        if not made:
            rows = dy if ctx.options[1] == "none" else None
            _, made, divisor = kernels.linear_cross_entropy(*ctx.saved, *ctx.options, wanted=ctx.wanted, dy=rows)
            dy = dy if rows is None else None
        dtype = ctx.saved[0].dtype
        grads = (kernels.scaled(grad, dy, divisor, dtype) for grad in made)
        return *(next(grads) if want else None for want in ctx.wanted), *[None] * 5


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """Return cross_entropy(linear(input, linear_weight, linear_bias), target, ...) in chunks of rows; logits are not
    kept.

    Shapes: input [K] or [R, K], linear_weight [N, K], linear_bias [N]; all else as `cross_entropy` of logits [N] or
    [R, N]. With "mean" and "sum" gradients are made with the loss, so that the logits are computed once; with "none"
    twice. target and weight get no gradient. Chunks are chosen here: torch's `options` are taken and change nothing.
    Raises as `cross_entropy`, and ValueError for other shapes.
    """
    for name, given in (("target", target), ("weight", weight)):
        if given is not None and given.requires_grad:
            raise ValueError(
                f"linear_cross_entropy: {name} requires a gradient, but gets none here; pass {name}.detach()"
            )
    index = -100 if ignore_index is None else check.whole("linear_cross_entropy", "ignore_index", ignore_index)
    if input.ndim == 1:
        input, target, one = input.unsqueeze(0), target.unsqueeze(0), True
    else:
        one = False
    loss = LinearCrossEntropy.apply(
        input, linear_weight, linear_bias, target, weight, index, reduction, label_smoothing
    )  # fmt: skip
    return loss[0] if one and reduction == "none" else loss
