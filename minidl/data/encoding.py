"""Encode pictures as PNG, JPEG, WebP and BMP. Workers import this module, so it does not import numpy.

PNG and BMP are exact. JPEG has quality 95 without chroma subsampling: the average error of a pixel is 1 or 2 of 256
levels. WebP has quality 95 with chroma subsampling: the error is 3 to 6, and below 1 for grey pictures.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from minidl.common import write_files
from minidl.data.workers import Message

QUALITY = 95
LONGEST = {"jpg": 65_500, "webp": 16_383}  # pixels in a row or column, for formats with a limit
_SOFTWARE, _DESCRIPTION = 0x0131, 0x010E  # of EXIF


def encoded(pixels: Any, shape: tuple[int, int, int], kind: str, text: Mapping[str, str]) -> bytes:
    """Return the file of one picture, a buffer of uint8 [height, width, channels]; `kind` is its suffix.

    `text` is its metadata: text chunks of a PNG, JSON in the description of a JPEG and a WebP. A BMP has none.
    """
    height, width, channels = shape
    image = Image.frombytes("L" if channels == 1 else "RGB", (width, height), pixels)
    content = io.BytesIO()
    if kind == "png":
        # Pillow's default compression level: a lower one saves a third of the time for large pictures, but their files
        # are an eighth larger; see benchmarks/notes.md.
        info = PngImagePlugin.PngInfo()
        for name, value in text.items():
            info.add_text(name, value)
        image.save(content, "PNG", pnginfo=info)
    elif kind == "jpg":
        image.save(content, "JPEG", quality=QUALITY, subsampling=0, exif=_exif(text))
    elif kind == "webp":
        image.save(content, "WEBP", quality=QUALITY, exif=_exif(text))
    else:
        image.save(content, "BMP")
    return content.getvalue()


def encode(request: Message) -> Message:
    """Return the names and files of pictures uint8 [n, height, width, channels]. A worker's job.

    The metadata of a picture are the `text` of all pictures and an entry of `texts`.
    """
    values = request.values
    height, width, channels = values["shape"]
    size, pixels = height * width * channels, memoryview(request.buffers[0]).cast("B")
    kind, shared = values["kind"], values["text"]
    contents = [
        encoded(pixels[i * size : (i + 1) * size], (height, width, channels), kind, {**shared, **text})
        for i, text in enumerate(values["texts"])
    ]
    return Message({"names": values["names"]}, contents)


def write(request: Message) -> Message:
    """Write the files of `encode` to disk, in a `folder` with this `identity`, and return their `sums`. A worker's job.

    No other process may read the folder meanwhile. Raises OSError.
    """
    values, contents = encode(request)
    folder = Path(request.values["folder"])
    with write_files.pin_folder(folder, request.values["identity"]):
        write_files.write_new(folder, dict(zip(values["names"], contents, strict=True)))
    return Message({**values, "sums": [*map(write_files.brief_sum, contents)]})


def _exif(text: Mapping[str, str]) -> Image.Exif:
    exif = Image.Exif()
    exif[_SOFTWARE] = text.get("Software", "")
    exif[_DESCRIPTION] = json.dumps(text)
    return exif
