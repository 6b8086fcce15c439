"""A fake torch module for processes that only compile kernels: importing torch takes two seconds.

Modules with kernels also have launchers, which use names of torch. A process that compiles and computes nothing may
give these names any value. Keys of kernels do not depend on it (tested).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch"


class _Anything(ModuleType):
    """A module and any attribute of it: a function, a decorator, a base class, a type."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        attribute = _Anything(f"{self.__name__}.{name}")
        setattr(self, name, attribute)
        return attribute

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not keywords else self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__
    __iter__ = None  # with __getitem__ alone, a loop over it would never end

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == _NAME else None

    def create_module(self, spec: ModuleSpec) -> Any:
        parent, _, name = spec.name.rpartition(".")
        return getattr(sys.modules[parent], name) if parent else _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Replace torch in this process; call this before torch is imported."""
    sys.meta_path.insert(0, _Finder())
