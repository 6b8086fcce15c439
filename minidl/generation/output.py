"""Pictures as files, one each, in a grid or in an archive, and NumPy arrays."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from minidl.common import write_files
from minidl.data import encoding
from minidl.data.threads import in_slices
from minidl.training.report import samples
from minidl.training.run_folder import files

Save = Callable[[Iterable[str], Iterable[bytes]], None]  # names and contents of files


def pixels(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, C] of images [N, C, H, W] from -1 (black) to 1, rounded to the nearest of 256 levels."""
    levels = np.rint((images.astype(np.float32).transpose(0, 2, 3, 1) + np.float32(1)) * np.float32(127.5))
    return np.clip(levels, 0, 255).astype(np.uint8, order="C")


def grid(pictures: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """uint8 [H', W', C]: pictures [N, H, W, C] row by row with grey lines between, black where there is none; small
    ones are enlarged by a whole number.

    Raises ValueError for more pictures than places.
    """
    missing = rows * columns - len(pictures)
    if missing < 0:
        raise ValueError(f"{len(pictures)} pictures do not fit into a grid of {rows} x {columns}")
    return samples.grid(np.concatenate([pictures, np.zeros((missing, *pictures.shape[1:]), np.uint8)]), columns)


def write_picture(path: Path, picture: np.ndarray, text: Mapping[str, str]) -> None:
    """Write uint8 [H, W, C] as the suffix says, with `text` as its metadata (see `encoding.encoded`)."""
    height, width, channels = picture.shape
    files.write_bytes(path, encoding.encoded(picture.tobytes(), (height, width, channels), path.suffix[1:], text))


@contextmanager
def into_archive(path: Path) -> Iterator[Save]:
    """Writes files into a .zip file, not compressed and without times: the same files make the same archive. It appears
    under its name when it is whole. Raises OSError naming it."""
    with write_files.atomic(path) as file, zipfile.ZipFile(file, "w") as archive:

        def save(names: Iterable[str], contents: Iterable[bytes]) -> None:
            for name, content in zip(names, contents, strict=True):
                member = zipfile.ZipInfo(name)
                member.external_attr = 0o644 << 16
                archive.writestr(member, content)

        yield save


def array_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """The beginning of a .npy file."""
    file = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


@contextmanager
def array_file(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[Callable[[np.ndarray], object]]:
    """Writes the next rows of a .npy file of float arrays [N, ...]; it appears under its name when it is whole.

    Raises OSError naming it.
    """
    with write_files.atomic(path) as file:
        file.write(array_header(shape, dtype))
        file.flush()
        each, end = math.prod(shape[1:]) * dtype.itemsize, file.tell()

        def write(part: np.ndarray) -> None:
            nonlocal end
            in_slices(lambda first, rows: write_at(file.fileno(), end + first * each, rows), part)
            end += len(part) * each

        yield write


def write_at(handle: int, place: int, rows: np.ndarray) -> None:
    """Write an array's values, in C order, to an open file from byte `place` on. Raises OSError."""
    some = memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    while some:
        written = os.pwrite(handle, some, place)
        some, place = some[written:], place + written
