"""Limit the memory for the user's files: compressed files and devices may contain any amount of data.

Uncompressed files are limited only by the machine's memory, because they take a multiple of their size.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from minidl.common import read_files
from minidl.data.records import DataError

STREAM = 2**32  # bytes of a pipe, whose size is unknown
# Limits for unpacked files: the larger of a size and a multiple of the file; also for the memory of Python values.
LEAST, TIMES = 2**26, 200
LEAST_MEMORY, TIMES_MEMORY = 2**28, 500
# Limits for the cells of a table of JSONL objects: a number, or a multiple of the values of the objects.
CELLS, EMPTY = 10**7, 16
_ROW, _VALUE = 200, 32  # bytes of Python's memory for a row, and for a value without its text
_BLOCK = 2**20


class Unpacked:
    """Counts the unpacked content of a file of `size` bytes; `advice` is the remedy for a file above the limits."""

    def __init__(self, path: Path, size: int, advice: str) -> None:
        self._path, self._size, self._advice = path, size, advice
        self._bytes = self._rows = self._values = 0

    def text(self, block: bytes) -> None:
        """Count a block of lines; each character that may end a row or begin a value counts. Raises DataError."""
        self.add(len(block), block.count(b"\n"), len(block) - len(block.translate(None, b",;\t[{")))

    def add(self, size: int, rows: int, values: int) -> None:
        """Add a part of the content. Raises DataError above the limits for a file of this size."""
        self._bytes, self._rows, self._values = self._bytes + size, self._rows + rows, self._values + values
        most = max(LEAST, TIMES * self._size)
        memory, most_memory = _ROW * self._rows + _VALUE * self._values, max(LEAST_MEMORY, TIMES_MEMORY * self._size)
        fault = ""
        if self._bytes > most:
            fault = f"unpacks to more than {most:,} bytes, the limit for its size"
        elif memory > most_memory:
            fault = (
                f"unpacks to more than {self._rows:,} rows and {self._values:,} values, which take {memory:,} bytes of "
                f"memory, and the limit for its size is {most_memory:,}"
            )
        if fault:
            raise DataError(f"{self._path} {fault}; {self._advice}")


def check_cells(path: Path, keys: int, objects: int, values: int) -> None:
    """Raise DataError for a table of objects that share few keys."""
    if keys * objects > max(CELLS, EMPTY * values):
        raise DataError(f"{path}: {keys} different keys in {objects} objects; give every object the same keys")


def content(path: Path) -> bytes:
    """Return the bytes of a file, pipe or terminal, up to its end. Raises OSError and DataError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode):
            if status.st_size > read_files.memory():
                raise DataError(f"{path} has {status.st_size:,} bytes, more than this machine has memory: split it")
            return file.read()
        ends = status.st_rdev == Path(os.devnull).stat().st_rdev or file.isatty()
        if stat.S_ISCHR(status.st_mode) and not ends:
            raise DataError(f"{path} is a device, which may have no end; give a file or a pipe")
        blocks, size = list[bytes](), 0
        while block := file.read(_BLOCK):
            blocks.append(block)
            size += len(block)
            if size > STREAM:
                raise DataError(f"{path} gives more than {STREAM:,} bytes, the limit of a pipe; give a file")
        return b"".join(blocks)
