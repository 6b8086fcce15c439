"""Sample pictures of a generator: a grid from fixed noise after each epoch, and their animation."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minidl.common import read_files
from minidl.training.run_folder import files
from minidl.training.run_folder.provenance import SOFTWARE

if TYPE_CHECKING:
    from minidl.models import Generator
    from minidl.tensors import Tensor

SIDE = 8  # pictures in a row and in a column
_GRID_SIDE = 480  # pixels, approximately; larger grids are not enlarged
_FRAME_MS, _LAST_MS = 150, 2000


def path(run: Path, epoch: int) -> Path:
    """Return the path of an epoch's grid."""
    return run / "samples" / f"epoch-{epoch:03d}.png"


def draw(model: Generator, z: Tensor) -> np.ndarray:
    """Return the pixels uint8 [N, H, W, C] of latents [N, latent]."""
    from minidl.autograd import no_grad  # commands read this file before they choose a device

    with no_grad():
        pictures = model(z)
    values = pictures.data.cpu().permute(0, 2, 3, 1).numpy().astype(np.float64)
    return np.clip(np.rint((values + 1.0) * 127.5), 0, 255).astype(np.uint8)


def grid(pixels: np.ndarray, columns: int = SIDE, gap: int = 1) -> np.ndarray:
    """Return uint8 [H', W', C], a grid of pictures [N, H, W, C] separated by grey lines, enlarged if it is small."""
    count, height, width, channels = pixels.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 96, dtype=np.uint8)
    for index, picture in enumerate(pixels):
        top, left = index // columns * (height + gap) + gap, index % columns * (width + gap) + gap
        sheet[top : top + height, left : left + width] = picture
    factor = max(1, round(_GRID_SIDE / max(sheet.shape[:2])))
    return sheet.repeat(factor, axis=0).repeat(factor, axis=1)


def write_grid(path: Path, pixels: np.ndarray) -> None:
    """Write a `grid` as PNG."""
    from PIL import Image, PngImagePlugin

    sheet = grid(pixels)
    content, metadata = io.BytesIO(), PngImagePlugin.PngInfo()
    metadata.add_text("Software", SOFTWARE)
    picture = Image.fromarray(sheet[:, :, 0] if sheet.shape[2] == 1 else sheet)
    picture.save(content, "PNG", optimize=True, pnginfo=metadata)
    files.make_folder(path.parent)
    files.write_bytes(path, content.getvalue())


def write_film(run: Path, epochs: int) -> None:
    """Write training.gif: the grids of all epochs, the last one longer. Missing and damaged grids are skipped."""
    from PIL import Image

    frames = []
    for epoch in range(1, epochs + 1):
        # A missing or damaged grid must not fail the run; Pillow raises SyntaxError for a broken PNG.
        with (
            contextlib.suppress(OSError, SyntaxError),
            read_files.opened(path(run, epoch)) as file,
            Image.open(file) as opened,
        ):
            frames.append(opened.convert("P" if opened.mode == "L" else "RGB"))
    if not frames:
        return
    content = io.BytesIO()
    options = {"duration": [_FRAME_MS] * (len(frames) - 1) + [_LAST_MS], "loop": 0, "comment": SOFTWARE}
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:], **options)
    files.write_bytes(run / "training.gif", content.getvalue())
