"""A deep-learning mini-framework in which every floating-point operation is a Triton kernel you can read.

Importing this package imports neither torch nor Triton (each takes over a second): the names below are
loaded when they are first used.
"""

import importlib
import os
import sys

from minidl.version import __version__

__all__ = [
    "Tensor",
    "__version__",
    "as_tensor",
    "capture",
    "check_grads",
    "compile_ahead",
    "data",
    "draw",
    "enable_grad",
    "from_torch",
    "full",
    "fusion",
    "is_grad_enabled",
    "load",
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
    "save",
    "set_float32_precision",
    "set_grad_enabled",
    "zeros",
]

# As in `typing`, which takes longer to import than all of this: a command can be interrupted without a traceback after
# that (see `__main__`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from minidl import data as data
    from minidl import models as models
    from minidl import nn as nn
    from minidl import ops as ops
    from minidl import optim as optim
    from minidl.autograd import enable_grad as enable_grad
    from minidl.autograd import is_grad_enabled as is_grad_enabled
    from minidl.autograd import no_grad as no_grad
    from minidl.autograd import set_grad_enabled as set_grad_enabled
    from minidl.captured import capture as capture
    from minidl.later import fusion as fusion
    from minidl.nn.saved import load as load
    from minidl.nn.saved import save as save
    from minidl.ops.random import rand as rand
    from minidl.ops.random import randn as randn
    from minidl.random import manual_seed as manual_seed
    from minidl.rehearsal import compile_ahead as compile_ahead
    from minidl.runtime.launch import set_float32_precision as set_float32_precision
    from minidl.tensors import Tensor as Tensor
    from minidl.tensors import as_tensor as as_tensor
    from minidl.tensors import from_torch as from_torch
    from minidl.tensors import full as full
    from minidl.tensors import ones as ones
    from minidl.tensors import zeros as zeros
    from minidl.testing import check_grads as check_grads
    from minidl.workbench.drawing import draw as draw
    from minidl.workbench.profiling import profile as profile

_SUBMODULES = ("data", "models", "nn", "ops", "optim")
_MORE = (
    "autograd",
    "kernels",
    "random",
    "sparse",
    "testing",
)  # not in `from minidl import *`: random is Python's, too

_HOMES = {
    "Tensor": "minidl.tensors",
    "as_tensor": "minidl.tensors",
    "capture": "minidl.captured",
    "check_grads": "minidl.testing",
    "compile_ahead": "minidl.rehearsal",
    "draw": "minidl.workbench.drawing",
    "enable_grad": "minidl.autograd",
    "from_torch": "minidl.tensors",
    "full": "minidl.tensors",
    "fusion": "minidl.later",
    "is_grad_enabled": "minidl.autograd",
    "load": "minidl.nn.saved",
    "manual_seed": "minidl.random",
    "no_grad": "minidl.autograd",
    "ones": "minidl.tensors",
    "profile": "minidl.workbench.profiling",
    "rand": "minidl.ops.random",
    "randn": "minidl.ops.random",
    "save": "minidl.nn.saved",
    "set_float32_precision": "minidl.runtime.launch",
    "set_grad_enabled": "minidl.autograd",
    "zeros": "minidl.tensors",
}


class _BeforeTriton:
    """Chooses where kernels run when Triton is imported, which reads the choice then: before all that needs it here."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "triton" and "TRITON_INTERPRET" not in os.environ:
            importlib.import_module("minidl.runtime")


if "triton" not in sys.modules:
    sys.meta_path.insert(0, _BeforeTriton())


def __getattr__(name: str) -> object:
    if name in (*_SUBMODULES, *_MORE):
        return importlib.import_module(f"minidl.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'minidl' has no attribute {name!r}")
    importlib.import_module("minidl.ops")  # attaches the operators to Tensor
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
