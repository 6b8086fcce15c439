"""The backend of `torch.compile`, which loads Dynamo and the passes when a graph is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compute a graph with minidl's operators, fused with what follows: `torch.compile(model, backend="minidl")`.

    Dynamo traces the model and guards what it has read, so that it is traced anew after a change. Layers, batch norms,
    sums and activations become one operator where kernels take them; what is left stays torch's.

    mode, options: those of torch's Inductor, which then compiles what lies between the operators, as
    `mode="reduce-overhead"` for CUDA graphs. Without them torch computes it as it stands.

    The logger `minidl.torch.fusion` tells at level INFO what each graph was made of.
    """
    from minidl.torch.fusion import compile_graph

    return compile_graph(module, inputs, mode, options)
