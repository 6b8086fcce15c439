"""Pictures that one process of each host decodes for all of its processes."""

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

_WHAT = "the decoding of pictures"
_EACH = 0.1  # seconds between two looks whether they are decoded


class OncePerHost:
    """Stands for a `PictureCache`, around the user's if there is one: the first process of each host of a group reads
    the pictures, and the others take them from its memory."""

    def __init__(self, group: Any, cache: PictureCache | None) -> None:
        self._group, self._cache = group, cache

    def read(
        self,
        paths: Sequence[Path],
        size: tuple[int, int] | None,
        channels: int | None,
        decode: Callable[[], Pixels],
    ) -> Pixels:
        """As `PictureCache.read`; every process must call it. Raises LostError when one is gone."""
        group, cache = self._group, self._cache
        # Processes of two containers may have one name of a host, and do not see each other.
        hosts = group.gathered(f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}", _WHAT)
        first, ended = hosts.index(hosts[group.rank]), threading.Event()

        def work() -> Pixels:
            try:
                return decode() if cache is None else cache.read(paths, size, channels, decode)
            finally:
                ended.set()

        wait = helpers.in_thread(work) if first == group.rank else None
        # It may take longer than processes wait for each other.
        while not all(group.gathered(wait is None or ended.is_set(), _WHAT)):
            time.sleep(_EACH)
        if wait is None:
            path, shape = group.gathered(None, _WHAT)[first]
            pixels, words = np.split(np.fromfile(path, np.uint8), [int(np.prod(shape))])
            group.gathered(None, _WHAT)
            return pixels.reshape(shape), words.tobytes().decode().split()
        pixels, keys = wait()
        with os.fdopen(os.memfd_create("minidl-pictures"), "wb") as memory:
            memory.write(np.ascontiguousarray(pixels).data)
            memory.write("\n".join(keys).encode())
            memory.flush()
            group.gathered([f"/proc/{os.getpid()}/fd/{memory.fileno()}", list(pixels.shape)], _WHAT)
            group.gathered(None, _WHAT)  # they have read
        return pixels, keys
