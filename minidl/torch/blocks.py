"""Several layers of torch as one operator: convolution or product, batch norm, sum and activation, as far as there are.

`block` is what a traced forward calls. Where an operator cannot take it, as under hooks or after a module was replaced,
it calls the layers one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minidl.torch import activations, convolution, folds, rows
from minidl.torch import normalisation as norms
from minidl.torch.activations import from_output
from minidl.torch.layers import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    LayerNorm,
    Linear,
    _BatchNorm,
    _Conv,
    ready,
)
from minidl.torch.registry import act_of, may_want

Act = tuple[str | None, float]

# torch's functions of the same names, of z and the number of an activation.
_TORCHS: dict[str | None, Callable[[torch.Tensor, float], torch.Tensor]] = {
    None: lambda z, _: z,
    "relu": lambda z, _: F.relu(z),
    "leaky_relu": F.leaky_relu,
    "sigmoid": lambda z, _: torch.sigmoid(z),
    "tanh": lambda z, _: torch.tanh(z),
    "gelu": lambda z, _: F.gelu(z),
    "gelu_tanh": lambda z, _: F.gelu(z, approximate="tanh"),
    "silu": lambda z, _: F.silu(z),
    "relu6": lambda z, _: F.relu6(z),
    "elu": F.elu,
    "mish": lambda z, _: F.mish(z),
    "hardswish": lambda z, _: F.hardswish(z),
    "hardsigmoid": lambda z, _: F.hardsigmoid(z),
}
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.Linear)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_OURS = (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, Linear)


def of_module(module: nn.Module) -> Act | None:
    """The activation that a module of torch is; None for any other module."""
    kind = type(module)
    simple: dict[type[nn.Module], str] = {
        nn.ReLU: "relu", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh", nn.SiLU: "silu", nn.ReLU6: "relu6", nn.Mish: "mish",
        nn.Hardswish: "hardswish", nn.Hardsigmoid: "hardsigmoid",
    }  # fmt: skip
    if kind in simple:
        return simple[kind], 0.0
    if isinstance(module, nn.GELU) and kind is nn.GELU:
        return ("gelu_tanh" if module.approximate == "tanh" else "gelu"), 0.0
    if isinstance(module, nn.LeakyReLU) and kind is nn.LeakyReLU:
        return _leaky(module.negative_slope)
    return None


def _leaky(slope: float) -> Act | None:
    return ("relu", 0.0) if slope == 0 else ("leaky_relu", float(slope)) if slope > 0 else None


def block(
    layer: Any, norm: Any, name: str | None, slope: float, x: torch.Tensor,
    added: torch.Tensor | None, in_place: bool = False,
) -> torch.Tensor:  # fmt: skip
    """act(norm(layer(x)) + added), all but x as far as it is given; in_place: the sum has the dtype of what it is added
    to."""
    if not _fits(layer, norm, x, added):
        return apart(layer, norm, name, slope, x, added, in_place)
    if added is not None and not from_output(name) and torch.is_grad_enabled():
        # The gradient needs what the activation is of.
        return activations._bias_act(block(layer, norm, None, 0.0, x, added), None, name, slope)
    if layer is None:
        return norm._minidl_normalised(x, added, name, slope)
    if norm is None:
        how: Any = name if name is None else act_of(name, slope)
        if isinstance(layer, Linear):
            return activations.linear(x, layer.weight, layer.bias, how)
        weight = _of(layer, "weight")
        return convolution.convolved(x, weight, layer.bias, layer._minidl_settings(weight), how, None, added)
    return _conv_norm(layer, norm, name, slope, x, added)


def _conv_norm(conv: Any, norm: Any, name: str | None, slope: float, x: torch.Tensor, added: Any) -> torch.Tensor:
    affine, weight, bias = (_of(norm, "weight"), _of(norm, "bias")), _of(conv, "weight"), _of(conv, "bias")
    settings = conv._minidl_settings(weight)
    if norm._minidl_of_batch:
        tensors = x, weight, bias, added, *affine
        return norms.conv_norm(*tensors, *norm._minidl_moved(), *settings, name, slope)[0]
    if may_want(x, weight, bias, added, *affine):
        return norm._minidl_normalised(conv(x), added, name, slope)
    buffers, made = norm._buffers, folds.part(conv) if torch.compiler.is_compiling() else None
    scale, shift = made or norms.folded(x, buffers["running_mean"], buffers["running_var"], bias, *affine, norm.eps)
    return convolution.convolution(x, weight, shift, scale, added, *settings, name, slope)


def _of(module: nn.Module, name: str) -> Any:
    """A parameter. (nn.Module's own way there takes 0.6 us, ten times as long.)"""
    found = module._parameters.get(name, module)
    return getattr(module, name) if found is module else found


def _fits(layer: Any, norm: Any, x: Any, added: Any) -> bool:
    """Whether the block can be one operator: torch's rules of broadcasting and promotion are left to torch."""
    if (
        not ready(x)
        or not (layer is None or type(layer) in _OURS)
        or not (norm is None or isinstance(norm, _BatchNorm))
    ):
        return False
    if layer is not None and not isinstance(layer, Linear) and x.dim() != layer.weight.dim():
        return False
    if norm is not None and norm._minidl_empty(x):
        return False
    if added is None:
        return True
    if not ready(added) or added.device != x.device:
        return False
    kind, lowered = x.device.type, layer is not None and x.dtype != torch.float64
    if added.dtype != (torch.get_autocast_dtype(kind) if lowered and torch.is_autocast_enabled(kind) else x.dtype):
        return False
    if isinstance(layer, _Conv):
        weight: Any = layer.weight
        return list(added.shape) == convolution.sizes(x, weight, layer._minidl_settings(weight))
    return layer is None and bool(added.shape == x.shape)


def lowered(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer norm that layers under autocast alone read: its result is rounded to their dtype as it is written."""
    device = x.device.type
    if isinstance(norm, LayerNorm) and ready(x) and x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return rows.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps, dtype)
    made: torch.Tensor = norm(x)
    return made


def apart(
    layer: Any, norm: Any, name: str | None, slope: float, x: Any, added: Any, in_place: bool = False
) -> Any:  # fmt: skip
    """The same, one layer after another."""
    y = x if layer is None else layer(x)
    y = y if norm is None else norm(y)
    if added is not None:
        y = y.add_(added) if in_place else y + added
    return _TORCHS[name](y, slope)
