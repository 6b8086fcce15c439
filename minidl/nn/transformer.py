"""The layers of transformers, with torch's arguments and names in a `state_dict`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from minidl import ops
from minidl.nn import init
from minidl.nn.attention import Mask, MultiheadAttention, causal_mask
from minidl.nn.containers import ModuleList
from minidl.nn.layers import Device, Dropout, Linear
from minidl.nn.module import Module
from minidl.nn.norms import LayerNorm
from minidl.tensors import Tensor


class _TransformerLayer(Module):
    """The base of encoder and decoder layers: attention, then linear2(dropout(activation(linear1)))."""

    _attentions: ClassVar[dict[str, type[MultiheadAttention]]] = {}

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = ops.relu, layer_norm_eps: float = 1e-5,
        batch_first: bool = False, norm_first: bool = False, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        attentions: dict[str, type[MultiheadAttention]] = {"self_attn": MultiheadAttention, **self._attentions}
        for name, attention in attentions.items():
            self.add_module(name, attention(d_model, nhead, dropout, bias, batch_first=batch_first, **kind))
        self.linear1 = Linear(d_model, dim_feedforward, bias, **kind)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, **kind)
        count = len(attentions) + 1
        for number in range(1, count + 1):
            self.add_module(f"norm{number}", LayerNorm(d_model, layer_norm_eps, bias=bias, **kind))
        for number in range(1, count + 1):
            self.add_module(f"dropout{number}", Dropout(dropout))
        self.norm_first = norm_first
        if isinstance(activation, str) and activation not in ("relu", "gelu"):
            raise ValueError(f"{type(self).__name__}: activation is {activation!r}, expected 'relu' or 'gelu'")
        self.activation: Callable[[Tensor], Tensor] = (
            getattr(ops, activation) if isinstance(activation, str) else activation
        )

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def _residual(self, number: int, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x with the block's result added, normalised before the block or after the sum."""
        norm, dropout = getattr(self, f"norm{number}"), getattr(self, f"dropout{number}")
        if self.norm_first:
            return x + dropout(block(norm(x)))
        return norm(x + dropout(block(x)))


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention and a feed-forward network, each with a residual sum and a layer norm."""

    def forward(
        self, src: Tensor, src_mask: Mask = None, src_key_padding_mask: Mask = None, is_causal: bool = False
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.self_attn(
                x, x, x, src_key_padding_mask, need_weights=False, attn_mask=src_mask, is_causal=is_causal
            )[0]

        return self._residual(2, self._residual(1, src, attend), self._feed_forward)


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to an encoder's memory and a feed-forward network, each with a sum and a norm."""

    _attentions: ClassVar = {"multihead_attn": MultiheadAttention}

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Mask = None, memory_mask: Mask = None,
        tgt_key_padding_mask: Mask = None, memory_key_padding_mask: Mask = None, tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        def attend(x: Tensor) -> Tensor:
            return self.self_attn(
                x, x, x, tgt_key_padding_mask, need_weights=False, attn_mask=tgt_mask, is_causal=tgt_is_causal
            )[0]

        def attend_memory(x: Tensor) -> Tensor:
            return self.multihead_attn(
                x, memory, memory, memory_key_padding_mask, need_weights=False, attn_mask=memory_mask,
                is_causal=memory_is_causal,
            )[0]  # fmt: skip

        x = self._residual(2, self._residual(1, tgt, attend), attend_memory)
        return self._residual(3, x, self._feed_forward)


class TransformerEncoder(Module):
    """`num_layers` copies of an encoder layer, then a norm. The last two arguments are torch's and change nothing."""

    def __init__(
        self, encoder_layer: Module, num_layers: int, norm: Module | None = None, enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layers = ModuleList(copy.deepcopy(encoder_layer) for _ in range(num_layers))
        self.num_layers, self.norm = num_layers, norm

    def forward(
        self, src: Tensor, mask: Mask = None, src_key_padding_mask: Mask = None, is_causal: bool | None = None
    ) -> Tensor:
        for layer in self.layers:
            src = layer(
                src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal)
            )  # fmt: skip
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(Module):
    """`num_layers` copies of a decoder layer, then a norm."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self.layers = ModuleList(copy.deepcopy(decoder_layer) for _ in range(num_layers))
        self.num_layers, self.norm = num_layers, norm

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Mask = None, memory_mask: Mask = None,
        tgt_key_padding_mask: Mask = None, memory_key_padding_mask: Mask = None, tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        for layer in self.layers:
            tgt = layer(
                tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask,
                tgt_is_causal=bool(tgt_is_causal), memory_is_causal=memory_is_causal,
            )  # fmt: skip
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """An encoder and a decoder (Vaswani et al., arXiv 1706.03762); weights of two dimensions start as
    `init.xavier_uniform_`.

    Shapes: src [S, N, d_model], tgt [L, N, d_model] -> [L, N, d_model]; with `batch_first` [N, S, ...].
    """

    def __init__(
        self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
        dim_feedforward: int = 2048, dropout: float = 0.1, activation: str | Callable[[Tensor], Tensor] = ops.relu,
        custom_encoder: Module | None = None, custom_decoder: Module | None = None, layer_norm_eps: float = 1e-5,
        batch_first: bool = False, norm_first: bool = False, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        options: tuple[Any, ...] = (
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias,
            device, dtype,
        )  # fmt: skip

        def norm() -> LayerNorm:
            return LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype)

        self.encoder = custom_encoder or TransformerEncoder(
            TransformerEncoderLayer(*options), num_encoder_layers, norm()
        )  # fmt: skip
        self.decoder = custom_decoder or TransformerDecoder(
            TransformerDecoderLayer(*options), num_decoder_layers, norm()
        )  # fmt: skip
        for parameter in self.parameters():
            if parameter.ndim > 1:
                init.xavier_uniform_(parameter)
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Mask = None, tgt_mask: Mask = None, memory_mask: Mask = None,
        src_key_padding_mask: Mask = None, tgt_key_padding_mask: Mask = None, memory_key_padding_mask: Mask = None,
        src_is_causal: bool | None = None, tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(
            tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask,
            tgt_is_causal, memory_is_causal,
        )  # fmt: skip

    @staticmethod
    def generate_square_subsequent_mask(
        sz: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> Tensor:  # fmt: skip
        """Return [sz, sz] with 0 on and below the diagonal, -inf above."""
        return causal_mask(sz, sz, device, dtype)
