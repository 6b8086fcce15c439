"""Attention of several heads between projections, with torch's arguments and names in a `state_dict`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minidl import ops
from minidl.kernels import check
from minidl.kernels.attention import added
from minidl.nn import init
from minidl.nn.layers import Device, Linear, _empty
from minidl.nn.module import Module
from minidl.tensors import Tensor

Mask = Tensor | torch.Tensor | None


class MultiheadAttention(Module):
    """Attention of `num_heads` heads between projections of query, key and value (Vaswani et al., arXiv 1706.03762).

    Shapes: query [L, N, embed_dim], key [S, N, kdim], value [S, N, vdim] -> [L, N, embed_dim]; with `batch_first`
    [N, L, ...]; without a batch [L, ...]. Raises ValueError for other shapes or an embed_dim that the heads do not
    divide.
    """

    _shown = ("embed_dim", "num_heads", "dropout", "batch_first")

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check.integer("MultiheadAttention", "embed_dim", embed_dim, 1)
        check.integer("MultiheadAttention", "num_heads", num_heads, 1)
        if embed_dim % num_heads:
            raise ValueError(f"MultiheadAttention: embed_dim {embed_dim} is not divisible by {num_heads} heads")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self._qkv_same_embed_dim = self.kdim == self.vdim == embed_dim
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(
            ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v")
        )
        if self._qkv_same_embed_dim:
            shapes["in_proj_weight"] = (3 * embed_dim, embed_dim)
        else:
            sizes = {"q": embed_dim, "k": self.kdim, "v": self.vdim}
            shapes |= {f"{name}_proj_weight": (embed_dim, size) for name, size in sizes.items()}
        if bias:
            shapes["in_proj_bias"] = (3 * embed_dim,)
        if add_bias_kv:
            shapes |= {"bias_k": (1, 1, embed_dim), "bias_v": (1, 1, embed_dim)}
        for name, shape in shapes.items():
            parameter = None if shape is None else _empty(*shape, device=device, dtype=dtype)
            self.register_parameter(name, parameter)
            if parameter is None:
                continue
            if name == "in_proj_bias":
                init.zeros_(parameter)
            else:
                (init.xavier_normal_ if name.startswith("bias") else init.xavier_uniform_)(parameter)
        self.out_proj = Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Mask = None, need_weights: bool = True,
        attn_mask: Mask = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the result and, with `need_weights`, the weights [N, L, S], or [N, num_heads, L, S] if they are not
        averaged. Without them no [L, S] matrix is stored.

        key_padding_mask [N, S] and attn_mask [L, S] or [N num_heads, L, S]: bool, True where a key is not seen, or
        numbers that are added. is_causal: attn_mask is the causal one (without attn_mask: apply it).
        """
        is_batched, is_self = query.ndim == 3, query is key is value
        self._check(query, key, value)
        if not is_batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._projected(query, key, value, is_self)
        plain = key_padding_mask is None and k.shape[-2] == key.shape[1]
        causal = is_causal and plain and not need_weights
        mask = None
        if not causal:
            mask = self._mask(query.shape[0], q.shape[-2], key.shape[1], key_padding_mask, attn_mask, is_causal, q)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = ops.matmul(ops.mul(q, self.head_dim**-0.5), k.transpose(-2, -1))
            weights = ops.softmax(scores if mask is None else scores + mask, -1)
            weights = ops.dropout(weights, p)
            y = ops.matmul(weights, v)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y = ops.scaled_dot_product_attention(q, k, v, mask, p, causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not is_batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        shapes = f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
        if not query.ndim == key.ndim == value.ndim or query.ndim not in (2, 3):
            raise ValueError(f"MultiheadAttention: {shapes}, expected two or three dimensions each")
        sizes = self.embed_dim, self.kdim, self.vdim
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != sizes or key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"MultiheadAttention: {shapes}, expected last sizes {sizes} and as many keys as values"
            )  # fmt: skip

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, is_self: bool) -> list[Tensor]:
        """Return the projections as heads [N, num_heads, rows, head_dim], with the keys and values that are added."""
        E, bias = self.embed_dim, self.in_proj_bias
        projected: Sequence[Tensor]
        if is_self and self._qkv_same_embed_dim:
            projected = ops.split(ops.linear(query, self.in_proj_weight, bias), E, -1)
        else:
            weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self._qkv_same_embed_dim:
                weights = ops.split(self.in_proj_weight, E)
            biases = (None,) * 3 if bias is None else ops.split(bias, E)
            projected = list(map(ops.linear, (query, key, value), weights, biases))
        q, k, v = projected
        N = query.shape[0]
        if self.bias_k is not None:
            k = ops.cat([k, self.bias_k.expand(N, 1, E)], 1)
            v = ops.cat([v, self.bias_v.expand(N, 1, E)], 1)
        if self.add_zero_attn:
            zeros = Tensor(torch.zeros(N, 1, E, dtype=k.dtype, device=k.device))
            k, v = ops.cat([k, zeros], 1), ops.cat([v, zeros], 1)
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v)]

    def _mask(
        self, N: int, L: int, S: int, padding: Mask, mask: Mask, is_causal: bool, like: Tensor
    ) -> Tensor | None:  # fmt: skip
        """Return the sum of the masks as numbers that broadcast to [N, num_heads, L, S and added rows]."""
        if is_causal and mask is None:
            mask = causal_mask(L, S, like.device, like.dtype)
        total: Tensor | None = None
        if mask is not None:
            shapes = ([L, S], [N * self.num_heads, L, S])
            if list(mask.shape) not in shapes:
                raise ValueError(
                    f"MultiheadAttention: attn_mask has shape {list(mask.shape)}, expected {shapes[0]} or {shapes[1]}"
                )  # fmt: skip
            total = _numbers(mask, like.dtype)
            total = total.unflatten(0, (N, self.num_heads)) if total.ndim == 3 else total
        if padding is not None:
            expected = [N, S] if padding.ndim == 2 else [S]
            if list(padding.shape) != expected or (padding.ndim == 1 and N != 1):
                raise ValueError(
                    f"MultiheadAttention: key_padding_mask has shape {list(padding.shape)}, expected {[N, S]}"
                )  # fmt: skip
            keys = _numbers(padding, like.dtype).reshape(N, 1, 1, S)
            total = keys if total is None else total + keys
        rows = int(self.bias_k is not None) + int(self.add_zero_attn)
        return ops.pad(total, (0, rows)) if total is not None and rows else total


def causal_mask(L: int, S: int, device: Any, dtype: torch.dtype | None) -> Tensor:
    """Return [L, S] with 0 where query i sees key j, j <= i, and -inf elsewhere."""
    hidden = torch.ones(L, S, dtype=torch.bool, device=device).triu_(1)
    return _numbers(hidden, dtype or torch.get_default_dtype())


def _numbers(mask: Tensor | torch.Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add: -inf where a bool mask is True."""
    mask = mask if isinstance(mask, Tensor) else Tensor(mask)
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return Tensor(added(mask.data, dtype))
