"""`grad`: gradients that are given back, in place of being added to those of leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minidl.autograd import second
from minidl.autograd.function import Function
from minidl.autograd.graph import Edge, Variable
from minidl.autograd.walk import backward
from minidl.modes import enable_grad, no_grad
from minidl.sparse.rows import RowGrad


def grad(
    outputs: Variable | Sequence[Variable],
    inputs: Variable | Sequence[Variable],
    grad_outputs: Variable | Sequence[Variable | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """The gradients of the sum of `outputs` (times `grad_outputs`) in each of `inputs`; no `grad` is changed.

    An input that no output depends on is an error, unless `allow_unused`: then its gradient is None, or zeros with
    `materialize_grads`. With `create_graph` the gradients are recorded, too, and the graph is kept.
    Raises RuntimeError as `backward`; ValueError for `only_inputs=False`, as in torch.
    """
    if not only_inputs:
        raise ValueError("grad: only_inputs=False is not built; call backward() for the gradients of all leaves")
    ends = [outputs] if isinstance(outputs, Variable) else list(outputs)
    starts = [inputs] if isinstance(inputs, Variable) else list(inputs)
    if grad_outputs is None:
        grad_outputs = [None] * len(ends)
    seeds = [grad_outputs] if isinstance(grad_outputs, Variable) else list(grad_outputs)
    if len(seeds) != len(ends):
        raise RuntimeError(f"grad: got {len(seeds)} grad_outputs for {len(ends)} outputs")
    for what, given in (("an output", ends), ("an input", starts)):
        if any(not t._requires_grad for t in given):
            raise RuntimeError(f"grad: {what} does not require grad, and was not made by an operation that is recorded")
    retain_graph = create_graph if retain_graph is None else retain_graph
    wanted: dict[Edge, Any] = {edge: None for t in starts if (edge := t._edge()) is not None}
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
                backward(end, None if seed is None else seed.data, keep, wanted)
                continue
            for edge, grad in second.gradients(end, seed, wanted, keep).items():
                wanted[edge] = grad if wanted[edge] is None else wanted[edge] + grad
    found: list[Any] = []
    for start in starts:
        edge = start._edge()
        value = None if edge is None else wanted[edge]
        if value is None and not (allow_unused or materialize_grads):
            raise RuntimeError(
                f"grad: input {len(found)} was not used in the graph of the outputs; pass allow_unused=True for None "
                "as its gradient"
            )
        if value is None and materialize_grads:
            value = torch.zeros_like(start.data)
        value = value.dense() if isinstance(value, RowGrad) else value
        found.append(Function.result_class(value) if isinstance(value, torch.Tensor) else value)
    return tuple(found)
