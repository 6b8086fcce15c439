"""Replace a layer and later operations by one operator: convolution or product, batch norm, sum and activation.

    layer -> batch norm -> + other -> activation      as long as each is the only reader of the one before

In training a convolution and its batch norm are `conv_norm`, which reads the convolution's result once less. In
inference the batch norm becomes a scale and a shift of the convolution. An activation whose gradient needs its input is
a separate operator if a gradient is recorded.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from minidl.kernels.activation import SLOPES
from minidl.torch import activations, conv_norm, convolution
from minidl.torch import normalisation as norms
from minidl.torch.activations import from_output
from minidl.torch.fusion import graph as graphs
from minidl.torch.fusion.graph import value
from minidl.torch.fusion.reading import Layer, Norm
from minidl.torch.layer import ready

Act = tuple[str | None, float]
_NONE: Act = (None, 0.0)
_ACTS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", "relu": "relu", torch.relu_: "relu", "relu_": "relu", F.relu6: "relu6",
    torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid", "sigmoid": "sigmoid", "sigmoid_": "sigmoid", torch.tanh: "tanh",
    F.tanh: "tanh", "tanh": "tanh", "tanh_": "tanh", F.silu: "silu", F.mish: "mish", F.hardswish: "hardswish",
    F.hardsigmoid: "hardsigmoid", F.hardtanh: "hardtanh", F.leaky_relu: "leaky_relu", F.gelu: "gelu",
    F.elu: "elu",
}  # fmt: skip


class Chain(NamedTuple):
    """The operations of one operator, and the nodes that it replaces."""

    layer: Layer | None
    norm: Norm | None
    added: fx.Node | None
    act: Act
    nodes: tuple[fx.Node, ...]

    def __str__(self) -> str:
        kind = "linear" if self.layer is not None and self.layer.settings is None else "convolution"
        parts = (self.layer and kind, self.norm and "batch norm", self.added and "sum", self.act[0])
        return " + ".join(part for part in parts if part)


def fuse(graph: fx.Graph) -> list[str]:
    """Replace all marked layers and batch norms, with later operations, by operators; return the operators' names."""
    names = []
    for node in list(graph.nodes):
        if node.target in (Layer, Norm) and not node._erased:
            chain = _chain(node)
            _emit(graph, chain)
            names.append(str(chain))
    return names


def _chain(node: fx.Node) -> Chain:
    nodes, added, act = [node], None, _NONE
    args: Any = node.args
    layer = Layer(*args) if node.target is Layer else None
    norm = Norm(*args) if node.target is Norm else None
    convolves = layer is not None and layer.settings is not None
    after = graphs.only_user(node)
    if convolves and after is not None and after.target is Norm and after.args[0] is node:
        args = after.args
        norm, after = Norm(*args), _take(nodes, after)
    addend = graphs.other_addend(after, nodes[-1]) if convolves or norm is not None else None
    if after is not None and addend is not None and _can_add(nodes[-1], addend):
        added, after = addend, _take(nodes, after)
    activation = None if after is None else _act_of(after)
    if after is not None and activation is not None:
        act = activation
        _take(nodes, after)
    statistics = (norm.mean, norm.var, norm.batches) if norm is not None and norm.training else ()
    read = (norm.mean, norm.var) if norm is not None and not norm.training else ()
    if graphs.has_barrier(nodes, statistics) or _updates_between(nodes, read):
        return Chain(layer, norm if layer is None else None, None, _NONE, (node,))
    return Chain(layer, norm, added, act, tuple(nodes))


def _updates_between(nodes: list[fx.Node], read: tuple[Any, ...]) -> bool:
    memory = {graphs.storage(each) for each in read} - {None}
    node = nodes[0]
    while node is not nodes[-1]:
        if memory and node not in nodes and updated_memory(node) & memory:
            return True
        node = node.next
    return False


def updated_memory(node: fx.Node) -> set[Any]:
    """Return the memory that a node may update if it is a batch norm."""
    if node.target not in (F.batch_norm, F.instance_norm, Norm, norms.batch_norm_training, conv_norm.conv_norm):
        return set()
    args: Any = node.args
    if node.target is Norm and not Norm(*args).training:
        return set()
    return {graphs.storage(each) for each in node.all_input_nodes}


def _take(nodes: list[fx.Node], node: fx.Node) -> fx.Node | None:
    nodes.append(node)
    return graphs.only_user(node)


def _can_add(one: fx.Node, other: fx.Node) -> bool:
    """Return whether the operator supports a sum: both have one shape, dtype and device."""
    a, b = value(one), value(other)
    return ready(b) and a.dtype == b.dtype and a.device == b.device and graphs.same_shape(a, b)


def _act_of(node: fx.Node) -> Act | None:
    """Return the name and number of a node's activation, None for other nodes."""
    name = _ACTS.get(node.target)
    if name is None or node.op not in ("call_function", "call_method"):
        return None
    keywords = [number for key, number in node.kwargs.items() if key != "inplace"]
    numbers = [number for number in (*node.args[1:], *keywords) if not isinstance(number, bool)]  # inplace, by position
    if name in ("leaky_relu", "elu"):
        slope = numbers[0] if numbers else SLOPES[name]
        if not isinstance(slope, int | float) or slope < 0:
            return None
        return (name, float(slope)) if slope or name == "elu" else ("relu", 0.0)
    if name == "hardtanh":
        return ("relu6", 0.0) if numbers[:2] == [0.0, 6.0] else None
    if name == "gelu":
        return ("gelu_tanh" if numbers == ["tanh"] else "gelu"), 0.0
    return None if numbers else (name, 0.0)


def _emit(graph: fx.Graph, chain: Chain) -> None:
    layer, norm, added, (name, slope), nodes = chain
    # A later detach_() has changed the fake tensor's requires_grad.
    detaches = any(node.target in ("detach_", torch.detach_) for node in graph.nodes)
    recorded = bool(value(nodes[-1]).requires_grad) or detaches
    # A batch norm without an addition saves its input, from which every activation's gradient follows.
    separate = recorded and not from_output(name) and (norm is None or added is not None)
    act = _NONE if separate else (name, slope)
    if norm is None:
        assert layer is not None
        result = graphs.replace(graph, nodes, *_layer_call(layer, layer.bias, None, added, act))
    elif norm.training:
        running = (norm.mean, norm.var, norm.batches, norm.momentum, norm.eps)
        running = running if norm.mean is not None else (None, None, None, 0.1, norm.eps)
        if layer is None:
            args: Any = (norm.x, norm.weight, norm.bias, added, *running, *act)
            result = graphs.replace(graph, nodes, norms.batch_norm_training, args, 0)
        else:
            args = (*layer[:3], added, norm.weight, norm.bias, *running, *(layer.settings or ()), *act)
            result = graphs.replace(graph, nodes, conv_norm.conv_norm, args, 0)
    elif layer is None or recorded:
        x = norm.x
        if layer is not None:
            with graph.inserting_before(nodes[-1]):
                x = graph.call_function(*_layer_call(layer, layer.bias, None, None, _NONE))
        args = (x, norm.weight, norm.bias, added, norm.mean, norm.var, norm.eps, *act)
        result = graphs.replace(graph, nodes, norms.batch_norm_inference, args, 0)
    else:
        vectors = (norm.mean, norm.var, layer.bias, norm.weight, norm.bias)
        with graph.inserting_before(nodes[-1]):
            folded = graph.call_function(norms.folded, (layer.x, *vectors, norm.eps))
            scale, shift = (graph.call_function(operator.getitem, (folded, i)) for i in range(2))
        result = graphs.replace(graph, nodes, *_layer_call(layer, shift, scale, added, act))
    if separate:
        graphs.append(graph, result, activations._bias_act, (result, None, name, slope))


def _layer_call(layer: Layer, bias: Any, scale: Any, added: Any, act: Act) -> tuple[Any, tuple[Any, ...]]:
    if layer.settings is None:
        return activations._linear, (layer.x, layer.weight, bias, *act)
    return convolution.convolution, (layer.x, layer.weight, bias, scale, added, *layer.settings, *act)
