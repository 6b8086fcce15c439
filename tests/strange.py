"""What may be in the place of a file: things that a reader would wait for, or that have no end."""

import contextlib
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest


def socket_at(path):
    before = Path.cwd()  # a socket's name may have 107 bytes
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(before)


def sparse(path):
    path.touch()
    os.truncate(path, 2**43)


STRANGE = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
    "socket": socket_at,
    "sparse file": sparse,
}


def replace(path, kind):
    """Put something strange in the place of a file, or where none is yet."""
    path.unlink(missing_ok=True)
    STRANGE[kind](path)


def files_of(folder):
    """The names of all files in a folder and those in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def copy_with(folder, copy, name, kind):
    """A copy of a folder in which a file is replaced."""
    shutil.copytree(folder, copy)
    replace(copy / name, kind)
    return copy


@contextlib.contextmanager
def soon(seconds=20):
    """A block that must end in so many seconds, also where it waits in the system."""

    def fail(*_):
        pytest.fail("it waits without end")

    before = signal.signal(signal.SIGALRM, fail)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
