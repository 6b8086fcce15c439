"""Parse UTF-8 text, CSV with a header line, and JSON objects, with the same rules for files and standard input.

Every error is a DataError that names the source, the line and the remedy.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from minidl.common.console import escaped
from minidl.data.records import DataError

ARGUMENT = Path("argument")  # the path of command line arguments; an argument is a line
MAX_NESTING = 64  # of JSON: what minidl writes has 6 levels
_MAX_FIELD = 2**31 - 1  # csv's own limit of 131,072 characters would refuse long texts
# A number with a decimal comma, alone in its cell.
_DECIMAL_COMMA = re.compile(r"^(\s*[-+]?\d+),(\d+\s*)$")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_NAMES = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}
_DECLARED = re.compile(r'(?i)(?P<quote>"?)sep=(?P<mark>[^"\r\n])(?P=quote)')
_QUOTED = re.compile(r'"[^"]*"')
QUOTES = "close every quoted field and write a double quote inside one twice"


def decode(raw: bytes, path: Path, first: int = 1) -> str:
    """Return the text of UTF-8 bytes (with or without a byte order mark) whose first line has the number `first`.

    Raises DataError with the line of the first bad byte.
    """
    if first == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16 text: save it as UTF-8")
    zero = raw.find(b"\0")
    content = raw if zero < 0 else raw[:zero]
    try:
        text = content.decode("utf-8-sig" if first == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first + raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8 text; save the file as UTF-8 "
            "(a spreadsheet's CSV export has the choice)"
        ) from None
    if zero >= 0:
        raise DataError(
            f"{path}, line {first + content.count(bytes([10]))}: a zero byte, so this is not a text file; "
            "save the data as UTF-8 text"
        )
    return text


class CsvRows:
    """Reads the rows of CSV or TSV with a header line. `columns` is empty until the header is read.

    A first line such as `sep=;`, Excel's notation, declares the delimiter. Otherwise the delimiter of CSV is the first
    of comma, semicolon, tab and bar that the header line has outside of quotes. With a semicolon, the decimal mark is
    the comma, as in spreadsheets. `advice` is the remedy for an unclosed field.
    """

    def __init__(self, path: Path, first_line: str, advice: str = QUOTES, tabs: bool = False) -> None:
        self.path = path
        self.advice = advice
        self.columns: list[str] = []
        declared = _DECLARED.fullmatch(first_line.strip(" \r\n"))
        self._declares = declared is not None
        header = _QUOTED.sub("", first_line)
        usual = "\t" if tabs else next((mark for mark in _NAMES if mark in header), ",")
        self.delimiter = usual if declared is None else declared["mark"]
        self.decimal_comma = self.delimiter == ";"

    def read(self, lines: Iterable[str], first: int = 1) -> Iterator[tuple[int, list[str]]]:
        """Return each row with its line number; the first of `lines` has the number `first`.

        Raises DataError for a column named twice, another number of fields than the header has, and bad quotes.
        """
        limit = csv.field_size_limit(_MAX_FIELD)
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
        line = first
        try:
            for row in reader:
                if row and self.columns:
                    yield line, self._cells(row, line)
                elif row and self._declares:
                    self._declares = False
                elif row:
                    self.columns = self._header(row, line)
                line = first + reader.line_num
        except csv.Error as error:
            raise DataError(f"{self.path}, line {line}: {error}; {self.advice}") from None
        finally:
            csv.field_size_limit(limit)

    def _header(self, row: list[str], line: int) -> list[str]:
        columns = [name.strip() for name in row]
        for name, count in Counter(columns).items():
            if count > 1:
                raise DataError(f"{self.path}, line {line}: column {shorten(name)} occurs twice; rename one of them")
        return columns

    def _cells(self, row: list[str], line: int) -> list[str]:
        if len(row) != len(self.columns):
            raise DataError(
                f"{self.path}, line {line}: {len(row)} fields where the header has {len(self.columns)}; put a field "
                f"that contains {_NAMES.get(self.delimiter, repr(self.delimiter))} or a line end in double quotes"
            )
        return row


def with_point(cell: str) -> str:
    """Return a cell of a file with decimal commas; if it is a number, with a decimal point."""
    return _DECIMAL_COMMA.sub(r"\1.\2", cell)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return `json.loads` of a text nested at most MAX_NESTING deep, so that code may recurse through the value.

    Raises ValueError for any other text.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_NESTING} deep") from None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(f"it is nested more than {MAX_NESTING} deep")
    return value


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def at_line(path: Path, line: int) -> str:
    """Return the name of a line of a file, or of an argument, for a message."""
    return f"{path} {line}" if path == ARGUMENT else f"{path}, line {line}"


def json_object(text: str, path: Path, line: int, example: str) -> dict[str, Any]:
    """Return the JSON object on a line. Raises DataError for any other line; `example` is a valid line."""
    where, advice = at_line(path, line), f"write one object per line, such as {example}"
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at character {error.pos + 1}); {advice}") from None
    except ValueError as error:
        raise DataError(f"{where}: JSON that cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: {kind_of(value)} where an object is expected; {advice}")
    return value


def in_columns(objects: Sequence[dict[str, Any]], expected: Sequence[str] = ()) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of JSON objects: the `expected` columns, then other keys by first occurrence."""
    columns = list(dict.fromkeys([*expected, *(key for value in objects for key in value)]))
    return columns, [[value.get(column) for column in columns] for value in objects]


def kind_of(value: object) -> str:
    """Return the type of a JSON value in words, or of another value by its name: "a date"."""
    if value is None:
        return "nothing"
    names = {
        bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object",
    }  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def one_of(names: Iterable[str]) -> str:
    """Return "one of a, b", or a single name."""
    listed = ", ".join(names)
    return f"one of {listed}" if ", " in listed else listed


def shorten(value: str) -> str:
    """Return a value in quotes, shortened and printable, for a message."""
    shown = value if len(value) <= 60 else value[:57] + "..."
    return ascii(shown) if not shown.isprintable() else repr(shown)


def encoded(value: Any) -> str:
    """Return a value as JSON on one line, with control characters escaped."""
    return escaped(_ENCODER.encode(value))


def can_encode_utf8(text: str) -> bool:
    """Return whether the text can be encoded: JSON and file names may contain half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def counted(number: int, what: str) -> str:
    """Return a number with its noun: "1 launch", "3,000 kernels"."""
    ending = "" if number == 1 else "es" if what.endswith(("ch", "s")) else "s"
    return f"{number:,} {what}{ending}"


def listed(names: Sequence[str]) -> str:
    """Return the first thirty names for a message."""
    shown = ", ".join(shorten(name) for name in names[:30])
    return shown + (f" and {len(names) - 30} more" if len(names) > 30 else "")
