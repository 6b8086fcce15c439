"""The functions of `torch.autograd`: `backward` of several results, and `grad`, which returns gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minidl.autograd import backward_pass, double_backward, graph
from minidl.autograd.function import Function
from minidl.autograd.graph import Edge
from minidl.autograd.modes import enable_grad, no_grad
from minidl.sparse.rows import RowGrad


def Variable(data: Any, requires_grad: bool = False) -> Any:  # noqa: N802 (torch's name)
    """Return a Tensor over the memory of another, or of a torch tensor, without a graph: torch's name from before
    0.4."""
    make: Any = Function.result_class
    return make(data.data if isinstance(data, graph.Variable) else data, requires_grad)


def backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """Run `Tensor.backward` of one tensor, or of several with the gradient of each (None for one element).

    Raises RuntimeError as `Tensor.backward`, and for another number of gradients.
    """
    ends: list[Any] = [tensors] if isinstance(tensors, graph.Variable) else list(tensors)
    for i, (end, seed) in enumerate(zip(ends, _seeds("backward", ends, grad_tensors), strict=True)):
        end.backward(seed, retain_graph or create_graph or i + 1 < len(ends), create_graph)


def _seeds(name: str, ends: Sequence[Any], gradients: Any) -> list[Any]:
    """Return the gradient of each of several results."""
    seeds = (
        [None] * len(ends)
        if gradients is None
        else [gradients]
        if isinstance(gradients, graph.Variable)
        else list(gradients)
    )
    if len(seeds) != len(ends):
        raise RuntimeError(f"{name}: got {len(seeds)} gradients of {len(ends)} results")
    return seeds


def grad(
    outputs: graph.Variable | Sequence[graph.Variable],
    inputs: graph.Variable | Sequence[graph.Variable],
    grad_outputs: graph.Variable | Sequence[graph.Variable | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """Return the gradients of the sum of `outputs` (times `grad_outputs`) in each of `inputs`; no `grad` is changed.

    An input that no output depends on is an error, unless `allow_unused`: then its gradient is None, or zeros with
    `materialize_grads`. With `create_graph` the gradients are recorded, too, and the graph stays valid.
    Raises RuntimeError as `backward`; ValueError for `only_inputs=False`, as in torch.
    """
    if not only_inputs:
        raise ValueError("grad: only_inputs=False is not supported; call backward() for the gradients of all leaves")
    ends = [outputs] if isinstance(outputs, graph.Variable) else list(outputs)
    starts = [inputs] if isinstance(inputs, graph.Variable) else list(inputs)
    seeds = _seeds("grad", ends, grad_outputs)
    for role, variables in (("an output", ends), ("an input", starts)):
        if any(not t._requires_grad for t in variables):
            raise RuntimeError(f"grad: {role} does not require grad, and no recorded operation computed it")
    retain_graph = create_graph if retain_graph is None else retain_graph
    requested: dict[Edge, Any] = {edge: None for t in starts if (edge := t._edge()) is not None}
    with enable_grad() if create_graph else no_grad():
        for i, (end, seed) in enumerate(zip(ends, seeds, strict=True)):
            if seed is None and end.data.numel() != 1:
                raise RuntimeError(f"grad: an output of shape {list(end.data.shape)} needs a gradient in grad_outputs")
            if seed is not None and (seed.data.shape, seed.data.dtype) != (end.data.shape, end.data.dtype):
                raise RuntimeError(
                    f"grad: grad_outputs[{i}] has shape {list(seed.data.shape)} and dtype {seed.data.dtype}, expected "
                    f"{list(end.data.shape)} and {end.data.dtype}"
                )
            keep = retain_graph or i + 1 < len(ends)
            if not create_graph:
                backward_pass.backward(end, None if seed is None else seed.data, keep, requested)
                continue
            for edge, grad in double_backward.gradients(end, seed, requested, keep).items():
                requested[edge] = grad if requested[edge] is None else requested[edge] + grad
    gradients: list[Any] = []
    for start in starts:
        edge = start._edge()
        value = None if edge is None else requested[edge]
        if value is None and not (allow_unused or materialize_grads):
            raise RuntimeError(
                f"grad: input {len(gradients)} was not used in the graph of the outputs; pass allow_unused=True for "
                "None as its gradient"
            )
        if value is None and materialize_grads:
            value = torch.zeros_like(start.data)
        value = value.dense() if isinstance(value, RowGrad) else value
        gradients.append(Function.result_class(value) if isinstance(value, torch.Tensor) else value)
    return tuple(gradients)
