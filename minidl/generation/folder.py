"""The folder of pictures: new ones are made in a folder inside it, and then take the place of the old ones.

images.json says what made the pictures, and names their files with the SHA-256 of each: a folder without it is never
overwritten, and no other file is touched. That of the new pictures lies beside them once all are made: a command that
is stopped from then on has begun an exchange, which the next one finishes.
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
_STAGED = ".new-pictures"  # in the folder, until all of them are made
_MARK, _MARKED = "begun.json", {"format": "minidl-images-begun"}  # in that folder: it is minidl's
_SHARED = re.compile(r"plan\.json|made-[0-9]+\.txt|grid\.rows")  # of `sharing`
_NAME = re.compile(r"((seed|step|latent)-[0-9]+|grid)\.(png|jpg|webp|bmp)|images\.(npy|zip)")


def check(folder: Path, overwrite: bool) -> set[str]:
    """The files that an earlier command made in a folder. Raises ConfigError when pictures must not be written there:
    told before the work."""
    check_length(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {folder} is a file: give the name of a folder")
        if not folder.exists() or _begun(folder) is not None or all(map(_is_begun, folder.iterdir())):
            return set()
    except OSError as error:
        raise ConfigError(cannot_write(folder, error)) from None
    if not overwrite:
        raise ConfigError(
            f"--out {folder} exists and is not empty: choose another folder, or replace the pictures in it with "
            "--overwrite"
        )
    if _manifest(folder) is None:
        raise ConfigError(f"--overwrite replaces only what `minidl generate` made; {folder} has no intact {MANIFEST}")
    return _written(folder)


def staged_in(folder: Path) -> Path:
    """Where the new pictures of a folder are made."""
    return folder / _STAGED


def finish(folder: Path, manifest: dict[str, Any]) -> bool:
    """Finish the exchange that a stopped command has begun; whether its pictures are those of `manifest`.

    Raises ConfigError where another process writes there, or a file of the user's is in the way; OSError.
    """
    if _begun(folder) is None:
        return False
    with folder_lock.lock(folder), write_files.pin_folder(folder):
        new = _begun(folder)
        if new is not None:
            _exchange(folder, new)
    return new is not None and _without_sums(new) == _without_sums(manifest)


@contextmanager
def replaced(folder: Path, overwrite: bool, manifest: dict[str, Any], kept: bool | None = None) -> Iterator[Path]:
    """A folder for the files that `manifest` names: they are in `folder`, in the place of the old ones, when the block
    has ended. Where it does not end, all is as it was.

    The folder is empty. Where `kept` is given it stays when the block does not end; if it is True, so does what an
    earlier block has left there.

    Raises ConfigError where another process writes there, or where a new file has the name of one that no earlier
    command made; OSError.
    """
    with write_files.folder_for(folder), folder_lock.lock(folder), write_files.pin_folder(folder):
        _check_free(folder, _listed(manifest), check(folder, overwrite))
        staged = folder / _STAGED
        if staged.is_symlink() or not _is_begun(staged):
            raise ConfigError(
                f"{staged} was not written by minidl, which needs this name: move it, or choose another --out"
            )
        if not kept:
            _discard(staged)
        files.sweep(folder)
        try:
            files.make_folder(staged)
            files.write_json(staged / _MARK, _MARKED)
            yield staged
            new = _with_sums(manifest, staged)
            files.write_json(staged / MANIFEST, new)
            _exchange(folder, new)
        finally:
            if kept is None and _begun(folder) is None:
                _discard(staged)


def _is_begun(path: Path) -> bool:
    """Whether a process that only began has left this, or one that is at work holds it."""
    if path.name == _STAGED and not path.is_symlink():
        begun = _read(path / _MARK) == _MARKED
        return (
            begun or not path.exists() or (path.is_dir() and all(write_files.is_part(x.name) for x in path.iterdir()))
        )
    return path.name == folder_lock.INSIDE or write_files.is_part(path.name)


def _begun(folder: Path) -> dict[str, Any] | None:
    """What images.json is to be, where a stopped command has begun an exchange."""
    staged = folder / _STAGED
    return None if staged.is_symlink() or _read(staged / _MARK) != _MARKED else _manifest(staged)


def _read(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except (OSError, DamagedError):
        return {}


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The content of an images.json, None where there is no intact one."""
    found = _read(folder / MANIFEST)
    return found if found.get("format") == FORMAT and isinstance(found.get("files"), list) else None


def _exchange(folder: Path, new: dict[str, Any]) -> None:
    """Put the pictures that were made, which `new` lists, in the place of the old ones. It may be stopped anywhere."""
    staged, old = folder / _STAGED, _written(folder)
    names = [name for name in _listed(new) if _NAME.fullmatch(name)]
    left = {path.name for path in staged.iterdir()}
    _check_free(folder, [name for name in names if name in left], old)
    with write_files.open_folder(staged) as source, write_files.open_folder(folder) as target:
        for name in names:
            if name in left:
                os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)  # 20,000 take 0.2 s
        for name in sorted(old.difference(names)):
            write_files.remove(folder / name)
        os.replace(MANIFEST, MANIFEST, src_dir_fd=source, dst_dir_fd=target)
    files.flush_folder(folder)
    _discard(staged)


def _check_free(folder: Path, names: Iterable[str], old: Container[str]) -> None:
    """Raises ConfigError for new files whose names others than the `old` ones have."""
    there = {path.name for path in folder.iterdir()}
    for name in names:
        if name in there and name not in old:
            raise ConfigError(
                f"--out {folder} has a {name} that is not the one that {MANIFEST} lists: move it, or give another "
                "folder"
            )


def _discard(staged: Path) -> None:
    """Delete what was made in the inner folder, and then its mark."""
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
    """The files in a folder that an earlier command made: images.json lists them with their SHA-256.

    An earlier version listed no sums; of its pictures those are known that name minidl.
    """
    found = set()
    for entry in _entries(_manifest(folder) or {"files": []}):
        name, expected = entry["file"], entry.get("sha256")
        path = folder / name
        # No others, whatever images.json says: nothing outside of the folder, and nothing of the user's.
        if _NAME.fullmatch(name) and path.is_file() and not path.is_symlink():
            known = provenance.is_of_run(path) if expected is None else files.sha256(path) == expected
            found |= {name} if known else set()
    return found


def _entries(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What images.json says of each file."""
    entries = [*manifest["files"], manifest.get("grid")]
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("file"), str)]


def _listed(manifest: dict[str, Any]) -> list[str]:
    """The files that images.json names."""
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
