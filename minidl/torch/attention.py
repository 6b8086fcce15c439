"""Scaled dot-product attention as a torch operator."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import attention as kernels
from minidl.ops.attention import arranged
from minidl.torch.registry import accumulator, operator

# The operands, shapes of which `kernels.attention` describes; the key of dropout; and the options.
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? lengths, Tensor? key, float scale, int left, int right, "
    "float p"
)


def _fake(q: Any, k: Any, v: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y = kernels._like(q if q.stride(3) == 1 else q.contiguous(), v.shape[-1])
    return y, q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.options = inputs[:6], inputs[6:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, dy: torch.Tensor, _: Any) -> Any:
    with_mask = ctx.needs_input_grad[3]
    gradients = attention_backward(dy, *ctx.saved_tensors, *ctx.options, with_mask)
    return *gradients, *[None] * (10 - len(gradients))


@operator(
    f"attention({ARGUMENTS}) -> (Tensor, Tensor)", _fake, save=_save, backward=_gradients, replay=True,
)  # fmt: skip
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, lengths: Any, key: Any, *options: Any
) -> tuple[torch.Tensor, Any]:
    """Return the result, and the logarithms of the sums of powers."""
    return kernels.attention(q, k, v, mask, lengths, kernels.Options(*options), key)[:2]


def _fake_backward(dy: Any, q: Any, k: Any, v: Any, mask: Any, *more: Any) -> list[torch.Tensor]:
    gradients = [kernels._like(x if x.stride(3) == 1 else x.contiguous(), x.shape[3]) for x in (q, k, v)]
    return [*gradients, *([mask.new_empty(mask.shape)] if more[-1] else [])]


@operator(
    f"attention_backward(Tensor dy, {ARGUMENTS.replace('key', 'key, Tensor y, Tensor lse')}, bool with_mask) -> "
    "Tensor[]",
    _fake_backward, replay=True,
)  # fmt: skip
def attention_backward(
    dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, lengths: Any, key: Any, *more: Any
) -> list[torch.Tensor]:
    y, lse, *options, with_mask = more
    saved = kernels.Saved(y, lse, key)
    gradients = kernels.attention_grad(
        dy, q, k, v, mask, lengths, saved, kernels.Options(*options), with_mask=with_mask
    )  # fmt: skip
    return [gradient for gradient in gradients if gradient is not None]


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *,
    window: tuple[int, int] | None = None, lengths: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention, whose gradients have the same bits in every run.

    window and lengths, and errors, are as in `minidl.ops.scaled_dot_product_attention`: a query that sees no key has
    the result 0. torch's generator draws the key of dropout.
    """
    if query.dtype != torch.float64 and torch.is_autocast_enabled(kind := query.device.type):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    operands, options, shape = arranged(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, lengths
    )  # fmt: skip
    drop = torch.randint(2**31, (2,), device=query.device) if dropout_p > 0.0 else None
    return attention(*operands, drop, *options)[0].reshape(shape)
