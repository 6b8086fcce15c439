"""A text classifier that reads terms in order: layers of a transformer's encoder, and the mean over each text."""

from __future__ import annotations

import math
from typing import Any

import torch

from minidl import nn, ops
from minidl.nn import init
from minidl.tensors import Tensor


class TextAttention(nn.Module):
    """logits = W norm(mean of encoder(E[x] + P)) + b; attention and the mean leave padding out.

    Shapes: int32 or int64 [batch, L], L at most `length`, at least one term, then 0 -> [batch, classes]. The layers
    normalise before each block (Xiong et al., arXiv 2002.04745). `std` is that of the initial E and P. `dropout` drops
    terms, and values of the layers.
    """

    def __init__(
        self, terms: int, classes: int, width: int = 128, heads: int = 2, length: int = 256, layers: int = 2,
        dropout: float = 0.2, std: float = 0.02, device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(terms, width, device=device, dtype=dtype)
        self.position = nn.Embedding(length, width, device=device, dtype=dtype)
        for table in (self.embedding, self.position):
            init.normal_(table.weight, 0.0, std)
        options: dict[str, Any] = {"batch_first": True, "norm_first": True, "device": device, "dtype": dtype}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, "gelu", **options) for _ in range(layers)
        )
        for layer in self.layers:
            layer.self_attn.dropout = 0.0  # its random numbers would take half of a step without a GPU
        self.dropout, self.norm = nn.Dropout1d(dropout), nn.LayerNorm(width, device=device, dtype=dtype)
        self.head = nn.Linear(width, classes, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        is_padding = ops.eq(input, 0)
        mask, share = ops.where(is_padding, -math.inf, 0.0), ops.where(is_padding, 0.0, 1.0).unsqueeze(-1)
        x = self.dropout(self.embedding(input)) + self.position.weight[: input.shape[1]]  # drops terms
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        y: Tensor = self.head(self.norm((x * share).sum(1) / share.sum(1)))
        return y
