"""The options of a command follow from its settings, see `training.settings`."""

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
    """What adds the command `name`, whose help and options are those of `settings`, then of `more` but for `leave_out`.

    `run` gets only the settings that were given, by name. `context` are settings of typer's context.
    """
    fields: dict[str, FieldInfo] = {}
    required = set()
    for each in (settings, *more):
        for own, info in _in_order(each).items():
            if each is settings or own not in leave_out:
                fields.setdefault(info.alias or own, info)
        required |= each.must_be_given().difference(leave_out)

    def call(**values: Any) -> None:
        with errors():
            environment.check_threads()
            values = {name: value for name, value in values.items() if value not in (None, [], ())}
            given = {name: read(name, fields[name], value) for name, value in values.items()}
            _check_outputs({name: kind for name in given if (kind := note(fields[name], Kind))}, given)
            run(given)

    parameters = [_parameter(name, info, name in required) for name, info in fields.items()]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # Read by the reference page.
    call.settings, call.fields = settings, fields  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    text, epilog = inspect.getdoc(settings), examples(*settings.examples)
    several = {flag(name): expected(info) for name, info in fields.items() if _is_pair(info)}
    kind = type("Command", (Command,), {"several": several})
    return lambda app: app.command(name, cls=kind, context_settings=context, help=text, epilog=epilog)(call)


def taken(given: dict[str, Any], settings: type[_Settings]) -> _Settings:
    """Take the settings of a class out of those that were given."""
    return settings(**{name: given.pop(name) for name in settings.model_fields if name in given})


def check_alone(given: Container[str], *others: str) -> None:
    """Raises ConfigError when settings are given that have no effect with --list."""
    for other in others:
        if other in given:
            raise ConfigError(f"--list cannot be combined with {flag(other)}")


def _check_outputs(kinds: Mapping[str, Kind], given: Mapping[str, Any]) -> None:
    """Raises ConfigError for outputs, of these kinds, that cannot be written or would replace something else."""
    check_different(**{name: given.get(name) for name in ("out", *kinds)})
    out = given.get("out")
    for name, kind in kinds.items():
        from minidl.training.run_folder.folder import RunFolder

        path = given[name]
        in_run = kind is TRACE and out is not None and os.path.realpath(path.parent) == os.path.realpath(out)
        RunFolder(path.parent).check_not_own(flag(name), path.name, in_run)
        if path.parent.exists() or not in_run:
            check_output(flag(name), path, kind)


def _in_order(settings: type[Settings]) -> dict[str, FieldInfo]:
    """The fields in the order of the help: required ones, the command's own, then shared ones."""
    fields = settings.model_fields
    levels = {name: level for level, each in enumerate(settings.__mro__) for name in getattr(each, "model_fields", ())}
    names = sorted(fields, key=lambda name: (not fields[name].is_required(), levels[name]))
    return {name: fields[name] for name in names}


def read(name: str, info: FieldInfo, value: Any) -> Any:
    """A setting from its form on the command line. Raises ConfigError."""
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
    """Whether the option of a field takes two values."""
    written = note(info, Written)
    return written is not None and get_origin(written.kind) is tuple


def _parameter(name: str, info: FieldInfo, required: bool) -> inspect.Parameter:
    """The parameter for typer. None means not given; the help states the default."""
    written, kind, text = note(info, Written), value_type(info), description(info)
    declared: Any
    if (place := note(info, Positional)) is not None:
        declared = typer.Argument(help=text, show_default=False, metavar=place.metavar or name.upper(), readable=False)
    elif kind is bool:
        # A flag sets the value that is not the default; if the default depends on the data, there are two flags.
        names = {False: flag(name), True: f" /{flag('no_' + name)}", None: f"{flag(name)}/{flag('no_' + name)}"}
        declared = typer.Option(names[info.default], help=text, metavar="", show_default=False)
    else:
        metavar = {**_NUMBERS, Path: "<path>"}.get(kind, "<str>") if written is None else written.metavar or "<str>"
        # What cannot be read is told where it is read, numbers in `read`.
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
