"""Images as files: PNG and BMP, one each or in a grid, and NumPy arrays; every file is written whole or not at all."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from minidl import storage
from minidl.training import files, samples


def pixels(images: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, C] of images [N, C, H, W] from -1 (black) to 1, rounded to the nearest of 256 levels."""
    levels = np.rint((images.astype(np.float32).transpose(0, 2, 3, 1) + np.float32(1)) * np.float32(127.5))
    return np.clip(levels, 0, 255).astype(np.uint8)


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
    """Write uint8 [H, W, C] as PNG, with `text` as its text metadata, or as BMP (which has none), by the suffix."""
    from PIL import Image, PngImagePlugin

    image = Image.fromarray(picture[:, :, 0] if picture.shape[-1] == 1 else picture)
    content = io.BytesIO()
    if path.suffix == ".png":
        info = PngImagePlugin.PngInfo()
        for name, value in text.items():
            info.add_text(name, value)
        image.save(content, format="PNG", pnginfo=info)
    else:
        image.save(content, format="BMP")
    files.write_bytes(path, content.getvalue())


@contextmanager
def array_file(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[Callable[[np.ndarray], object]]:
    """Writes the next rows of a .npy file of float arrays [N, ...]; it appears under its name when it is whole.

    Raises OSError naming it.
    """
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with storage.whole(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        yield lambda part: file.write(np.ascontiguousarray(part).tobytes())


def sha256(path: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
