"""Losses. Cross-entropy computes its gradient together with the loss; backward only scales it."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear
from minidl.kernels import check, nll
from minidl.kernels import cross_entropy as cross_entropy_kernels
from minidl.kernels import loss as loss_kernels
from minidl.ops import loss_grad
from minidl.tensors import Tensor

__all__ = [
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "kl_div", "l1_loss",
    "mse_loss", "nll_loss", "smooth_l1_loss",
]  # fmt: skip


class CrossEntropy(Function):
    seed_is_optional = True  # dy None means a gradient of 1
    recorded_backward = staticmethod(loss_grad.cross_entropy)

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, reduction: str,
        smoothing: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save(x, target, weight)
        ctx.options = ignore_index, reduction, smoothing
        parts = cross_entropy_kernels.cross_entropy_parts(
            x, target, weight, ignore_index, reduction, smoothing, ctx.needs[0]
        )
        ctx.gradient = parts.grad, parts.divisor  # grad must be divided by the divisor, unless that is None
        # Backward does not read the loss, so the caller may change it in place.
        return parts.loss

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:
        dt = None
        if ctx.needs[1]:
            x, weight, seed = (None if t is None else Tensor(t) for t in (ctx.saved[0], ctx.saved[2], dy))
            dt = loss_grad.target_probabilities(x, weight, seed, ctx.options).data
        if not ctx.needs[0]:
            return None, dt, None, None, None, None
        # backward scales the gradient in place and returns it; a second one through a retained graph computes it again.
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            arguments: Any = (*ctx.saved, *ctx.options, True)
            _, *gradient = cross_entropy_kernels.cross_entropy_parts(*arguments)
        grad, divisor = gradient
        if dy is not None or divisor is not None:
            grad = cross_entropy_kernels.cross_entropy_grad_(grad, dy, divisor)
        return grad, dt, None, None, None, None


@linear(lambda ctx, x: NLLLoss.apply(x, *ctx.how))
class NLLLoss(Function):
    seed_is_optional = True  # dy None means a gradient of 1

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, reduction: str
    ) -> torch.Tensor:
        loss, ctx.divisor = nll.nll_loss(x, target, weight, ignore_index, reduction)
        ctx.save(x, target, weight)
        ctx.how = target, weight, ignore_index, reduction
        return loss

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:
        x, target, weight = ctx.saved
        return nll.nll_loss_grad(dy, x, target, weight, ctx.how[2], ctx.divisor), None, None, None, None


class ElementLoss(Function):
    """An element-wise loss, selected by `options`."""

    seed_is_optional = True  # dy None means a gradient of 1
    recorded_backward = staticmethod(loss_grad.element_loss)

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, options: loss_kernels.Loss, weight: torch.Tensor | None = None,
        pos_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        # The gradient of kl_div by x reads only target, which stands in for x: x can be freed or changed.
        drop_x = options.op == "kl_div" and not ctx.needs[1]
        ctx.save(target if drop_x else x, target, weight, pos_weight)
        ctx.options = options
        return loss_kernels.elements_loss(options, x, target, weight, pos_weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> Any:
        x, target, weight, pos_weight = ctx.saved
        dx, dt = loss_kernels.elements_loss_grad(ctx.options, dy, x, target, weight, pos_weight, ctx.needs[:2])
        return (dx, dt, *(None for _ in ctx.needs[2:]))


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the cross-entropy of softmax(input) and the target classes or probabilities, as
    torch.nn.functional.cross_entropy.

    Shapes: input [N], [R, N] or [R, N, ...] logits of N classes; target [], [R] or [R, ...] of int64, int32 or
    uint8 classes, or input's shape and dtype for probabilities; weight [N], a factor for each class. Rows whose target
    is `ignore_index` are left out. "mean" divides by the sum of the weights of the remaining targets (NaN if there are
    none), or by the number of rows for probabilities; "none" gives the loss of each row. weight gets no gradient.
    size_average and reduce are torch's older names of reductions.
    Raises TypeError for dtypes, ValueError for shapes, devices or options that do not fit. A target outside the classes
    raises IndexError on the CPU; on a GPU, where the check would wait for the device, its loss is NaN.
    """
    _refuse_grad("cross_entropy", weight=weight)
    reduction = named_reduction(size_average, reduce, reduction)
    ignore_index = check.integer("cross_entropy", "ignore_index", ignore_index)
    return CrossEntropy.apply(input, target, weight, ignore_index, reduction, label_smoothing)


def nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return -weight[target] input[target] of rows of logarithms of probabilities; otherwise as `cross_entropy` of
    classes."""
    _refuse_grad("nll_loss", weight=weight)
    ignore_index = check.integer("nll_loss", "ignore_index", ignore_index)
    return NLLLoss.apply(input, target, weight, ignore_index, named_reduction(size_average, reduce, reduction))


def mse_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return (input - target)^2 of two tensors of the same shape: "mean", "sum" or "none" (elementwise).

    Raises TypeError for dtypes, ValueError for shapes, devices or a reduction that do not fit, and for a weight,
    which is not supported: multiply the result of reduction="none" by it.
    """
    return _element_loss("mse_loss", input, target, named_reduction(size_average, reduce, reduction), weight=weight)


def l1_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return |input - target|, with a gradient of 0 where they are equal. Otherwise as `mse_loss`."""
    return _element_loss("l1_loss", input, target, named_reduction(size_average, reduce, reduction), weight=weight)


def smooth_l1_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", beta: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return d^2 / (2 beta) where d = |input - target| is below beta, else d - beta / 2. Otherwise as `mse_loss`."""
    reduction = named_reduction(size_average, reduce, reduction)
    return _element_loss("smooth_l1_loss", input, target, reduction, threshold=beta)


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """Return d^2 / 2 where d = |input - target| is at most delta, else delta (d - delta / 2). Otherwise as
    `mse_loss`."""
    return _element_loss("huber_loss", input, target, reduction, threshold=delta, weight=weight)


def kl_div(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None,
    reduction: str = "mean", log_target: bool = False,
) -> Tensor:  # fmt: skip
    """Return target (log(target) - input), or exp(target) (target - input) with log_target; input is a log-probability.

    "batchmean" divides the sum by the first size. Otherwise as `mse_loss`.
    """
    reduction = named_reduction(size_average, reduce, reduction)
    return _element_loss("kl_div", input, target, reduction, log_target=log_target)


def binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return the binary cross-entropy of probabilities and targets from 0 to 1 of one shape: "mean", "sum" or "none".

    As in torch, logarithms are at least -100. A probability outside [0, 1] gives NaN. `weight` is a factor for each
    element, broadcasts and gets no gradient. Raises as `mse_loss`.
    """
    _refuse_grad("binary_cross_entropy", weight=weight)
    options = loss_kernels.Loss("binary_cross_entropy", named_reduction(size_average, reduce, reduction))
    return ElementLoss.apply(input, target, options, weight)


def binary_cross_entropy_with_logits(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    reduce: bool | None = None, reduction: str = "mean", pos_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the binary cross-entropy of sigmoid(input) and targets from 0 to 1 of one shape: "mean", "sum" or "none".

    `weight` is a factor for each element, `pos_weight` a factor for the positive term; both broadcast to input's shape
    and get no gradient. Raises as `mse_loss`.
    """
    _refuse_grad("binary_cross_entropy_with_logits", weight=weight, pos_weight=pos_weight)
    options = loss_kernels.Loss("binary_cross_entropy_with_logits", named_reduction(size_average, reduce, reduction))
    return ElementLoss.apply(input, target, options, weight, pos_weight)


def _element_loss(
    op: str, x: Tensor, target: Tensor, reduction: str, threshold: float = 1.0, log_target: bool = False,
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if weight is not None:
        raise ValueError(f'{op}: weight is not supported; multiply the result of reduction="none" by it')
    return ElementLoss.apply(x, target, loss_kernels.Loss(op, reduction, threshold, log_target))


def named_reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """Return the reduction; torch's older arguments, if not None, name it."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _refuse_grad(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient, but {op} computes none for it; pass {name}.detach()")
