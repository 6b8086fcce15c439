"""Check the arguments of operations: Tensors where the annotations say so, flags, torch's autocast, unknown names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.autograd import UnknownTensor
from minidl.autograd.function import rerouted
from minidl.common import suggestions
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations

Dim = int | Sequence[int] | None  # one dimension, several, or all

# Types of an argument by its annotation; where a Tensor is expected, a torch tensor passes, too.
_ALLOWED: dict[str, tuple[type, ...]] = {
    "Tensor": (Tensor, torch.Tensor),
    "Tensor | None": (Tensor, type(None), torch.Tensor),
    "Sequence[Tensor]": (list, tuple),
}
# Arguments that are True or False: a dimension passed by mistake would count as true.
_FLAGS = ("ceil_mode", "count_include_pad", "descending", "keepdim", "largest", "unbiased")
_NUMPY_NAMES = (("axis", "dim"), ("keepdims", "keepdim"))  # NumPy's names of arguments, which torch takes, too
# Operations that autocast computes in its dtype and, as on a GPU, in float32; others in the widest type of operands.
_IN_AUTOCAST_DTYPE = {
    "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "einsum", "linear", "linear_cross_entropy", "matmul", "mm", "mv", "prelu", "sparse_linear",
}  # fmt: skip
_IN_FLOAT32 = {
    "cdist", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "exp", "expm1", "group_norm", "instance_norm",
    "kl_div", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "norm", "normalize", "pow",
    "prod", "reciprocal", "rms_norm", "rsqrt", "softmax", "softplus", "sum",
}  # fmt: skip


def _autocast(op: str, values: Sequence[Any]) -> list[Any]:
    """Return the arguments of an operation as torch.autocast converts them, if it is enabled for their device."""
    floats = [x for x in values if isinstance(x, Tensor | torch.Tensor) and x.dtype.is_floating_point and x.ndim]
    if not floats or op == "to" or not torch.is_autocast_enabled(kind := floats[0].device.type):
        return list(values)
    if op in _IN_AUTOCAST_DTYPE:
        dtype = torch.get_autocast_dtype(kind)
    elif op in _IN_FLOAT32 or op.endswith("_loss"):
        dtype = torch.float32
    else:
        dtype = functools.reduce(torch.promote_types, {x.dtype for x in floats})
    chosen = [id(x) for x in floats if x.dtype not in (dtype, torch.float64)]
    return [x.to(dtype) if id(x) in chosen else x for x in values]


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with checks of its arguments.

    It raises TypeError for an argument that is not a Tensor where the annotation says Tensor, and for a flag that is
    neither True nor False.
    """

    def refuse(name: str, value: Any, expected: str) -> None:
        raise TypeError(
            f"{function.__name__}: {name} is of type {type(value).__name__}, expected {expected}; "
            "use minidl.as_tensor(...)"
        )

    signature = inspect.signature(function).parameters
    # Sizes and dimensions come one by one, as a sequence, or by name, as torch's functions take them.
    variadic = next((p.name for p in signature.values() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    tensors = [
        (i, p.name, _ALLOWED[p.annotation], p.annotation == "Sequence[Tensor]")
        for i, p in enumerate(signature.values())
        if p.annotation in _ALLOWED
    ]
    flags = [(i, name) for i, name in enumerate(signature) if name in _FLAGS]
    at_dim = list(signature).index("dim") if "dim" in signature else len(signature)
    takes_several = "dim" in signature and signature["dim"].annotation in ("Any", "Dim")

    def check_flags(args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for i, name in flags:
            value = args[i] if i < len(args) else options.get(name)
            if not (isinstance(value, bool) or value is None):
                dims = args[at_dim:]
                several = takes_several and len(dims) > 1 and all(isinstance(dim, int) for dim in dims)
                raise TypeError(
                    f"{function.__name__}: {name} is {value!r}, expected True or False"
                    + (f"; write several dimensions as dim={dims}" if several else "")
                )

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if rerouted and (answer := rerouted[-1](function, args, options)) is not NotImplemented:
            return answer
        if torch._C._is_any_autocast_enabled():
            values = _autocast(function.__name__, (*args, *options.values()))
            args, options = tuple(values[: len(args)]), dict(zip(options, values[len(args) :], strict=True))
        if options:
            for numpy_name, name in _NUMPY_NAMES:
                if numpy_name in options and name in signature and numpy_name not in signature and name not in options:
                    options[name] = options.pop(numpy_name)
        if variadic in options:
            before = list(signature)[len(args) : list(signature).index(variadic)]
            args = (*args, *(options.pop(name) for name in before if name in options), options.pop(variadic))
        if flags:
            check_flags(args, options)
        for i, name, allowed, several in tensors:
            if i < len(args):
                value = args[i]
            elif name in options:
                value = options[name]
            else:
                continue
            if not isinstance(value, allowed):
                refuse(name, value, "a list of Tensors" if several else "a Tensor")
            if several:
                for k, part in enumerate(value):
                    if not isinstance(part, _ALLOWED["Tensor"]):
                        refuse(f"{name}[{k}]", part, "a Tensor")
        try:
            return function(*args, **options)
        except UnknownTensor as unknown:
            return unknown.answer((args, options))
        except TypeError:
            if options and (error := suggestions.argument(function.__name__, function, options)) is not None:
                raise error from None
            raise

    return call if tensors or function.__name__ in _IN_AUTOCAST_DTYPE | _IN_FLOAT32 else function
