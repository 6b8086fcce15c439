"""Tensors in einops, whichever of the two is imported first. Nothing here imports einops, nor torch.

einops asks the subclasses of its `AbstractBackend` whose a tensor is. Its backend of torch calls names that minidl has,
too, so that one with `minidl` in place of `torch` is all that it takes; it is made once einops has been imported.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_BACKENDS = "einops._backends"


def add_to(backends: ModuleType) -> None:
    """Give einops a backend of minidl's Tensors."""

    class Backend(backends.TorchBackend):  # type: ignore[misc, name-defined]
        framework_name = "minidl"

        def __init__(self) -> None:
            self.torch = sys.modules["minidl"]

        def is_appropriate_type(self, tensor: Any) -> bool:
            return "minidl.tensors" in sys.modules and isinstance(tensor, self.torch.Tensor)

        def layers(self) -> Any:
            raise NotImplementedError("einops has no layers of minidl's; call rearrange, reduce or einsum in forward()")

    backends.MinidlBackend = Backend  # type: ignore[attr-defined]  # einops refers to subclasses weakly


class _AfterEinops:
    """Adds the backend as soon as einops is imported."""

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _BACKENDS else None
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            add_to(module)

        loader.exec_module = executed
        return spec


def expect() -> None:
    """Add the backend now, or when einops is imported."""
    if _BACKENDS in sys.modules:
        add_to(sys.modules[_BACKENDS])
    else:
        sys.meta_path.insert(0, _AfterEinops())
