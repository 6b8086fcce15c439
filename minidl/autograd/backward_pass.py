"""The backward pass: from a result to the gradients of its leaves.

Reverse-mode accumulation: Griewank and Walther, Evaluating Derivatives, 2nd ed., ch. 3. It is iterative, visits nodes
from the newest to the oldest (so sums of gradients have one order), and frees every saved tensor after its last use.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from minidl.autograd.graph import Context, Edge, Grad, Hook, Incoming, Node, PendingSum, Variable, accumulating
from minidl.autograd.modes import is_anomaly_enabled
from minidl.runtime import streams
from minidl.sparse.rows import RowGrad

# Gradients that have reached the outputs of a node, or a leaf.
Pending = dict["Variable | Node", list["Incoming"]]


def backward(
    root: Variable,
    gradient: torch.Tensor | None,
    retain_graph: bool = False,
    requested: dict[Edge, Grad | None] | None = None,
) -> None:
    """Add d(root)/d(leaf) times `gradient` (None for ones) to the `grad` of every leaf that root depends on.

    With `requested`, add it to the values of those edges, and to no `grad`.

    Raises RuntimeError, before any gradient is changed, when part of the graph was already used and freed.
    """
    edge = root._edge()
    assert edge is not None
    stream = streams.current(root.data.device)
    if isinstance(edge[0], Node):
        waiting = _count_uses(edge[0])
        if gradient is None and (requested is not None or not _needs_no_seed(*edge)):
            gradient = torch.ones_like(root.data)
        _run(edge, gradient, waiting, retain_graph, requested, stream)
    else:
        _to_leaf(edge[0], torch.ones_like(root.data) if gradient is None else gradient, True, requested, stream)


def _needs_no_seed(node: Variable | Node, index: int) -> bool:
    """Return whether the root's gradient of 1 may be None: only the operation's own backward reads it."""
    return (
        isinstance(node, Node)
        and node.function.seed_is_optional
        and len(node.outputs) == 1
        and not node.hooks.get(index)
        and index not in node.retained
    )


def _count_uses(root: Node) -> dict[Variable | Node, int]:
    """Return the number of gradients that will reach each node and leaf that root depends on."""
    uses: dict[Variable | Node, int] = {root: 1}
    stack = [root]
    while stack:
        node = stack.pop()
        _context(node)
        for edge in node.edges:
            if edge is None:
                continue
            target = edge[0]
            if target not in uses:
                uses[target] = 0
                if isinstance(target, Node):
                    stack.append(target)
            uses[target] += 1
    return uses


def _context(node: Node) -> Context:
    """Return the node's context. Raises RuntimeError if it was freed, perhaps by another thread."""
    context = node.context
    if context is None:
        raise RuntimeError(
            f"{node}: backward() reached this operation a second time, after its saved tensors were freed; "
            "call backward(retain_graph=True) the first time, or recompute the result"
        )
    return context


def _run(
    edge: Edge,
    gradient: torch.Tensor | None,
    waiting: dict[Variable | Node, int],
    retain_graph: bool,
    requested: dict[Edge, Grad | None] | None,
    stream: Any,
) -> None:
    root, index = edge
    assert isinstance(root, Node)
    pending: Pending = {root: [None] * len(root.outputs)}
    pending[root][index] = gradient
    # A hook may change a gradient in place that shares memory with another one: then every sum is added at once.
    hooked = any(any(t.hooks.values()) if isinstance(t, Node) else t._hooks for t in waiting)
    # Leaves whose only gradient so far shares memory with other values.
    borrowed: set[Variable] = set()
    ready = [(-root.sequence, root)]
    while ready:
        node = heapq.heappop(ready)[1]
        grads = [_run_hooks(node, i, g, stream) for i, g in enumerate(pending.pop(node))]
        if requested is not None:
            for i, arrived in enumerate(grads):
                if arrived is not None and (node, i) in requested:
                    dense = arrived if isinstance(arrived, torch.Tensor) else arrived.dense()
                    requested[node, i] = _add(requested[node, i], dense.clone())
        is_seed = gradient is None and node is root
        for (target, position), grad, shared in _run_node(node, grads, pending, retain_graph, is_seed):
            slots = pending.setdefault(target, [None] * (len(target.outputs) if isinstance(target, Node) else 1))
            if grad is not None:
                if not isinstance(target, Node):
                    if shared and slots[0] is None:
                        borrowed.add(target)
                    else:
                        borrowed.discard(target)
                last = waiting[target] == 1 and not hooked
                stays_open = last and isinstance(target, Node) and target.function.accepts_pending_sums()
                slots[position] = (_pending_sum if stays_open else _add)(slots[position], grad)
            waiting[target] -= 1
            if waiting[target]:
                continue
            if isinstance(target, Node):
                heapq.heappush(ready, (-target.sequence, target))
            else:
                total = pending.pop(target)[0]
                assert not isinstance(total, PendingSum)
                if total is not None:
                    _to_leaf(target, total, target in borrowed, requested, stream)


def _take_pending(pending: Pending, edges: list[Edge | None], index: int) -> torch.Tensor | None:
    """Remove and return the pending gradient at the end of an edge. Row gradients stay pending."""
    target, position = edges[index] or (None, 0)
    slot = None if target is None else pending.get(target)
    if slot is None or not isinstance(arrived := slot[position], torch.Tensor):
        return None
    slot[position] = None
    return arrived


def _run_node(
    node: Node, grads: list[Incoming], pending: Pending, retain_graph: bool, is_seed: bool
) -> Iterator[tuple[Edge, Grad | None, bool]]:
    """Return the gradients of a node's inputs, each with the edge it goes to and whether its memory is also used
    elsewhere.

    `is_seed`: the gradient of the output is the seed, 1, which may be None.
    """
    context = _context(node)
    if not retain_graph:
        node.context = None
    if not is_seed and all(g is None for g in grads):
        returned: Sequence[Grad | None] = (None,) * len(node.edges)
    else:
        context._pending[threading.get_ident()] = partial(_take_pending, pending, node.edges)
        # Only leaves, and so the optimiser, receive row gradients.
        dense = (g.dense() if isinstance(g, RowGrad) else g for g in grads)
        returned = node.gradients(node.function.backward(context, *dense))
        context._pending.pop(threading.get_ident(), None)
        if is_anomaly_enabled():
            node.refuse_nan(returned)
    parts = (part for g in grads for part in (g if isinstance(g, PendingSum) else (g,)))
    in_use = {_memory(t) for t in (*parts, *context._saved) if t is not None}
    for edge, meta, grad in zip(node.edges, node.metas, returned, strict=True):
        if edge is None or meta is None:
            continue
        if grad is not None and (tuple(grad.shape), grad.dtype) != meta:
            raise node.mismatch(grad, meta)
        shared = False
        if grad is not None:
            shared = _memory(grad) in in_use
            in_use.add(_memory(grad))
        yield edge, grad, shared


def _memory(grad: Grad) -> int:
    tensor = grad.values if isinstance(grad, RowGrad) else grad
    return tensor.untyped_storage().data_ptr()


def _run_hooks(node: Node, index: int, grad: Incoming, stream: Any) -> Incoming:
    if isinstance(grad, PendingSum) and (node.hooks.get(index) or index in node.retained):
        grad = grad.dense()
    if grad is None or isinstance(grad, PendingSum):
        return grad
    for hook in node.hooks.get(index, {}).values():
        grad = _apply_hook(hook, grad, str(node))
    reference = node.retained.get(index)
    tensor = reference() if reference is not None else None
    if tensor is not None:
        _add_to_grad(tensor, grad, stream)
    return grad


def _apply_hook(hook: Hook, grad: Grad, where: str) -> Grad:
    """Return the gradient that a hook returns, or the given gradient if the hook returns None."""
    dense = grad.dense() if isinstance(grad, RowGrad) else grad
    version = dense._version
    changed = hook(dense)
    if changed is None:
        return grad if dense._version == version else dense
    if changed.shape != dense.shape or changed.dtype != dense.dtype:
        raise RuntimeError(
            f"{where}: a hook returned shape {list(changed.shape)} and dtype {changed.dtype}, "
            f"expected {list(dense.shape)} and {dense.dtype}"
        )
    return changed


def _to_leaf(leaf: Variable, grad: Grad, shared: bool, requested: dict[Edge, Grad | None] | None, stream: Any) -> None:
    if requested is not None and (leaf, 0) not in requested:
        return
    for hook in leaf._hooks.values():
        grad = _apply_hook(hook, grad, "gradient of a leaf")
    if requested is not None:
        shares = shared and isinstance(grad, torch.Tensor)
        requested[leaf, 0] = _add(
            requested[leaf, 0], grad.clone() if shares and isinstance(grad, torch.Tensor) else grad
        )
        return
    _add_to_grad(leaf, grad, stream, shared)
    for after in list(leaf._after.values()):
        after(leaf)


def _add_to_grad(variable: Variable, grad: Grad, stream: Any, shared: bool = False) -> None:
    with accumulating:
        if variable._grad is None and shared and isinstance(grad, torch.Tensor):
            grad = grad.clone()
        variable._adds_on(stream)
        variable._grad = _add(variable._grad, grad)


def _add(old: Incoming, new: Grad) -> Grad:
    """Return old + new; either may be rows, and the sum of two is dense."""
    total = _pending_sum(old, new)
    return total.dense() if isinstance(total, PendingSum) else total


def _pending_sum(old: Incoming, new: Grad) -> Grad | PendingSum:
    return new if old is None else PendingSum(*(g if isinstance(g, torch.Tensor) else g.dense() for g in (old, new)))
