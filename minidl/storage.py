"""How minidl writes files: each whole or not at all, tensor files with a checksum.

A file is written to a temporary file beside it, flushed to disk and renamed to its final name; then the folder is
flushed. Whenever the machine stops, a reader finds either the old content or the new. A failed write leaves the old
content and no temporary file; a killed process may leave one, whose name begins with a dot and ends in `.part`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from minidl import reading

if TYPE_CHECKING:
    import torch

PART = ".part"
CHECKSUM = "sha256"  # in the metadata of a tensor file
# The errors of file systems that cannot flush a folder, and of systems that cannot open one.
_NO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.ENOSYS}


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to; it appears at `path` when the block ends without an exception.

    Raises OSError naming `path`; the old content is then still there, or the new one if only flushing the folder
    failed.
    """
    # Part of the name, because a long one with the additions would be too long. Chosen before the file is made, so that
    # a signal at any moment leaves no unknown file.
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
        flush_folder(path.parent)
    except OSError as error:
        if error.filename not in (None, str(temporary), str(path.parent)):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path`. Raises as `whole`."""
    with whole(path) as file:
        file.write(content)


def write_new(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Put files into a folder under names that nothing has there, and flush them to disk, but not the folder.

    For a folder that nobody reads before all its files are whole. All are open at the same time. Raises OSError.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("xb")) for name in contents]
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
            file.flush()
            # Begins to write to the disk, so that one commit of the journal serves the flushes of all: 64 files are on
            # disk in 0.6 of the time.
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for file in files:
            os.fsync(file.fileno())


def make_folder(path: Path, parents: bool = False) -> None:
    """Make a folder, and with `parents` those above it, where there is none; it survives a power cut.

    Raises OSError naming it.
    """
    if path.is_dir():
        return
    if parents:
        make_folder(path.parent, parents)
    path.mkdir(exist_ok=True)
    flush_folder(path.parent)


@contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """A block that fills the folder `path`, which is made with those above it; of these the empty ones are deleted."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_folder(path, parents=True)
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def checksum(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> str:
    """SHA-256 of tensors on the CPU, with their names, dtypes and shapes, and of `about`."""
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
    metadata = {**(about or {}), CHECKSUM: found}
    raw = memoryview(save(on_cpu, metadata=metadata))
    # safetensors orders the metadata anew in each process: a file of the same content is to have the same bytes.
    (length,) = struct.unpack("<Q", raw[:8])
    header = {**json.loads(bytes(raw[8 : 8 + length])), "__metadata__": dict(sorted(metadata.items()))}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, raw[8 + length :]]), found


def read_tensors(source: Path | bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, or of its content.

    Raises OSError, and ValueError for any other file and for one that does not match its checksum, which files of older
    versions do not have.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    try:
        if isinstance(source, bytes):
            tensors = load(source)
            header = json.loads(source[8 : 8 + int.from_bytes(source[:8], "little")])
            about = dict(header.get("__metadata__", {}))
        else:
            with (
                reading.opened(source) as file,
                safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as opened,
            ):
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
                about = dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file ({error})") from None
    written = about.pop(CHECKSUM, None)
    if written is not None and written != checksum(tensors, about):
        raise ValueError("its content does not match its checksum")
    return tensors, about


def _discard(temporary: Path) -> None:
    """Delete an unfinished file, ignoring errors: the one that led here is reported."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def flush_folder(folder: Path) -> None:
    """Make renames and new files in this folder survive a power cut, where the file system can.

    Raises OSError naming the folder.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise OSError(error.errno, error.strerror, str(folder)) from error
