"""The folder of pictures: new ones are made in a folder inside it, and then take the place of the old ones.

images.json says what made the pictures and names their files: a folder without it is never overwritten, and no file
that it does not name is touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minidl import storage
from minidl.training import files, locks
from minidl.training.errors import ConfigError, DamagedError
from minidl.training.outputs import cannot_write, check_length

MANIFEST = "images.json"
FORMAT, VERSION = "minidl-images", 1
_STAGED = ".new-pictures"  # in the folder, until all of them are made
_BEGUN = re.compile(rf"\.{re.escape(MANIFEST)}\..*{re.escape(storage.PART)}")  # what a killed process left at its end
_SHARED = re.compile(r"plan\.json|made-[0-9]+\.txt|grid\.rows")  # of `sharing`
_NAME = re.compile(r"((seed|step|latent)-[0-9]+|grid)\.(png|jpg|webp|bmp)|images\.(npy|zip)")


def check(folder: Path, overwrite: bool) -> set[str]:
    """The files that an earlier command made in a folder. Raises ConfigError when pictures must not be written there:
    told before the work."""
    check_length(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {folder} is a file: give the name of a folder")
        if not folder.exists() or all(map(_is_begun, folder.iterdir())):
            return set()
    except OSError as error:
        raise ConfigError(cannot_write(folder, error)) from None
    if not overwrite:
        raise ConfigError(
            f"--out {folder} exists and is not empty: choose another folder, or replace the pictures in it with "
            "--overwrite"
        )
    return _written(folder)


def staged_in(folder: Path) -> Path:
    """Where the new pictures of a folder are made."""
    return folder / _STAGED


@contextmanager
def replaced(folder: Path, overwrite: bool, manifest: dict[str, Any], kept: bool | None = None) -> Iterator[Path]:
    """A folder for the files that `manifest` names: they are in `folder`, in the place of the old ones, when the block
    has ended. Where it does not end, all is as it was.

    The folder is empty. Where `kept` is given it stays when the block does not end; if it is True, so does what an
    earlier block has left there.

    Raises ConfigError where another process writes there, or where a new file has the name of one that no earlier
    command made; OSError.
    """
    with storage.folder_for(folder), locks.held(folder):
        old = check(folder, overwrite)
        for name in _listed(manifest):
            if name not in old and os.path.exists(f"{folder}/{name}"):  # noqa: PTH110 (10,000 paths take 0.05 s)
                raise ConfigError(
                    f"--out {folder} has a {name} that {MANIFEST} does not list: move it, or give another folder"
                )
        staged = folder / _STAGED
        if not kept:
            _discard(staged)
        for path in folder.iterdir():
            if _BEGUN.fullmatch(path.name):
                path.unlink(missing_ok=True)
        try:
            files.make_folder(staged, parents=True)
            yield staged
            _change_places(folder, staged, old, manifest)
            kept = None
        finally:
            if kept is None:
                _discard(staged)


def _is_begun(path: Path) -> bool:
    """Whether a process that only began has left this, or one that is at work holds it."""
    if path.name == _STAGED and path.is_dir() and not path.is_symlink():
        return all(_is_ours(inner.name) for inner in path.iterdir())
    return path.name == locks.INSIDE or _BEGUN.fullmatch(path.name) is not None


def _is_ours(name: str) -> bool:
    """Whether files of this name are made in the inner folder."""
    unfinished = name.startswith(".") and name.endswith(storage.PART)
    return unfinished or name == MANIFEST or any(form.fullmatch(name) for form in (_NAME, _SHARED))


def _change_places(folder: Path, staged: Path, old: set[str], manifest: dict[str, Any]) -> None:
    """Put the pictures in `staged`, which `manifest` names, in the place of the `old` ones in `folder`."""
    new = _listed(manifest)
    gone = [{"file": name} for name in sorted(old.difference(new))]
    if gone:
        files.write_json(staged / MANIFEST, manifest)
    # All are listed while they change places, so that a stopped command leaves nothing that the next cannot clear.
    files.write_json(folder / MANIFEST, {**manifest, "files": [*manifest["files"], *gone]})
    for name in new:
        os.replace(f"{staged}/{name}", f"{folder}/{name}")  # 20,000 paths take 0.2 s
    for entry in gone:
        (folder / entry["file"]).unlink(missing_ok=True)
    files.sweep(folder)
    if gone:
        os.replace(staged / MANIFEST, folder / MANIFEST)
    files.flush_folder(folder)


def _discard(staged: Path) -> None:
    files.remove_folder(staged, _is_ours)


def _written(folder: Path) -> set[str]:
    """The files that an earlier command made in a folder. Raises ConfigError when it has no images.json of minidl's."""
    refused = ConfigError(f"--overwrite replaces only what `minidl generate` made; {folder} has no intact {MANIFEST}")
    try:
        manifest = files.read_json(folder / MANIFEST)
    except (OSError, DamagedError):
        raise refused from None
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("files"), list):
        raise refused
    # No others, whatever the manifest says: nothing outside the folder, and nothing of the user's.
    return {name for name in _listed(manifest) if _NAME.fullmatch(name)}


def _listed(manifest: dict[str, Any]) -> list[str]:
    """The files that images.json names."""
    named = [entry.get("file") for entry in [*manifest["files"], manifest.get("grid")] if isinstance(entry, dict)]
    return [name for name in named if isinstance(name, str)]
