"""The backend "minidl" of `torch.compile`, which fuses the graphs that Dynamo traces.

Dynamo guards a model and traces it again after a change. Read the passes in their order: `reading` marks layers and
batch norms, `chains` replaces each with its later operations by one operator, `sums` replaces scaled sums, `exchanging`
single functions, `orders` keeps torch's memory format if the graph depends on it, `joining` joins tensors in one
memory, and `folding` folds all batch norms of an inference at once. Other operations stay torch's.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from minidl.compilation.rehearsal import compile_ahead
from minidl.runtime import launch
from minidl.torch.fusion import chains, exchanging, folding, guarding, joining, orders, reading, sums

_log = logging.getLogger(__name__)


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[Any], mode: str | None, options: dict[str, Any] | None
) -> Callable[..., Any]:
    """Return a function that computes a graph of Dynamo: see `minidl.torch.backend`."""
    compiles = mode is not None or options is not None
    guarding.guard_modules()
    graph = module.graph
    reading.mark(graph)
    counts = Counter(chains.fuse(graph))
    counts["scaled sum"] += sums.scale_and_add(graph)
    counts.update(exchanging.exchange(graph))
    orders.keep_order(graph)
    if not compiles:
        joining.join_in_one_memory(graph)
    folding.fold_at_once(graph, alone=not compiles)
    graph.lint()
    module.recompile()
    _log.info("%s", _summary(graph, counts))
    if compiles:
        wrapper: Any = torch._TorchCompileInductorWrapper
        return wrapper(mode, options, None)(module, inputs)
    return module.forward if launch.ON_CPU or not __name__.startswith("minidl.") else _ahead(module)


def _summary(graph: fx.Graph, counts: Counter[str]) -> str:
    left = Counter(
        str(getattr(node.target, "__name__", node.target)) for node in graph.nodes
        if node.op in ("call_function", "call_method") and node.target is not operator.getitem
        and not str(getattr(node.target, "__module__", "")).startswith("minidl.")
    )  # fmt: skip
    ours = [f"{count} {name}" for name, count in (+counts).items()]
    return f"operators: {', '.join(ours) or 'none'}; torch: {', '.join(f'{n} {name}' for name, n in left.items())}"


def _ahead(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the graph, whose first call compiles its kernels and those of its gradients on all processors."""
    is_first = True

    def call(*args: Any) -> Any:
        nonlocal is_first
        if is_first and not torch.cuda.is_current_stream_capturing():
            compile_ahead(lambda: _step(module, args))
            is_first = False
        return module.forward(*args)

    return call


def _step(module: fx.GraphModule, args: Sequence[Any]) -> None:
    args = [_detached(each) for each in args]
    results = (each for each in tree_leaves(module.forward(*args)) if isinstance(each, torch.Tensor))
    recorded = [each for each in results if each.grad_fn is not None]
    inputs = [each for each in args if isinstance(each, torch.Tensor) and each.requires_grad]
    if recorded and inputs:
        gradients = [torch.empty_like(each) for each in recorded]
        with contextlib.suppress(RuntimeError):  # a graph without a gradient
            torch.autograd.grad(recorded, inputs, gradients, allow_unused=True)


def _detached(value: Any) -> Any:
    """Return a leaf without the hooks of its gradient, and anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
        return value.detach().requires_grad_()
    return value
