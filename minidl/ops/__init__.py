"""Differentiable operations on Tensors. Importing this attaches the operators and methods to Tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


_attach()
