"""A step of training, or a pass of a network, as a CUDA graph: what Python launched once one call launches again.

A step that only works on tensors of constant shapes at addresses that stay, and reads nothing on the host, is the same
list of kernels each time. A graph holds that list; its results are those of the step itself, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minidl.tensor import Tensor

EAGER = 3  # steps before the recording: kernels are compiled and optimisers make their tables in them


class Captured:
    """`step` with its first `eager` calls as they are and all later ones replayed; on a CPU always as it is.

    It takes Tensors of the same shapes at every call, and returns torch tensors, which each call makes anew. A call
    whose step raises does not count.
    """

    def __init__(self, step: Callable[..., tuple[torch.Tensor, ...]], eager: int = EAGER) -> None:
        self._step, self._eager = step, eager
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._outputs: tuple[torch.Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[torch.Tensor, ...]:
        """The step with these inputs, on its way on the current stream."""
        if inputs[0].data.device.type != "cuda" or self._calls < self._eager:
            outputs = self._step(*inputs)
            self._calls += 1
            return outputs
        if self._graph is None:
            self._inputs = [given.data.clone() for given in inputs]
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self._outputs = self._step(*(Tensor(kept) for kept in self._inputs))
            # A graph whose step raised holds its first kernels.
            self._graph = graph
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given.data)
        self._graph.replay()
        return tuple(output.clone() for output in self._outputs)
