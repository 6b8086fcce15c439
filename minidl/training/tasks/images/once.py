"""Decode pictures in one process of each host for all processes of the host."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minidl.data.picture_cache import PictureCache, Pixels
from minidl.training.process import helpers

_WORK = "the decoding of pictures"
_INTERVAL = 0.1  # seconds between two checks whether the pictures are decoded


class OncePerHost:
    """A wrapper of a `PictureCache` or of none: the first process of each host of a group reads the pictures, and the
    others copy them from its memory."""

    def __init__(self, group: Any, cache: PictureCache | None) -> None:
        self._group, self._cache = group, cache

    def read(
        self,
        paths: Sequence[Path],
        size: tuple[int, int] | None,
        channels: int | None,
        decode: Callable[[], Pixels],
    ) -> Pixels:
        """Read as `PictureCache.read` does; every process must call this. Raises LostError if a process has ended."""
        group, cache = self._group, self._cache
        # Two containers may share a host name, but not a process namespace.
        hosts = group.gathered(f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}", _WORK)
        first, ended = hosts.index(hosts[group.rank]), threading.Event()

        def work() -> Pixels:
            try:
                return decode() if cache is None else cache.read(paths, size, channels, decode)
            finally:
                ended.set()

        wait = helpers.in_thread(work) if first == group.rank else None
        # Exchanges in short intervals: decoding may take longer than the timeout of an exchange.
        while not all(group.gathered(wait is None or ended.is_set(), _WORK)):
            time.sleep(_INTERVAL)
        if wait is None:
            path, shape = group.gathered(None, _WORK)[first]
            pixels, words = np.split(np.fromfile(path, np.uint8), [int(np.prod(shape))])
            group.gathered(None, _WORK)
            return pixels.reshape(shape), words.tobytes().decode().split()
        pixels, keys = wait()
        with os.fdopen(os.memfd_create("minidl-pictures"), "wb") as memory:
            memory.write(np.ascontiguousarray(pixels).data)
            memory.write("\n".join(keys).encode())
            memory.flush()
            group.gathered([f"/proc/{os.getpid()}/fd/{memory.fileno()}", list(pixels.shape)], _WORK)
            group.gathered(None, _WORK)  # the others have read the memory
        return pixels, keys
