"""Differentiable operations on Tensors. Importing this attaches the operators and methods to Tensor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from minidl.ops.activation import bias_act, gelu, leaky_relu, relu, sigmoid, silu, tanh
from minidl.ops.conv import conv2d
from minidl.ops.conv_transpose import conv_transpose2d
from minidl.ops.elementwise import (
    abs,
    add,
    clamp,
    div,
    eq,
    exp,
    ge,
    gt,
    le,
    log,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    neg,
    pow,
    reciprocal,
    sign,
    sqrt,
    square,
    sub,
    where,
)
from minidl.ops.linalg import linear, matmul
from minidl.ops.loss import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from minidl.ops.norm import batch_norm, fold_batch_norm
from minidl.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from minidl.ops.random import dropout, rand, randn
from minidl.ops.reduce import amax, argmax, max, mean, norm, sum
from minidl.ops.softmax import log_softmax, softmax
from minidl.ops.sparse import sparse_linear
from minidl.ops.view import (
    cat,
    clone,
    contiguous,
    expand,
    flatten,
    getitem,
    permute,
    reshape,
    squeeze,
    stack,
    to,
    transpose,
    transposed,
    unsqueeze,
)
from minidl.tensor import Tensor

__all__ = [
    "abs",
    "adaptive_avg_pool2d",
    "add",
    "amax",
    "argmax",
    "avg_pool2d",
    "batch_norm",
    "bias_act",
    "binary_cross_entropy_with_logits",
    "cat",
    "clamp",
    "clone",
    "contiguous",
    "conv2d",
    "conv_transpose2d",
    "cross_entropy",
    "div",
    "dropout",
    "eq",
    "exp",
    "expand",
    "flatten",
    "fold_batch_norm",
    "ge",
    "gelu",
    "getitem",
    "gt",
    "le",
    "leaky_relu",
    "linear",
    "log",
    "log_softmax",
    "lt",
    "matmul",
    "max",
    "max_pool2d",
    "maximum",
    "mean",
    "minimum",
    "mse_loss",
    "mul",
    "ne",
    "neg",
    "norm",
    "permute",
    "pow",
    "rand",
    "randn",
    "reciprocal",
    "relu",
    "reshape",
    "sigmoid",
    "sign",
    "silu",
    "softmax",
    "sparse_linear",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "sub",
    "sum",
    "tanh",
    "to",
    "transpose",
    "transposed",
    "unsqueeze",
    "where",
]


# What an argument may be by its annotation; Tensor lets plain torch tensors through.
_ALLOWED: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, torch.Tensor),
    "Tensor | None": (Tensor, type(None), torch.Tensor),
    "Sequence[Tensor]": (list, tuple),
}


def _takes_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with a TypeError for whatever else than a tensor is given where its annotations say Tensor."""

    def refuse(name: str, value: Any, expected: str) -> None:
        raise TypeError(
            f"{function.__name__}: {name} is of type {type(value).__name__}, expected {expected}; "
            "use minidl.as_tensor(...)"
        )

    parameters = enumerate(inspect.signature(function).parameters.values())
    places = [
        (i, p.name, _ALLOWED[p.annotation], p.annotation == "Sequence[Tensor]")
        for i, p in parameters
        if p.annotation in _ALLOWED
    ]

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        for i, name, allowed, several in places:
            if i < len(args):
                value = args[i]
            elif name in named:
                value = named[name]
            else:
                continue
            if not isinstance(value, allowed):
                refuse(name, value, "a list of Tensors" if several else "a Tensor")
            if several:
                for k, part in enumerate(value):
                    if not isinstance(part, _ALLOWED["Tensor"]):
                        refuse(f"{name}[{k}]", part, "a Tensor")
        return function(*args, **named)

    return checked if places else function


def _swapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, other: function(other, x)


def _attach() -> None:
    operators: dict[str, Callable[..., Any]] = {
        "add": add, "sub": sub, "mul": mul, "truediv": div, "pow": pow, "matmul": matmul,
        "eq": eq, "ne": ne, "lt": lt, "le": le, "gt": gt, "ge": ge,
    }  # fmt: skip
    for name, function in operators.items():
        setattr(Tensor, f"__{name}__", function)
    for name in ("add", "sub", "mul", "truediv", "pow"):
        setattr(Tensor, f"__r{name}__", _swapped(operators[name]))
    setattr(Tensor, "__neg__", neg)  # noqa: B010 (an assignment would be an error to the type checker)
    setattr(Tensor, "__abs__", abs)  # noqa: B010
    setattr(Tensor, "__getitem__", getitem)  # noqa: B010
    setattr(Tensor, "T", property(transposed))  # noqa: B010
    setattr(Tensor, "view", reshape)  # noqa: B010
    methods = (
        abs, amax, argmax, clamp, clone, contiguous, exp, expand, flatten, log, log_softmax, matmul, max, mean, norm,
        permute, relu, reshape, sigmoid, softmax, sqrt, square, squeeze, sum, tanh, to, transpose, unsqueeze,
    )  # fmt: skip
    for method in methods:
        setattr(Tensor, method.__name__, method)


for _name in __all__:
    globals()[_name] = _takes_tensors(globals()[_name])
_attach()
