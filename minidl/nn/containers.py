"""Lists and dictionaries of modules; their parameters belong to the module that contains them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, overload

from minidl.nn.module import Module, described


class ModuleList(Module):
    """Modules in a list, named "0", "1", ... as in torch. The list itself cannot be called."""

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        super().__init__()
        self.extend(modules or ())

    def append(self, module: Module) -> ModuleList:
        """Add a module at the end."""
        return self._replace([*self, module])

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        """Add modules at the end."""
        return self._replace([*self, *modules])

    def insert(self, index: int, module: Module) -> None:
        """Add a module before the one at `index`."""
        listed = list(self)
        listed.insert(index, module)
        self._replace(listed)

    def _replace(self, modules: list[Any]) -> ModuleList:
        for index, module in enumerate(modules):
            _check(self, index, module)
        self._modules.clear()
        self._modules.update({str(index): module for index, module in enumerate(modules)})
        return self

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> ModuleList: ...
    def __getitem__(self, index: int | slice) -> Module:
        selection = list(self)[index]
        return type(self)(selection) if isinstance(selection, list) else selection

    def __setitem__(self, index: int, module: Module) -> None:
        listed = list(self)
        listed[index] = module
        self._replace(listed)

    def __delitem__(self, index: int | slice) -> None:
        listed = list(self)
        del listed[index]
        self._replace(listed)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())


class ModuleDict(Module):
    """Modules by name, in the order they were added. It is not called; its modules are."""

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def update(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]]) -> None:
        """Add or replace modules."""
        for name, module in dict(modules).items():
            self[name] = module

    def __getitem__(self, name: str) -> Module:
        return self._modules[name]

    def __setitem__(self, name: str, module: Module) -> None:
        _check(self, name, module)
        self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._modules.keys()

    def values(self) -> ValuesView[Module]:
        """The modules."""
        return self._modules.values()

    def items(self) -> ItemsView[str, Module]:
        """Pairs of name and module."""
        return self._modules.items()


def _check(owner: Module, key: object, module: object) -> None:
    if not isinstance(module, Module):
        raise TypeError(f"{type(owner).__name__}: {key!r} is {described(module)}")
