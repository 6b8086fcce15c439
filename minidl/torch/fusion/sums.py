"""Replace a tensor scaled along a dimension and added to another, the end of ConvNeXt's blocks, by one operator.

scale * t  [* a factor for each example, drawn by stochastic depth]  + other
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from minidl.kernels import scaled_sum as kernels
from minidl.torch import scaling
from minidl.torch.fusion import graph as graphs
from minidl.torch.fusion.graph import value
from minidl.torch.layer import ready

_PRODUCTS = (operator.mul, torch.mul, "mul")


def scale_and_add(graph: fx.Graph) -> int:
    """Replace all such sums of a graph; return their number."""
    count = 0
    for node in list(graph.nodes):
        if node.target in _PRODUCTS and not node._erased:
            count += _replace(graph, node)
    return count


def _replace(graph: fx.Graph, node: fx.Node) -> bool:
    operands = _operands(node, _is_scale)
    if operands is None:
        return False
    scale, x = operands
    nodes, factor, after = [node], None, graphs.only_user(node)
    if after is not None and after.target in _PRODUCTS:
        factors = _operands(after, _is_factor)
        if factors is None or factors[1] is not node or factors[0] is node:
            return False
        factor, after = factors[0], graphs.only_user(after)
        nodes.append(next(iter(node.users)))
    added = graphs.other_addend(after, nodes[-1])
    if after is None or added is None or not _fits(x, scale, factor, added, after):
        return False
    read = {graphs.storage(each) for each in (x, scale, added)}
    if graphs.has_barrier((nodes[-1], after)) or graphs.has_barrier(nodes, but=lambda node: _draws(node, read)):
        return False
    graphs.replace(graph, (*nodes, after), scaling.scaled, (scale, x, factor, added))
    return True


def _operands(node: fx.Node, fits: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return the operand of a product for which `fits` holds, and the other one; None without one."""
    if node.kwargs or len(node.args) != 2 or not all(value(arg) is not None for arg in node.args):
        return None
    a, b = node.args
    for one, other in ((a, b), (b, a)):
        if fits(value(one), value(other)):
            return one, other  # type: ignore[return-value]
    return None


def _is_scale(scale: Any, x: Any) -> bool:
    """Return whether a tensor has size 1 in all dimensions but one."""
    sizes = [size for size in scale.shape if not (isinstance(size, int) and size == 1)]
    return ready(scale) and ready(x) and 0 < scale.dim() <= x.dim() and len(sizes) == 1 and isinstance(sizes[0], int)


def _is_factor(factor: Any, x: Any) -> bool:
    """Return whether a tensor has a number for each example."""
    ones = all(isinstance(size, int) and size == 1 for size in factor.shape[1:])
    return (
        ready(factor)
        and factor.dim() == x.dim() > 1
        and ones
        and factor.shape[0] == x.shape[0]
        and not factor.requires_grad
    )


def _fits(x: fx.Node, scale: fx.Node, factor: fx.Node | None, added: fx.Node, total: fx.Node) -> bool:
    """Return whether the operator's result has the shape and dtype of the sum."""
    x_, scale_, added_, total_ = (value(each) for each in (x, scale, added, total))
    shapes = ready(added_) and graphs.same_shape(x_, added_) and graphs.same_shape(x_, total_)
    return shapes and kernels.promoted(x_, scale_, value(factor), added_) == total_.dtype


def _draws(node: fx.Node, read: set[Any]) -> bool:
    """Return whether a node fills new memory, for example with random numbers, that is not in `read`."""
    if graphs.storage(node.args[0] if node.args else None) in read:
        return False
    while node.args and isinstance(node.args[0], fx.Node) and graphs.is_in_place(node):
        node = node.args[0]
    return node.target in (torch.empty, torch.empty_like, "new_empty")
