"""Activations with a bias, and linear layers with both, as torch operators."""

from __future__ import annotations

from typing import Any

import torch

from minidl.kernels import activation, gemm
from minidl.kernels import bias_act as kernels
from minidl.kernels.activation import Activation
from minidl.ops import activation_grad
from minidl.torch.recorded import recorded
from minidl.torch.registry import LOWER, NAMESPACE, Gradients, act_of, operator, spread, straight

_PIXELS = [1], [0, 0], [1], [0], 1, False  # settings of a linear layer as a convolution of images [rows, K, 1]


def parts(how: Activation) -> tuple[str | None, float]:
    """Return the name and number of an activation, the arguments of operators."""
    return activation.parse(how)


def from_output(name: str | None) -> bool:
    return name in activation.FROM_OUTPUT


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, bias, ctx.name, ctx.slope = inputs
    if from_output(ctx.name):
        ctx.save_for_backward(output, None)
    else:
        ctx.save_for_backward(x, bias)


def _gradients(ctx: Any, dy: torch.Tensor) -> Any:
    saved, bias = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:2])
    if ctx.name is None and not mask[1]:
        return dy, None, None, None
    return *act_gradients(dy, saved, bias, ctx.name, ctx.slope, mask), None, None


def act_gradients(dy: torch.Tensor, saved: torch.Tensor, bias: Any, name: Any, slope: float, mask: list[bool]) -> Any:
    """Return `bias_act_backward`, which has a gradient with `create_graph`."""
    if not torch.is_grad_enabled() or not straight((dy, saved, bias)):
        return bias_act_backward(dy, saved, bias, name, slope, mask)

    def gradients(dy: Any, x: Any, b: Any) -> Any:
        how = act_of(name, slope), from_output(name)
        return activation_grad.bias_act_grad(dy, x, b, *how, want_x=mask[0], want_bias=mask[1])

    return recorded(gradients, dy, saved, bias)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return an empty result of an elementwise kernel, with x's memory format if x is dense."""
    return torch.empty_like(x)


def _fake(x: Any, bias: Any, name: Any, slope: Any) -> torch.Tensor:
    return x.new_empty(x.shape) if bias is not None else _dense(x)


@operator(
    "bias_act(Tensor x, Tensor? bias, str? act, float slope) -> Tensor",
    _fake,
    save=_save,
    backward=_gradients,
    replay=True,
)
def _bias_act(x: torch.Tensor, bias: torch.Tensor | None, name: str | None, slope: float) -> torch.Tensor:
    y = kernels.bias_act(x, bias, act_of(name, slope))
    return y if bias is not None else _as(y, x)


def _as(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return y with the strides of `torch.empty_like(x)`."""
    if y.stride() == x.stride():
        return y
    like = torch.empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y)


def _fake_backward(dy: Any, saved: Any, bias: Any, name: Any, slope: Any, mask: Any) -> list[torch.Tensor]:
    return [dy.new_empty(dy.shape) if mask[1] else _dense(saved), dy.new_empty(dy.shape[-1:] if mask[1] else 0)]


@operator(
    "bias_act_backward(Tensor dy, Tensor kept, Tensor? bias, str? act, float slope, bool[] wanted) -> Tensor[]",
    _fake_backward,
    replay=True,
)
def bias_act_backward(
    dy: torch.Tensor, saved: torch.Tensor, bias: torch.Tensor | None, name: str | None, slope: float, mask: list[bool]
) -> Gradients:
    dx, db = kernels.bias_act_grad(
        dy, saved, bias, act_of(name, slope), from_output(name), want_x=mask[0], want_bias=mask[1]
    )
    if dx is dy:
        dx = dy.clone()
    if dx is not None:
        dx = dx.contiguous() if mask[1] else _as(dx, saved)
    return dx, db


def bias_act(x: torch.Tensor, b: torch.Tensor | None, act: Activation = "relu") -> torch.Tensor:
    """Return act(x + b), with b added to each row: `minidl.ops.bias_act` for torch tensors."""
    return _bias_act(x, b, *parts(act))


def act(x: torch.Tensor, how: Activation) -> torch.Tensor:
    """Apply an activation to x; the result has its shape, dtype and memory format."""
    return _bias_act(x, None, *parts(how))


def _fake_linear(x: Any, weight: Any, bias: Any, name: Any, slope: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _save_linear(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, weight, _, ctx.name, ctx.slope = inputs
    if not from_output(ctx.name):
        raise ValueError(f"minidl::linear: the gradient of {ctx.name} needs its input; apply it after the product")
    ctx.save_for_backward(x, weight, None if ctx.name is None else output)


def _linear_gradients(ctx: Any, dy: torch.Tensor) -> Any:
    x, weight, y = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():
        dz = dy if y is None else act_gradients(dy, y, None, ctx.name, ctx.slope, [True, False])[0]
        operands = _rows(dz).unsqueeze(-1), _rows(x).unsqueeze(-1), weight.unsqueeze(-1), None
        backward = getattr(torch.ops, NAMESPACE).convolution_backward.default
        dx, dw, db = spread(backward(*operands, *_PIXELS, None, 0.0, [*mask, False]), mask)
        return dx if dx is None else dx.view(x.shape), dw if dw is None else dw.squeeze(-1), db, None, None
    return *linear_backward(dy, x, weight, y, ctx.name, ctx.slope, mask), None, None


@operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, str? act, float slope) -> Tensor",
    _fake_linear, save=_save_linear, backward=_linear_gradients, cast=(LOWER, (0, 1, 2)), replay=True,
)  # fmt: skip
def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str | None, slope: float
) -> torch.Tensor:
    bias = None if bias is None else bias.contiguous()
    y = gemm.gemm(_rows(x), weight.t(), bias, act_of(name, slope))
    return y.view(*x.shape[:-1], weight.shape[0])


def _fake_linear_backward(dy: Any, x: Any, weight: Any, y: Any, name: Any, slope: Any, mask: Any) -> Any:
    return [x.new_empty(shape) for shape in (x.shape, weight.shape, weight.shape[:1])]


@operator(
    "linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor? y, str? act, float slope, bool[] wanted) -> Tensor[]",
    _fake_linear_backward,
    replay=True,
)
def linear_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor | None, name: str | None, slope: float,
    mask: list[bool],
) -> Gradients:  # fmt: skip
    rows = _rows(dy)
    output = rows if y is None else _rows(y)
    dz, db = kernels.bias_act_grad(rows, output, None, act_of(name, slope), y is not None, want_bias=mask[2])
    assert dz is not None
    dx = gemm.gemm(dz, weight).view(x.shape) if mask[0] else None
    return dx, gemm.gemm(dz.t(), _rows(x)) if mask[1] else None, db


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1 if x.numel() else x.shape[:-1].numel(), x.shape[-1])


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, act: Activation = None
) -> torch.Tensor:
    """torch.nn.functional.linear with the activation in the same kernel: act(input weight^T + bias)."""
    name, slope = parts(act)
    if not from_output(name) and torch.is_grad_enabled():
        return _bias_act(_linear(input, weight, bias, None, 0.0), None, name, slope)
    return _linear(input, weight, bias, name, slope)
