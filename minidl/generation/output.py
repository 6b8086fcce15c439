"""Pictures as files, one each, in a grid or in an archive, and NumPy arrays."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minidl.common import read_files, write_files
from minidl.data import encoding
from minidl.data.threads import in_slices
from minidl.training.report import samples
from minidl.training.run_folder import files

Save = Callable[[Iterable[str], Iterable[bytes]], None]  # names and contents of files


def pixels(images: np.ndarray) -> np.ndarray:
    """Return uint8 [N, H, W, C] of images [N, C, H, W] from -1 (black) to 1, rounded to the nearest of 256 levels."""
    levels = np.rint((images.astype(np.float32).transpose(0, 2, 3, 1) + np.float32(1)) * np.float32(127.5))
    return np.clip(levels, 0, 255).astype(np.uint8, order="C")


def grid(pictures: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return uint8 [H', W', C]: pictures [N, H, W, C] row by row with grey lines in between, black in empty cells;
    small pictures are enlarged by an integer factor.

    Raises ValueError for more pictures than cells.
    """
    missing = rows * columns - len(pictures)
    if missing < 0:
        raise ValueError(f"{len(pictures)} pictures do not fit into a grid of {rows} x {columns}")
    return samples.grid(np.concatenate([pictures, np.zeros((missing, *pictures.shape[1:]), np.uint8)]), columns)


def write_picture(path: Path, picture: np.ndarray, text: Mapping[str, str]) -> None:
    """Write uint8 [H, W, C] in the format of the suffix, with `text` as its metadata (see `encoding.encoded`)."""
    height, width, channels = picture.shape
    files.write_bytes(path, encoding.encoded(picture.tobytes(), (height, width, channels), path.suffix[1:], text))


@contextmanager
def into_archive(path: Path) -> Iterator[Save]:
    """A context with a function that adds files to a .zip file, uncompressed and without times: the same files give the
    same archive. It appears under its name when it is complete. Raises OSError with the path."""
    with write_files.atomic(path) as file, zipfile.ZipFile(file, "w") as archive:

        def save(names: Iterable[str], contents: Iterable[bytes]) -> None:
            for name, content in zip(names, contents, strict=True):
                member = zipfile.ZipInfo(name)
                member.external_attr = 0o644 << 16
                archive.writestr(member, content)

        yield save


def array_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Return the header of a .npy file."""
    file = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


@contextmanager
def array_file(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[Callable[[np.ndarray], object]]:
    """A context with a function that writes the next rows [n, ...] of a .npy file of floats, which appears under its
    name when it is complete. Raises OSError with the path."""
    with write_files.atomic(path) as file:
        file.write(array_header(shape, dtype))
        file.flush()
        row_bytes, end = math.prod(shape[1:]) * dtype.itemsize, file.tell()

        def write(part: np.ndarray) -> None:
            nonlocal end
            in_slices(lambda first, rows: _write_at(file.fileno(), end + first * row_bytes, rows), part)
            end += len(part) * row_bytes

        yield write


class RowFile(NamedTuple):
    """A file of a header and `total` rows of `row_bytes` bytes, into which several processes write."""

    path: Path
    header: bytes
    row_bytes: int
    total: int

    def offset(self, row: int) -> int:
        """Return the byte at which a row begins."""
        return len(self.header) + row * self.row_bytes

    def create(self) -> None:
        """Create the file, with zeros in all rows. Raises OSError."""
        with write_files.atomic(self.path) as file:
            file.write(self.header)
            file.truncate(self.offset(self.total))

    def checksums(self, numbers: np.ndarray) -> list[str]:
        """Return the checksums of the rows with these numbers, "" for all without a file that has this header."""
        try:
            with read_files.opened(self.path) as file:
                if file.read(len(self.header)) != self.header:
                    return [""] * len(numbers)
                checksums = []
                for i in numbers.tolist():
                    file.seek(self.offset(i))
                    checksums.append(write_files.brief_sum(file.read(self.row_bytes)))
                return checksums
        except FileNotFoundError:
            return [""] * len(numbers)

    def write(self, numbers: np.ndarray, rows: np.ndarray) -> list[str]:
        """Write rows [n, ...] with ascending numbers [n] to disk, and return their checksums. Raises OSError."""
        # Synchronously: otherwise an NFS client may write complete pages, with outdated rows of other hosts in them.
        handle = write_files.handle_of(self.path, os.O_WRONLY | os.O_DSYNC)
        try:
            for start, stop in runs(numbers):
                first = int(np.searchsorted(numbers, start))
                _write_at(handle, self.offset(start), rows[first : first + stop - start])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(handle)
        return [write_files.brief_sum(np.ascontiguousarray(row)) for row in rows]


def runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Return numbers in order as ranges (first, end)."""
    if len(numbers) == 0:
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts, lasts = numbers[np.concatenate([[0], breaks])], numbers[np.concatenate([breaks - 1, [len(numbers) - 1]])]
    return [(first, last + 1) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def _write_at(handle: int, offset: int, rows: np.ndarray) -> None:
    """Write an array's values, in C order, to an open file from this byte on. Raises OSError."""
    data = memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written
