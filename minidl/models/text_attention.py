"""A text classifier that reads terms in order: layers of a transformer's encoder, and the mean over each text."""

from __future__ import annotations

import math

import torch

from minidl import nn, ops
from minidl.nn import init
from minidl.tensors import Tensor


class TextAttention(nn.Module):
    """logits = W norm(mean of encoder(E[x] + P)) + b, where the mean and attention leave padding out.

    Shapes: int32 or int64 [batch, L], L at most `length`, 0 for padding behind the terms -> [batch, classes]. A text
    has at least one term. Layers normalise before each block (Xiong et al., arXiv 2002.04745).
    """

    def __init__(
        self, terms: int, classes: int, width: int = 128, heads: int = 4, layers: int = 2, length: int = 256,
        dropout: float = 0.2, std: float = 0.1, device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(terms, width, device=device, dtype=dtype)
        self.position = nn.Embedding(length, width, device=device, dtype=dtype)
        for table in (self.embedding, self.position):
            init.normal_(table.weight, 0.0, std)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout, "gelu", batch_first=True, norm_first=True, device=device, dtype=dtype
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.head = nn.Linear(width, classes, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        is_padding = ops.eq(input, 0)
        added = ops.where(is_padding, -math.inf, 0.0)
        x = self.dropout(self.embedding(input) + self.position.weight[: input.shape[1]])
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=added)
        terms = ops.where(is_padding, 0.0, 1.0).unsqueeze(-1)
        mean = (x * terms).sum(1) / terms.sum(1)
        y: Tensor = self.head(self.norm(mean))
        return y
