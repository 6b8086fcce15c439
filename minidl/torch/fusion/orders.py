"""Give results torch's memory format if a graph depends on it: kernels write channels-last, torch contiguous results.

A view of a contiguous result may not exist for a channels-last one (`view`), be a different one (`as_strided`) or a
copy (`reshape`, `flatten`), in which a change in place would be lost.
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
    """Make results contiguous if a view, or a change in place of a copy, depends on their memory format."""
    mutations = [node for node in graph.nodes if graphs.is_in_place(node)]
    changed = {graphs.storage(each) for node in mutations for each in node.all_input_nodes}
    for node in list(graph.nodes):
        if _is_ours(node) and value(node).is_contiguous():
            kinds = {user.target for user in node.users}
            if kinds & _VIEWS or (kinds & _COPIES and graphs.storage(node) in changed):
                graphs.append(graph, node, torch.Tensor.contiguous, (node,))


def _is_ours(node: fx.Node) -> bool:
    """Return whether a node is a result, or an item of the results, of a function of minidl."""
    call: Any = node.args[0] if node.target is operator.getitem else node
    ours = isinstance(call, fx.Node) and str(getattr(call.target, "__module__", "")).startswith("minidl.")
    return ours and value(node) is not None and value(node).dim() > 2
