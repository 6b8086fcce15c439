"""Check output files before the work begins, and discard standard output."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from minidl.data.parsing import shorten
from minidl.errors import ConfigError
from minidl.training.run_folder.provenance import Kind

LONGEST = 240  # bytes of a folder's name: the names of its lock and of the run that it replaces are longer


def check_output(name: str, path: Path, kind: Kind) -> None:
    """Raise ConfigError if the file that a flag names cannot be written.

    Links, devices and pipes are refused as well: writing would replace them, even /dev/null. So are files that minidl
    did not write as an output of the same kind: data, scripts, pictures, and files of a run.
    """
    try:
        is_folder, has_folder, is_other = path.is_dir(), path.parent.is_dir(), path.exists() and not path.is_file()
    except OSError as error:
        raise ConfigError(f"{name} cannot be created: {error.strerror}; give another name") from None
    if is_folder:
        raise ConfigError(f"{name} {path} is a folder: give the name of a file")
    if path.is_symlink():
        raise ConfigError(f"{name} {path} is a link: give the name of the file, {os.path.realpath(path)}")
    if is_other:
        raise ConfigError(f"{name} {path} is a device or a pipe: give the name of a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{name} {path} cannot be written; make it writable, or give another file")
    if not has_folder:
        raise ConfigError(f"{name} {path}: {path.parent} is not a folder; create it, or give a file in another folder")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{name} {path}: {path.parent} cannot be written; give a file in another folder")
    try:
        replaces = not path.exists() or kind.has(path)
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; give another name") from None
    if not replaces:
        raise ConfigError(f"{name} {path} exists and was not written by {name}: delete it, or choose another name")


def cannot_write(folder: Path, error: OSError) -> str:
    """Return the error message for a folder given by --out that cannot be written."""
    return f"--out {folder} cannot be written: {error.strerror or error}; choose another folder or free some space"


def run_folder(path: Path) -> Path:
    """Return the folder of a run, for a link its target. Raises ConfigError for a path with no name or a long one."""
    if path.name in ("", ".."):
        raise ConfigError(f"--out is {str(path)!r}, expected the name of a folder, such as runs/first")
    check_length(path)
    return Path(os.path.realpath(path)) if os.path.islink(path) else path  # noqa: PTH114 (raises nothing)


def check_length(path: Path) -> None:
    """Raise ConfigError for a folder whose name is too long for the name of its lock."""
    length = len(os.fsencode(path.name))
    if length > LONGEST:
        raise ConfigError(f"--out is a name of {length} bytes, expected at most {LONGEST}; give a shorter one")


def check_different(**paths: Path | str | None) -> None:
    """Raise ConfigError when two flags, passed without dashes, name the same file, or one has no valid name."""
    flags: dict[str, str] = {}
    for name, path in paths.items():
        if path is not None:
            try:
                real = os.path.realpath(path)
            except ValueError:  # a zero character, or half of a surrogate pair
                raise ConfigError(f"--{name} is {shorten(str(path))}, not a valid file name; give another") from None
            other = flags.setdefault(real, name)
            if other != name:
                raise ConfigError(f"--{other} and --{name} name the same file, {path}: give two names")


def discard_output() -> None:
    """Redirect standard output, with its buffer, to /dev/null: Python would try to write it again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
