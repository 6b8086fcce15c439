"""Finds chains of operations in a graph of torch.fx that `blocks.block` computes at once, and puts blocks there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from minidl.torch import blocks, joining

_ADDITIONS = (operator.add, operator.iadd, torch.add)
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_ACTS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", F.relu6: "relu6", torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid",
    torch.tanh: "tanh", F.tanh: "tanh", F.silu: "silu", F.mish: "mish", F.hardswish: "hardswish",
    F.hardsigmoid: "hardsigmoid",
}  # fmt: skip
_METHODS = {
    "relu": "relu",
    "relu_": "relu",
    "sigmoid": "sigmoid",
    "sigmoid_": "sigmoid",
    "tanh": "tanh",
    "tanh_": "tanh",
}


class Block(NamedTuple):
    """Names of the modules that a block is made of, None for those it has not, and whether it has a sum."""

    layer: str | None
    norm: str | None
    act: str | None
    slope: float
    sum: bool

    def __str__(self) -> str:
        parts = (self.layer, self.norm, "sum" if self.sum else None, self.act)
        return " + ".join(part for part in parts if part)


class _Chain(NamedTuple):
    layer: fx.Node | None
    norm: fx.Node | None
    added: fx.Node | None
    act: tuple[str | None, float]
    in_place: bool  # the sum, which then has the dtype of what is before it
    nodes: tuple[fx.Node, ...]


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module does more than its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def rewrite(graph: fx.Graph, root: nn.Module, ours: Callable[[nn.Module], bool]) -> tuple[list[Block], set[str]]:
    """Put blocks in place of what they compute; these, and the names of modules that are no longer called."""
    modules = dict(root.named_modules(remove_duplicate=False))
    taken: set[fx.Node] = set()
    found, called = [], set()
    for node in list(graph.nodes):
        chain = None if node in taken else _chain(node, modules, taken)
        if chain is None or not all(each is None or ours(modules[str(each.target)]) for each in chain[:2]):
            continue
        taken.update(chain.nodes)
        first, final = chain.nodes[0], chain.nodes[-1]
        with graph.inserting_before(final):
            parts = [None if each is None else graph.get_attr(str(each.target)) for each in (chain.layer, chain.norm)]
            given = (*parts, *chain.act, first.args[0], chain.added, chain.in_place)
            made = graph.call_function(blocks.block, given)
        final.replace_all_uses_with(made)
        for each in reversed(chain.nodes):
            graph.erase_node(each)
            called.update([str(each.target)] if each.op == "call_module" else [])
        layer, norm = (None if each is None else str(each.target) for each in (chain.layer, chain.norm))
        found.append(Block(layer, norm, *chain.act, chain.added is not None))
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _JOINS and _for_norms(node):
            node.target = joining.cat
        elif _is(node, (nn.LayerNorm,), modules) and ours(modules[str(node.target)]) and _for_layers(node, modules):
            called.update(str(each.target) for each in (node, *node.users) if each.op == "call_module")
            with graph.inserting_before(node):
                made = graph.call_function(blocks.lowered, (graph.get_attr(str(node.target)), node.args[0]))
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    return found, called


def _for_layers(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether nothing but products and convolutions reads a result, which autocast rounds for them."""
    kinds = blocks.LAYERS
    for user in node.users:
        in_block = user.target is blocks.block and user.args[4] is node and user.args[5] is not node
        layer = user.args[0] if in_block else None
        if not _is(user, kinds, modules) and not (
            isinstance(layer, fx.Node) and type(modules[str(layer.target)]) in kinds
        ):
            return False
    return bool(node.users)


def _for_norms(node: fx.Node) -> bool:
    """Whether nothing but blocks that begin with a batch norm reads what is joined."""
    if len(node.args) != 2 or node.kwargs:
        return False
    return all(
        user.target is blocks.block and user.args[0] is None and user.args[4] is node and user.args[5] is not node
        for user in node.users
    )


def _chain(node: fx.Node, modules: dict[str, nn.Module], taken: set[fx.Node]) -> _Chain | None:
    """What begins with a node and follows it alone; None where that is not two operations at least."""
    layer, norm = (node if _is(node, kinds, modules) else None for kinds in (blocks.LAYERS, blocks.NORMS))
    if layer is None and norm is None:
        return None
    nodes = [node]
    after = _only_user(node)
    if layer is not None and _is(after, blocks.NORMS, modules) and not _is(layer, (nn.Linear,), modules):
        norm, after = _take(nodes, after)
    added: fx.Node | None = None
    act: tuple[str | None, float] = (None, 0.0)
    sums = norm is not None or _is(layer, (nn.Conv2d,), modules)
    other = _other(after, nodes[-1]) if sums and after not in taken else None
    in_place = False
    if other is not None:
        added = other
        summed, after = _take(nodes, after)
        in_place = summed.target in (operator.iadd, "add_")
    known = None if after is None or after in taken else _act(after, modules)
    if known is not None:
        act = known
        _take(nodes, after)
    made = _Chain(layer, norm, added, act, in_place, tuple(nodes))
    return made if len(nodes) > 1 and not _changes_between(made.nodes, modules, norm) else None


def _take(nodes: list[fx.Node], node: Any) -> tuple[fx.Node, fx.Node | None]:
    nodes.append(node)
    return node, _only_user(node)


def _is(node: fx.Node | None, kinds: tuple[type, ...], modules: dict[str, nn.Module]) -> bool:
    """Whether a node calls a module of one of torch's classes, of one tensor and without hooks."""
    if node is None or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module = modules[str(node.target)]
    return type(module) in kinds and not has_hooks(module) and isinstance(node.args[0], fx.Node)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(node: fx.Node | None, one: fx.Node) -> fx.Node | None:
    """What a node adds to another one, as an operation or in place."""
    if node is None or node.kwargs or len(node.args) != 2:
        return None
    adds = node.op == "call_function" and node.target in _ADDITIONS
    method = node.op == "call_method" and node.target in ("add", "add_")
    first, second = node.args
    if not (adds or method) or not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    if first is one:
        return second
    return None if node.target in (operator.iadd, "add_") else first


def _act(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[str | None, float] | None:
    if node.op == "call_module":
        module = modules[str(node.target)]
        return None if has_hooks(module) or len(node.args) != 1 or node.kwargs else blocks.of_module(module)
    plain = len(node.args) == 1 and not set(node.kwargs) - {"inplace"}
    if node.op == "call_method" and plain and node.target in _METHODS:
        return _METHODS[str(node.target)], 0.0
    if node.op == "call_function" and plain and node.target in _ACTS:
        return _ACTS[node.target], 0.0
    return None


def _changes_between(nodes: tuple[fx.Node, ...], modules: dict[str, nn.Module], norm: fx.Node | None = None) -> bool:
    """Whether something else is changed in place between the first and the last node: what the block reads later; or
    the running statistics of its batch norm move."""
    moved = None if norm is None else modules[str(norm.target)]
    node = nodes[0].next
    while node is not nodes[-1]:
        again = node.op == "call_module" and modules[str(node.target)] is moved
        if node not in nodes and (again or _in_place(node, modules)):
            return True
        node = node.next
    return False


def _in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        module = modules[str(node.target)]
        known = type(module).__module__.startswith(("torch.nn.", "minidl."))  # others may change what they are given
        return not known or bool(getattr(module, "inplace", False))
    name = getattr(node.target, "__name__", str(node.target))
    changes = name.endswith("_") or (name.startswith("i") and getattr(operator, name, None) is node.target)
    changes = changes or node.kwargs.get("out") is not None or node.target is operator.setitem
    return changes or bool(node.kwargs.get("inplace", False))
