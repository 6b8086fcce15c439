"""Store repeated joins along the channels, for batch norms, in one memory: see `minidl.ops.join`.

A dense block joins all earlier results with the result of each layer. Batch norms can read strided rows of channels, so
each join copies only the new tensor, into rows as wide as the last join of the block.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from minidl.ops.join import Room
from minidl.torch import normalisation as norms
from minidl.torch.fusion import graph as graphs
from minidl.torch.fusion.graph import value
from minidl.torch.layer import ready
from minidl.torch.registry import straight

_JOINS = (torch.cat, torch.concat, torch.concatenate)
_READERS = (norms.batch_norm_training, norms.batch_norm_inference)
Joined = tuple[torch.Tensor, Room | None]


class _Join(NamedTuple):
    node: fx.Node
    parts: list[fx.Node]


def join_in_one_memory(graph: fx.Graph) -> None:
    """Replace joins that each begin with the parts of the join before, and that only batch norms read."""
    families: list[list[_Join]] = []
    for node in graph.nodes:
        parts = _parts(node)
        if parts is None:
            continue
        for family in families:
            last = family[-1]
            extends = last.parts == parts[: len(last.parts)] or last.node is parts[0]
            if extends and not graphs.has_barrier((last.node, node)):
                family.append(_Join(node, parts))
                break
        else:
            families.append([_Join(node, parts)])
    for family in families:
        if len(family) > 1:
            _replace(graph, family)


def _parts(node: fx.Node) -> list[fx.Node] | None:
    """Return the parts of a join along the channels that only batch norms read, None for other nodes."""
    arguments = graphs.bind(node, ("tensors", "dim"), {"dim": 0}) if node.target in _JOINS else None
    if arguments is None or arguments["dim"] != 1 or value(node) is None or value(node).dim() < 3 or not node.users:
        return None
    reads = all(user.target in _READERS and user.args[0] is node and user.args[3] is not node for user in node.users)
    parts = list(arguments["tensors"])
    sizes = all(ready(value(part)) and isinstance(value(part).shape[1], int) for part in parts)
    return parts if reads and sizes else None


def _replace(graph: fx.Graph, family: list[_Join]) -> None:
    channels = value(family[-1].node).shape[1]
    previous: _Join | None = None
    call: fx.Node | None = None
    for join in family:
        with graph.inserting_before(join.node):
            if previous is None or call is None:
                joined = graph.call_function(begin, (join.parts, channels))
            else:
                count = 1 if join.parts[0] is previous.node else len(previous.parts)
                joined = graph.call_function(extend, (call, join.parts[:count], join.parts[count:]))
            result = graph.call_function(operator.getitem, (joined, 0))
        result.meta["example_value"] = value(join.node)
        join.node.replace_all_uses_with(result)
        graph.erase_node(join.node)
        previous, call = _Join(result, [result if part is join.node else part for part in join.parts]), joined


class _InRoom(torch.autograd.Function):
    """Append parts [N, C_i, ...] to a room; the first part is already in it."""

    @staticmethod
    def forward(ctx: Any, room: Room, *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [part.shape[1] for part in parts]
        return _fill(room, parts)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return None, *dy.split(ctx.sizes, 1)


def _fill(room: Room, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    for part in parts[1:]:
        room.add(part.detach())
    return room.contents()


def begin(parts: Sequence[torch.Tensor], channels: int) -> Joined:
    """Return the joined parts and their room for `channels` channels, or None as room if they do not fit."""
    if not _fits(parts):
        return torch.cat(list(parts), 1), None
    return _in_room(Room(parts[0].detach(), channels), parts)


def extend(previous: Joined, first: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Joined:
    """Return an earlier join, of the parts `first`, extended by further parts."""
    joined, room = previous
    if room is None or not _fits((joined, *parts)):
        return torch.cat([*first, *parts], 1), None
    return _in_room(room, (joined, *parts))


def _in_room(room: Room, parts: Sequence[torch.Tensor]) -> Joined:
    recorded = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    return (_InRoom.apply(room, *parts) if recorded else _fill(room, parts)), room  # type: ignore[no-untyped-call]


def _fits(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether all parts are dense rows of channels."""
    first = parts[0]
    return straight(parts) and all(
        type(part) is torch.Tensor and part.stride(1) == 1 and part.dtype == first.dtype
        and part.shape[0] == first.shape[0] and part.shape[2:] == first.shape[2:]
        for part in parts
    )  # fmt: skip
