"""Convert pixels of any kind to eight bits per channel, without transparency.

Functions import numpy themselves: most workers decode without it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

_STRIP = 256  # rows: the largest pictures would take gigabytes


def check_png(content: bytes) -> None:
    """Raise ValueError if a chunk does not match its checksum; Pillow does not check chunks of pixels."""
    start = 8
    while start + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, start)
        kind = content[start + 4 : start + 8]
        end = start + 8 + length
        if end + 4 > len(content):
            break  # truncated after the pixels; Pillow itself reports truncated pixels
        if struct.unpack_from(">I", content, end)[0] != zlib.crc32(content[start + 4 : end]):
            raise ValueError(f"its {kind.decode('latin-1')} chunk does not match its checksum")
        if kind == b"IEND":
            return
        start = end + 4


def plain_picture(image: Image.Image) -> Image.Image:
    """Return the picture with eight bits per channel, composited over black if it is transparent.

    Raises ValueError for numbers whose white level is unknown.
    """
    from PIL import Image

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.mode == "LAB":  # Pillow cannot convert it to grey
        return image.convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        opaque = Image.new("RGB", image.size)
        for top in range(0, image.height, _STRIP):
            strip = image.crop((0, top, image.width, min(top + _STRIP, image.height))).convert("RGBA")
            black = Image.new("RGBA", strip.size, (0, 0, 0, 255))
            opaque.paste(Image.alpha_composite(black, strip).convert("RGB"), (0, top))
        return opaque
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return the upper 8 of 16 bits, as Pillow does for color: its conversion of grey clips at 255. Floats from 0 to 1
    times 255, others from 0 to 255 rounded."""
    import numpy as np
    from PIL import Image

    is_float = image.mode == "F"
    low = min(float(strip.min()) for _, strip in _strips(image))
    high = max(float(strip.max()) for _, strip in _strips(image))
    values = f"its values lie between {low:g} and {high:g}"
    if is_float and not (low >= 0 and high <= 255):  # including NaN
        raise ValueError(f"{values}, and floats must lie between 0 and 1, or 0 and 255: scale them")
    if not is_float and not (low >= 0 and high < 2**16):
        raise ValueError(f"{values}, and whole numbers must lie between 0 and 65535: scale them")
    if image.mode == "I" and image.format == "TIFF" and 0 < high < 2**8:  # would be black
        raise ValueError(f"{values}, in 32 bits, of which 65535 is white: save it with 8 bits")
    grey = np.empty((image.height, image.width), dtype=np.uint8)
    for top, strip in _strips(image):
        grey[top : top + _STRIP] = np.rint(strip * (255.0 if high <= 1 else 1.0)) if is_float else strip // 256.0
    return Image.fromarray(grey)


def _strips(image: Image.Image) -> Iterator[tuple[int, np.ndarray]]:
    """Return strips of rows of a picture of one channel: the number of the first row, and float64 rows."""
    import numpy as np

    for top in range(0, image.height, _STRIP):
        rows = image.crop((0, top, image.width, min(top + _STRIP, image.height)))
        yield top, np.asarray(rows, dtype=np.float64)
