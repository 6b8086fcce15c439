"""Read picture files with Pillow, within limits, and resize them to one size.

A picture is grey (one channel) or color (red, green, blue); transparency becomes black. Formats for which Pillow starts
another program are not read.

Functions import numpy themselves: workers decode without it, and its import is half of their start time.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from minidl.data.picture_folders import picture_files as picture_files
from minidl.data.picture_modes import check_png, plain_picture
from minidl.data.records import DataError
from minidl.data.threads import in_threads
from minidl.data.workers import Job, Message, Workers

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from minidl.data.picture_cache import PictureCache

MAX_PIXELS = 2**26  # of one file: 8192 x 8192; a small file can declare far more
MAX_LENGTH = 2**16  # of a side of one file: resizing takes 32 bytes per pixel of a side
MAX_SIDE = 1024  # of the inputs of a network
MAX_BYTES = 2**32  # of all pictures in memory
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
# Files in a part; larger parts if there are many files, because each part waits for Python's lock, which the import of
# torch holds: 20,000 files in 16 processes took 2.0 to 2.9 s in parts of 16, 1.7 to 2.3 s in parts of 78, and 1.7 s
# without the import.
_LEAST_FILES = 16
_MOST_FILES, _MOST_BYTES = 128, 2**24  # of a part: files, and their pixels
_PARTS = 16  # per worker, so that all workers finish at about the same time
_FEW = 240  # files, for which starting processes takes longer than it saves
_Result = TypeVar("_Result")


def read_pictures(
    paths: Sequence[Path], size: tuple[int, int] | None, channels: int | None, workers: Workers | None = None
) -> np.ndarray:
    """Return uint8 [N, H, W, C] of picture files.

    `size` is (height, width); None means the most common size, or the largest of equally common sizes. `channels` None
    means 1 if every pixel of every picture is grey, else 3. Raises DataError, naming the file, for a file that is not a
    picture, is truncated or has more than MAX_PIXELS pixels or MAX_LENGTH in a row or column, for a size above
    MAX_SIDE, and for more than MAX_BYTES in total.
    """
    return _read(paths, size, channels, workers, keyed=False)[0]


def read_keyed(
    paths: Sequence[Path],
    size: tuple[int, int] | None,
    channels: int | None,
    workers: Workers | None = None,
    cache: PictureCache | None = None,
) -> tuple[np.ndarray, list[str]]:
    """Return the result of `read_pictures`, from the cache if it has the pictures, and the SHA-256 of each picture's
    pixels: equal pictures have equal keys."""
    decode = partial(_read, paths, size, channels, workers, keyed=True)
    return decode() if cache is None else cache.read(paths, size, channels, decode)


def _read(
    paths: Sequence[Path], size: tuple[int, int] | None, channels: int | None, workers: Workers | None, *, keyed: bool
) -> tuple[np.ndarray, list[str]]:
    import numpy as np

    if size is None:
        counts: Counter[tuple[int, int]] = Counter()
        for message in _in_parts(_sizes, paths, {}, workers):
            counts.update(map(tuple, message.values["sizes"]))
        size = max(counts, key=lambda s: (counts[s], s[0] * s[1], s))
    height, width = size
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise DataError(
            f"the pictures are {height} x {width} pixels, a network takes sides from 1 to {MAX_SIDE}; give a --size"
        )
    depth = 3 if channels is None else channels
    picture_bytes = height * width * depth
    if (total := len(paths) * picture_bytes) > MAX_BYTES:
        raise DataError(
            f"{len(paths)} pictures of {height} x {width} are {total:,} bytes, above the limit of {MAX_BYTES:,}; give "
            "a smaller --size"
        )
    is_grey, keys, grey_keys = channels is None, list[str](), list[str]()
    # Workers write the pixels to the memory of the array, because the threads of this process would copy them one after
    # another.
    memory = os.memfd_create("minidl-pictures")
    try:
        os.truncate(memory, total)
        values = {
            "size": [height, width], "channels": depth, "grey": is_grey, "keyed": keyed, "bytes": picture_bytes,
            "into": [f"/proc/{os.getpid()}/fd/{memory}", os.fstat(memory).st_ino],
        }  # fmt: skip
        for message in _in_parts(_pixels, paths, values, workers, picture_bytes):
            for buffer in message.buffers:
                os.pwrite(memory, buffer, message.values["first"] * picture_bytes)
            keys += message.values["keys"]
            grey_keys += message.values["grey_keys"]
            is_grey = is_grey and message.values["grey"]
        mapping = mmap.mmap(memory, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) if total else b""
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC):
            raise
        raise MemoryError(f"{total:,} bytes of pictures: {error.strerror}") from None
    finally:
        os.close(memory)
    pixels = np.frombuffer(mapping, dtype=np.uint8).reshape(-1, height, width, depth)
    return (np.ascontiguousarray(pixels[:, :, :, :1]), grey_keys) if is_grey else (pixels, keys)


def _in_parts(
    job: Job, paths: Sequence[Path], values: dict[str, Any], workers: Workers | None, result_bytes: int = 1
) -> Iterator[Message]:
    """Return the results of a job for parts of the paths: from processes, or from threads if there are few paths."""
    names = [os.fspath(path) for path in paths]
    shared = workers is not None and workers.count > 1 and len(names) > _FEW
    count = workers.count if workers is not None and shared else 1
    most = max(_LEAST_FILES, min(_MOST_FILES, _MOST_BYTES // result_bytes))
    step = min(most, max(_LEAST_FILES, len(names) // (_PARTS * count)))
    parts = [
        Message({**values, "first": start, "paths": names[start : start + step]})
        for start in range(0, len(names), step)
    ]
    if workers is not None and shared:
        yield from workers.map(job, parts)
        return
    yield from in_threads(job, parts)


def _sizes(request: Message) -> Message:
    """Return the sizes of picture files. A worker's job."""
    return Message({"sizes": [picture_size(Path(name)) for name in request.values["paths"]]})


def _pixels(request: Message) -> Message:
    """Return the keys of picture files, and whether all of them are grey. A worker's job.

    It writes the pixels to the memory `into` (a path and its inode) or, if that fails, returns them as a buffer.
    """
    values = request.values
    is_grey, first, size = values["grey"], values["first"], tuple(values["size"])
    pictures, keys, grey_keys = list[bytes](), list[str](), list[str]()
    for name in values["paths"]:
        pixels = _pixels_of(Path(name), size, values["channels"])
        is_grey = is_grey and pixels[0::3] == pixels[1::3] == pixels[2::3]
        pictures.append(pixels)
        if values["keyed"]:
            keys.append(hashlib.sha256(pixels).hexdigest())
            grey_keys += [hashlib.sha256(pixels[::3]).hexdigest()] if is_grey else []
    content = b"".join(pictures)
    answer = {"first": first, "grey": is_grey, "keys": keys, "grey_keys": grey_keys}
    try:
        name, inode = values["into"]
        with Path(name).open("r+b") as file:
            # After an error the command closes the memory, and another file may reuse its descriptor.
            if os.fstat(file.fileno()).st_ino != inode:
                return Message(answer, [content])
            file.seek(first * values["bytes"])
            file.write(content)
    except OSError:
        return Message(answer, [content])
    return Message(answer)


def read_picture(path: Path, size: tuple[int, int], channels: int) -> np.ndarray:
    """Return uint8 [H, W, C] of a picture file, resized with antialiasing. Raises DataError as `read_pictures`."""
    import numpy as np

    return np.frombuffer(_pixels_of(path, size, channels), dtype=np.uint8).reshape(*size, channels)


def _pixels_of(path: Path, size: tuple[int, int], channels: int) -> bytes:
    """Return the values of `read_picture` as bytes."""
    from PIL import Image, ImageOps

    mode = "L" if channels == 1 else "RGB"

    def convert(image: Image.Image) -> bytes:
        ImageOps.exif_transpose(image, in_place=True)  # otherwise it copies upright pictures
        plain = plain_picture(image)
        if plain.mode != mode:
            plain = plain.convert(mode)
        if image.format == "PNG":
            check_png(path.read_bytes())
        height, width = size
        if plain.size != (width, height):
            plain = plain.resize((width, height), Image.Resampling.BICUBIC)
        return plain.tobytes()

    return _with_image(path, convert)


def picture_size(path: Path) -> tuple[int, int]:
    """Return (height, width) of a picture file as displayed, from its header. Raises DataError as `read_pictures`."""

    def size(image: Image.Image) -> tuple[int, int]:
        is_rotated = image.getexif().get(0x0112) in (5, 6, 7, 8)
        return (image.width, image.height) if is_rotated else (image.height, image.width)

    return _with_image(path, size)


def _with_image(path: Path, use: Callable[[Image.Image], _Result]) -> _Result:
    """Return the result of `use` for the open image. Every failure becomes a DataError that names the file."""
    from PIL import Image, UnidentifiedImageError

    try:
        if not path.is_file() and path.exists():  # a thread that waits for a pipe cannot be interrupted
            raise DataError(f"{path} is a folder, a device or a pipe; give the path of a picture")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(
                        f"{path} has {image.width} x {image.height} pixels, more than the limit of {MAX_PIXELS:,}; "
                        "shrink it or leave it out"
                    )
                if max(image.size) > MAX_LENGTH:
                    raise DataError(
                        f"{path} has {image.width} x {image.height} pixels, and a side may have {MAX_LENGTH:,}; "
                        "shrink it or leave it out"
                    )
                return use(image)
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{path} is not a picture of a known format ({', '.join(_FORMATS)}); leave it out") from None
    except MemoryError:
        raise DataError(f"{path} does not fit into free memory; shrink it or leave it out") from None
    except Image.DecompressionBombError:
        raise DataError(f"{path} has more than the limit of {MAX_PIXELS:,} pixels; shrink it or leave it out") from None
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the path of a picture") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error, zlib.error) as error:
        # The error that Pillow raises for a damaged file depends on the format.
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path} cannot be read as a picture: {why}; correct it or leave it out") from None
