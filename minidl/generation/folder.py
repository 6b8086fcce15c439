"""The folder of pictures: new pictures are made in a folder inside it, and then replace the old ones.

images.json describes the pictures, and lists their files with the SHA-256 of each: a folder without it is never
overwritten, and other files are not touched. The inner folder gets its images.json once all new pictures are complete:
if the command is stopped from then on, the next command finishes the replacement.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minidl.common import write_files
from minidl.errors import ConfigError, DamagedError
from minidl.training.run_folder import files, folder_lock, provenance
from minidl.training.run_folder.outputs import cannot_write, check_length

MANIFEST = "images.json"
FORMAT, VERSION = "minidl-images", 1
_STAGED = ".new-pictures"  # the inner folder
_MARK, _MARKED = "begun.json", {"format": "minidl-images-begun"}  # in the inner folder: minidl created it
_SHARED = re.compile(r"plan\.json|made-[0-9]+\.txt|grid\.rows")  # of `sharing`
_NAME = re.compile(r"((seed|step|latent)-[0-9]+|grid)\.(png|jpg|webp|bmp)|images\.(npy|zip)")


def check(folder: Path, overwrite: bool) -> bool:
    """Return whether a folder has pictures of an earlier command. Raises ConfigError, before the work, if pictures must
    not be written to it."""
    check_length(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {folder} is a file: give the name of a folder")
        if not folder.exists() or _pending(folder) is not None or all(map(_is_leftover, folder.iterdir())):
            return False
    except OSError as error:
        raise ConfigError(cannot_write(folder, error)) from None
    if not overwrite:
        raise ConfigError(
            f"--out {folder} exists and is not empty: choose another folder, or replace the pictures in it with "
            "--overwrite"
        )
    if _manifest(folder) is None:
        raise ConfigError(f"--overwrite replaces only what `minidl generate` made; {folder} has no intact {MANIFEST}")
    return True


def staged_in(folder: Path) -> Path:
    """Return the inner folder, in which the new pictures are made."""
    return folder / _STAGED


def finish(folder: Path, manifest: dict[str, Any]) -> bool:
    """Finish the replacement that a stopped command has begun, and return whether its pictures match `manifest`.

    Raises ConfigError if another process writes to the folder or a user's file has the name of a picture, and OSError.
    """
    if _pending(folder) is None:
        return False
    with folder_lock.lock(folder), write_files.pin_folder(folder):
        new = _pending(folder)
        if new is not None:
            _replace(folder, new)
    return new is not None and _without_sums(new) == _without_sums(manifest)


@contextmanager
def replaced(folder: Path, overwrite: bool, manifest: dict[str, Any], resumed: bool | None = None) -> Iterator[Path]:
    """A context with an inner folder for the files of `manifest`, which replace the old files of `folder` at its end.
    If an exception is raised, `folder` is unchanged.

    The inner folder is empty, and deleted after an exception. With `resumed` False it is not deleted, and with True it
    also has the files of an earlier context.

    Raises ConfigError if another process writes to the folder, or a new file has the name of a file that no earlier
    command made, and OSError.
    """
    with write_files.folder_for(folder), folder_lock.lock(folder), write_files.pin_folder(folder):
        _check_free(folder, _listed(manifest), _written(folder) if check(folder, overwrite) else ())
        staged = folder / _STAGED
        if staged.is_symlink() or not _is_leftover(staged):
            raise ConfigError(
                f"{staged} was not written by minidl, which needs this name: move it, or choose another --out"
            )
        if not resumed:
            _discard(staged)
        files.sweep(folder)
        try:
            files.make_folder(staged)
            files.write_json(staged / _MARK, _MARKED)
            yield staged
            new = _with_sums(manifest, staged)
            files.write_json(staged / MANIFEST, new)
            _replace(folder, new)
        finally:
            if resumed is None and _pending(folder) is None:
                _discard(staged)


def _is_leftover(path: Path) -> bool:
    """Return whether a running or stopped command may have created this before the first picture."""
    if path.name == _STAGED and not path.is_symlink():
        marked = _read(path / _MARK) == _MARKED
        return (
            marked or not path.exists() or (path.is_dir() and all(write_files.is_part(x.name) for x in path.iterdir()))
        )
    return path.name == folder_lock.INSIDE or write_files.is_part(path.name)


def _pending(folder: Path) -> dict[str, Any] | None:
    """Return the new images.json if a stopped command has begun the replacement, else None."""
    staged = folder / _STAGED
    return None if staged.is_symlink() or _read(staged / _MARK) != _MARKED else _manifest(staged)


def _read(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except (OSError, DamagedError):
        return {}


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the content of images.json, None if it is missing or damaged."""
    manifest = _read(folder / MANIFEST)
    return manifest if manifest.get("format") == FORMAT and isinstance(manifest.get("files"), list) else None


def _replace(folder: Path, new: dict[str, Any]) -> None:
    """Replace the old pictures by the pictures that `new` lists. It may be stopped anywhere and repeated."""
    staged, old = folder / _STAGED, _written(folder)
    names = [name for name in _listed(new) if _NAME.fullmatch(name)]
    remaining = {path.name for path in staged.iterdir()}
    _check_free(folder, [name for name in names if name in remaining], old)
    with write_files.open_folder(staged) as source, write_files.open_folder(folder) as target:
        for name in names:
            if name in remaining:
                os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)  # 20,000 take 0.2 s
        for name in sorted(old.difference(names)):
            write_files.remove(folder / name)
        os.replace(MANIFEST, MANIFEST, src_dir_fd=source, dst_dir_fd=target)
    files.flush_folder(folder)
    _discard(staged)


def _check_free(folder: Path, names: Iterable[str], old: Container[str]) -> None:
    """Raise ConfigError for a new file whose name a file other than the `old` ones has."""
    existing = {path.name for path in folder.iterdir()}
    for name in names:
        if name in existing and name not in old:
            raise ConfigError(
                f"--out {folder} has a {name} that is not the one that {MANIFEST} lists: move it, or give another "
                "folder"
            )


def _discard(staged: Path) -> None:
    """Delete minidl's files in the inner folder, and then the folder."""
    if staged.is_symlink():
        return
    if _read(staged / _MARK) == _MARKED:
        for name in [path.name for path in staged.iterdir()]:
            if name == MANIFEST or any(form.fullmatch(name) for form in (_NAME, _SHARED)):
                write_files.remove(staged / name)
        write_files.remove(staged / _MARK)
    files.sweep(staged)
    with contextlib.suppress(OSError):
        staged.rmdir()


def _written(folder: Path) -> set[str]:
    """Return the files of an earlier command in a folder, unchanged since: images.json lists them with their SHA-256.

    An earlier version listed no SHA-256; its pictures are recognized by metadata that names minidl.
    """
    written = set()
    for entry in _entries(_manifest(folder) or {"files": []}):
        name, expected = entry["file"], entry.get("sha256")
        path = folder / name
        # images.json may be edited: it must not name files outside the folder or files of the user.
        if _NAME.fullmatch(name) and path.is_file() and not path.is_symlink():
            is_ours = provenance.is_of_run(path) if expected is None else files.sha256(path) == expected
            written |= {name} if is_ours else set()
    return written


def _entries(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of files."""
    entries = [*manifest["files"], manifest.get("grid")]
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("file"), str)]


def _listed(manifest: dict[str, Any]) -> list[str]:
    """Return the files that images.json lists."""
    return [entry["file"] for entry in _entries(manifest)]


def _with_sums(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    new = copy.deepcopy(manifest)
    for entry in _entries(new):
        entry["sha256"] = files.sha256(folder / entry["file"])
    return new


def _without_sums(manifest: dict[str, Any]) -> dict[str, Any]:
    same = copy.deepcopy(manifest)
    for entry in _entries(same):
        entry.pop("sha256", None)
    return same
