"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from minidl import random
from minidl.autograd import Function
from minidl.kernels import attention as kernels
from minidl.kernels import check
from minidl.ops.shape import reshape
from minidl.tensors import Tensor

__all__ = ["scaled_dot_product_attention"]

OP = "scaled_dot_product_attention"


class Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        lengths: torch.Tensor | None, options: kernels.Options, key: torch.Tensor | None, first: int,
    ) -> torch.Tensor:  # fmt: skip
        saved = kernels.attention(q, k, v, mask, lengths, options, key, first, with_lse=any(ctx.needs))
        ctx.save(q, k, v, mask, lengths, *saved)
        ctx.options, ctx.first = options, first
        return saved.y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, k, v, mask, lengths, y, lse, key = ctx.saved
        gradients = kernels.attention_grad(
            dy, q, k, v, mask, lengths, kernels.Saved(y, lse, key), ctx.options, ctx.first, ctx.needs[3]
        )  # fmt: skip
        return *gradients, *[None] * 4


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    window: tuple[int, int] | None = None, lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(scale query key^T + attn_mask) value, computed in blocks: no [L, S] matrix is stored.

    Shapes: query [..., H, L, E], key [..., H, S, E], value [..., H, S, V] -> [..., H, L, V]; the leading dimensions
    broadcast, and each may be missing. With `enable_gqa` key and value have fewer heads, each for H / heads
    consecutive heads of query. Head sizes are at most 256. scale: 1 / sqrt(E) by default.

    attn_mask broadcasts to [..., H, L, S]: bool, with False where a key is not seen, or numbers of query's dtype that
    are added. is_causal: query i sees keys 0 to i. window (left, right): it sees keys i - left to i + right; -1 is no
    limit. lengths [...]: whole numbers, of which batch item b sees the first lengths[b] keys. A query that sees no key
    has the result 0. dropout_p: weights are dropped and the others scaled, also in `eval` (pass 0 there, as in torch).

    Gradients have the same bits in every run; there is no second derivative. Values behind `lengths` are not read, so
    these may be NaN. Source: Dao, FlashAttention-2, arXiv 2307.08691. Raises TypeError for dtypes that differ or
    integers, ValueError for shapes that do not fit, options out of range, or a mask together with is_causal.
    """
    operands, options, shape = arranged(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, lengths
    )  # fmt: skip
    first, drop_key = 0, None
    if dropout_p > 0.0:
        seed, stream = random.key()
        rows = operands[0].shape[:3]
        drop_key, first = kernels.dropout_key(seed, stream, query.device), random.first_index(rows)
    return reshape(Attention.apply(*operands, options, drop_key, first), *shape)


def arranged(
    query: Any, key: Any, value: Any, mask: Any, p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
    window: tuple[int, int] | None, lengths: Any,
) -> tuple[tuple[Any, ...], kernels.Options, list[int]]:  # fmt: skip
    """Return the operands (query, key, value, mask, lengths) in one batch, options, and the result's shape: the
    arguments of `scaled_dot_product_attention` are Tensors or torch's tensors. Raises its errors."""
    _check(query, key, value, mask, p, is_causal, lengths)
    limits = (-1, -1) if window is None else check.integers(OP, "window", window)
    if len(limits) != 2 or min(limits) < -1:
        raise ValueError(f"{OP}: window is {window}, expected two numbers from 0, or -1 for no limit")
    left, right = limits[0], 0 if is_causal else limits[1]
    H, E, V = _heads(query), query.shape[-1], value.shape[-1]
    groups = _heads(key)
    if groups != _heads(value) or (groups != H and not (enable_gqa and groups and H % groups == 0) and groups != 1):
        hint = "" if enable_gqa else "; enable_gqa=True shares heads of key and value"
        raise ValueError(f"{OP}: query has {H} heads, key {groups} and value {_heads(value)}{hint}")
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    L, S = query.shape[-2], key.shape[-2]
    q = _in_batch(query, (*batch, H, L, E))
    k, v = _in_batch(key, (*batch, groups, S, E)), _in_batch(value, (*batch, groups, S, V))
    if mask is not None:
        mask = _in_batch(mask, (*batch, H, L, S))
    if lengths is not None:
        lengths = lengths.expand(*batch).reshape(q.shape[0])
    if scale is None:
        scale = 1 / math.sqrt(E) if E else 0.0
    return (q, k, v, mask, lengths), kernels.Options(float(scale), left, right, p), [*batch, *query.shape[-3:-2], L, V]


def _heads(x: Any) -> Any:
    return x.shape[-3] if x.ndim > 2 else 1


def _in_batch(x: Any, shape: tuple[int, ...]) -> Any:
    """Return x broadcast to `shape`, as [batch, heads, rows, columns]."""
    return x.expand(*shape).reshape(math.prod(shape[:-3]), *shape[-3:])


def _check(query: Any, key: Any, value: Any, mask: Any, p: float, is_causal: bool, lengths: Any) -> None:
    check.floating(OP, query=query, key=key, value=value)
    check.same(OP, query=query, key=key, value=value)
    shapes = f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(f"{OP}: {shapes}: expected at least two dimensions each")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(f"{OP}: {shapes}, expected [..., L, E], [..., S, E] and [..., S, V]")
    if max(query.shape[-1], value.shape[-1]) > kernels.LARGEST_HEAD:
        raise ValueError(f"{OP}: {shapes}: heads have at most {kernels.LARGEST_HEAD} values")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{OP}: dropout_p is {p}, expected a probability from 0 to 1")
    if mask is not None and is_causal:
        raise ValueError(f"{OP}: both attn_mask and is_causal are set; add the causal mask to attn_mask")
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        raise TypeError(f"{OP}: attn_mask has dtype {mask.dtype}, expected torch.bool or {query.dtype}")
    if lengths is not None and lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{OP}: lengths has dtype {lengths.dtype}, expected torch.int32 or torch.int64")
