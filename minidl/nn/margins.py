"""Losses of distances, margins and distributions as modules: each calls the function of its name in `minidl.ops`."""

from __future__ import annotations

from collections.abc import Callable

from minidl import ops
from minidl.nn.losses import Loss, Reduction
from minidl.tensors import Tensor


class _OfTriplets(Reduction):
    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return self._loss(anchor, positive, negative)


class _OfInputs(Reduction):
    def __init__(
        self, margin: float = 0.0, size_average: bool | None = None, reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.margin = margin

    def forward(self, input1: Tensor, input2: Tensor, target: Tensor) -> Tensor:
        return self._loss(input1, input2, target)


class TripletMarginLoss(_OfTriplets):
    """max(d(anchor, positive) - d(anchor, negative) + margin, 0), see `ops.triplet_margin_loss`."""

    _op, _shown = staticmethod(ops.triplet_margin_loss), ("margin", "p", "eps", "swap", "reduction")

    def __init__(
        self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False,
        size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.margin, self.p, self.eps, self.swap = margin, p, eps, swap


class TripletMarginWithDistanceLoss(_OfTriplets):
    """`TripletMarginLoss` with a distance function."""

    _op = staticmethod(ops.triplet_margin_with_distance_loss)
    _shown = ("distance_function", "margin", "swap", "reduction")

    def __init__(
        self, *, distance_function: Callable[[Tensor, Tensor], Tensor] | None = None, margin: float = 1.0,
        swap: bool = False, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(reduction=reduction)
        self.distance_function, self.margin, self.swap = distance_function, margin, swap


class MarginRankingLoss(_OfInputs):
    """max(-target (input1 - input2) + margin, 0), see `ops.margin_ranking_loss`."""

    _op, _shown = staticmethod(ops.margin_ranking_loss), ("margin", "reduction")


class CosineEmbeddingLoss(_OfInputs):
    """1 - cos, or max(cos - margin, 0) where the target is -1, see `ops.cosine_embedding_loss`."""

    _op, _shown = staticmethod(ops.cosine_embedding_loss), ("margin", "reduction")


class HingeEmbeddingLoss(Loss):
    """input, or max(margin - input, 0) where the target is -1, see `ops.hinge_embedding_loss`."""

    _op, _shown = staticmethod(ops.hinge_embedding_loss), ("margin", "reduction")

    def __init__(
        self, margin: float = 1.0, size_average: bool | None = None, reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.margin = margin


class SoftMarginLoss(Loss):
    """log(1 + e^(-target input)), see `ops.soft_margin_loss`."""

    _op, _shown = staticmethod(ops.soft_margin_loss), ("reduction",)


class PoissonNLLLoss(Loss):
    """e^input - target input, see `ops.poisson_nll_loss`."""

    _op, _shown = staticmethod(ops.poisson_nll_loss), ("log_input", "full", "eps", "reduction")

    def __init__(
        self, log_input: bool = True, full: bool = False, size_average: bool | None = None, eps: float = 1e-8,
        reduce: bool | None = None, reduction: str = "mean",
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.log_input, self.full, self.eps = log_input, full, eps


class GaussianNLLLoss(Reduction):
    """(log var + (input - target)^2 / var) / 2, see `ops.gaussian_nll_loss`."""

    _op, _shown = staticmethod(ops.gaussian_nll_loss), ("full", "eps", "reduction")

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> None:
        super().__init__(reduction=reduction)
        self.full, self.eps = full, eps

    def forward(self, input: Tensor, target: Tensor, var: Tensor) -> Tensor:
        return self._loss(input, target, var)
