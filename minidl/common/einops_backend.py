"""Support of minidl's Tensors in einops, in any order of imports. This module imports neither einops nor torch.

einops asks the subclasses of its `AbstractBackend` for the type of a tensor. Its torch backend calls only names that
minidl has too, so a subclass with `minidl` instead of `torch` suffices; it is defined when einops has been imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_BACKENDS = "einops._backends"


def add_to(backends: ModuleType) -> None:
    """Give einops a backend for minidl's Tensors."""

    class Backend(backends.TorchBackend):  # type: ignore[misc, name-defined]
        framework_name = "minidl"

        def __init__(self) -> None:
            self.torch = sys.modules["minidl"]

        def is_appropriate_type(self, tensor: Any) -> bool:
            return "minidl.tensors" in sys.modules and isinstance(tensor, self.torch.Tensor)

        def layers(self) -> Any:
            raise NotImplementedError("einops has no layers for minidl; call rearrange, reduce or einsum in forward()")

    backends.MinidlBackend = Backend  # type: ignore[attr-defined]  # einops refers to subclasses weakly


class _AfterEinops:
    """Adds the backend as soon as einops is imported."""

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _BACKENDS else None
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        execute = loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            add_to(module)

        loader.exec_module = execute_and_add
        return spec


def expect() -> None:
    """Add the backend now, or when einops is imported."""
    if _BACKENDS in sys.modules:
        add_to(sys.modules[_BACKENDS])
    else:
        sys.meta_path.insert(0, _AfterEinops())
