"""Differentiable operations on Tensors. Importing this attaches the operators and methods to Tensor."""

from __future__ import annotations

import builtins
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from minidl.autograd import UnknownTensor
from minidl.common import suggestions
from minidl.ops import (
    activation,
    batchnorm,
    conv,
    conv_sequence,
    conv_transpose,
    conv_volume,
    elementwise,
    index_assignment,
    inplace,
    kin,
    linalg,
    linear_loss,
    lookup,
    loss,
    named,
    pieces,
    pool,
    reduce,
    resample,
    row_norm,
    scatter_gather,
    sorting,
    sparse,
    unary,
    view,
)
from minidl.ops import float8 as float8
from minidl.ops.activation import *
from minidl.ops.batchnorm import *
from minidl.ops.conv import *
from minidl.ops.conv_sequence import *
from minidl.ops.conv_transpose import *
from minidl.ops.conv_volume import *
from minidl.ops.double_backward import layers as second_layers  # noqa: F401 (registers second derivatives)
from minidl.ops.elementwise import *
from minidl.ops.kin import *
from minidl.ops.linalg import *
from minidl.ops.linear_loss import *
from minidl.ops.lookup import *
from minidl.ops.loss import *
from minidl.ops.named import *
from minidl.ops.pieces import *
from minidl.ops.pool import *
from minidl.ops.random import dropout, dropout2d, rand, randn
from minidl.ops.reduce import *
from minidl.ops.resample import *
from minidl.ops.row_norm import *
from minidl.ops.scatter_gather import *
from minidl.ops.sorting import *
from minidl.ops.sparse import *
from minidl.ops.unary import *
from minidl.ops.view import *
from minidl.tensors import OPERATIONS, Tensor

__all__ = ["dropout", "dropout2d", "rand", "randn"]  # in the form that type checkers understand
__all__ += activation.__all__
__all__ += batchnorm.__all__
__all__ += conv.__all__
__all__ += conv_sequence.__all__
__all__ += conv_transpose.__all__
__all__ += conv_volume.__all__
__all__ += elementwise.__all__
__all__ += kin.__all__
__all__ += linalg.__all__
__all__ += linear_loss.__all__
__all__ += lookup.__all__
__all__ += loss.__all__
__all__ += named.__all__
__all__ += pieces.__all__
__all__ += pool.__all__
__all__ += reduce.__all__
__all__ += resample.__all__
__all__ += row_norm.__all__
__all__ += scatter_gather.__all__
__all__ += sorting.__all__
__all__ += sparse.__all__
__all__ += unary.__all__
__all__ += view.__all__

# What an argument may be by its annotation; Tensor lets plain torch tensors through.
_ALLOWED: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, torch.Tensor),
    "Tensor | None": (Tensor, type(None), torch.Tensor),
    "Sequence[Tensor]": (list, tuple),
}


# Arguments that are True or False, also where a dimension more is given by mistake.
_FLAGS = ("ceil_mode", "count_include_pad", "descending", "keepdim", "largest", "unbiased")
_OF_NUMPY = (("axis", "dim"), ("keepdims", "keepdim"))  # NumPy's names of arguments, which torch takes, too


# What torch.autocast computes in its own dtype first of all: the products.
_BY_AUTOCAST = {
    "addmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "einsum", "linear",
    "linear_cross_entropy", "matmul", "mm", "mv", "sparse_linear",
}  # fmt: skip


def _check_autocast(op: str, args: Sequence[Any]) -> None:
    """Raise RuntimeError where torch's autocast would convert an operand."""
    for x in args:
        if not isinstance(x, Tensor | torch.Tensor) or not torch.is_autocast_enabled(x.device.type):
            continue
        if x.dtype not in (torch.float64, kind := torch.get_autocast_dtype(x.device.type)):
            raise RuntimeError(
                f"{op}: got {x.dtype} under torch.autocast, which would compute in {kind} and does not reach minidl: "
                "convert the model and its inputs by .to(), with a loss_scale of the optimizer in float16, or write "
                f"`with torch.autocast({x.device.type!r}, enabled=False):` around minidl's part"
            )


def _takes_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, raising TypeError where its annotations say Tensor and an argument is something else."""

    def refuse(name: str, value: Any, expected: str) -> None:
        raise TypeError(
            f"{function.__name__}: {name} is of type {type(value).__name__}, expected {expected}; "
            "use minidl.as_tensor(...)"
        )

    signature = inspect.signature(function).parameters
    # Sizes and dimensions are given one by one, as a sequence, or as torch's functions take them, by name.
    spread = next((p.name for p in signature.values() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    parameters = enumerate(signature.values())
    places = [
        (i, p.name, _ALLOWED[p.annotation], p.annotation == "Sequence[Tensor]")
        for i, p in parameters
        if p.annotation in _ALLOWED
    ]

    flags = [(i, name) for i, name in enumerate(signature) if name in _FLAGS]
    at_dim = list(signature).index("dim") if "dim" in signature else len(signature)
    takes_several = "dim" in signature and signature["dim"].annotation in ("Any", "Dim")

    def check_flags(args: tuple[Any, ...], named: dict[str, Any]) -> None:
        for i, name in flags:
            value = args[i] if i < len(args) else named.get(name)
            if not (isinstance(value, bool) or value is None):
                dims = args[at_dim:]
                several = takes_several and len(dims) > 1 and builtins.all(isinstance(dim, int) for dim in dims)
                raise TypeError(
                    f"{function.__name__}: {name} is {value!r}, expected True or False"
                    + (f"; write several dimensions as dim={dims}" if several else "")
                )

    converts = function.__name__ in _BY_AUTOCAST

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        if converts and torch._C._is_any_autocast_enabled():
            _check_autocast(function.__name__, (*args, *named.values()))
        if named:
            for numpys, name in _OF_NUMPY:
                if numpys in named and name in signature and numpys not in signature and name not in named:
                    named[name] = named.pop(numpys)
        if spread in named:
            before = list(signature)[len(args) : list(signature).index(spread)]
            args = (*args, *(named.pop(name) for name in before if name in named), named.pop(spread))
        if flags:
            check_flags(args, named)
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
        try:
            return function(*args, **named)
        except UnknownTensor as unknown:
            return unknown.answer((args, named))
        except TypeError:
            if named and (error := suggestions.argument(function.__name__, function, named)) is not None:
                raise error from None
            raise

    return checked if places or converts else function


def _swapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, other: function(other, x)


def _or_none(function: Callable[..., Any]) -> Callable[..., Any]:
    """`==` or `!=`, which answers None as every object does: a tensor is not it."""
    return lambda x, other: NotImplemented if other is None else function(x, other)


def _attach(functions: dict[str, Callable[..., Any]]) -> None:
    """Make operations operators and methods of Tensor."""
    for name in (
        "abs", "add", "ge", "getitem", "gt", "le", "lt", "matmul", "mul", "neg", "pow", "sub",
    ):  # fmt: skip
        setattr(Tensor, f"__{name}__", functions[name])
    for name in ("eq", "ne"):
        setattr(Tensor, f"__{name}__", _or_none(functions[name]))
    setattr(Tensor, "__truediv__", functions["div"])  # noqa: B010 (an assignment would be an error to the type checker)
    for name, operator in (("bitwise_and", "and"), ("bitwise_or", "or"), ("bitwise_xor", "xor"), ("remainder", "mod"),
                           ("floor_divide", "floordiv")):  # fmt: skip
        setattr(Tensor, f"__{operator}__", functions[name])
        setattr(Tensor, f"__r{operator}__", _swapped(functions[name]))
    for name, function in (("lshift", pieces.left_shift), ("rshift", pieces.right_shift)):
        setattr(Tensor, f"__{name}__", function)
        setattr(Tensor, f"__r{name}__", _swapped(function))
    setattr(Tensor, "__pos__", pieces.positive)  # noqa: B010
    setattr(Tensor, "__contains__", pieces.contains)  # noqa: B010
    setattr(Tensor, "__invert__", functions["bitwise_not"])  # noqa: B010
    for name, operator in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "truediv"), ("pow", "pow"),
                           ("matmul", "matmul")):  # fmt: skip
        setattr(Tensor, f"__r{operator}__", _swapped(functions[name]))
    for name in (
        "abs", "add", "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "bmm", "ceil", "chunk", "clamp",
        "clone", "contiguous", "cos", "cumsum", "diagonal", "div", "eq", "erf", "exp", "expand", "expm1", "flatten",
        "flip", "floor", "floor_divide", "fmod", "gather", "ge", "gt", "index_add", "index_select", "le", "log",
        "log1p", "log2", "log_softmax", "lt", "masked_fill", "matmul", "max", "maximum", "mean", "min", "minimum",
        "mm", "mul", "ne", "neg", "norm", "outer", "permute", "pow", "reciprocal", "relu", "remainder", "repeat",
        "reshape", "roll", "round", "scatter", "scatter_add", "sigmoid", "sign", "sin", "softmax", "sort",
        "split", "sqrt", "square", "squeeze", "std", "sub", "sum", "tanh", "to", "topk", "transpose", "trunc",
        "unsqueeze", "var",
    ):  # fmt: skip
        setattr(Tensor, name, functions[name])
    for name in filter(functools.partial(hasattr, torch.Tensor), kin.__all__):
        setattr(Tensor, name, functions[name])
    setattr(Tensor, "__setitem__", index_assignment.set_item)  # noqa: B010
    for name, method in inplace.METHODS.items():
        setattr(Tensor, name, method)
    setattr(Tensor, "view", _takes_tensors(view.viewed))  # noqa: B010
    setattr(Tensor, "T", property(functions["transposed"]))  # noqa: B010


_FUNCTIONS = {name: _takes_tensors(globals()[name]) for name in __all__}
globals().update(_FUNCTIONS)
OPERATIONS.update(_FUNCTIONS)
_attach(_FUNCTIONS)


def _batch(parts: list[Tensor], *, collate_fn_map: object = None) -> Tensor:
    """What torch's DataLoader makes of a dataset's Tensors."""
    return view.stack(parts)


default_collate_fn_map[Tensor] = _batch


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.ops", name, __all__)
