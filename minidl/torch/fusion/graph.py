"""Read and change a graph of torch.fx that Dynamo has traced: values of nodes, barriers, replacement."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_IN_PLACE_OPERATORS = {getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod",
                                                                   "pow", "matmul", "and", "or", "xor")}  # fmt: skip


def value(node: Any) -> Any:
    """Return the fake tensor of a node, with its shape, dtype and device; None for other values."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return example if isinstance(example, torch.Tensor) else None


def bind(node: fx.Node, names: Sequence[str], defaults: dict[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments by name, in the order of the names; None if it has others or fewer."""
    arguments = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    if len(node.args) > len(names) or arguments.keys() != set(names):
        return None
    return {name: arguments[name] for name in names}


def is_constant(argument: Any) -> bool:
    """Return whether an argument contains no node (a symbolic size is a node)."""
    if isinstance(argument, list | tuple):
        return all(map(is_constant, argument))
    return not isinstance(argument, fx.Node)


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two shapes are equal for all values of their symbols."""
    return a.dim() == b.dim() and all(
        x is y or statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True)
    )


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the only user of a node, None if it has several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def other_addend(node: fx.Node | None, one: fx.Node) -> fx.Node | None:
    """Return the node that a sum adds to `one`; None for other nodes, and for a sum in place of the other addend."""
    if node is None or node.target not in ADDITIONS or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    if first is second or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    if first is one:
        return second
    return None if node.target in (operator.iadd, "add_") else first


def storage(node: Any) -> Any:
    """Return a key of the memory of a node's fake tensor, equal for its views; None for other values."""
    tensor = value(node)
    return None if tensor is None or tensor.layout is not torch.strided else tensor.untyped_storage()._cdata


def is_in_place(node: fx.Node) -> bool:
    """Return whether a node may change a tensor other than a counter of batches, which no pass reads later."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if node.kwargs.get("out") is not None:
        return True
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = str(getattr(target, "__name__", target))
    changes = (
        target in _IN_PLACE_OPERATORS
        or target is operator.setitem
        or (name.endswith("_") and not name.endswith("__"))
        or _inplace(node)
    )
    changed = value(node.args[0]) if changes and node.args else None
    return changes and (changed is None or changed.dim() > 0 or changed.dtype != torch.int64)


def _inplace(node: fx.Node) -> bool:
    """Return whether a torch function gets `inplace`, by name or by position."""
    try:
        target: Any = node.target
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return bool(node.kwargs.get("inplace"))
    at = names.index("inplace") if "inplace" in names else len(node.args)
    return bool(node.kwargs.get("inplace")) or (at < len(node.args) and node.args[at] is not False)


def is_mode(node: fx.Node) -> bool:
    """Return whether a node changes a mode of torch, such as the recording of gradients."""
    name = str(getattr(node.target, "__name__", node.target))
    return node.op == "call_function" and name.startswith(("_enter_", "_exit_", "_set_", "_saved_tensors"))


def has_barrier(
    nodes: Sequence[fx.Node], written: Sequence[Any] = (), but: Callable[[fx.Node], bool] = lambda node: False
) -> bool:
    """Return whether moving nodes to the last one would change their results: another node in between changes a tensor
    or a mode, or reads one of the tensors `written`. Changes for which `but` returns True do not count."""
    node = nodes[0]
    memory = {storage(tensor) for tensor in written} - {None}
    while node is not nodes[-1]:
        changes = (is_mode(node) or is_in_place(node)) and not but(node)
        if node not in nodes and (changes or any(storage(each) in memory for each in node.all_input_nodes)):
            return True
        node = node.next
    return False


def replace(
    graph: fx.Graph, nodes: Sequence[fx.Node], target: Any, args: Sequence[Any], item: int | None = None
) -> fx.Node:
    """Replace the last of these nodes by a call, or by an item of its result, and erase them all."""
    last = nodes[-1]
    with graph.inserting_before(last):
        call = result = graph.call_function(target, tuple(args))
        if item is not None:
            result = graph.call_function(operator.getitem, (call, item))
    result.meta["example_value"] = last.meta.get("example_value")
    last.replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)
    return result


def append(graph: fx.Graph, node: fx.Node, target: Any, args: Sequence[Any]) -> fx.Node:
    """Insert a call on a node's result after it, and pass the call's result to all readers."""
    readers = list(node.users)
    with graph.inserting_after(node):
        result = graph.call_function(target, tuple(args))
    result.meta["example_value"] = node.meta.get("example_value")
    for reader in readers:
        reader.replace_input_with(node, result)
    return result
