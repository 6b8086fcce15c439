"""Read the files of minidl: runs, pictures, caches, plans, results and tile tables.

A path may lead to anything. Opening a pipe waits for its writer, a device such as /dev/zero never ends, and a sparse
file may have more bytes than the memory, so only regular files are read, up to a size that depends on their kind.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

DOCUMENT = 2**28  # bytes of JSON, text and plots
_VALUES = (".safetensors", ".pictures", ".npy", ".npz", ".zip", ".gz", ".rows")  # up to the size of the memory
_NO_FILE = "it is a pipe, a socket or a device: only a regular file is read"


def memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def handle(path: Path, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a regular file without blocking, and return its descriptor; `folder` may be its folder's descriptor. Raises
    OSError with the path."""
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path if folder is None else path.name, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a pipe without a reader
            raise
        raise OSError(errno.EINVAL, _NO_FILE, str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, _NO_FILE, str(path))


def opened(path: Path, most: int | None = None) -> BufferedReader:
    """Open a regular file of a limited size (default: by its kind) for reading. Raises OSError with the path."""
    file = os.fdopen(handle(path), "rb")
    if most is None:
        most = memory() if path.suffix.lower() in _VALUES else DOCUMENT
    size = os.fstat(file.fileno()).st_size
    if size > most:
        file.close()
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", str(path))
    return file


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the content of a file of `opened`. Raises OSError with the path."""
    with opened(path, most) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a file of `opened`. Raises OSError with the path, or UnicodeDecodeError."""
    return read_bytes(path).decode()
