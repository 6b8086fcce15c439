"""Mark the layers of a graph, computed by torch's functions or minidl's operators, by one kind of node each.

`mark` replaces a convolution or linear layer by a call of `Layer`, and a batch norm with its counter of batches by a
call of `Norm`, if kernels support it and torch is not known to be faster. `chains.fuse` replaces these by operators.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from minidl.torch import convolution
from minidl.torch.convolution import Settings
from minidl.torch.fusion import graph as graphs
from minidl.torch.fusion.graph import bind, is_constant, value
from minidl.torch.layer import few_rows, ready, wide_volume
from minidl.torch.registry import NAMESPACE

_CONVOLUTIONS: dict[Any, str] = {
    torch.conv1d: "conv1d", torch.conv2d: "conv2d", torch.conv3d: "conv3d",
    torch.conv_transpose1d: "conv_transpose1d", torch.conv_transpose2d: "conv_transpose2d",
    torch.conv_transpose3d: "conv_transpose3d",
}  # fmt: skip
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_CONVOLUTION_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NORM_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


class Layer(NamedTuple):
    """A convolution, or a linear layer, which has no settings."""

    x: Any
    weight: Any
    bias: Any
    settings: Settings | None


class Norm(NamedTuple):
    """A batch norm. `batches` is the counter that it increments, None without one."""

    x: Any
    mean: Any
    var: Any
    weight: Any
    bias: Any
    training: bool
    momentum: float | None
    eps: float
    batches: Any = None


def mark(graph: fx.Graph) -> None:
    """Replace the layers and batch norms of a graph by calls of `Layer` and `Norm`."""
    operators = getattr(torch.ops, NAMESPACE)
    absorbed: set[fx.Node] = set()
    for node in list(graph.nodes):
        layer = _torchs_layer(node) or _our_layer(node, operators)
        if layer is not None and _supports_layer(node, layer):
            graphs.replace(graph, [node], Layer, layer)
            continue
        norm = _torchs_norm(node) if node.target is F.batch_norm else _our_norm(node, operators)
        if norm is not None and _supports_norm(node, norm):
            if node.target is operator.getitem:
                absorbed.add(node.args[0])
            graphs.replace(graph, [node], Norm, norm if norm.batches is not None else _counted(graph, node, norm))
    for node in reversed(list(graph.nodes)):
        if _is_operator(node) and (not node.target._schema.is_mutable or node in absorbed):
            graph.erase_node(node)


def _is_operator(node: fx.Node) -> bool:
    """Return whether a node is an operator of minidl without users."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == NAMESPACE and not node.users


def _torchs_layer(node: fx.Node) -> Layer | None:
    if node.op != "call_function":
        return None
    if node.target is F.linear:
        arguments = bind(node, ("input", "weight", "bias"), {"bias": None})
        return None if arguments is None else Layer(arguments["input"], arguments["weight"], arguments["bias"], None)
    name = _CONVOLUTIONS.get(node.target)
    if name is None:
        return None
    transposed = "transpose" in name
    defaults = _CONVOLUTION_DEFAULTS | ({"output_padding": 0} if transposed else {})
    arguments = bind(node, _TRANSPOSED if transposed else _CONVOLUTION, defaults)
    if arguments is None:
        return None
    x, weight, bias = (arguments.pop(key) for key in ("input", "weight", "bias"))
    shape = () if value(weight) is None else value(weight).shape
    if not shape or not all(isinstance(size, int) for size in shape) or not all(map(is_constant, arguments.values())):
        return None
    return Layer(x, weight, bias, convolution.settings_of(name, value(weight), **arguments))


def _our_layer(node: fx.Node, operators: Any) -> Layer | None:
    args: Any = node.args
    if node.target is operators.linear.default and args[3] is None:
        return Layer(args[0], args[1], args[2], None)
    if node.target is operators.convolution.default:
        x, weight, bias, scale, added, *settings, act, _ = args
        if scale is None and added is None and act is None:
            return Layer(x, weight, bias, tuple(settings))
    return None


def _supports_layer(node: fx.Node, layer: Layer) -> bool:
    if not _are_ready(node, layer.x, layer.weight, layer.bias):
        return False
    x, weight, bias = value(layer.x), value(layer.weight), value(layer.bias)
    outputs = (
        weight.shape[0] if layer.settings is None or not layer.settings[5] else weight.shape[1] * layer.settings[4]
    )
    if bias is not None and tuple(bias.shape) != (outputs,):
        return False
    if layer.settings is None:
        return weight.dim() == 2 and x.dim() >= 2 and not few_rows(x, *weight.shape[::-1])
    return x.dim() == weight.dim() and not wide_volume(weight, layer.settings[4])


def _torchs_norm(node: fx.Node) -> Norm | None:
    arguments = bind(node, _NORM, _NORM_DEFAULTS)
    if arguments is None or not all(is_constant(arguments[key]) for key in ("training", "momentum", "eps")):
        return None
    return Norm(*(arguments[key] for key in _NORM))


def _our_norm(node: fx.Node, operators: Any) -> Norm | None:
    call: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if not isinstance(call, fx.Node) or len(call.users) != 1:
        return None
    args: Any = call.args
    if call.target is operators.batch_norm.default:
        x, weight, bias, added, mean, var, batches, momentum, eps, act, _ = args
        norm = Norm(x, mean, var, weight, bias, True, momentum, eps, batches)
    elif call.target is operators.batch_norm_inference.default:
        x, weight, bias, added, mean, var, eps, act, _ = args
        norm = Norm(x, mean, var, weight, bias, False, None, eps)
    else:
        return None
    return norm if added is None and act is None else None


def _supports_norm(node: fx.Node, norm: Norm) -> bool:
    if not _are_ready(node, norm.x, norm.weight, norm.bias, norm.mean, norm.var) or value(norm.x).dim() < 2:
        return False
    if not norm.training:
        return norm.mean is not None and norm.var is not None
    x = value(norm.x)
    empty = any(isinstance(size, int) and size == 0 for size in x.shape)
    return not empty and (norm.momentum is not None or norm.batches is not None)


def _counted(graph: fx.Graph, node: fx.Node, norm: Norm) -> Norm:
    """Return the batch norm with the `batches.add_(1)` before it absorbed, if nothing else reads that counter."""
    before = node.prev
    while norm.training and norm.mean is not None and before.op not in ("root", "placeholder"):
        counter: Any = before.args[0] if before.target == "add_" and before.args[1:] == (1,) else None
        if counter is not None and not before.kwargs and not before.users and len(counter.users) == 1:
            tensor = value(counter)
            if tensor is not None and tensor.dtype == torch.int64 and tensor.dim() == 0:
                graph.erase_node(before)
                return norm._replace(batches=counter)
        if before.target is F.batch_norm or before.target is Norm:
            break
        before = before.prev
    return norm


def _are_ready(node: fx.Node, *tensors: Any) -> bool:
    """Return whether kernels support these tensors and the node's dtype, all on one device."""
    values = [value(tensor) for tensor in (node, *tensors) if tensor is not None]
    return all(map(ready, values)) and len({each.device for each in values}) == 1
