"""The backward pass with `create_graph`: its gradients are recorded, as results of differentiable operations.

An operation's `recorded_backward` receives the values that the operation saved, as variables of the graph, and the
gradients of its results. No graph changes, so each can be used again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from minidl.autograd.function import Function, TensorContext
from minidl.autograd.graph import Edge, Hook, Node, Variable, accumulating
from minidl.autograd.modes import enable_grad, is_anomaly_enabled
from minidl.runtime import streams
from minidl.sparse.rows import RowGrad


class Same(Function):
    """A value with a leaf's elements in another memory layout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy

    recorded_backward = backward


class RecordedContext(TensorContext):
    """A node's context for `recorded_backward`: saved inputs and outputs are variables of the graph."""

    def __init__(self, node: Node, needs: tuple[bool, ...]) -> None:
        assert node.context is not None
        super().__init__(node.context)
        self.needs = self.needs_input_grad = needs
        self.function = node.function
        self._node = node

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        is_input_or_output = isinstance(value, torch.Tensor) and id(value) in self._node.tensor_ids
        return self._variable(value) if is_input_or_output else value

    def input(self, index: int, value: torch.Tensor) -> Variable:
        """Return the variable of an input from its value, for inputs that were saved in another form."""
        edge = self._node.edges[index]
        return Function.result_class(value) if edge is None else _variable_at(edge, value)

    def output(self, value: torch.Tensor) -> Variable:
        """Return the variable of the only output from its value."""
        return _variable_at((self._node, 0), value)

    def _variable(self, tensor: torch.Tensor) -> Variable:
        node, identity = self._node, id(tensor)
        edges = {(node, i - len(node.edges)) if i >= len(node.edges) else node.edges[i]
                  for i, other in enumerate(node.tensor_ids) if other == identity} - {None}  # fmt: skip
        if len(edges) > 1:
            raise RuntimeError(f"{node}: create_graph=True finds two tensors over one `data`; clone() one of them")
        edge = next(iter(edges), None)
        return Function.result_class(tensor) if edge is None else _variable_at(edge, tensor)


def _variable_at(edge: Edge, value: torch.Tensor) -> Variable:
    """Return a variable of this value at this edge."""
    target, index = edge
    if isinstance(target, Node):
        variable = Function.result_class(value)
        variable._recorded_by(target, index)
        return variable
    if target._data is value:
        return target
    variable = Same.apply(target)
    variable._data = value
    return variable


def gradients(
    root: Variable, gradient: Variable | None, requested: Collection[Edge] | None = None, retain_graph: bool = True
) -> dict[Edge, Variable]:
    """Return the recorded gradients of root (times `gradient`, None for ones) at the edges `requested`, or at all
    leaves.

    Raises RuntimeError, before anything changes, if an operation in between has no second derivative, or part of the
    graph was freed.
    """
    start = root._edge()
    assert start is not None
    nodes, used = _nodes_between(start, requested)
    for node in nodes:
        if node.function.recorded_backward is None:
            raise RuntimeError(
                f"create_graph=True needs a second derivative of {node}, which minidl does not have; leave it out, "
                "compute this part by other operations (docs/python.md lists those that have one), or take a "
                "difference of two first gradients"
            )
        if node.context is None:
            raise RuntimeError(f"{node}: its saved tensors were freed; call the first backward with retain_graph=True")
    arrived = {start: Function.result_class(torch.ones_like(root.data)) if gradient is None else gradient}
    reached: dict[Edge, Variable] = {}
    with enable_grad():
        for node in nodes:
            grads = [arrived.pop((node, i), None) for i in range(len(node.outputs))]
            for i, grad in enumerate(grads):
                if grad is not None:
                    _call_hooks(grad, node.hooks.get(i, {}), str(node))
                    if requested is not None and (node, i) in requested:
                        reached[node, i] = grad
                    reference = node.retained.get(i)
                    if reference is not None and (tensor := reference()) is not None:
                        _add_to_grad(tensor, grad)
            if any(grad is not None for grad in grads):
                for edge, grad in _run_node(node, grads, used):
                    arrived[edge] = arrived[edge] + grad if edge in arrived else grad  # type: ignore[operator]
            if not retain_graph:
                node.context = None
    for (target, i), grad in arrived.items():
        if isinstance(target, Node):  # requested, with no node before it
            _call_hooks(grad, target.hooks.get(i, {}), str(target))
        else:
            _call_hooks(grad, target._hooks, "gradient of a leaf")
    return reached | arrived


def backward(root: Variable, gradient: Variable | None, retain_graph: bool) -> None:
    """Add the recorded gradients of root to the `grad` of every leaf, which is then recorded, too."""
    for (leaf, _), grad in gradients(root, gradient, None, retain_graph).items():
        assert isinstance(leaf, Variable)
        _add_to_grad(leaf, grad)


def _add_to_grad(leaf: Variable, grad: Variable) -> None:
    with accumulating:
        leaf._adds_on(streams.current(grad.data.device))
        stored = leaf._grad
        if stored is not None:
            dense = stored.dense() if isinstance(stored, RowGrad) else stored
            previous: Any = leaf._graph_grad()
            previous = Function.result_class(dense) if previous is None else previous
            grad = previous + grad
        else:
            grad = grad.clone()  # type: ignore[attr-defined]  # two leaves may share one gradient
        leaf._grad, leaf._recorded_grad = grad.data, grad
    for hook in list(leaf._after.values()):
        hook(leaf)


def _nodes_between(start: Edge, requested: Collection[Edge] | None) -> tuple[list[Node], set[Edge]]:
    """Return the nodes between the start and the edges `requested`, the newest first, and the edges between them."""
    reached: set[Node] = set()
    stack = [start[0]]
    while stack:
        node = stack.pop()
        if isinstance(node, Node) and node not in reached:
            reached.add(node)
            stack += [edge[0] for edge in node.edges if edge is not None]
    nodes: list[Node] = []
    used: set[Edge] = set()
    leading: set[Any] = set()
    for node in sorted(reached, key=lambda node: node.sequence):
        leads = {edge for edge in node.edges if edge is not None and (
            edge[0] in leading or (not isinstance(edge[0], Node) if requested is None else edge in requested)
        )}  # fmt: skip
        if leads:
            leading.add(node)
            nodes.append(node)
            used |= leads
    return nodes[::-1], used


def _run_node(node: Node, grads: list[Variable | None], used: set[Edge]) -> list[tuple[Edge, Variable]]:
    """Return the gradients of a node's inputs that are used, each with its edge."""
    needs = tuple(edge in used for edge in node.edges)
    returned = node.gradients(node.function.recorded_backward(RecordedContext(node, needs), *grads))
    if is_anomaly_enabled():
        node.refuse_nan(returned)
    results = []
    for edge, meta, grad, need in zip(node.edges, node.metas, returned, needs, strict=True):
        if edge is None or meta is None or grad is None or not need:
            continue
        if not isinstance(grad, Variable):
            raise RuntimeError(
                f"{node}: with create_graph=True its backward returned a {type(grad).__name__}, whose gradient is not "
                "recorded; write it with minidl.ops"
            )
        if (tuple(grad.data.shape), grad.data.dtype) != meta:
            raise node.mismatch(grad.data, meta)
        results.append((edge, grad))
    return results


def _call_hooks(grad: Variable, hooks: dict[int, Hook], where: str) -> None:
    """Call hooks. Raises RuntimeError where one changes the gradient."""
    for hook in hooks.values():
        version = grad.data._version
        if hook(grad.data) is not None or grad.data._version != version:
            raise RuntimeError(f"{where}: a hook changed a gradient that create_graph=True records; remove() it")
