"""Cache the decoded pictures of folders on disk: `minidl train images --cache`.

There is one entry for each folder, size and number of channels: a line with the SHA-256 of the rest and the length of
the JSON, the JSON, and the pixels. An entry is valid while the path, the size and the modification time of every file
and Pillow's version stay the same; otherwise all pictures are decoded again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidl.common import read_files, write_files
from minidl.data.download import cache_folder
from minidl.data.records import DataError

MAX_BYTES = 2**33  # of all entries
_VERSION = 1  # of the entries, and of the code that decodes files
_HEAD = 64 + 1 + 12 + 1  # bytes of the first line

Pixels = tuple[np.ndarray, list[str]]  # what `pictures.read_keyed` returns


@dataclass(frozen=True)
class PictureCache:
    """The user's cache of pictures. `tell` receives a note: the pictures are cached, or the reason why not."""

    tell: Callable[[str], None]

    def read(
        self,
        paths: Sequence[Path],
        size: tuple[int, int] | None,
        channels: int | None,
        decode: Callable[[], Pixels],
    ) -> Pixels:
        """Return the pictures of class folders from the cache, or from `decode` and then store them.

        Only `decode` raises.
        """
        try:
            folder = cache_folder() / "pictures"
            root = Path(os.path.commonpath([path.parent for path in paths]))
            key = [_VERSION, str(root.resolve()), size, channels]
            # Computed before decoding: a file that changes during decoding invalidates the entry.
            stamp = _stamp(key, paths, root)
        except (DataError, OSError) as error:
            self.tell(f"note: pictures are not cached: {error}")
            return decode()
        path = folder / f"{_digest(key)[:32]}.pictures"
        pixels = self._load(path, stamp)
        if pixels is None:
            pixels = decode()
            self._store(path, stamp, *pixels)
        return pixels

    def _load(self, path: Path, stamp: str) -> Pixels | None:
        """Return the pictures of an entry; None if it does not exist or has another stamp."""
        try:
            with read_files.opened(path) as file:
                raw = np.fromfile(file, dtype=np.uint8)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.tell(f"note: {path} cannot be read ({error.strerror or error}): all pictures are decoded")
            return None
        try:
            checksum, length = raw[:_HEAD].tobytes().split()
            if hashlib.sha256(raw[_HEAD:].data).hexdigest().encode() != checksum:
                raise ValueError("its checksum does not match")
            end = _HEAD + int(length)
            header = json.loads(raw[_HEAD:end].tobytes())
            if header["stamp"] != stamp:
                return None
            return raw[end:].reshape(header["shape"]), header["keys"]
        except (ValueError, KeyError, TypeError):
            self.tell(f"note: {path} is damaged: all pictures are decoded, and it is rebuilt")
            return None

    def _store(self, path: Path, stamp: str, pixels: np.ndarray, keys: list[str]) -> None:
        folder, header = path.parent, json.dumps({"stamp": stamp, "shape": pixels.shape, "keys": keys}).encode()
        remove = f"to clear the cache: rm -r {shlex.quote(str(folder))}"
        digest = hashlib.sha256(header)
        digest.update(pixels.data)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.scandir(folder) as entries:
                others = sum(entry.stat().st_size for entry in entries if entry.name != path.name)
            if others + pixels.nbytes > MAX_BYTES:
                self.tell(
                    f"note: the decoded pictures are not cached: they take {pixels.nbytes:,} bytes, others {others:,}, "
                    f"and all may take {MAX_BYTES:,}; {remove}"
                )
                return
            with write_files.atomic(path) as file:
                file.write(f"{digest.hexdigest()} {len(header):012d}\n".encode() + header)
                file.write(pixels.data)
        except OSError as error:
            self.tell(
                f"note: the decoded pictures are not cached, as {path} cannot be written: {error.strerror or error}"
            )
            return
        self.tell(f"note: the decoded pictures are cached for the next run with --cache; {remove}")


def _stamp(key: list[object], paths: Sequence[Path], root: Path) -> str:
    """Return a digest of everything that determines the pixels. Raises OSError for a missing file."""
    import PIL

    stats = [(path.relative_to(root).parts, path.stat()) for path in paths]
    return _digest([*key, PIL.__version__, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]])


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
