"""Give results torch's memory order where a graph depends on it: kernels write channels last what torch has contiguous.

A view of a contiguous result may not exist of one that lies channels last (`view`), may be another one (`as_strided`)
or a copy (`reshape`, `flatten`), which would not see a change in place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from minidl.torch.fusion import graph as graphs
from minidl.torch.fusion.graph import value

_VIEWS = {"view", "view_as", "as_strided", torch.as_strided, torch.Tensor.view}
_COPIES = {
    "reshape", "reshape_as", "flatten", "ravel", "contiguous", torch.reshape, torch.flatten, torch.ravel,
}  # fmt: skip


def keep_order(graph: fx.Graph) -> None:
    """Make results contiguous whose order views or changes in place of their copies would tell."""
    mutations = [node for node in graph.nodes if graphs.is_in_place(node)]
    changed = {graphs.storage(each) for node in mutations for each in node.all_input_nodes}
    for node in list(graph.nodes):
        if _is_ours(node) and value(node).is_contiguous():
            kinds = {user.target for user in node.users}
            if kinds & _VIEWS or (kinds & _COPIES and graphs.storage(node) in changed):
                graphs.append(graph, node, torch.Tensor.contiguous, (node,))


def _is_ours(node: fx.Node) -> bool:
    """Whether a node is a result, or an item of the results, of a function of minidl."""
    call: Any = node.args[0] if node.target is operator.getitem else node
    ours = isinstance(call, fx.Node) and str(getattr(call.target, "__module__", "")).startswith("minidl.")
    return ours and value(node) is not None and value(node).dim() > 2
