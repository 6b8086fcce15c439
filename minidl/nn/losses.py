"""Losses as modules, with torch's arguments: each calls the function of its name in `minidl.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl import ops
from minidl.nn.module import Module
from minidl.ops.loss import named_reduction
from minidl.tensors import Tensor

Weight = Tensor | torch.Tensor | None


class Reduction(Module):
    """The base of losses, `_op`; size_average and reduce are torch's older reduction settings."""

    _op: Callable[..., Tensor]

    def __init__(self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = named_reduction(size_average, reduce, reduction)

    def _loss(self, *tensors: Any) -> Tensor:
        return type(self)._op(*tensors, **{name: getattr(self, name) for name in (*self._shown, *self._buffers)})


class Loss(Reduction):
    """A loss of an input and a target."""

    def _weights(self, **weights: Weight) -> None:
        for name, weight in weights.items():
            self.register_buffer(name, Tensor(weight) if isinstance(weight, torch.Tensor) else weight)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self._loss(input, target)


class MSELoss(Loss):
    """(input - target)^2. Shapes: two equal shapes -> [], or the same shape for reduction "none"."""

    _op, _shown = staticmethod(ops.mse_loss), ("reduction",)


class L1Loss(Loss):
    """|input - target|. Shapes as `MSELoss`."""

    _op, _shown = staticmethod(ops.l1_loss), ("reduction",)


class SmoothL1Loss(Loss):
    """d^2 / (2 beta) where d = |input - target| is below beta, else d - beta / 2. Shapes as `MSELoss`."""

    _op, _shown = staticmethod(ops.smooth_l1_loss), ("reduction", "beta")

    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean", beta: float = 1.0
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.beta = beta


class HuberLoss(Loss):
    """d^2 / 2 where d = |input - target| is at most delta, else delta (d - delta / 2). Shapes as `MSELoss`."""

    _op, _shown = staticmethod(ops.huber_loss), ("reduction", "delta")

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=reduction)
        self.delta = delta


class KLDivLoss(Loss):
    """target (log target - input) of logarithms of probabilities; "batchmean" divides the sum by the first size."""

    _op, _shown = staticmethod(ops.kl_div), ("reduction", "log_target")

    def __init__(
        self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean",
        log_target: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.log_target = log_target


class BCELoss(Loss):
    """Binary cross-entropy of probabilities. `weight` is a factor for each element. Shapes as `MSELoss`."""

    _op, _shown = staticmethod(ops.binary_cross_entropy), ("reduction",)

    def __init__(
        self, weight: Weight = None, size_average: bool | None = None, reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self._weights(weight=weight)


class BCEWithLogitsLoss(Loss):
    """Binary cross-entropy of logits; `pos_weight` is a factor for the positive term. Otherwise as `BCELoss`."""

    _op, _shown = staticmethod(ops.binary_cross_entropy_with_logits), ("reduction",)

    def __init__(
        self, weight: Weight = None, size_average: bool | None = None, reduce: bool | None = None,
        reduction: str = "mean", pos_weight: Weight = None,
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self._weights(weight=weight, pos_weight=pos_weight)


class NLLLoss(Loss):
    """-weight[target] input[target] of logarithms of probabilities.

    Shapes: [N] and [], [R, N] and [R], or [R, N, ...] and [R, ...] -> [], or the target's for reduction "none".
    """

    _op, _shown = staticmethod(ops.nll_loss), ("ignore_index", "reduction")

    def __init__(
        self, weight: Weight = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.ignore_index = ignore_index
        self._weights(weight=weight)


class CrossEntropyLoss(Loss):
    """Cross-entropy of softmax(input) and classes or probabilities. Shapes as `NLLLoss`; probabilities have input's."""

    _op, _shown = staticmethod(ops.cross_entropy), ("ignore_index", "reduction", "label_smoothing")

    def __init__(
        self, weight: Weight = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self._weights(weight=weight)


class CTCLoss(Reduction):
    """Minus the log-probability of labels in any alignment with blanks, see `ops.ctc_loss`."""

    _op, _shown = staticmethod(ops.ctc_loss), ("blank", "reduction", "zero_infinity")

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> None:
        super().__init__(reduction=reduction)
        self.blank, self.zero_infinity = blank, zero_infinity

    def forward(
        self, log_probs: Tensor, targets: Tensor, input_lengths: ops.ctc.Lengths, target_lengths: ops.ctc.Lengths
    ) -> Tensor:
        return self._loss(log_probs, targets, input_lengths, target_lengths)
