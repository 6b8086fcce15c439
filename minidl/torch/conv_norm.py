"""A convolution and its batch norm in training as one operator of torch, with a sum and an activation.

The convolution hands on the statistics of its tiles: its result is read once less.
"""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import activation
from minidl.kernels import norm as kernels
from minidl.kernels.norm import alone
from minidl.ops.conv import Conv2d
from minidl.runtime.launch_cache.replay import replayed
from minidl.torch.convolution import SETTINGS, Convolution, convolution_backward, sizes
from minidl.torch.normalisation import MOVED, batch_norm_backward, mark_moved, normalise_batch
from minidl.torch.registry import LOWER, accumulator, act_of, last, operator, straight


def _fake_conv_norm(x: Any, weight: Any, *more: Any) -> tuple[torch.Tensor, ...]:
    shape = sizes(x, weight, more[9:15])
    vector = x.new_empty(shape[1], dtype=accumulator(x.dtype))
    return last(shape, x), last(shape, x), vector, torch.empty_like(vector)


def _save_conv_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, added, gamma, beta, *_ = inputs
    *_, ctx.name, ctx.slope = inputs
    ctx.settings = inputs[11:17]
    y, z, mean, rstd = output
    ctx.mark_non_differentiable(z, mean, rstd)
    if added is not None and ctx.name not in activation.FROM_OUTPUT:
        raise ValueError(f"conv_norm: the gradient of {ctx.name} after a sum is not built; apply it afterwards")
    ctx.save_for_backward(x, weight, z, mean, rstd, gamma, beta, None if added is None or ctx.name is None else y)


def _conv_norm_gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    tensors = dy, *ctx.saved_tensors
    how = *ctx.settings, ctx.name, ctx.slope, ctx.needs_input_grad[:6]
    if torch.is_grad_enabled() or not straight(tensors):  # the operators refuse a gradient of the gradients
        found = _back(batch_norm_backward, convolution_backward, *tensors, *how)
    else:
        found = _at_once(*tensors, *how)
    return *found, *[None] * 13


@replayed
def _at_once(*given: Any) -> Any:
    """`_back` without operators: one replay in place of two."""
    return _back(batch_norm_backward.function, convolution_backward.function, *given)  # type: ignore[attr-defined]


def _back(
    norm_back: Any, conv_back: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor,
    mean: torch.Tensor, rstd: torch.Tensor, gamma: Any, beta: Any, y: Any, *more: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients that are wanted of x, weight, bias, what was added, and the batch norm's weight and bias."""
    *settings, name, slope, want = more
    made = [True, want[4], want[5], want[3] and y is not None]
    found = iter(norm_back(dy, z, mean, rstd, gamma, beta, y, True, name, slope, made))
    dz, dgamma, dbeta, dadded = (next(found) if each else None for each in made)
    if want[3] and y is None:
        dadded = dy
    of_conv = [*want[:3], False]
    found = iter(conv_back(dz, x, weight, None, *settings, None, 0.0, of_conv))
    return *(next(found) if each else None for each in of_conv[:3]), dadded, dgamma, dbeta


@operator(
    "conv_norm(Tensor x, Tensor conv_weight, Tensor? conv_bias, Tensor? added, Tensor? weight, Tensor? bias, "
    f"{MOVED}, {SETTINGS}, str? act, float slope) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_conv_norm, save=_save_conv_norm, backward=_conv_norm_gradients, pack=1, cast=(LOWER, (0, 1, 2, 3)),
)  # fmt: skip
def conv_norm(
    x: torch.Tensor, conv_weight: torch.Tensor, conv_bias: Any, added: Any, weight: Any, bias: Any, *more: Any
) -> tuple[torch.Tensor, ...]:
    """(y, the convolution's result, mean, rstd) of a convolution and its batch norm in training."""
    found = _conv_norm(x, conv_weight, conv_bias, added, weight, bias, *more)
    mark_moved(*more[:3])
    return found


@replayed
def _conv_norm(
    x: torch.Tensor, conv_weight: torch.Tensor, conv_bias: Any, added: Any, weight: Any, bias: Any, *more: Any
) -> tuple[torch.Tensor, ...]:
    *moved, _, _, _, _, _, _, name, slope = more
    made = Convolution(x, conv_weight, more[5:11], bias=conv_bias)
    values = sizes(x, conv_weight, more[5:11])
    few = added is None and moved[3] is not None and values[0] * _product(values[2:]) <= alone.MOST
    hands_on = made.kind is Conv2d and not few and values[0] > 0
    z, handed = made.forward(x, conv_weight, conv_bias, None, **({"statistics": True} if hands_on else {}))
    kernels.check_arguments(z, moved[0], moved[1], weight, bias, True, moved[4])
    y, mean, rstd = normalise_batch(z, weight, bias, added, moved, act_of(name, slope), handed if hands_on else None)
    return y, z, mean, rstd


def _product(numbers: list[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
