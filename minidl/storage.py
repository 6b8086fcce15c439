"""Files written whole or not at all, and the checksum that tensor files carry: the one way by which minidl writes.

A file is written to a temporary sibling, flushed to the disk and renamed over its final name, and then the folder is
flushed: a reader finds the old content or the new, whenever the machine stops. A write that fails leaves the old
content and no temporary file; a process that is killed may leave one, whose name begins with a point and ends in
`.part`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import torch

PART = ".part"
CHECKSUM = "sha256"  # in the metadata of a tensor file
# What file systems answer that cannot flush a folder, and systems that do not let one be opened.
_NO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.ENOSYS}


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which stands at `path` when the block has ended without an exception.

    Raises OSError naming `path`; the old content is then still there, or the new one where only the folder could not be
    flushed.
    """
    # A part of the name: the whole of a long one would be too long with what is added. It is chosen before anything is
    # made, so that there is no moment at which a signal leaves a file that nobody knows of.
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}{PART}")
    try:
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            _discard(temporary)
            raise
        _flush_folder(path.parent)
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path`. Raises as `whole`."""
    with whole(path) as file:
        file.write(content)


def checksum(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> str:
    """SHA-256 of tensors on the CPU, with their names, dtypes and shapes, and of the texts in `about`."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for name in sorted(about or {}):
        digest.update(f"{name} {len((about or {})[name])}\n{(about or {})[name]}\n".encode())
    return digest.hexdigest()


def tensor_bytes(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> tuple[bytes, str]:
    """A safetensors file with `about` as its metadata, and the checksum that it carries."""
    from safetensors.torch import save

    on_cpu = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    found = checksum(on_cpu, about)
    return save(on_cpu, metadata={**(about or {}), CHECKSUM: found}), found


def _discard(temporary: Path) -> None:
    """Delete what was begun; the error that led here is what is to be told."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def _flush_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut; file systems that cannot do it are left as they are."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise OSError(error.errno, error.strerror) from error
