"""A text classifier: TF-IDF rows through a multilayer perceptron whose first layer is sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minidl import nn


class TextMLP(nn.Sequential):
    """logits = W_k relu(... relu(x W_1 + b_1) ...) + b_k, with dropout after each relu.

    Shapes: CSR [batch, features] -> [batch, classes]. The first weight is [features, hidden[0]]: a row per term. `std`
    is the spread of its first values; rows of x have length 1.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        hidden: Sequence[int] = (128,),
        dropout: float = 0.5,
        std: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        layers: list[nn.Module] = [nn.SparseLinear(features, hidden[0], act="relu", std=std, device=device, dtype=dtype)]
        for fan_in, fan_out in zip(hidden, hidden[1:], strict=False):
            layers += [nn.Dropout(dropout), nn.Linear(fan_in, fan_out, act="relu", device=device, dtype=dtype)]
        layers += [nn.Dropout(dropout), nn.Linear(hidden[-1], classes, device=device, dtype=dtype)]
        super().__init__(*layers)
