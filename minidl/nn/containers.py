"""Lists and dictionaries of modules or parameters, which belong to the module that contains them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Self

import torch

from minidl.nn.module import Module, Parameter, described
from minidl.tensors import Tensor


class _Container(Module):
    """The base of lists and dictionaries."""

    _items = property(lambda self: self._modules)

    def _add(self, name: str, item: Any) -> None:
        self.add_module(name, self._checked(name, item))

    def _checked(self, key: object, item: Any) -> Any:
        if not isinstance(item, Module):
            raise TypeError(f"{type(self).__name__}: {key!r} is {described(item)}")
        return item

    def __len__(self) -> int:
        return len(self._items)


class _OfParameters(_Container):
    """The base of lists and dictionaries of parameters."""

    _items = property(lambda self: self._parameters)

    def _add(self, name: str, item: Any) -> None:
        self.register_parameter(name, self._checked(name, item))

    def _checked(self, key: object, item: Any) -> Any:
        if not isinstance(item, Tensor | torch.Tensor):
            raise TypeError(f"{type(self).__name__}: {key!r} is of type {type(item).__name__}, expected a Parameter")
        return item if isinstance(item, Parameter) else Parameter(item)


class Listed(_Container):
    """The base of lists of modules, which are named "0", "1", ... as in torch."""

    def append(self, module: Any) -> Self:
        """Add a module at the end. Raises TypeError for anything else."""
        return self.extend([module])

    def extend(self, modules: Iterable[Any]) -> Self:
        """Add modules at the end."""
        for module in [self._checked(str(len(self) + i), module) for i, module in enumerate(modules)]:
            self._add(str(len(self)), module)
        return self

    def insert(self, index: int, module: Any) -> Self:
        """Add a module before the one at `index`."""
        listed = list(self)
        listed.insert(index, self._checked(str(index), module))
        return self._number(listed)

    def pop(self, key: int | slice) -> Any:
        """Remove the module at an index, or the modules of a slice, and return it or a list of them."""
        modules = self[key]
        del self[key]
        return modules

    def _number(self, modules: list[Module]) -> Self:
        self._items.clear()
        self._items.update({str(index): module for index, module in enumerate(modules)})
        return self

    def _part(self, modules: dict[str, Module]) -> Module:
        """Return the list of a slice of the modules."""
        return type(self)(modules.values())  # type: ignore[call-arg]

    def __getitem__(self, index: int | slice) -> Any:
        return self._part(dict(list(self._items.items())[index])) if isinstance(index, slice) else list(self)[index]

    def __setitem__(self, index: int, module: Any) -> None:
        self._add(list(self._items)[index], module)

    def __delitem__(self, index: int | slice) -> None:
        listed = list(self)
        del listed[index]
        self._number(listed)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._items.values())


class ModuleList(Listed):
    """Modules in a list. The list itself cannot be called."""

    def __init__(self, modules: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.extend(modules or ())


class ParameterList(_OfParameters, ModuleList):
    """Parameters in a list, named "0", "1", ... Other tensors become Parameters."""

    def __init__(self, values: Iterable[Any] | None = None) -> None:
        super().__init__(values)


class ModuleDict(_Container, MutableMapping[str, Any]):
    """Modules by name, in the order they were added. It is not called; its modules are."""

    __eq__, __hash__ = Module.__eq__, Module.__hash__

    def __init__(self, modules: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __setitem__(self, name: str, module: Any) -> None:
        self._add(name, module)

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)


class ParameterDict(_OfParameters, ModuleDict):
    """Parameters by name, in the order they were added. Other tensors become Parameters."""

    def __init__(self, parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None) -> None:
        super().__init__(parameters)
