"""What users rely on, as text: the public names of Python with their signatures, and the flags of the commands.

python -m tests.snapshots.make          writes api.txt and commands.txt anew, for a change that is meant
"""

import enum
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

import minidl
from minidl.cli import Deferred, app
from minidl.generation.config import Generate
from minidl.training.settings.command import Evaluate, Predict
from minidl.training.settings.declaration import choices as choices_of
from minidl.training.settings.declaration import flag
from minidl.training.tasks import TASKS

HERE = Path(__file__).parent
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PRIVATE_COMMANDS = ("minidl.cli", "minidl.__main__")


def api() -> str:
    """Every name of every `__all__` in the package, one line each, and the public members of its classes."""
    lines = []
    for module in modules():
        for name in sorted(getattr(module, "__all__", ())):
            lines += _described(f"{module.__name__}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


def modules() -> Iterator[Any]:
    yield minidl
    for found in pkgutil.walk_packages(minidl.__path__, "minidl."):
        if not found.name.startswith(_PRIVATE_COMMANDS) and not found.name.rpartition(".")[2].startswith("_"):
            yield importlib.import_module(found.name)


def _described(path: str, value: Any) -> list[str]:
    if inspect.ismodule(value):
        return [f"{path}: module"]
    if inspect.isclass(value) and value.__module__.startswith("torch."):
        return [f"{path}: {value.__module__}.{value.__qualname__}"]
    if inspect.isclass(value):
        last = _parts(value)[-1] if value is minidl.Tensor else value
        bases = ", ".join(base.__name__ for base in last.__bases__ if base is not object)
        # What torch's class takes depends on its version.
        taken = "(...)" if str(getattr(value.__init__, "__module__", "")).startswith("torch.") else _signature(value)
        lines = [f"{path}{taken}: class" + (f" of {bases}" if bases else "")]
        members = _own(value)
        for name in sorted(members):
            if not name.startswith("_") or name in ("__call__", "__enter__", "__len__", "__iter__", "__getitem__"):
                lines += _member(f"{path}.{name}", members[name])
        return lines
    if callable(value):
        return [f"{path}{_signature(value)}"]
    if isinstance(value, str | int | float | tuple | frozenset) and not path.endswith("__version__"):
        return [f"{path} = {value!r}"]
    if isinstance(value, dict):
        return [f"{path}: dict of {', '.join(map(repr, value))}"]
    return [f"{path}: {type(value).__name__}"]


def _parts(kind: type) -> tuple[type, ...]:
    """Return the classes that `minidl.tensors` splits Tensor into."""
    return tuple(base for base in kind.__mro__ if base.__module__.startswith("minidl.tensors."))


def _own(kind: type) -> dict[str, Any]:
    """Return the members of a class, with those of the bases of `nn.Module` and Tensor that nothing exports."""
    members: dict[str, Any] = {}
    bases = kind.__mro__ if kind is minidl.nn.Module else _parts(kind) if kind is minidl.Tensor else (kind,)
    for base in reversed(bases):
        members.update(vars(base) if base.__module__.startswith("minidl.") else {})
    return members


def _member(path: str, value: Any) -> list[str]:
    if isinstance(value, property):
        return [f"{path}: property" + ("" if value.fset is None else ", can be set")]
    if isinstance(value, staticmethod | classmethod):
        return [f"{path}{_signature(value.__func__)}: {type(value).__name__}"]
    if inspect.isfunction(value):
        return [f"{path}{_signature(value)}"]
    if isinstance(value, str | int | float | bool | tuple | enum.Enum):
        return [f"{path} = {value!r}"]
    return [f"{path}: attribute"]


def _signature(value: Callable[..., Any]) -> str:
    try:
        return _ADDRESS.sub("", str(inspect.signature(value)))
    except (TypeError, ValueError):  # of something that is not written in Python
        return "(...)"


def commands() -> str:
    """Every command with its arguments and flags: names, types, defaults, what is told of the default; and choices."""
    choices = {
        f"{flag(name)}: {', '.join(known)}"
        for settings in (*(task.settings for task in TASKS.values()), Evaluate, Predict, Generate)
        for name, info in settings.model_fields.items()
        if (known := choices_of(info))
    }
    return "\n".join([*_command("minidl", typer.main.get_command(app)), "", "choices", *sorted(choices)]) + "\n"


def _command(path: str, command: Any) -> list[str]:
    if isinstance(command, Deferred):
        command = command.load()
    lines = [path]
    # Of the function: typer's own classes differ from version to version.
    types = typing.get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
    for parameter in command.params:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        more = ["flag" if getattr(parameter, "is_flag", False) else _type(types.get(parameter.name))]
        more += ["required"] * parameter.required + ["repeated"] * bool(getattr(parameter, "multiple", False))
        if parameter.nargs != 1:
            more.append(f"{parameter.nargs} values")
        if parameter.default is not None and not callable(parameter.default):
            more.append(f"default {parameter.default!r}")
        told = re.search(r"Default: .*", getattr(parameter, "help", None) or "")
        lines.append(f"    {names}: {', '.join(more)}" + (f" ({told[0]})" if told else ""))
    for name in sorted(getattr(command, "commands", {})):
        lines += _command(f"{path} {name}", command.commands[name])
    return lines


def _type(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("pathlib.", "")


SNAPSHOTS: dict[str, Callable[[], str]] = {"api.txt": api, "commands.txt": commands}

if __name__ == "__main__":
    for file, make in SNAPSHOTS.items():
        (HERE / file).write_text(make())
        print(f"wrote {HERE / file}")
