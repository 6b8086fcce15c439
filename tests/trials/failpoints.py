"""Faults before, within and after each step by which files are written, below one folder.

A step is an operation that changes the folder: open (for writing), write, fsync, rename, unlink, mkdir or rmdir. Each
gives three points: before it, in the middle of it (of a write, which then has taken half; else as before), and after.
"""

import builtins
import contextlib
import errno
import io
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

CODES = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS, "EACCES": errno.EACCES}
# What a full disk and full memory refuse: what is there may still be deleted and renamed.
TAKES_SPACE = ("open", "write", "fsync", "mkdir")
DEAD = 137


@dataclass(frozen=True)
class Fault:
    """`kind` is a name of CODES, "memory", "death" or "vanish"; `lasting` for one that meets every later step, too."""

    kind: str
    at: int  # number of the point
    lasting: bool = False


def strikes(kind, point):
    """Whether a fault of a kind does anything at a point, as "before write"."""
    when, step = point.split()
    if kind in ("ENOSPC", "memory"):
        return step in TAKES_SPACE
    # These are done or not done.
    return not (kind in CODES and when == "after" and step in ("rename", "unlink", "rmdir", "mkdir"))


def drawn(draw, kinds, points, lasting):
    """A fault of one of the kinds that strikes at one of the points; a lasting one with this probability."""
    kind = draw.choice(kinds)
    lasting = kind != "vanish" and draw.random() < lasting
    places = [
        at
        for at, point in enumerate(points)
        if strikes(kind, point) and not (lasting and kind != "death" and point.startswith("after"))
    ]
    return Fault(kind, draw.choice(places), lasting)


def _at(folder, path):
    """The path of what is named within a folder that is open."""
    return path if folder is None else f"{Path(f'/proc/self/fd/{folder}').readlink()}/{path}"


class Failpoints:
    """While entered, the steps below `folder` are counted, and `fault` strikes; `steps` names what each was."""

    def __init__(self, folder, fault=None):
        self.folder, self.fault = str(folder), fault
        self.points, self.struck = [], None
        self._lock = threading.RLock()

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._real_open = io.open
        for owner, name in ((io, "open"), (builtins, "open")):
            self._replace(owner, name, self._open)
        for name in ("rename", "replace", "unlink", "remove", "mkdir", "rmdir"):
            step = {"replace": "rename", "remove": "unlink"}.get(name, name)
            self._replace(os, name, self._wrapped(step, getattr(os, name)))
        self._replace(os, "fsync", self._fsync(os.fsync))
        return self

    def __exit__(self, *error):
        self._stack.close()

    def _replace(self, owner, name, value):
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _wrapped(self, step, real):
        def call(given, *args, **options):
            path = _at(options.get("dir_fd", options.get("src_dir_fd")), given)
            if not self._inside(path):
                return real(given, *args, **options)
            self.point(step, "before", path)
            result = real(given, *args, **options)
            self.point(step, "after", path)
            return result

        return call

    def _fsync(self, real):
        def fsync(handle):
            path = str(Path(f"/proc/self/fd/{handle}").readlink())
            if not self._inside(path):
                return real(handle)
            self.point("fsync", "before", path)
            result = real(handle)
            self.point("fsync", "after", path)
            return result

        return fsync

    def _open(self, given, mode="r", *args, **options):
        path = _at(getattr(options.get("opener"), "keywords", {}).get("dir_fd"), given)
        if not self._inside(path) or not set(mode) & set("wxa+"):
            return self._real_open(given, mode, *args, **options)
        self.point("open", "before", path)
        file = self._real_open(given, mode, *args, **options)
        try:
            self.point("open", "after", path)
        except BaseException:
            file.close()
            raise
        return _Watched(file, self, path)

    def _inside(self, path):
        return isinstance(path, str | os.PathLike) and str(Path(path).absolute()).startswith(self.folder)

    def point(self, step, when, path):
        """Count a point, and let the fault strike there."""
        with self._lock:
            number = len(self.points)
            self.points.append(f"{when} {step}")
            fault = self.fault
            if fault is None or number < fault.at or (number > fault.at and not fault.lasting):
                return
            if fault.lasting and fault.kind != "death" and when == "after":
                return
            if not strikes(fault.kind, self.points[-1]):
                return
            self.struck = self.struck or self.points[-1]
        if fault.kind == "death":
            os._exit(DEAD)
        if fault.kind == "vanish":
            shutil.rmtree(self.folder, ignore_errors=True)
        elif fault.kind == "memory":
            raise MemoryError
        else:
            code = CODES[fault.kind]
            raise OSError(code, os.strerror(code), str(path))


class _Watched:
    """A file whose writes are points."""

    def __init__(self, file, points, path):
        self._file, self._points, self._path = file, points, path

    def write(self, content):
        self._points.point("write", "before", self._path)
        half = len(content) // 2
        self._file.write(content[:half])
        self._file.flush()
        self._points.point("write", "amid", self._path)
        self._file.write(content[half:])
        self._file.flush()
        self._points.point("write", "after", self._path)
        return len(content)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)


class PowerCuts(Failpoints):
    """While entered, `lost` gets a sentence for each file that is deleted while an entry of a folder is not flushed.

    `unflushed` are the folders in which something was renamed or made since they were flushed. Of the files written,
    `storage` flushes the content.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self.unflushed, self.lost = set(), []

    def point(self, step, when, path):
        """Keep account of a step."""
        with self._lock:
            super().point(step, when, path)
            path = str(Path(path).absolute())
            if when == "after" and step in ("rename", "mkdir"):
                self.unflushed.add(str(Path(path).parent))
            elif when == "after" and step == "fsync":
                self.unflushed.discard(path)
            elif when == "before" and step == "unlink" and self.unflushed:
                self.lost.append(f"{path} is deleted before {sorted(self.unflushed)} are flushed")


def leftovers(folder):
    """Temporary files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob(".*.part"))
