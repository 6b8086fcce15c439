"""Fold all batch norms of a graph in inference by few launches, before its first convolution.

`chains` puts `norms.folded` before each convolution: a launch of 2 us, of which ResNet-50 has 53. One operator
computes the scales and shifts of all similar batch norms from their concatenated vectors. A second one computes the
statistics of batch norms without a convolution before them, as in DenseNet. Each call reads the running statistics.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from minidl.kernels.norm import fold as kernels
from minidl.kernels.norm import normalise
from minidl.kernels.norm.launches import Statistics
from minidl.runtime.launch_cache.replay import replayed
from minidl.torch import normalisation as norms
from minidl.torch.fusion import chains
from minidl.torch.fusion import graph as graphs
from minidl.torch.fusion.graph import value
from minidl.torch.registry import NAMESPACE, _library, accumulator, act_of

_NAME, _ALIGNED = "fold_batch_norms", 8  # vectors begin at multiples of _ALIGNED numbers (16 bytes), as kernels expect


def _fold(mean: Any, var: Any, conv_bias: Any, weight: Any, bias: Any, eps: float, double: bool) -> Any:
    """Return concatenated (scales, shifts); a list is empty if the batch norms have no such vectors."""
    joined = [torch.cat(column) if column else None for column in (conv_bias, mean, var, weight, bias)]
    count = sum(map(len, mean))
    return kernels.fold(mean[0].new_empty(count, dtype=_dtype(double)), *joined, eps, wide=True)


def _fake(mean: Any, var: Any, conv_bias: Any, weight: Any, bias: Any, eps: float, double: bool) -> Any:
    scales = mean[0].new_empty(sum(len(each) for each in mean), dtype=_dtype(double))
    return scales, torch.empty_like(scales)


def _dtype(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


# Without a gradient and not called from Python, so it does not need `registry.operator`.
_library.define(
    f"{_NAME}(Tensor[] mean, Tensor[] var, Tensor[] conv_bias, Tensor[] weight, Tensor[] bias, float eps, bool double) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _device in ("CPU", "CUDA"):
    _library.impl(_NAME, _fold, _device)
torch.library.register_fake(f"{NAMESPACE}::{_NAME}", _fake, lib=_library)
_operator = getattr(getattr(torch.ops, NAMESPACE), _NAME).default


def fold_at_once(graph: fx.Graph, alone: bool) -> None:
    """Replace similar folds of a graph by one after the graph's inputs; with `alone` also the statistics of batch norms
    without a convolution, which Inductor cannot trace."""
    if any(graphs.is_mode(node) for node in graph.nodes):
        return
    changed = {
        graphs.storage(each) for node in graph.nodes if graphs.is_in_place(node) for each in node.all_input_nodes
    }
    changed = changed.union(*(chains.updated_memory(node) for node in graph.nodes))
    groups: dict[Any, list[tuple[fx.Node, list[Any]]]] = defaultdict(list)
    for node in graph.nodes:
        args: Any = node.args
        if node.target is norms.folded:
            vectors, eps = list(args[1:6]), args[6]
        elif node.target is norms.batch_norm_inference and alone and not value(next(iter(node.users))).requires_grad:
            vectors, eps = list(args[4:6]), args[6]
        else:
            continue
        inputs = [vector for vector in vectors if vector is not None]
        if all(
            v.op in ("placeholder", "get_attr") and graphs.storage(v) not in changed and _is_aligned(v) for v in inputs
        ):
            kinds = tuple(None if v is None else (value(v).dtype, value(v).device) for v in vectors)
            groups[node.target, accumulator(value(args[0]).dtype), eps, kinds].append((node, vectors))
    for (target, dtype, eps, _), members in groups.items():
        if len(members) > 1:
            _replace(graph, members, target is norms.folded, dtype, eps)


def _is_aligned(vector: fx.Node) -> bool:
    return bool(value(vector).dim() == 1 and len(value(vector)) % _ALIGNED == 0)


def _replace(
    graph: fx.Graph, members: list[tuple[fx.Node, list[Any]]], folds: bool, dtype: torch.dtype, eps: float
) -> None:
    columns = [
        [] if column[0] is None else list(column) for column in zip(*(vectors for _, vectors in members), strict=True)
    ]
    lengths = [len(value(vectors[0])) for _, vectors in members]
    last = next(node for node in graph.nodes if node.op != "placeholder").prev
    for vector in (vector for column in columns for vector in column if vector.op == "get_attr"):
        last.append(vector)
        last = vector
    with graph.inserting_after(last):
        if folds:
            results = graph.call_function(_split_folds, (*columns, eps, dtype == torch.float64, lengths))
        else:
            results = graph.call_function(_split_statistics, (*columns, eps, dtype, lengths))
    for index, (node, _) in enumerate(members):
        if folds:
            node.target, node.args = operator.getitem, (results, index)
            continue
        with graph.inserting_before(node):
            part = graph.call_function(operator.getitem, (results, index))
        x, weight, bias, added, _, _, _, *act = node.args
        node.target, node.args = _normalise, (x, part, weight, bias, added, *act)


def _split_folds(*args: Any) -> list[tuple[torch.Tensor, ...]]:
    """Return the scale and shift of each convolution."""
    *columns, lengths = args
    scales, shifts = _operator(*columns)
    return list(zip(scales.split(lengths), shifts.split(lengths), strict=True))


def _split_statistics(mean: Any, var: Any, eps: float, dtype: torch.dtype, lengths: list[int]) -> list[Statistics]:
    """Return the mean and reciprocal deviation of each batch norm."""
    means, rstds = kernels.running_statistics(torch.cat(mean), torch.cat(var), eps, dtype)
    return [Statistics(*each) for each in zip(means.split(lengths), rstds.split(lengths), strict=True)]


def _normalise(x: Any, statistics: Any, weight: Any, bias: Any, added: Any, name: Any, slope: Any) -> Any:
    """Return (act(batch norm of x + added),) without a gradient."""
    return (_normalised(x, *statistics, weight, bias, added, name, slope),)


@replayed
def _normalised(
    x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, added: Any, name: Any, slope: Any
) -> torch.Tensor:
    return normalise(x, Statistics(mean, rstd), weight, bias, act_of(name, slope), added)
