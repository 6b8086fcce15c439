"""A table model: standardised columns through a multilayer perceptron, for regression and classification."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minidl import nn
from minidl.kernels.activation import Activation


class TableMLP(nn.MLP):
    """W_k act(... act(x W_1^T + b_1) ...) + b_k, with dropout after each activation.

    Shapes: [batch, features] -> [batch, outputs]: one standardised value in a regression, logits in a classification.
    tanh by default: trained on few rows, it depends less on the choice of rows than relu.
    """

    def __init__(
        self,
        features: int,
        outputs: int,
        hidden: Sequence[int] = (64, 64),
        dropout: float = 0.0,
        act: Activation = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(features, hidden, outputs, act=act, dropout=dropout, device=device, dtype=dtype)
