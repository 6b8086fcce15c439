"""What a file of the user's may take. A few kilobytes that are compressed, or a device, may stand for any amount.

A text that is not compressed has no limit but the machine's memory: what it takes is a multiple of its size.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from minidl.common import read_files
from minidl.data.records import DataError

STREAM = 2**32  # bytes of a pipe, whose size is not known before
# What a file may unpack to: so many bytes, or so many times its own; and as values of Python so many bytes of memory.
LEAST, TIMES = 2**26, 200
LEAST_MEMORY, TIMES_MEMORY = 2**28, 500
# A table made from JSONL objects has at most so many cells, or so many times the values of the objects.
CELLS, EMPTY = 10**7, 16
_ROW, _VALUE = 200, 32  # bytes of memory that Python takes for a row, and for a value in it besides its text
_BLOCK = 2**20


class Unpacked:
    """What a file of `size` bytes unpacks to, counted as it comes; `advice` says what to do with one of more."""

    def __init__(self, path: Path, size: int, advice: str) -> None:
        self._path, self._size, self._advice = path, size, advice
        self._bytes = self._rows = self._values = 0

    def text(self, block: bytes) -> None:
        """Count a block of lines: what may end a row or begin a value counts for one. Raises DataError."""
        self.add(len(block), block.count(b"\n"), len(block) - len(block.translate(None, b",;\t[{")))

    def add(self, size: int, rows: int, values: int) -> None:
        """Count some of it. Raises DataError when it is more than a file of this size may have."""
        self._bytes, self._rows, self._values = self._bytes + size, self._rows + rows, self._values + values
        most = max(LEAST, TIMES * self._size)
        memory, most_memory = _ROW * self._rows + _VALUE * self._values, max(LEAST_MEMORY, TIMES_MEMORY * self._size)
        what = ""
        if self._bytes > most:
            what = f"unpacks to more than {most:,} bytes, the limit for its size"
        elif memory > most_memory:
            what = (
                f"unpacks to more than {self._rows:,} rows and {self._values:,} values, which take {memory:,} bytes of "
                f"memory, and the limit for its size is {most_memory:,}"
            )
        if what:
            raise DataError(f"{self._path} {what}; {self._advice}")


def check_cells(path: Path, keys: int, objects: int, values: int) -> None:
    """Raises DataError for a table of objects that hardly share their keys."""
    if keys * objects > max(CELLS, EMPTY * values):
        raise DataError(f"{path}: {keys} different keys in {objects} objects; give every object the same keys")


def content(path: Path) -> bytes:
    """The bytes of a file, of a pipe until its writer ends, or of a terminal. Raises OSError and DataError."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode):
            if found.st_size > read_files.memory():
                raise DataError(f"{path} has {found.st_size:,} bytes, more than this machine has memory: split it")
            return file.read()
        ends = found.st_rdev == Path(os.devnull).stat().st_rdev or file.isatty()
        if stat.S_ISCHR(found.st_mode) and not ends:
            raise DataError(f"{path} is a device, which may have no end; give a file or a pipe")
        blocks, size = list[bytes](), 0
        while block := file.read(_BLOCK):
            blocks.append(block)
            size += len(block)
            if size > STREAM:
                raise DataError(f"{path} gives more than {STREAM:,} bytes, the limit of a pipe; give a file")
        return b"".join(blocks)
