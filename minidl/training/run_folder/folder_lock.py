"""One writer at a time in a folder: a lock of the operating system, which ends with the process that holds it.

The lock is on the file `.NAME.lock` beside the folder NAME, as a run that is replaced is renamed; on `.lock` in the
folder where nothing can be made beside it. The file says who holds the lock and is deleted with it; one that a killed
process left is not locked, and the next writer takes it. A file that says anything else is the user's, and stays.
Readers need no lock.
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
    """Hold the lock of a folder, which need not exist if the one above it does.

    Raises ConfigError when another process, or another thread of this one, holds it; OSError when no file can be made.
    Without effect on a file system that has no locks.
    """
    try:
        opened = _opened(folder)
    except KeyboardInterrupt:
        # The file may have been made.
        with contextlib.suppress(OSError, ConfigError), lock(folder):
            pass
        raise
    try:
        yield
    finally:
        if opened is not None:
            path, handle = opened
            try:
                with contextlib.suppress(OSError):
                    if _is_at(path, handle):
                        path.unlink()  # before the lock ends: later it may be another's
            finally:
                os.close(handle)


def check_free(folder: Path) -> None:
    """Raises ConfigError when another process writes to a folder: told before the work."""
    with contextlib.suppress(OSError), lock(folder):
        pass


def _opened(folder: Path) -> tuple[Path, int] | None:
    """The lock file and its handle, locked; None where there are no locks."""
    while True:
        path, handle = _open(Path(os.path.realpath(folder)))
        try:
            _check_own(path, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held it before may have deleted it in between; then this lock keeps nobody out.
            if not _is_at(path, handle):
                os.close(handle)
                continue
            with contextlib.suppress(OSError):  # on a full disk it is not said who holds it
                os.ftruncate(handle, 0)
                os.pwrite(handle, _about_this().encode(), 0)
        except BlockingIOError:
            holder = os.pread(handle, 4096, 0)
            os.close(handle)
            raise ConfigError(
                f"{folder} is being written by {_described(holder)}; wait until it ends, or choose another folder"
            ) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in _NO_LOCKS:
                raise
            path.unlink(missing_ok=True)
            return None
        except (KeyboardInterrupt, ConfigError):
            os.close(handle)
            raise
        return path, handle


def _check_own(path: Path, handle: int) -> None:
    """Raises ConfigError for a file of the user's at the name of a lock, also where it has other names."""
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1 or not _BEGIN.startswith(os.pread(handle, len(_BEGIN), 0)):
        raise ConfigError(_NOT_OURS.format(path))


def _open(folder: Path) -> tuple[Path, int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    path = folder.with_name(f".{folder.name}.lock") if folder.name else folder / INSIDE
    try:
        return path, read_files.handle(path, flags)
    except OSError as error:
        _check_file(path, folder)
        if error.errno not in _NOT_WRITABLE or not folder.is_dir():
            raise
    path = folder / INSIDE
    try:
        return path, read_files.handle(path, flags)
    except OSError:
        _check_file(path, folder)
        raise


def _check_file(path: Path, folder: Path) -> None:
    """Raises ConfigError for a lock that is no file."""
    kind = "a link" if path.is_symlink() else "a folder" if path.is_dir() else None
    if kind is None and path.exists() and not path.is_file():
        raise ConfigError(_NOT_OURS.format(path))
    if kind is not None:
        raise ConfigError(f"{path}, the lock of {folder}, is {kind}, expected a file; delete it, then try again")


def _is_at(path: Path, handle: int) -> bool:
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(handle)
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)


def _about_this() -> str:
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


def _described(holder: bytes) -> str:
    try:
        about = json.loads(holder)
        return f"process {about['process']} on {about['host']} since {about['since']} ({about['command']})"
    except (ValueError, KeyError, TypeError):  # not yet written
        return "another process"
