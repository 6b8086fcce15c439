"""Pictures as the content of files: PNG, JPEG, WebP and BMP. Without numpy: workers load this.

PNG and BMP hold the pixels exactly. JPEG has quality 95 with every colour kept: on average a pixel is off by 1 or 2 of
256 levels. WebP has quality 95, with colours at half the size: off by 3 to 6, grey pictures by less than 1.
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
LONGEST = {"jpg": 65_500, "webp": 16_383}  # pixels in a row or column, where the format has a limit
_SOFTWARE, _DESCRIPTION = 0x0131, 0x010E  # of EXIF


def encoded(pixels: Any, shape: tuple[int, int, int], kind: str, text: Mapping[str, str]) -> bytes:
    """The file of one picture, a buffer of uint8 [height, width, channels]; `kind` is its suffix.

    `text` is its metadata: text chunks of a PNG, JSON in the description of a JPEG and a WebP. A BMP has none.
    """
    height, width, channels = shape
    image = Image.frombytes("L" if channels == 1 else "RGB", (width, height), pixels)
    content = io.BytesIO()
    if kind == "png":
        # Pillow's usual level of compression: a lower one saves a third of the time of large pictures, but their files
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


def encode(asked: Message) -> Message:
    """A worker's job: the files of pictures uint8 [n, height, width, channels], with the `text` of all and their own
    `texts`, and their names."""
    height, width, channels = asked.values["shape"]
    size, pixels = height * width * channels, memoryview(asked.buffers[0]).cast("B")
    kind, shared = asked.values["kind"], asked.values["text"]
    contents = [
        encoded(pixels[i * size : (i + 1) * size], (height, width, channels), kind, {**shared, **text})
        for i, text in enumerate(asked.values["texts"])
    ]
    return Message({"names": asked.values["names"]}, contents)


def write(asked: Message) -> Message:
    """A worker's job: write what `encode` makes into a `folder` of this `identity` that nobody reads yet; it is on disk
    then. The answer has the `sums` of the files.

    Raises OSError.
    """
    values, contents = encode(asked)
    folder = Path(asked.values["folder"])
    with write_files.pin_folder(folder, asked.values["identity"]):
        write_files.write_new(folder, dict(zip(values["names"], contents, strict=True)))
    return Message({**values, "sums": [*map(write_files.brief_sum, contents)]})


def _exif(text: Mapping[str, str]) -> Image.Exif:
    exif = Image.Exif()
    exif[_SOFTWARE] = text.get("Software", "")
    exif[_DESCRIPTION] = json.dumps(text)
    return exif
