"""Replace single functions of torch by minidl's functions with the same arguments."""

from __future__ import annotations

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
    """A function of minidl: the names of its arguments, their defaults, and a test of the arguments."""

    run: Callable[..., Any]
    names: tuple[str, ...]
    defaults: dict[str, Any]
    takes: Callable[[dict[str, Any]], bool] = lambda arguments: True


_POOL = ("input", "kernel_size", "stride", "padding")
_SOFTMAX = ("input", "dim", "_stacklevel", "dtype")
_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _is_image(arguments: dict[str, Any]) -> bool:
    return value(arguments["input"]).dim() in (3, 4)


def _has_classes(x: Any, target: Any, weight: Any) -> bool:
    """Return whether a target is classes, or probabilities of the logits' dtype, and gets no gradient."""
    recorded = any(each is not None and each.requires_grad for each in (target, weight))
    return target is not None and not recorded and target.dtype in (torch.int64, torch.uint8, x.dtype)


def _softmax(run: Callable[..., Any]) -> Function:
    def call(input: Any, dim: Any, _stacklevel: Any, dtype: Any) -> Any:
        return run(input, dim, dtype)

    return Function(call, _SOFTMAX, {"dim": None, "_stacklevel": 3, "dtype": None}, lambda a: a["dim"] is not None)


_FUNCTIONS: dict[Any, Function] = {
    F.max_pool2d: Function(
        pooling.max_pool2d, (*_POOL, "dilation", "ceil_mode", "return_indices"),
        {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False},
        lambda a: _is_image(a) and not a["return_indices"] and a["stride"] != [],
    ),
    F.avg_pool2d: Function(
        pooling.avg_pool2d, (*_POOL, "ceil_mode", "count_include_pad", "divisor_override"),
        {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True, "divisor_override": None},
        lambda a: _is_image(a) and a["stride"] != [],
    ),
    F.adaptive_avg_pool2d: Function(pooling.adaptive_avg_pool2d, ("input", "output_size"), {}, _is_image),
    F.layer_norm: Function(
        rows.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps"),
        {"weight": None, "bias": None, "eps": 1e-5},
    ),
    F.rms_norm: Function(
        rows.rms_norm, ("input", "normalized_shape", "weight", "eps"), {"weight": None, "eps": None}
    ),
    F.group_norm: Function(
        rows.group_norm, ("input", "num_groups", "weight", "bias", "eps"), {"weight": None, "bias": None, "eps": 1e-5}
    ),
    F.softmax: _softmax(rows.softmax),
    F.log_softmax: _softmax(rows.log_softmax),
    F.cross_entropy: Function(
        rows.cross_entropy, _LOSS,
        {"weight": None, "size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean",
         "label_smoothing": 0.0},
        lambda a: _has_classes(value(a["input"]), value(a["target"]), value(a["weight"])),
    ),
}  # fmt: skip


def exchange(graph: fx.Graph) -> list[str]:
    """Replace the functions of a graph; return their names."""
    names = []
    for node in list(graph.nodes):
        function = _FUNCTIONS.get(node.target) if node.op == "call_function" else None
        arguments = None if function is None else graphs.bind(node, function.names, function.defaults)
        if function is None or arguments is None or not _is_ready(node, arguments) or not function.takes(arguments):
            continue
        call = tuple(arguments.values())
        if node.target is F.layer_norm:
            call = (*call, _dtype_read(node))
        names.append(str(getattr(function.run, "__name__", node.name)))
        graphs.replace(graph, [node], function.run, call)
    return names


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
