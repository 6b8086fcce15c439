"""Operations of transformers that PyTorch has no function for: gated activations and rotary positions."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import linear
from minidl.kernels import check, elementwise
from minidl.kernels import rotary as kernels
from minidl.ops.activation import activated
from minidl.ops.activation_grad import bias_act_grad
from minidl.ops.join import cat
from minidl.ops.rearrange import chunk
from minidl.tensors import Tensor

__all__ = ["geglu", "rotary", "swiglu"]


class Gated(Function):
    """act(a) b of the halves a and b of the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: str) -> torch.Tensor:
        ctx.act = act
        ctx.save(x)
        a, b = _halves(x)
        return elementwise.act_mul(a, b, act).view(*x.shape[:-1], a.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        (a, b), (da, db) = _halves(x), _halves(dx)
        dy = dy.reshape(a.shape)
        elementwise.act_mul_grad(dy, a, b, ctx.act, out=da)
        elementwise.act_mul(a, dy, ctx.act, out=db)
        return dx, None

    @staticmethod
    def recorded_backward(ctx: Any, dy: Tensor) -> Any:
        a, b = chunk(ctx.saved[0], 2, -1)
        da, _ = bias_act_grad(dy * b, a, None, ctx.act, False, want_x=True, want_bias=False)
        return cat([da, dy * activated(a, ctx.act)], -1), None


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).chunk(2, 1)


def _gated(op: str, x: Tensor, act: str) -> Tensor:
    check.floating(op, input=x.data)
    if not x.ndim or x.shape[-1] % 2 or not x.shape[-1]:
        raise ValueError(f"{op}: input has shape {list(x.shape)}, expected an even last size of 2 or more")
    return Gated.apply(x, act)


def swiglu(input: Tensor) -> Tensor:
    """Return silu(a) b of the halves a and b of the last dimension, in one launch; backward takes two.

    Shapes: [..., 2 N] -> [..., N]. Raises TypeError for integers, ValueError for an odd size. Source: Shazeer, arXiv
    2002.05202.
    """
    return _gated("swiglu", input, "silu")


def geglu(input: Tensor, approximate: str = "none") -> Tensor:
    """Return gelu(a, approximate) b of the halves a and b of the last dimension. As `swiglu`."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'geglu: approximate is {approximate!r}, expected "none" or "tanh"')
    return _gated("geglu", input, "gelu_tanh" if approximate == "tanh" else "gelu")


@linear(lambda ctx, x: Rotary.apply(x, *ctx.how))
class Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.how = cos.contiguous(), sin.contiguous(), interleaved
        return kernels.rotary(x.contiguous(), *ctx.how)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return kernels.rotary(dy.contiguous(), *ctx.how, inverse=True), None, None, None


def rotary(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return queries or keys with each pair of numbers (a, b) as (a cos - b sin, b cos + a sin), in one launch.

    Shapes: input [..., T, D], cos and sin [T, D / 2], of any floating types, without a gradient -> input's, in its
    dtype. A pair is i and i + D / 2, as in Llama, or 2 i and 2 i + 1 with `interleaved`. Raises TypeError for integers,
    ValueError for other shapes. Source: Su et al., RoFormer, arXiv 2104.09864.
    """
    check.floating("rotary", input=input.data, cos=cos.data, sin=sin.data)
    shapes = f"input {list(input.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)}"
    if input.ndim < 2 or input.shape[-1] % 2 or not cos.shape == sin.shape == (input.shape[-2], input.shape[-1] // 2):
        raise ValueError(f"rotary: {shapes}, expected [..., T, D], [T, D / 2] and [T, D / 2]")
    return Rotary.apply(input, cos.detach(), sin.detach(), interleaved)
