"""Convolution and batch norm in training, with an addition and an activation, as one torch operator.

The convolution returns the statistics of its tiles, which saves one pass over its result.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from minidl.kernels import activation
from minidl.kernels import norm as kernels
from minidl.kernels.norm import alone
from minidl.ops.conv import Conv2d
from minidl.runtime.launch_cache.replay import replayed
from minidl.torch.convolution import SETTINGS, Convolution, convolution, convolution_backward, sizes
from minidl.torch.normalisation import RUNNING, batch_norm_backward, mark_updated, norm_gradients, normalise_batch
from minidl.torch.registry import LOWER, accumulator, act_of, last, operator, straight


def _fake_conv_norm(x: Any, weight: Any, *more: Any) -> tuple[torch.Tensor, ...]:
    shape = sizes(x, weight, more[9:15])
    vector = x.new_empty(shape[1], dtype=accumulator(x.dtype))
    return last(shape, x), last(shape, x), vector, torch.empty_like(vector)


def _save_conv_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, added, gamma, beta, *_ = inputs
    *_, ctx.name, ctx.slope = inputs
    ctx.settings = inputs[11:17]
    y, z, mean, rstd = output
    ctx.mark_non_differentiable(z, mean, rstd)
    if added is not None and ctx.name not in activation.FROM_OUTPUT:
        raise ValueError(f"conv_norm: the gradient of {ctx.name} after an addition is not supported; apply it later")
    ctx.save_for_backward(x, weight, z, mean, rstd, gamma, beta, None if added is None or ctx.name is None else y, bias)


def _conv_norm_gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    *saved, bias = ctx.saved_tensors
    tensors = [dy, *saved]
    settings = *ctx.settings, ctx.name, ctx.slope, ctx.needs_input_grad[:6]
    if torch.is_grad_enabled() or not straight(tensors):
        if torch.is_grad_enabled():  # z as a function of x, for second derivatives
            tensors[3] = convolution(*tensors[1:3], bias, None, None, *ctx.settings, None, 0.0)
        gradients = _gradients(norm_gradients, convolution_backward, *tensors, *settings)
    else:
        gradients = _gradients_in_one_replay(*tensors, *settings)
    return *gradients, *[None] * 13


@replayed
def _gradients_in_one_replay(*arguments: Any) -> Any:
    """Return `_gradients` without operators: one replay instead of two."""
    return _gradients(batch_norm_backward.function, convolution_backward.function, *arguments)  # type: ignore[attr-defined]


def _gradients(
    norm_back: Any, conv_back: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor,
    mean: torch.Tensor, rstd: torch.Tensor, gamma: Any, beta: Any, y: Any, *more: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the requested gradients of x, weight, bias, `added`, and the batch norm's weight and bias."""
    *settings, name, slope, needs = more
    mask = [True, needs[4], needs[5], needs[3] and y is not None]
    dz, dgamma, dbeta, dadded = norm_back(dy, z, mean, rstd, gamma, beta, y, True, name, slope, mask)
    if needs[3] and y is None:
        dadded = dy
    gradients = conv_back(dz, x, weight, None, *settings, None, 0.0, [*needs[:3], False])
    return *gradients[:3], dadded, dgamma, dbeta


@operator(
    "conv_norm(Tensor x, Tensor conv_weight, Tensor? conv_bias, Tensor? added, Tensor? weight, Tensor? bias, "
    f"{RUNNING}, {SETTINGS}, str? act, float slope) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_conv_norm, save=_save_conv_norm, backward=_conv_norm_gradients, pack=1, cast=(LOWER, (0, 1, 2, 3)),
)  # fmt: skip
def conv_norm(
    x: torch.Tensor, conv_weight: torch.Tensor, conv_bias: Any, added: Any, weight: Any, bias: Any, *more: Any
) -> tuple[torch.Tensor, ...]:
    """Return (y, the convolution's result, mean, rstd) in training."""
    outputs = _conv_norm(x, conv_weight, conv_bias, added, weight, bias, *more)
    mark_updated(*more[:3])
    return outputs


@replayed
def _conv_norm(
    x: torch.Tensor, conv_weight: torch.Tensor, conv_bias: Any, added: Any, weight: Any, bias: Any, *more: Any
) -> tuple[torch.Tensor, ...]:
    *running, _, _, _, _, _, _, name, slope = more
    convolution = Convolution(x, conv_weight, more[5:11], bias=conv_bias)
    shape = sizes(x, conv_weight, more[5:11])
    is_small = added is None and running[3] is not None and shape[0] * math.prod(shape[2:]) <= alone.MOST
    is_fused = convolution.kind is Conv2d and not is_small and shape[0] > 0
    z, sums = convolution.forward(x, conv_weight, conv_bias, None, **({"statistics": True} if is_fused else {}))
    kernels.check_arguments(z, running[0], running[1], weight, bias, True, running[4])
    y, mean, rstd = normalise_batch(z, weight, bias, added, running, act_of(name, slope), sums if is_fused else None)
    return y, z, mean, rstd
