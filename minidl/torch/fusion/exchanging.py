"""Replace single functions of torch by minidl's functions with the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from minidl.torch import activations, conv_norm, convolution, pooling, rows
from minidl.torch.fusion import graph as graphs
from minidl.torch.fusion.graph import value
from minidl.torch.layer import ready

_LAYERS = (F.linear, activations._linear, convolution.convolution, conv_norm.conv_norm, torch.conv1d, torch.conv2d)


class Function(NamedTuple):
    """A function of minidl with the arguments of torch's, and a test of the arguments."""

    run: Callable[..., Any]
    takes: Callable[[dict[str, Any]], bool] = lambda arguments: True


def _is_pool(arguments: dict[str, Any], axes: int) -> bool:
    is_supported = not arguments.get("return_indices") and arguments.get("stride") != []
    return is_supported and value(arguments["input"]).dim() in (axes + 1, axes + 2)


def _has_classes(x: Any, target: Any, weight: Any) -> bool:
    """Return whether a target is classes, or probabilities of the logits' dtype, and gets no gradient."""
    recorded = any(each is not None and each.requires_grad for each in (target, weight))
    return target is not None and not recorded and target.dtype in (torch.int64, torch.uint8, x.dtype)


_FUNCTIONS: dict[Any, Function] = {
    F.max_pool2d: Function(pooling.max_pool2d, lambda a: _is_pool(a, 2)),
    F.max_pool3d: Function(pooling.max_pool3d, lambda a: _is_pool(a, 3)),
    F.avg_pool2d: Function(pooling.avg_pool2d, lambda a: _is_pool(a, 2)),
    F.avg_pool3d: Function(pooling.avg_pool3d, lambda a: _is_pool(a, 3)),
    F.adaptive_avg_pool2d: Function(pooling.adaptive_avg_pool2d, lambda a: _is_pool(a, 2)),
    F.adaptive_avg_pool3d: Function(pooling.adaptive_avg_pool3d, lambda a: _is_pool(a, 3)),
    F.layer_norm: Function(rows.layer_norm),
    F.rms_norm: Function(rows.rms_norm),
    F.group_norm: Function(rows.group_norm),
    F.softmax: Function(rows.softmax, lambda a: a["dim"] is not None),
    F.log_softmax: Function(rows.log_softmax, lambda a: a["dim"] is not None),
    F.cross_entropy: Function(
        rows.cross_entropy, lambda a: _has_classes(value(a["input"]), value(a["target"]), value(a["weight"]))
    ),
}  # fmt: skip


def exchange(graph: fx.Graph) -> list[str]:
    """Replace the functions of a graph; return their names."""
    names = []
    for node in list(graph.nodes):
        function = _FUNCTIONS.get(node.target) if node.op == "call_function" else None
        arguments = None if function is None else graphs.bind(node, *_signature(function.run))
        if function is None or arguments is None or not _is_ready(node, arguments) or not function.takes(arguments):
            continue
        call = tuple(arguments.values())
        if node.target is F.layer_norm:
            call = (*call[:-1], _dtype_read(node))
        names.append(str(getattr(function.run, "__name__", node.name)))
        graphs.replace(graph, [node], function.run, call)
    return names


def _signature(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of a function's arguments, and their defaults."""
    parameters = inspect.signature(function).parameters
    return tuple(parameters), {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def _is_ready(node: fx.Node, arguments: dict[str, Any]) -> bool:
    tensors = [value(node), value(arguments.get("input")), value(arguments.get("weight")), value(arguments.get("bias"))]
    values = [tensor for tensor in tensors if tensor is not None]
    settings = (each for name, each in arguments.items() if name not in ("input", "weight", "bias", "target"))
    return value(node) is not None and all(map(ready, values)) and all(map(graphs.is_constant, settings))


def _dtype_read(node: fx.Node) -> torch.dtype | None:
    """Return autocast's dtype for a layer norm that only layers read, so that its result is rounded once, else None."""
    dtypes = {value(user).dtype if user.target in _LAYERS and user.args[0] is node else None for user in node.users}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return None if dtype == value(node).dtype else dtype
