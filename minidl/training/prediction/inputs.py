"""The inputs of `minidl predict`: lines and rows from standard input as they arrive, or from arguments.

Inputs before an invalid one are yielded first; then its error is raised.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from minidl.common import console
from minidl.data import formats
from minidl.data.file_rows import Records
from minidl.data.files import no_rows
from minidl.data.parsing import CsvRows, decode, in_columns, json_object, parse_json
from minidl.data.records import DataError

STANDARD_INPUT = Path("standard input")
CHUNK = 256
FILE_CHUNK = 2**15  # inputs of a file in a chunk
_BLOCK = 2**16
LONGEST = 2**26  # bytes of a line
_EXAMPLE = '{"column": 1.5}'

Line = tuple[int, str]
_Item = TypeVar("_Item")
_Read = TypeVar("_Read")


def standard_input() -> io.BufferedIOBase:
    """Return standard input as bytes. Raises DataError when the process was started without one."""
    if sys.stdin is None:
        raise DataError(f"{STANDARD_INPUT} is closed: give the inputs as arguments or by --file")
    return cast(io.BufferedIOBase, sys.stdin.buffer)


def note_files(arguments: Iterable[str], kind: str) -> None:
    """Note on standard error that an argument, which is read as an input of this kind, is the name of a data file."""
    for argument in arguments:
        try:
            is_data_file = formats.kind_of(Path(argument)) is not None and Path(argument).is_file()
        except (OSError, ValueError):  # the argument is not a path
            continue
        if is_data_file:
            file = shlex.quote(argument)
            console.note(f"{argument} is read as {kind}; to predict the file's contents: --file {file}")


def note_unknown(unknown: int, total: int) -> None:
    """Note on standard error that `unknown` of `total` texts have no known terms, if there are any."""
    if unknown == 1 == total:
        console.note("the text contains no term that the model knows: the answer does not depend on the text")
    elif unknown:
        contain, their = ("contains", "its answer does") if unknown == 1 else ("contain", "their answers do")
        count = f"{unknown:,} of {total:,} texts {contain} no term that the model knows"
        console.note(f"{count}: {their} not depend on the text")


def chunks(items: list[_Item], size: int = CHUNK) -> Iterator[list[_Item]]:
    """Yield all items in lists of `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))


def lines_as_they_come(stream: io.BufferedIOBase) -> Iterator[list[Line]]:
    """Yield chunks of the numbered lines that have arrived, so that a single line is answered at once.

    Raises DataError for a line that is not UTF-8 text, and when reading fails.
    """
    number = 0
    for arrived in _lines(stream):
        for start in range(0, len(arrived), CHUNK):
            raw = arrived[start : start + CHUNK]
            yield from _until_fault(enumerate(raw, number + 1), lambda line: [(line[0], _text(line[1], line[0]))])
            number += len(raw)


def _lines(stream: io.BufferedIOBase) -> Iterator[list[bytes]]:
    """Yield the complete lines after each read, without line ends.

    Raises DataError when reading fails, and for a line of more than LONGEST bytes.

    `read1` returns as soon as any input is available, so no thread has to read ahead; such a thread would hold the lock
    of standard input when the process ends.
    """
    pieces: list[bytes] = []
    number, length = 1, 0  # of the incomplete line in `pieces`
    while True:
        try:
            block = stream.read1(_BLOCK)
        except OSError as error:
            raise DataError(
                f"{STANDARD_INPUT} cannot be read: {error.strerror or error}; give a file with --file"
            ) from None
        if not block:
            break
        end, newline, rest = block.rpartition(b"\n")
        length += len(block.partition(b"\n")[0])
        if length > LONGEST:
            raise DataError(
                f"{STANDARD_INPUT}, line {number}: more than {LONGEST:,} bytes, the limit for a line; "
                "split it into several lines, or pass a file with --file"
            )
        if newline:
            arrived = b"".join([*pieces, end]).split(b"\n")
            pieces.clear()
            number, length = number + len(arrived), len(rest)
            yield arrived
        if rest:
            pieces.append(rest)
    if pieces:
        yield [b"".join(pieces)]


def rows_as_they_come(stream: io.BufferedIOBase, expected: Sequence[str]) -> Iterator[Records]:
    """Yield table rows from JSON lines, if the first line is JSON, or from CSV with a header line and a row."""
    reader: CsvRows | None = None
    has_rows = False
    is_json: bool | None = None
    for lines in lines_as_they_come(stream):
        chunk = lines
        if is_json is None:
            chunk = list(itertools.dropwhile(lambda line: not line[1].strip(), lines))
            if not chunk:
                continue
            is_json = _is_json(chunk[0][1].strip())
        if is_json:
            yield from json_rows([line for line in chunk if line[1].strip()], STANDARD_INPUT, expected)
            continue
        reader = reader or CsvRows(STANDARD_INPUT, chunk[0][1], "each row must be on one line")
        for rows in _csv_rows(chunk, reader):
            has_rows = True
            yield rows
    if reader is not None and not has_rows:
        raise no_rows(STANDARD_INPUT)


def _is_json(line: str) -> bool:
    """Return whether a line is JSON: it begins as an object or is a list; a CSV header may begin with a bracket."""
    if line.startswith("["):
        with contextlib.suppress(ValueError):
            parse_json(line)
            return True
    return line.startswith("{")


def json_rows(lines: Sequence[Line], source: Path, expected: Sequence[str] = ()) -> Iterator[Records]:
    """Yield rows with the columns of all lines and the `expected` ones."""

    def read(line: Line) -> list[tuple[int, dict[str, Any]]]:
        return [(line[0], json_object(line[1], source, line[0], _EXAMPLE))]

    for objects in _until_fault(lines, read):
        columns, rows = in_columns([value for _, value in objects], expected)
        yield Records(source, columns, rows, [number for number, _ in objects], "")


def _csv_rows(lines: Sequence[Line], reader: CsvRows) -> Iterator[Records]:
    for numbered_rows in _until_fault(lines, lambda line: list(reader.read([line[1]], line[0]))):
        rows, numbers = [row for _, row in numbered_rows], [number for number, _ in numbered_rows]
        yield Records(reader.path, reader.columns, rows, numbers, "", reader.decimal_comma)


def _until_fault(items: Iterable[_Item], read: Callable[[_Item], list[_Read]]) -> Iterator[list[_Read]]:
    """Yield the results of `read` for all items before the first error, if there are any; then raise the DataError."""
    results: list[_Read] = []
    try:
        for item in items:
            results.extend(read(item))
    except DataError:
        if results:
            yield results
        raise
    if results:
        yield results


def _text(raw: bytes, number: int) -> str:
    return decode(raw, STANDARD_INPUT, number).removesuffix("\r")
