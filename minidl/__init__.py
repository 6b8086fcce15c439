"""A deep-learning mini-framework in which every floating-point operation is a Triton kernel you can read.

Importing this package imports neither torch nor Triton (each takes over a second): the names below are
loaded at their first use.
"""

from __future__ import annotations

import importlib
import os
import sys

from minidl.common import einops_backend
from minidl.version import __version__ as __version__

# As in `typing`, whose import takes longer than the rest; until `__main__` runs, Ctrl-C prints a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from minidl import data as data
    from minidl import models as models
    from minidl import nn as nn
    from minidl import ops as ops
    from minidl import optim as optim
    from minidl.autograd import enable_grad as enable_grad
    from minidl.autograd import inference_mode as inference_mode
    from minidl.autograd import is_grad_enabled as is_grad_enabled
    from minidl.autograd import no_grad as no_grad
    from minidl.autograd import set_grad_enabled as set_grad_enabled
    from minidl.autograd.deferred import fusion as fusion
    from minidl.compilation.capture import capture as capture
    from minidl.compilation.rehearsal import compile_ahead as compile_ahead
    from minidl.nn.onnx import export_onnx as export_onnx
    from minidl.nn.saved import load as load
    from minidl.nn.saved import save as save
    from minidl.ops.creation import *
    from minidl.ops.random import rand as rand
    from minidl.ops.random import randn as randn
    from minidl.random import manual_seed as manual_seed
    from minidl.runtime.launch import set_float32_precision as set_float32_precision
    from minidl.tensors import Tensor as Tensor
    from minidl.tensors import as_tensor as as_tensor
    from minidl.tensors import from_torch as from_torch
    from minidl.tensors import full as full
    from minidl.tensors import is_tensor as is_tensor
    from minidl.tensors import ones as ones
    from minidl.tensors import zeros as zeros
    from minidl.testing import check_grads as check_grads
    from minidl.tools.drawing import draw as draw
    from minidl.tools.profiling import profile as profile

# Names of torch, with the same meaning.
_TORCH_NAMES = (
    "Size", "autocast", "bfloat16", "bool", "device", "double", "dtype", "finfo", "float", "float16", "float32",
    "float64", "get_default_dtype", "half", "iinfo", "inf", "int", "int16", "int32", "int64", "int8", "long", "nan",
    "pi", "set_default_dtype", "short", "uint8",
)  # fmt: skip
# The operations of `minidl.ops` that torch also has at its top level; a test compares them with `ops.registry`.
_OPERATIONS = (
    "abs", "absolute", "adaptive_avg_pool1d", "add", "addcdiv", "addcmul", "addmm", "all", "allclose", "amax", "amin",
    "any", "argmax", "argmin", "argsort", "avg_pool1d", "baddbmm", "bincount", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "bmm", "cat", "cdist", "ceil", "celu", "chunk", "clamp", "clip", "clone", "concat",
    "concatenate", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cos",
    "cosine_embedding_loss", "count_nonzero", "cumprod", "cumsum", "deg2rad", "diag", "diagonal", "div", "divide",
    "dot", "dropout", "einsum", "eq", "equal", "erf", "exp", "expm1", "flatten", "flip", "fliplr", "flipud", "floor",
    "floor_divide", "fmod", "frac", "gather", "ge", "greater", "greater_equal", "gt", "hardshrink",
    "hinge_embedding_loss", "histc", "hstack", "index_add", "index_select", "inner", "isclose", "isfinite", "isinf",
    "isnan", "kron", "kthvalue", "le", "lerp", "less", "less_equal", "log", "log10", "log1p", "log2", "log_softmax",
    "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logsumexp", "lt",
    "margin_ranking_loss", "masked_fill", "masked_select", "matmul", "max", "max_pool1d", "maximum", "mean", "median",
    "meshgrid", "min", "minimum", "mm", "movedim", "msort", "mul", "multinomial", "multiply", "mv", "nan_to_num",
    "narrow", "ne", "neg", "negative", "nonzero", "norm", "not_equal", "outer", "pairwise_distance", "permute",
    "poisson_nll_loss", "pow", "prod", "quantile", "rad2deg", "reciprocal", "relu", "remainder", "repeat_interleave",
    "reshape", "roll", "rot90", "round", "rsqrt", "scatter", "scatter_add", "select", "selu", "sigmoid", "sign", "sin",
    "softmax", "sort", "split", "sqrt", "square", "squeeze", "stack", "std", "std_mean", "sub", "subtract", "sum",
    "swapaxes", "tanh", "threshold", "tile", "topk", "trace", "transpose", "tril", "triplet_margin_loss", "triu",
    "true_divide", "trunc", "unbind", "unflatten", "unique", "unique_consecutive", "unsqueeze", "var", "var_mean",
    "vdot", "vstack", "where", "xlogy",
)  # fmt: skip
_SUBMODULES = ("data", "models", "nn", "ops", "optim")
# Not in `from minidl import *`, because Python has a module random.
_MORE = ("amp", "autograd", "cuda", "kernels", "linalg", "random", "sparse", "testing")

_MODULES = {
    name: f"minidl.{module}"
    for module, names in {
        "autograd": ("enable_grad", "inference_mode", "is_grad_enabled", "no_grad", "set_grad_enabled"),
        "compilation.capture": ("capture",),
        "autograd.deferred": ("fusion",),
        "ops.creation": (
            "arange", "empty", "empty_like", "eye", "from_numpy", "full_like", "linspace", "ones_like", "rand_like",
            "randint", "randn_like", "randperm", "tensor", "zeros_like",
        ),
        "nn.onnx": ("export_onnx",),
        "nn.saved": ("load", "save"),
        "ops.random": ("rand", "randn"),
        "random": ("manual_seed",),
        "compilation.rehearsal": ("compile_ahead",),
        "runtime.launch": ("set_float32_precision",),
        "tensors": ("Tensor", "as_tensor", "from_torch", "full", "is_tensor", "ones", "zeros"),
        "testing": ("check_grads",),
        "tools.drawing": ("draw",),
        "tools.profiling": ("profile",),
    }.items()
    for name in names
}  # fmt: skip
__all__ = sorted(("__version__", *_MODULES, *_SUBMODULES))  # noqa: PLE0605 (type checkers read the imports above)


class _BeforeTriton:
    """Imports `minidl.runtime` before Triton, which reads TRITON_INTERPRET when it is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "triton" and "TRITON_INTERPRET" not in os.environ:
            importlib.import_module("minidl.runtime")


if "triton" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTriton())
einops_backend.expect()


class _UnknownName(AttributeError):  # noqa: N818 (reported as AttributeError)
    """An unknown name. The message is built on demand, because `from minidl import tensors` looks up the name first."""

    def __str__(self) -> str:
        name = str(self.args[0])
        text = f"module 'minidl' has no attribute {name!r}"
        if name in importlib.import_module("minidl.ops").__all__:
            return f"{text}: it is minidl.ops.{name}"
        names = [*__all__, *_OPERATIONS, *_TORCH_NAMES]
        return text + str(importlib.import_module("minidl.common.suggestions").hint("minidl.ops", name, names))


def __getattr__(name: str) -> Any:
    if name in (*_SUBMODULES, *_MORE):
        return importlib.import_module(f"minidl.{name}")
    if name not in (*_MODULES, *_OPERATIONS, *_TORCH_NAMES):
        raise _UnknownName(name)
    ops = importlib.import_module("minidl.ops")  # attaches the operators to Tensor
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        value = getattr(ops if name in _OPERATIONS else importlib.import_module("torch"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OPERATIONS, *_TORCH_NAMES})
