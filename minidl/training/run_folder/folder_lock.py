"""A lock that admits one writer to a folder: an flock of the operating system, which ends with its process.

The lock is on the file `.NAME.lock` next to the folder NAME, as a run that is replaced is renamed; on `.lock` in the
folder if its parent cannot be written. The file names the process that holds the lock and is deleted with it; a killed
process leaves a file without a lock, which the next writer takes. A file with other content belongs to the user, and
stays. Readers need no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from minidl.common import read_files
from minidl.errors import ConfigError

INSIDE = ".lock"  # the name of a lock file in the folder itself
_BEGIN = b'{"process": '  # of a lock file
_NOT_OURS = "{} is not a lock file of minidl, which needs this name: move it, or choose another folder"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}  # of file systems without locks
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """A context that holds the lock of a folder, which need not exist if its parent does.

    Raises ConfigError when another process, or another thread of this one, holds it; OSError when no file can be made.
    Without effect on a file system that has no locks.
    """
    try:
        locked = _locked_file(folder)
    except KeyboardInterrupt:
        # The file may have been made.
        with contextlib.suppress(OSError, ConfigError), lock(folder):
            pass
        raise
    try:
        yield
    finally:
        if locked is not None:
            path, handle = locked
            try:
                with contextlib.suppress(OSError):
                    if _is_at(path, handle):
                        path.unlink()  # before the lock ends: later the file may belong to another process
            finally:
                os.close(handle)


def check_free(folder: Path) -> None:
    """Raise ConfigError when another process writes to a folder."""
    with contextlib.suppress(OSError), lock(folder):
        pass


def _locked_file(folder: Path) -> tuple[Path, int] | None:
    """Return the path and the descriptor of the locked file; None if the file system has no locks."""
    folder_path = Path(os.path.realpath(folder))
    while True:
        path, handle = _open(folder_path, not folder_path.name)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, handle)
            try:
                _check_own(path, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # If the previous holder has deleted the file in between, the lock on it keeps no process out.
                if _is_at(path, handle):
                    with contextlib.suppress(OSError):  # a full disk
                        os.ftruncate(handle, 0)
                        os.pwrite(handle, _describe_process().encode(), 0)
                    stack.pop_all()
                    return path, handle
            except BlockingIOError:
                holder = _describe_holder(os.pread(handle, 4096, 0))
                raise ConfigError(
                    f"{folder} is being written by {holder}; wait until it ends, or choose another folder"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                path.unlink(missing_ok=True)
                return None


def _check_own(path: Path, handle: int) -> None:
    """Raise ConfigError if an open file is not a lock file of minidl, or has other names."""
    status = os.fstat(handle)
    is_own = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    if not is_own or not _BEGIN.startswith(os.pread(handle, len(_BEGIN), 0)):
        raise ConfigError(_NOT_OURS.format(path))


def _open(folder: Path, inside: bool) -> tuple[Path, int]:
    path = folder / INSIDE if inside else folder.with_name(f".{folder.name}.lock")
    try:
        return path, read_files.handle(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else None
        if kind is not None:
            message = f"{path}, the lock of {folder}, is {kind}, expected a file; delete it, then try again"
            raise ConfigError(message) from error
        if path.exists() and not path.is_file():
            raise ConfigError(_NOT_OURS.format(path)) from error
        if inside or error.errno not in _NOT_WRITABLE or not folder.is_dir():
            raise
    return _open(folder, inside=True)


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _describe_process() -> str:
    program = Path(sys.argv[0]).name
    command = shlex.join(["minidl" if program == "__main__.py" else program, *sys.argv[1:]])  # of python -m minidl
    return json.dumps(
        {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": command if len(command) <= 200 else command[:200] + "...",
        }
    )


def _describe_holder(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['process']} on {holder['host']} since {holder['since']} ({holder['command']})"
    except (ValueError, KeyError, TypeError):  # not yet written
        return "another process"
