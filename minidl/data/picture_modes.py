"""Pixels of any kind as eight bits a channel, without transparency.

numpy is imported where it is needed: most workers decode without it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

_STRIP = 256  # rows: a picture of the most pixels would take gigabytes at once


def check_png(content: bytes) -> None:
    """Raises ValueError if a chunk does not match its checksum: Pillow does not check those of the pixels."""
    place = 8
    while place + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, place)
        kind = content[place + 4 : place + 8]
        end = place + 8 + length
        if end + 4 > len(content):
            break  # truncated after the pixels; Pillow itself reports truncated pixels
        if struct.unpack_from(">I", content, end)[0] != zlib.crc32(content[place + 4 : end]):
            raise ValueError(f"its {kind.decode('latin-1')} chunk does not match its checksum")
        if kind == b"IEND":
            return
        place = end + 4


def plain_picture(image: Image.Image) -> Image.Image:
    """The picture with eight bits a channel, and laid over black where it is transparent.

    Raises ValueError for numbers of which it is not known what is white.
    """
    from PIL import Image

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.mode == "LAB":  # which Pillow does not make grey
        return image.convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        laid = Image.new("RGB", image.size)
        for top in range(0, image.height, _STRIP):
            strip = image.crop((0, top, image.width, min(top + _STRIP, image.height))).convert("RGBA")
            ground = Image.new("RGBA", strip.size, (0, 0, 0, 255))
            laid.paste(Image.alpha_composite(ground, strip).convert("RGB"), (0, top))
        return laid
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """The upper 8 of 16 bits, as Pillow does for colour: its own conversion of grey clips at 255. Floats from 0 to 1
    times 255, others from 0 to 255 rounded."""
    import numpy as np
    from PIL import Image

    floats = image.mode == "F"
    low = min(float(strip.min()) for _, strip in _strips(image))
    high = max(float(strip.max()) for _, strip in _strips(image))
    between = f"its values lie between {low:g} and {high:g}"
    if floats and not (low >= 0 and high <= 255):  # also where one is NaN
        raise ValueError(f"{between}, and floats must lie between 0 and 1, or 0 and 255: scale them")
    if not floats and not (low >= 0 and high < 2**16):
        raise ValueError(f"{between}, and whole numbers must lie between 0 and 65535: scale them")
    if image.mode == "I" and image.format == "TIFF" and 0 < high < 2**8:  # they would be black
        raise ValueError(f"{between}, in 32 bits, of which 65535 is white: save it with 8 bits")
    grey = np.empty((image.height, image.width), dtype=np.uint8)
    for top, strip in _strips(image):
        grey[top : top + _STRIP] = np.rint(strip * (255.0 if high <= 1 else 1.0)) if floats else strip // 256.0
    return Image.fromarray(grey)


def _strips(image: Image.Image) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of a picture of one channel as float64, each time with the number of the first."""
    import numpy as np

    for top in range(0, image.height, _STRIP):
        rows = image.crop((0, top, image.width, min(top + _STRIP, image.height)))
        yield top, np.asarray(rows, dtype=np.float64)
