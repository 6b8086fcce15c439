"""Records saved as JSON: dataclasses whose types, checked by pydantic, define the valid files."""

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
    """The base of dataclasses for `validate`: no conversions, no unknown fields, only finite numbers."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Record(Checked):
    """The base of dataclasses that are saved as files of a `format`, whose name is in the file.

    `_optional` names fields that earlier versions lacked; they are omitted if they are None.
    """

    format: ClassVar[str]
    _optional: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> str:
        """Return the record as JSON text."""
        record: Any = self

        def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if value is not None or name not in self._optional}

        values = asdict(record, dict_factory=to_dict)
        return json.dumps({"format": self.format, "version": 1, **values}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        """Return the record that `to_json` wrote. Raises DataError, naming `source`, for any other text."""
        try:
            data = parse_json(text)
            if not isinstance(data, dict) or data.pop("format", None) != cls.format or data.pop("version", None) != 1:
                raise ValueError(f"not a {cls.format} file of version 1")
            return validate(cls, data, cls._optional)
        except ValueError as error:
            raise DataError(f"{source or cls.format} is damaged: {cut(error)}; restore it or train again") from None


def validate(cls: type[R], data: object, optional: Container[str] = ()) -> R:
    """Return the record of JSON values. Raises ValueError, naming the field, for an invalid or missing value."""
    adapter = TypeAdapter(cls)
    text = json.dumps(data, ensure_ascii=False).encode()
    try:
        record = adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            raise ValueError(f"it lacks {field}") from None
        got = f"{field or 'it'} is {cut(repr(first['input']), 60)}: "
        raise ValueError(reason if first["type"] == "value_error" and not field else got + reason) from None
    missing = _missing_field(adapter.dump_python(record), data, optional)
    if missing is not None:
        raise ValueError(f"it lacks {missing}")
    return record


def _missing_field(record: Any, data: Any, optional: Container[str]) -> str | None:
    """Return the first field of a record that is not in the JSON data, where its default would replace it."""
    pairs = record.items() if isinstance(record, Mapping) else enumerate(record) if isinstance(record, list) else ()
    for key, value in pairs:
        if isinstance(data, Mapping) and key not in data:
            if key in optional:
                continue
            return str(key)
        inner = _missing_field(value, data[key], optional)
        if inner is not None:
            return f"{key}.{inner}"
    return None
