"""Where an operation is available. A module of `minidl.ops` declares its operations once, in `__all__`.

From that list follow `minidl.ops`, `minidl.nn.functional`, the methods of Tensor (operations that torch.Tensor has)
and the in-place methods of `unary` and `powers`. `minidl/__init__.py` imports no torch and lists its operations itself;
`tests/ops/test_registry.py` compares that list with `on_top_level`, and the methods with their declared types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from minidl.ops import bitwise, compare, index_assignment, inplace, shape, unary
from minidl.ops.arguments import checked
from minidl.tensors import OPERATIONS, Tensor

__all__: list[str] = []  # no public operations

# Operations that are functions alone, although torch has a method of the name.
_NO_METHOD = frozenset((
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "logical_and", "logical_not", "logical_or", "prelu",
    "unfold", "where",
))  # fmt: skip
# Operations of `minidl.ops` and `minidl.nn.functional` alone, although torch has the name at its top level; rand and
# randn come from `minidl.ops.random`.
_NOT_ON_TOP_LEVEL = frozenset((
    "adaptive_max_pool1d", "batch_norm", "binary_cross_entropy_with_logits", "cosine_similarity", "ctc_loss",
    "embedding", "embedding_bag", "group_norm", "instance_norm", "kl_div", "layer_norm", "max_pool2d", "max_pool3d",
    "pixel_shuffle", "pixel_unshuffle", "prelu", "rand", "randn", "rms_norm",
))  # fmt: skip
# Operators by the operation that computes them; those of the second table also exist with the operands swapped.
_OPERATORS = {
    "abs": "abs", "ge": "ge", "getitem": "getitem", "gt": "gt", "le": "le", "lt": "lt", "bitwise_not": "invert",
    "neg": "neg",
}  # fmt: skip
_OPERATORS_WITH_SWAP = {
    "add": "add", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "div": "truediv",
    "floor_divide": "floordiv", "matmul": "matmul", "mul": "mul", "pow": "pow", "remainder": "mod", "sub": "sub",
}  # fmt: skip


def on_top_level(names: Iterable[str]) -> list[str]:
    """Return the names of operations that are also attributes of `minidl`, as they are of torch."""
    return sorted(name for name in names if hasattr(torch, name) and name not in _NOT_ON_TOP_LEVEL)


def register(functions: dict[str, Callable[..., Any]]) -> None:
    """Attach the operations of `minidl.ops`, by name, to Tensor as methods and operators."""
    OPERATIONS.update(functions)
    attributes: dict[str, Any] = {
        name: function for name, function in functions.items() if hasattr(torch.Tensor, name) and name not in _NO_METHOD
    }
    attributes |= {f"__{operator}__": functions[name] for name, operator in _OPERATORS.items()}
    attributes |= {f"__{name}__": _none_is_unequal(functions[name]) for name in ("eq", "ne")}
    for name, operator in _OPERATORS_WITH_SWAP.items():
        _add_operator(attributes, operator, functions[name])
    _add_operator(attributes, "lshift", bitwise.left_shift)
    _add_operator(attributes, "rshift", bitwise.right_shift)
    attributes |= {"__pos__": unary.positive, "__contains__": compare.contains}
    attributes |= {"__setitem__": index_assignment.set_item, **inplace.METHODS}
    attributes |= {"view": checked(shape.viewed), "T": property(functions["transposed"])}
    for name, value in attributes.items():
        setattr(Tensor, name, value)


def _add_operator(attributes: dict[str, Any], operator: str, function: Callable[..., Tensor]) -> None:
    attributes[f"__{operator}__"] = function
    attributes[f"__r{operator}__"] = lambda x, other: function(other, x)


def _none_is_unequal(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `==` or `!=` that leaves None to Python, for which a tensor is another object."""
    return lambda x, other: NotImplemented if other is None else function(x, other)
