"""A text classifier: TF-IDF rows through a multilayer perceptron whose first layer is sparse."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from minidl import nn


class TextMLP(nn.Sequential):
    """logits = W_k act(... act(x W_1 + b_1) ...) + b_k, with dropout after each activation `act`.

    Shapes: CSR [batch, features] -> [batch, classes]. The first weight is [features, hidden[0]]: a row per term. `std`
    is the standard deviation of its initial values; rows of x should have length 1.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        hidden: Sequence[int] = (128,),
        dropout: float = 0.5,
        std: float = 0.03,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        act: str = "relu",
    ) -> None:
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        layers: list[nn.Module] = [nn.SparseLinear(features, hidden[0], act=act, std=std, **options)]
        for fan_in, fan_out in pairwise(hidden):
            layers += [nn.Dropout(dropout), nn.Linear(fan_in, fan_out, act=act, **options)]
        layers += [nn.Dropout(dropout), nn.Linear(hidden[-1], classes, **options)]
        super().__init__(*layers)
