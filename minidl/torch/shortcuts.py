"""Finds in a graph of torch.fx where a parameter scales a tensor that is then added to another: `scaling.scaled`.

    scale * t   or   t * scale,  then stochastic depth or nothing,  then + other

Each is the only user of what is before it, so that nobody else sees a sum in place.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from minidl.torch import scaling
from minidl.torch.chains import _changes_between, _only_user, _other, _take, has_hooks

_IN_PLACE = (operator.iadd, "add_")


class Sum(NamedTuple):
    """Names of a scale and of the module that drops examples, None where there is none."""

    scale: str
    depth: str | None

    def __str__(self) -> str:
        return " + ".join(part for part in (self.scale, self.depth, "sum") if part)


class _Found(NamedTuple):
    name: str
    scale: fx.Node
    x: fx.Node
    depth: fx.Node | None
    added: fx.Node
    nodes: tuple[fx.Node, ...]


def rewrite(graph: fx.Graph, root: nn.Module) -> tuple[list[Sum], set[str]]:
    """Put scaled sums in place of what they compute; these, and the names of modules that are no longer called."""
    modules = dict(root.named_modules(remove_duplicate=False))
    parameters = dict(root.named_parameters(remove_duplicate=False))
    sums = []
    for node in list(graph.nodes):
        found = _find(node, modules, parameters)
        if found is None:
            continue
        final = found.nodes[-1]
        with graph.inserting_before(final):
            depth = None if found.depth is None else graph.get_attr(str(found.depth.target))
            in_place = final.target in _IN_PLACE
            made = graph.call_function(scaling.scaled, (found.scale, found.x, depth, found.added, in_place))
        final.replace_all_uses_with(made)
        for each in reversed(found.nodes):
            graph.erase_node(each)
        sums.append(Sum(found.name, None if found.depth is None else str(found.depth.target)))
    return sums, {each.depth for each in sums if each.depth is not None}


def _find(node: fx.Node, modules: dict[str, nn.Module], parameters: dict[str, nn.Parameter]) -> _Found | None:
    if node.target not in (operator.mul, torch.mul, "mul") or node.kwargs or len(node.args) != 2:
        return None
    for scale, x in (node.args, node.args[::-1]):
        name = _scales(scale, parameters)
        if name is not None and isinstance(scale, fx.Node) and isinstance(x, fx.Node):
            break
    else:
        return None
    nodes, depth, after = [node], None, _only_user(node)
    if after is not None and _drops(after, modules):
        depth, after = _take(nodes, after)
    added = _other(after, nodes[-1])
    if added is None or after is None:
        return None
    nodes.append(after)
    found = _Found(name, scale, x, depth, added, tuple(nodes))
    return None if _changes_between(found.nodes, modules) or (depth and _draws_between(found.nodes, modules)) else found


def _scales(node: Any, parameters: dict[str, nn.Parameter]) -> str | None:
    """The name of a parameter of one size along one dimension and 1 along the others, that a node is or reshapes."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method" and node.target in ("reshape", "view"):
        return _scales(node.args[0], parameters)
    known = parameters.get(str(node.target)) if node.op == "get_attr" else None
    return str(node.target) if known is not None and known.dim() > 0 and known.numel() == max(known.shape) else None


def _drops(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module = modules[str(node.target)]
    return scaling.drops(module) and not has_hooks(module)


def _draws_between(nodes: tuple[fx.Node, ...], modules: dict[str, nn.Module]) -> bool:
    """Whether random numbers may be drawn between the depth's own place and the sum, where its will be drawn."""
    node = nodes[0].next
    while node is not nodes[-1]:
        idle = node.op == "call_module" and type(modules[str(node.target)]) is nn.Identity
        if node not in nodes and node.op != "get_attr" and not idle:
            return True
        node = node.next
    return False
