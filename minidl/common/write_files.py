"""Write files atomically, tensor files with a checksum.

Content is written to a temporary file in the same folder, flushed to disk and renamed; then the folder is flushed.
After a crash at any time, a reader gets either the old content or the new. A failed write leaves the old content and no
temporary file; a killed process may leave one, see `is_part`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from minidl.common import read_files

if TYPE_CHECKING:
    import torch

PART = ".part"
CHECKSUM = "sha256"  # in the metadata of a tensor file
_GONE = "another folder, or a link, is in its place"
# Errors of file systems that cannot flush a folder, and of systems that cannot open one.
_NO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.ENOSYS}

Identity = tuple[int, int]  # device and inode of a folder
_pinned: dict[Path, Identity] = {}


@contextmanager
def pin_folder(folder: Path, expected: Sequence[int] | None = None) -> Iterator[Identity]:
    """A context in which writes into `folder` raise OSError if it is no longer the same folder (default: the present
    one, else the one with identity `expected`), or a subfolder has become a link."""
    outer = _pinned.pop(folder, None)
    with open_folder(folder) as handle:
        _pinned[folder] = (expected[0], expected[1]) if expected else identity(handle)
    try:
        yield _pinned[folder]
    finally:
        del _pinned[folder]
        if outer is not None:
            _pinned[folder] = outer


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """A context with a file descriptor of a folder. Raises OSError, also if the folder of `pin_folder` was replaced."""
    root = next((parent for parent in (folder, *folder.parents) if parent in _pinned), folder)
    handle = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        names = folder.relative_to(root).parts
        if root in _pinned and identity(handle) != _pinned[root]:
            raise OSError(errno.ESTALE, _GONE, str(root))
        for name in names:
            outer, handle = handle, os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=handle)
            os.close(outer)
            if not stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(errno.ESTALE, _GONE, str(folder))
        yield handle
    finally:
        os.close(handle)


def identity(handle: int) -> Identity:
    """Return the identity of an open folder."""
    status = os.fstat(handle)
    return status.st_dev, status.st_ino


def handle_of(path: Path, flags: int) -> int:
    """Open a file that is not a link in its folder; return its descriptor. Raises OSError with the path."""
    try:
        with open_folder(path.parent) as folder:
            return read_files.handle(path, flags | os.O_NOFOLLOW, folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def part(name: str) -> str:
    """Return the name of a temporary file: the beginning of `name`, a random number and a checksum."""
    start, number = f".{name[:40]}", secrets.token_hex(4)
    return f"{start}.{number}{_check(start, number)}{PART}"


def is_part(name: str) -> bool:
    """Return whether a name is from `part`; no other program uses such names."""
    start, _, number = name.removesuffix(PART).rpartition(".")
    return name.endswith(PART) and number[8:] == _check(start, number[:8])


def _check(start: str, number: str) -> str:
    return hashlib.sha256(f"minidl {start}.{number}".encode(errors="surrogateescape")).hexdigest()[:8]


def _new(folder: int, name: str) -> BinaryIO:
    return open(name, "xb", opener=partial(os.open, mode=0o666, dir_fd=folder))


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A context with a file to write to, which replaces `path` at its end unless an exception is raised.

    Raises OSError with `path`, which then has its old content, or the new one if only flushing the folder failed.
    """
    # Chosen before the file exists, so that a signal at any time leaves no unknown file.
    temporary = part(path.name)
    try:
        with open_folder(path.parent) as folder:
            try:
                with _new(folder, temporary) as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _discard(temporary, folder)
                raise
        flush_folder(path.parent)
    except OSError as error:
        if error.filename not in (None, temporary, str(path.parent)):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _discard(temporary: str, folder: int) -> None:
    with contextlib.suppress(OSError):  # the original error is reported
        os.unlink(temporary, dir_fd=folder)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`. Raises the errors of `atomic`."""
    with atomic(path) as file:
        file.write(content)


def write_new(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files with new names into a folder, and flush them to disk, but not the folder.

    Use it for a folder that is not read before all files are complete. All are open at the same time. Raises OSError.
    """
    with open_folder(folder) as handle, contextlib.ExitStack() as stack:
        files = [stack.enter_context(_new(handle, name)) for name in contents]
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
            file.flush()
            # Start writing, so that one journal commit covers all flushes: 64 files take 0.6 of the time.
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for file in files:
            os.fsync(file.fileno())


def make_folder(path: Path, parents: bool = False) -> None:
    """Create a folder, with `parents` also its parents, and flush it to disk, unless it exists.

    Raises OSError with the path.
    """
    if path.is_dir():
        return
    if parents:
        make_folder(path.parent, parents)
    with open_folder(path.parent) as handle:
        try:
            os.mkdir(path.name, dir_fd=handle)
        except OSError as error:
            if not path.is_dir():
                raise OSError(error.errno, error.strerror, str(path)) from None
    flush_folder(path.parent)


@contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """A context with a new folder `path` and its parents; those that are empty at its end are deleted."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_folder(path, parents=True)
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def remove(path: Path) -> None:
    """Delete a file if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), open_folder(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


def brief_sum(content: Any) -> str:
    """Return the first half of the SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()[:32]


def checksum(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> str:
    """Return the SHA-256 of tensors on the CPU, with their names, dtypes and shapes, and of `about`."""
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
    """Return the bytes of a safetensors file with `about` as metadata, and its checksum."""
    from safetensors.torch import save

    on_cpu = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    digest = checksum(on_cpu, about)
    metadata = {**(about or {}), CHECKSUM: digest}
    raw = memoryview(save(on_cpu, metadata=metadata))
    # safetensors orders metadata differently in each process; sort it, so that equal content has equal bytes.
    (length,) = struct.unpack("<Q", raw[:8])
    header = {**json.loads(bytes(raw[8 : 8 + length])), "__metadata__": dict(sorted(metadata.items()))}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, raw[8 + length :]]), digest


def read_tensors(source: Path | bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file, or of its content.

    Raises OSError, and ValueError for another format or a wrong checksum. (Files of older versions have none.)
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    try:
        if isinstance(source, bytes):
            tensors = dict(sorted(load(source).items()))
            header = json.loads(source[8 : 8 + int.from_bytes(source[:8], "little")])
            about = dict(header.get("__metadata__", {}))
        else:
            with (
                read_files.opened(source) as file,
                safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as opened,
            ):
                tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
                about = dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file ({error})") from None
    written = about.pop(CHECKSUM, None)
    if written is not None and written != checksum(tensors, about):
        raise ValueError("its content does not match its checksum")
    return tensors, about


def flush_folder(folder: Path) -> None:
    """Flush renames and new files of a folder to disk, if the file system supports it.

    Raises OSError with the folder.
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
