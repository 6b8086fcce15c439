"""Make the options of a command from its settings, see `training.settings`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin

import typer

from minidl.cli.common import Command, errors, examples
from minidl.errors import ConfigError
from minidl.training.process import environment
from minidl.training.run_folder.outputs import check_different, check_output
from minidl.training.run_folder.provenance import TRACE, Kind
from minidl.training.settings.declaration import (
    Positional,
    Settings,
    Written,
    choices,
    description,
    expected,
    flag,
    note,
    shown,
    value_type,
)

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


_NUMBERS = {int: "<int>", float: "<float>"}  # and how the help shows them
_Settings = TypeVar("_Settings", bound=Settings)


def command(
    name: str,
    settings: type[Settings],
    run: Callable[[dict[str, Any]], None],
    *more: type[Settings],
    leave_out: Sequence[str] = (),
    context: dict[str, Any] | None = None,
) -> Callable[[typer.Typer], object]:
    """Return a function that adds the command `name` with the help of `settings`, and the options of `settings` and of
    `more` except `leave_out`.

    `run` gets only the options that the user specified, by name. `context` are settings of typer's context.
    """
    fields: dict[str, FieldInfo] = {}
    required = set()
    for source in (settings, *more):
        for field, info in _in_order(source).items():
            if source is settings or field not in leave_out:
                fields.setdefault(info.alias or field, info)
        required |= source.must_be_given().difference(leave_out)

    def call(**values: Any) -> None:
        with errors():
            environment.check_threads()
            values = {name: value for name, value in values.items() if value not in (None, [], ())}
            options = {name: read(name, fields[name], value) for name, value in values.items()}
            _check_outputs({name: kind for name in options if (kind := note(fields[name], Kind))}, options)
            run(options)

    parameters = [_parameter(name, info, name in required) for name, info in fields.items()]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # Read by the reference page.
    call.settings, call.fields = settings, fields  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    text, epilog = inspect.getdoc(settings), examples(*settings.examples)
    pairs = {flag(name): expected(info) for name, info in fields.items() if _is_pair(info)}
    kind = type("Command", (Command,), {"pairs": pairs})
    return lambda app: app.command(name, cls=kind, context_settings=context, help=text, epilog=epilog)(call)


def extract(options: dict[str, Any], settings: type[_Settings]) -> _Settings:
    """Remove the settings of a class from `options`, and return them as this class."""
    return settings(**{name: options.pop(name) for name in settings.model_fields if name in options})


def check_alone(options: Container[str], *others: str) -> None:
    """Raise ConfigError for options that have no effect with --list."""
    for other in others:
        if other in options:
            raise ConfigError(f"--list cannot be combined with {flag(other)}")


def _check_outputs(kinds: Mapping[str, Kind], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for outputs of these kinds that cannot be written or would replace another file."""
    check_different(**{name: options.get(name) for name in ("out", *kinds)})
    out = options.get("out")
    for name, kind in kinds.items():
        from minidl.training.run_folder.folder import RunFolder

        path = options[name]
        in_run = kind is TRACE and out is not None and os.path.realpath(path.parent) == os.path.realpath(out)
        RunFolder(path.parent).check_not_own(flag(name), path.name, in_run)
        if path.parent.exists() or not in_run:
            check_output(flag(name), path, kind)


def _in_order(settings: type[Settings]) -> dict[str, FieldInfo]:
    """Return the fields in the order of the help: required ones, those of the command, then shared ones."""
    fields = settings.model_fields
    levels = {name: level for level, base in enumerate(settings.__mro__) for name in getattr(base, "model_fields", ())}
    names = sorted(fields, key=lambda name: (not fields[name].is_required(), levels[name]))
    return {name: fields[name] for name in names}


def read(name: str, info: FieldInfo, value: Any) -> Any:
    """Convert the text of an option to the value of its setting. Raises ConfigError."""
    written, kind = note(info, Written), value_type(info)
    if written is not None:
        return written.parse(value)
    if kind not in _NUMBERS:
        return value
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{flag(name)} is {shown(value)}, expected {expected(info)}") from None


def _is_pair(info: FieldInfo) -> bool:
    """Return whether the option of a field takes two values."""
    written = note(info, Written)
    return written is not None and get_origin(written.kind) is tuple


def _parameter(name: str, info: FieldInfo, required: bool) -> inspect.Parameter:
    """Return the parameter for typer. None means not specified; the help states the default."""
    written, kind, text = note(info, Written), value_type(info), description(info)
    declared: Any
    if (word := note(info, Positional)) is not None:
        declared = typer.Argument(help=text, show_default=False, metavar=word.metavar or name.upper(), readable=False)
    elif kind is bool:
        # A flag sets the value other than the default; if the default depends on the data, there are two flags.
        names = {False: flag(name), True: f" /{flag('no_' + name)}", None: f"{flag(name)}/{flag('no_' + name)}"}
        declared = typer.Option(names[info.default], help=text, metavar="", show_default=False)
    else:
        metavar = {**_NUMBERS, Path: "<path>"}.get(kind, "<str>") if written is None else written.metavar or "<str>"
        # `read` reports numbers that cannot be read.
        parser = str if kind in _NUMBERS and written is None else None
        declared = typer.Option(
            flag(name), help=text, metavar=metavar, parser=parser, show_default=False, readable=False
        )
    kind = str if choices(info) else kind if written is None else written.kind
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[kind if required else kind | None, declared],
    )
