"""A deep-learning mini-framework in which every floating-point operation is a Triton kernel you can read.

Importing this package imports neither torch nor Triton (each takes over a second): the names below are
loaded when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "Tensor",
    "__version__",
    "as_tensor",
    "capture",
    "check_grads",
    "data",
    "draw",
    "enable_grad",
    "from_torch",
    "full",
    "is_grad_enabled",
    "manual_seed",
    "models",
    "nn",
    "no_grad",
    "ones",
    "ops",
    "optim",
    "profile",
    "rand",
    "randn",
    "set_float32_precision",
    "zeros",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minidl import data as data
    from minidl import models as models
    from minidl import nn as nn
    from minidl import ops as ops
    from minidl import optim as optim
    from minidl.autograd import enable_grad as enable_grad
    from minidl.autograd import is_grad_enabled as is_grad_enabled
    from minidl.autograd import no_grad as no_grad
    from minidl.captured import capture as capture
    from minidl.drawing import draw as draw
    from minidl.kernels.launch import set_float32_precision as set_float32_precision
    from minidl.ops.random import rand as rand
    from minidl.ops.random import randn as randn
    from minidl.profiling.profile import profile as profile
    from minidl.random import manual_seed as manual_seed
    from minidl.tensor import Tensor as Tensor
    from minidl.tensor import as_tensor as as_tensor
    from minidl.tensor import from_torch as from_torch
    from minidl.tensor import full as full
    from minidl.tensor import ones as ones
    from minidl.tensor import zeros as zeros
    from minidl.testing import check_grads as check_grads

_SUBMODULES = ("data", "models", "nn", "ops", "optim")

_HOMES = {
    "Tensor": "minidl.tensor",
    "as_tensor": "minidl.tensor",
    "capture": "minidl.captured",
    "check_grads": "minidl.testing",
    "draw": "minidl.drawing",
    "enable_grad": "minidl.autograd",
    "from_torch": "minidl.tensor",
    "full": "minidl.tensor",
    "is_grad_enabled": "minidl.autograd",
    "manual_seed": "minidl.random",
    "no_grad": "minidl.autograd",
    "ones": "minidl.tensor",
    "profile": "minidl.profiling",
    "rand": "minidl.ops.random",
    "randn": "minidl.ops.random",
    "set_float32_precision": "minidl.kernels.launch",
    "zeros": "minidl.tensor",
}


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"minidl.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'minidl' has no attribute {name!r}")
    importlib.import_module("minidl.ops")  # attaches the operators to Tensor
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
