"""Output files, checked before the work begins, and standard output."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from minidl.data.parsing import shorten
from minidl.errors import ConfigError
from minidl.training.run_folder.provenance import Kind

LONGEST = 240  # bytes of the name of a folder: those of its lock and of a run that it replaces are longer


def check_output(name: str, path: Path, kind: Kind) -> None:
    """Raises ConfigError when the file that a flag names cannot be written, before the work and not after it.

    Links, devices and pipes are refused as well: writing would replace them, even /dev/null. So are files that minidl
    did not write as an output of the same kind: data, scripts, pictures, and what belongs to a run.
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
    """What to say when the folder named by --out cannot be written."""
    return f"--out {folder} cannot be written: {error.strerror or error}; choose another folder or free some space"


def run_folder(path: Path) -> Path:
    """The folder of a run; of a link, the folder that it names.

    Raises ConfigError for one without a name of its own, and for a name that is too long.
    """
    if path.name in ("", ".."):
        raise ConfigError(f"--out is {str(path)!r}, expected the name of a folder, such as runs/first")
    check_length(path)
    return Path(os.path.realpath(path)) if os.path.islink(path) else path  # noqa: PTH114 (raises nothing)


def check_length(path: Path) -> None:
    """Raises ConfigError for a folder whose name is so long that its lock has none."""
    length = len(os.fsencode(path.name))
    if length > LONGEST:
        raise ConfigError(f"--out is a name of {length} bytes, expected at most {LONGEST}; give a shorter one")


def check_different(**paths: Path | str | None) -> None:
    """Raises ConfigError when two flags, given without their dashes, name the same file, or no valid name."""
    names: dict[str, str] = {}
    for name, path in paths.items():
        if path is not None:
            try:
                real = os.path.realpath(path)
            except ValueError:  # a zero character, or half of a surrogate pair
                raise ConfigError(f"--{name} is {shorten(str(path))}, not a valid file name; give another") from None
            before = names.setdefault(real, name)
            if before != name:
                raise ConfigError(f"--{before} and --{name} name the same file, {path}: give two names")


def discard_output() -> None:
    """Send standard output nowhere, with what it has not yet written: Python would try again as it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
