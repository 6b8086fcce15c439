"""Decoded pictures of folders, kept on disk between runs: `minidl train images --cache`.

An entry is a file for each folder, size and number of channels: a line with the SHA-256 of what follows it and the
length of the JSON that comes next, and then the pixels. It is used while every file has the path, the size and the
modification time that it had, and Pillow the same version; otherwise all pictures are decoded again.
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
_VERSION = 1  # of entries, and of what makes pixels of a file
_HEAD = 64 + 1 + 12 + 1  # bytes of the first line

Pixels = tuple[np.ndarray, list[str]]  # what `pictures.read_keyed` returns


@dataclass(frozen=True)
class PictureCache:
    """The user's cache of pictures. `tell` gets a line about what was kept, or why nothing was."""

    tell: Callable[[str], None]

    def read(
        self,
        paths: Sequence[Path],
        size: tuple[int, int] | None,
        channels: int | None,
        decode: Callable[[], Pixels],
    ) -> Pixels:
        """Pictures of class folders in a folder as they were kept, or as `decode` returns them, which are then kept.

        Nothing but `decode` raises.
        """
        try:
            folder = cache_folder() / "pictures"
            root = Path(os.path.commonpath([path.parent for path in paths]))
            asked = [_VERSION, str(root.resolve()), size, channels]
            # Before decoding: a file that is changed meanwhile has another time afterwards.
            stamp = _stamp(asked, paths, root)
        except (DataError, OSError) as error:
            self.tell(f"note: pictures are not cached: {error}")
            return decode()
        path = folder / f"{_digest(asked)[:32]}.pictures"
        found = self._kept(path, stamp)
        if found is None:
            found = decode()
            self._keep(path, stamp, *found)
        return found

    def _kept(self, path: Path, stamp: str) -> Pixels | None:
        """What an entry holds; None if there is none for this stamp."""
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
            about = json.loads(raw[_HEAD:end].tobytes())
            if about["stamp"] != stamp:
                return None
            return raw[end:].reshape(about["shape"]), about["keys"]
        except (ValueError, KeyError, TypeError):
            self.tell(f"note: {path} is damaged: all pictures are decoded, and it is rebuilt")
            return None

    def _keep(self, path: Path, stamp: str, pixels: np.ndarray, keys: list[str]) -> None:
        folder, about = path.parent, json.dumps({"stamp": stamp, "shape": pixels.shape, "keys": keys}).encode()
        remove = f"to clear the cache: rm -r {shlex.quote(str(folder))}"
        digest = hashlib.sha256(about)
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
                file.write(f"{digest.hexdigest()} {len(about):012d}\n".encode() + about)
                file.write(pixels.data)
        except OSError as error:
            self.tell(
                f"note: the decoded pictures are not cached, as {path} cannot be written: {error.strerror or error}"
            )
            return
        self.tell(f"note: the decoded pictures are cached for the next run with --cache; {remove}")


def _stamp(asked: list[object], paths: Sequence[Path], root: Path) -> str:
    """A digest of all that pixels depend on. Raises OSError for a file that is not there."""
    import PIL

    stats = [(path.relative_to(root).parts, path.stat()) for path in paths]  # however the folder is named
    return _digest([*asked, PIL.__version__, [(name, found.st_size, found.st_mtime_ns) for name, found in stats]])


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
