"""The backend of `torch.compile`, which imports Dynamo and the passes when it compiles a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph with minidl's operators, fused with later operations: `torch.compile(model, backend="minidl")`.

    Dynamo traces the model, guards it, and traces it again after a change. Layers, batch norms, sums and activations
    become one operator if kernels support them; other operations stay torch's.

    mode, options: arguments of torch's Inductor, which then compiles the other operations, such as
    `mode="reduce-overhead"` for CUDA graphs. Without them torch runs these operations eagerly.

    The logger `minidl.torch.fusion` reports the operators of each graph at level INFO.
    """
    from minidl.torch.fusion import compile_graph

    return compile_graph(module, inputs, mode, options)
