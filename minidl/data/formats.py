"""Read data files by suffix: CSV, TSV and JSON Lines, also compressed by gzip or Zstandard; Parquet and Arrow.

pyarrow, the extra `arrow`, reads Zstandard, Parquet and Arrow. `limits` limits the unpacked size.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minidl.data import limits
from minidl.data.limits import Unpacked
from minidl.data.parsing import shorten
from minidl.data.records import DataError

LINES = (".csv", ".tsv", ".jsonl")
TABLES = (".parquet", ".arrow", ".feather")
SUFFIXES = (*LINES, *TABLES)
PACKED = (".gz", ".zst")
_BLOCK = 2**20
_ROWS = 1024  # of a table per read
_AS_TEXT = "write it as .csv or .jsonl, which has no such limit"


def kind_of(path: Path) -> str | None:
    """Return the suffix of a data file without that of its compression: ".csv" for a.csv.gz; None for other files."""
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in PACKED:
        endings.pop()
        return endings[-1] if endings and endings[-1] in LINES else None
    return endings[-1] if endings and endings[-1] in SUFFIXES else None


def endings() -> str:
    """Return the suffixes of data files, for a message."""
    return f"{', '.join(SUFFIXES)} ({', '.join(LINES)} also with {' or '.join(PACKED)})"


def no_data_file(path: Path) -> DataError:
    """Return the error for a path without the suffix of a data file."""
    try:
        folder = path.is_dir()
    except (OSError, ValueError):
        folder = False
    kind = "a folder" if folder else "not a data file that minidl reads"
    return DataError(f"{path} is {kind}: give a file ending in {endings()}")


def read_bytes(path: Path) -> bytes:
    """Return the unpacked content of a file. Raises DataError."""
    try:
        raw = limits.content(path)
    except IsADirectoryError:
        raise no_data_file(path) from None
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give the path of a file that can") from None
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    ending = path.suffix.lower()
    return raw if ending not in PACKED else _unpack(raw, ending, path)


def _unpack(raw: bytes, ending: str, path: Path) -> bytes:
    unpacked = Unpacked(path, len(raw), "unpack it")
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    stream: Any
    if ending == ".gz":
        stream = gzip.GzipFile(fileobj=io.BytesIO(raw))
    else:
        pyarrow = _pyarrow(path)
        stream = pyarrow.CompressedInputStream(pyarrow.BufferReader(raw), "zstd")
        errors = (*errors, pyarrow.ArrowException)
    blocks: list[bytes] = []
    try:
        with stream:
            while block := stream.read(_BLOCK):
                blocks.append(block)
                unpacked.text(block)
    except errors as error:
        raise DataError(f"{path} cannot be unpacked ({error}); it is damaged or incomplete: create it again") from None
    return b"".join(blocks)


def table(raw: bytes, path: Path) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of a Parquet or an Arrow file. Raises DataError for any other or a damaged file."""
    pyarrow = _pyarrow(path)
    unpacked = Unpacked(path, len(raw), _AS_TEXT)
    rows: list[list[Any]] = []
    try:
        columns, batches = _batches(raw, path, pyarrow)
        for name, count in Counter(columns).items():
            if count > 1:
                raise DataError(f"{path}: column {shorten(name)} occurs {count} times; rename all but one of them")
        for batch in batches:
            values = [_plain(column, pyarrow) for column in batch.columns]
            unpacked.add(sum(column.nbytes for column in values), batch.num_rows, sum(map(_values, values)))
            rows.extend(map(list, zip(*(column.to_pylist() for column in values), strict=True)))
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}); make it again") from None
    return columns, rows


def _plain(column: Any, pyarrow: Any) -> Any:
    """Return a column with its values stored per row. A slice of a dictionary, run-length or view column reports the
    bytes of all rows, and a value shared by many rows becomes one in each row."""
    types = pyarrow.types
    if types.is_dictionary(column.type):
        return _plain(column.dictionary, pyarrow).take(column.indices)
    if types.is_run_end_encoded(column.type):
        from pyarrow import compute

        return _plain(compute.run_end_decode(column), pyarrow)
    if types.is_string_view(column.type):
        return column.cast(pyarrow.large_string())
    return column.cast(pyarrow.large_binary()) if types.is_binary_view(column.type) else column


def _batches(raw: bytes, path: Path, pyarrow: Any) -> tuple[list[str], Iterator[Any]]:
    """Return the names of the columns and batches of rows."""
    source = pyarrow.BufferReader(raw)
    if path.suffix.lower() == ".parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(source)
        _check_declared_size(file.metadata, Unpacked(path, len(raw), _AS_TEXT))
        return list(file.schema_arrow.names), file.iter_batches(batch_size=_ROWS)
    from pyarrow import ipc

    opened = ipc.open_file(source) if raw.startswith(b"ARROW1") else ipc.open_stream(source)
    batches = (
        (opened.get_batch(i) for i in range(opened.num_record_batches)) if raw.startswith(b"ARROW1") else iter(opened)
    )
    return list(opened.schema.names), (part for batch in batches for part in _slices(batch))


def _slices(batch: Any) -> Iterator[Any]:
    """Return slices of a batch of an Arrow file, after a check of its offsets, which Arrow does not check."""
    batch.validate(full=True)
    return (batch.slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))


def _check_declared_size(metadata: Any, unpacked: Unpacked) -> None:
    """Raise DataError for a Parquet file whose metadata declare too much content, before it is unpacked."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(i) for i in range(group.num_columns)]
        size = sum(max(0, column.total_uncompressed_size) for column in columns)
        unpacked.add(size, max(0, group.num_rows), sum(max(0, column.num_values) for column in columns))


def _values(column: Any) -> int:
    """Return the number of values in a column and its lists and structures; each becomes a Python object."""
    inner = [column.keys, column.items] if hasattr(column, "items") else getattr(column, "flatten", list)()
    return len(column) + sum(map(_values, inner if isinstance(inner, list) else [inner]))


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise DataError(f"{path} cannot be read without pyarrow: pip install pyarrow") from None
    return pa
