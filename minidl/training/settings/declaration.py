"""Settings are declared once, as fields of a class per command: name, type, range, default and help.

Command-line options, `config.json`, checks with their error messages and the reference page follow from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from minidl.common.console import cut
from minidl.data.parsing import can_encode_utf8
from minidl.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

FLOAT32 = 3.4028234663852886e38  # the largest float32, as devices compute in it


class Settings(BaseModel):
    """The validated settings of a command; the docstring and `examples` are the command's help.

    Types are strict: no number is parsed from text, no flag from a number. Raises ConfigError for the first setting
    that is unknown, missing, or of the wrong type or range.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    examples: ClassVar[tuple[str, ...]] = ()
    # Values of settings that earlier versions lacked, in runs of these versions. A run
    # with such a value is saved without it.
    earlier: ClassVar[dict[str, Any]] = {}

    @classmethod
    def must_be_given(cls) -> set[str]:
        """The names of required settings."""
        return {name for name, info in cls.model_fields.items() if info.is_required()}

    if not TYPE_CHECKING:  # the constructor has the types of the fields

        def __init__(self, /, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(_sentence(type(self), values, error)) from None
            except UnicodeEncodeError as error:
                # pydantic raises this for a validator's ConfigError that names a file whose name is not UTF-8.
                raise ConfigError(error.object) from None


@dataclass(frozen=True)
class Expected:
    """The description of valid values for error messages, if it does not follow from the field's type and range.

    `utf8` is used for text that is not valid UTF-8, `some` for an empty list.
    """

    text: str
    utf8: str = ""
    some: str = ""


@dataclass(frozen=True)
class Written:
    """The form of a value on the command line: a `kind` that `parse` converts. `parse` raises ConfigError."""

    kind: Any
    parse: Callable[[Any], Any]
    metavar: str | None = None


@dataclass(frozen=True)
class Positional:
    """A positional argument, without a flag."""

    metavar: str | None = None


def _utf8(value: str | Path | None) -> str | Path | None:
    if value is not None and not can_encode_utf8(str(value)):
        raise PydanticCustomError("string_unicode", "not UTF-8")
    return value


def _in_float32(value: float | None) -> float | None:
    if value and not ctypes.c_float(value).value:
        raise PydanticCustomError("zero_in_float32", "zero in float32")
    return value


IN_FLOAT32 = AfterValidator(_in_float32)  # rejects numbers that become zero in float32
REPEATED = Written(list[str], tuple)
UTF8 = AfterValidator(_utf8)  # its error is the `utf8` of Expected


def flag(name: str) -> str:
    """Return the flag of a field: `--batch-size` of `batch_size`, `--from` of `from_`, `-m` of `m`."""
    return ("--" if len(name) > 1 else "-") + name.rstrip("_").replace("_", "-")


def note(info: FieldInfo, kind: type[Any]) -> Any:
    """Return the Expected, Written or Positional of a field, None if it has none."""
    return next((each for each in info.metadata if isinstance(each, kind)), None)


def value_type(info: FieldInfo) -> Any:
    """Return the type of a field's value when it is set: `int` of `int | None`."""
    kinds = [kind for kind in get_args(info.annotation) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(info.annotation) else info.annotation


def choices(info: FieldInfo) -> tuple[str, ...]:
    """Return the allowed values of a field; () for any value."""
    kind = value_type(info)
    return get_args(kind) if get_origin(kind) is Literal else ()


def description(info: FieldInfo) -> str:
    """Return the help of a field, with its choices after a final colon, and its default."""
    text = info.description or ""
    if text.endswith(":"):
        *others, last = choices(info)
        text += f" {', '.join(others)} or {last}."
    if info.is_required() or info.default_factory or isinstance(info.default, bool) or info.default in (None, "", ()):
        return text
    return f"{text} Default: {shown(info.default)}."


def expected(info: FieldInfo, error: str = "") -> str:
    """Return a description of the values that a field accepts: "a whole number from 1 to 5"."""
    declared = note(info, Expected)
    if declared is not None:
        return {"string_unicode": declared.utf8, "too_short": declared.some}.get(error) or declared.text
    kind = value_type(info)
    if choices(info):
        return "one of " + ", ".join(choices(info))
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return _range("a whole number" if kind is int else "a number", info)
    return "a path" if kind is Path else "a text"


def shown(value: Any) -> str:
    """Return a value as written on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    return "not set" if value is None else cut(value) or "empty"


def differences(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each setting that differs from the run's: "--epochs is 10 in the run, 20 was given"."""
    return [
        f"{flag(name)} is {shown(saved.get(name))} in the run, {shown(value)} was given"
        for name, value in settings.items()
        if saved.get(name) != (list(value) if isinstance(value, tuple) else value)
    ]


def changed(saved: Any, identity: Mapping[str, Any]) -> list[str]:
    """Return the names of a run's settings that differ in a saved state; a missing setting counts as None."""
    if not isinstance(saved, dict):
        return sorted(identity)
    return sorted(name for name in saved.keys() | identity.keys() if saved.get(name) != identity.get(name))


def _range(kind: str, info: FieldInfo) -> str:
    ends = {end: getattr(each, end) for each in info.metadata for end in ("gt", "ge", "lt", "le") if hasattr(each, end)}
    high = f" to below {ends['lt']}" if "lt" in ends else f" to {ends.get('le')}"
    if "gt" in ends:
        high = f", below {ends['lt']}" if "lt" in ends else ""
        high = high or ("" if ends.get("le") == FLOAT32 else f", at most {ends['le']}")
        return f"{kind} above {ends['gt']}{high}" + ("" if high else " that float32 holds")
    if ends.get("le") == FLOAT32:
        return f"{kind} of at least {ends['ge']} that float32 holds"
    return f"{kind} from {ends['ge']}{high}"


def _sentence(settings: type[Settings], values: dict[str, Any], error: ValidationError) -> str:
    """Return the first of pydantic's errors as an error message of the command line."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"{flag(name)} is not a setting of this command"
    if name not in values:
        return f"{flag(name)} is missing"
    fields = settings.model_fields
    info = next(info for field, info in fields.items() if name in (field, info.alias))
    return f"{flag(name)} is {shown(values[name])}, expected {expected(info, first['type'])}"
