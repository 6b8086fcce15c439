"""Records that are saved as JSON: dataclasses whose types say what a file may hold, checked by pydantic."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from minidl.common.console import cut
from minidl.data.parsing import parse_json
from minidl.data.records import DataError

R = TypeVar("R")


def _different(values: list[str]) -> list[str]:
    if len(set(values)) != len(values):
        raise ValueError("two of them are equal")
    return values


Count = Annotated[int, Field(ge=0)]
Names = Annotated[list[str], AfterValidator(_different)]
Scale = Annotated[float, Field(gt=0)]


class Checked:
    """The base of dataclasses for `made`: no value is converted, none is unknown, all numbers are finite."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Record(Checked):
    """The base of dataclasses that are saved as files, which say that they are of this `format`.

    Fields of an `_optional` name, which earlier versions lacked, are left out where they are None.
    """

    format: ClassVar[str]
    _optional: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> str:
        """The record as JSON text."""
        whole: Any = self

        def written(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if value is not None or name not in self._optional}

        values = asdict(whole, dict_factory=written)
        return json.dumps({"format": self.format, "version": 1, **values}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        """The record that `to_json` wrote. Raises DataError, naming `source`, for anything else."""
        try:
            data = parse_json(text)
            if not isinstance(data, dict) or data.pop("format", None) != cls.format or data.pop("version", None) != 1:
                raise ValueError(f"not a {cls.format} file of version 1")
            return made(cls, data, cls._optional)
        except ValueError as error:
            raise DataError(f"{source or cls.format} is damaged: {cut(error)}; restore it or train again") from None


def made(cls: type[R], data: object, optional: Container[str] = ()) -> R:
    """The record of JSON values. Raises ValueError, naming the field, for a value that is another or missing."""
    adapter = TypeAdapter(cls)
    text = json.dumps(data, ensure_ascii=False).encode()
    try:
        found = adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            raise ValueError(f"it lacks {place}") from None
        got = f"{place or 'it'} is {cut(repr(first['input']), 60)}: "
        raise ValueError(what if first["type"] == "value_error" and not place else got + what) from None
    lacking = _lacking(adapter.dump_python(found), data, optional)
    if lacking is not None:
        raise ValueError(f"it lacks {lacking}")
    return found


def _lacking(whole: Any, given: Any, optional: Container[str]) -> str | None:
    """The first place of a whole record that the given values do not have, as a default would fill it."""
    pairs = whole.items() if isinstance(whole, Mapping) else enumerate(whole) if isinstance(whole, list) else ()
    for place, value in pairs:
        if isinstance(given, Mapping) and place not in given:
            if place in optional:
                continue
            return str(place)
        inner = _lacking(value, given[place], optional)
        if inner is not None:
            return f"{place}.{inner}"
    return None
