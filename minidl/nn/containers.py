"""Lists and dictionaries of modules; their parameters belong to the module that contains them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Self

from minidl.nn.module import Module, described


class Listed(Module):
    """The base of lists of modules, which are named "0", "1", ... as in torch."""

    def append(self, module: Module) -> Self:
        """Add a module at the end. Raises TypeError for anything else."""
        return self.extend([module])

    def extend(self, modules: Iterable[Module]) -> Self:
        """Add modules at the end."""
        for module in [_check(self, str(len(self) + i), module) for i, module in enumerate(modules)]:
            self.add_module(str(len(self)), module)
        return self

    def insert(self, index: int, module: Module) -> Self:
        """Add a module before the one at `index`."""
        listed = list(self)
        listed.insert(index, _check(self, str(index), module))
        return self._number(listed)

    def pop(self, key: int | slice) -> Module:
        """Remove the module at an index, or the modules of a slice, and return it or a list of them."""
        modules = self[key]
        del self[key]
        return modules

    def _number(self, modules: list[Module]) -> Self:
        self._modules.clear()
        self._modules.update({str(index): module for index, module in enumerate(modules)})
        return self

    def _part(self, modules: dict[str, Module]) -> Module:
        """Return the list of a slice of the modules."""
        return type(self)(modules.values())  # type: ignore[call-arg]

    def __getitem__(self, index: int | slice) -> Any:
        return self._part(dict(list(self._modules.items())[index])) if isinstance(index, slice) else list(self)[index]

    def __setitem__(self, index: int, module: Module) -> None:
        name = list(self._modules)[index]
        self.add_module(name, _check(self, name, module))

    def __delitem__(self, index: int | slice) -> None:
        listed = list(self)
        del listed[index]
        self._number(listed)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())


class ModuleList(Listed):
    """Modules in a list. The list itself cannot be called."""

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        super().__init__()
        self.extend(modules or ())


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


def _check(owner: Module, key: object, module: Any) -> Any:
    if not isinstance(module, Module):
        raise TypeError(f"{type(owner).__name__}: {key!r} is {described(module)}")
    return module
