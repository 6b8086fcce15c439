"""Fold all batch norms of a graph in inference by few operators, before its first convolution.

`chains` puts `norms.folded` before each convolution: a launch of 2 us, of which ResNet-50 has 53. One operator makes
the scales and shifts of all that are alike, of their vectors behind one another. The graph reads them at each call.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from minidl.kernels.norm import fold as kernels
from minidl.torch import normalisation as norms
from minidl.torch.backend import graph as graphs
from minidl.torch.backend.graph import value
from minidl.torch.registry import NAMESPACE, _library, accumulator

_NAME, _ALIGNED = "fold_batch_norms", 8  # parts begin at multiples of so many numbers: of 16 bytes, as kernels expect


def _fold(mean: Any, var: Any, conv_bias: Any, weight: Any, bias: Any, eps: float, double: bool) -> Any:
    """(scales, shifts) behind one another; a list is empty where there are none."""
    joined = [torch.cat(column) if column else None for column in (conv_bias, mean, var, weight, bias)]
    count = sum(map(len, mean))
    return kernels.fold(mean[0].new_empty(count, dtype=_dtype(double)), *joined, eps, wide=True)


def _fake(mean: Any, var: Any, conv_bias: Any, weight: Any, bias: Any, eps: float, double: bool) -> Any:
    scales = mean[0].new_empty(sum(len(each) for each in mean), dtype=_dtype(double))
    return scales, torch.empty_like(scales)


def _dtype(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


# Without a gradient, and not for Python to call: what `registry.operator` adds is for others.
_library.define(
    f"{_NAME}(Tensor[] mean, Tensor[] var, Tensor[] conv_bias, Tensor[] weight, Tensor[] bias, float eps, bool double) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _device in ("CPU", "CUDA"):
    _library.impl(_NAME, _fold, _device)
torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake, lib=_library)
_operator = getattr(getattr(torch.ops, NAMESPACE), _NAME).default


def fold_at_once(graph: fx.Graph) -> None:
    """Replace the calls of `norms.folded` that are alike by one operator behind the graph's inputs."""
    if any(graphs.is_mode(node) for node in graph.nodes):
        return
    changed = {node.args[0] for node in graph.nodes if node.args and graphs.is_in_place(node)}
    alike: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is norms.folded:
            *vectors, eps = node.args[1:]
            inputs = [vector for vector in vectors if vector is not None]
            if all(v.op in ("placeholder", "get_attr") and v not in changed and _is_aligned(v) for v in inputs):
                kinds = tuple(None if v is None else (value(v).dtype, value(v).device) for v in vectors)
                alike[accumulator(value(node.args[0]).dtype), eps, kinds].append(node)
    for (dtype, eps, _), members in alike.items():
        if len(members) > 1:
            _replace(graph, members, dtype, eps)


def _is_aligned(vector: fx.Node) -> bool:
    return bool(value(vector).dim() == 1 and len(value(vector)) % _ALIGNED == 0)


def _replace(graph: fx.Graph, members: list[fx.Node], dtype: torch.dtype, eps: float) -> None:
    columns = [
        [] if column[0] is None else list(column)
        for column in zip(*(node.args[1:6] for node in members), strict=True)
    ]  # fmt: skip
    lengths = [len(value(node.args[1])) for node in members]
    last = next(node for node in graph.nodes if node.op != "placeholder").prev
    for vector in (vector for column in columns for vector in column if vector.op == "get_attr"):
        last.append(vector)
        last = vector
    with graph.inserting_after(last):
        parts = graph.call_function(split_folds, (*columns, eps, dtype == torch.float64, lengths))
    for index, node in enumerate(members):
        node.target, node.args = operator.getitem, (parts, index)


def split_folds(*args: Any) -> list[tuple[torch.Tensor, ...]]:
    """Return scale and shift of each convolution."""
    *columns, lengths = args
    scales, shifts = _operator(*columns)
    return list(zip(scales.split(lengths), shifts.split(lengths), strict=True))
