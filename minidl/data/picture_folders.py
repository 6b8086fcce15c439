"""Find the picture files in folders. Without numpy and Pillow."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from minidl.data.parsing import can_encode_utf8, listed
from minidl.data.records import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm")
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


def picture_files(folder: Path, skipped: Counter[str] | None = None) -> list[Path]:
    """Return the picture files in a folder and its subfolders, by suffix, in the order of torchvision's ImageFolder.

    Hidden files are ignored; `skipped` counts the other files by suffix. Linked folders are read, except links to a
    parent folder.
    """
    names_in: dict[str, list[str]] = {}
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(os.fspath(folder), frozenset())]
    while waiting:
        path, parents = waiting.pop()
        stat = Path(path).stat()
        if (stat.st_dev, stat.st_ino) in parents:
            continue
        path_parents = parents | {(stat.st_dev, stat.st_ino)}
        names_in[path] = []
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is(entry.is_dir):
                    waiting.append((entry.path, path_parents))
                elif entry.name.lower().endswith(SUFFIXES) and _is(entry.is_file):
                    names_in[path].append(entry.name)
                elif skipped is not None:
                    skipped[Path(entry.name).suffix.lower() or "without a suffix"] += 1
    return [Path(path, name) for path in sorted(names_in) for name in sorted(names_in[path])]


def pictures_in(folder: Path, skipped: Counter[str]) -> list[Path]:
    """Return the picture files directly in a folder or, if there are none, in its subfolders."""
    files = picture_files(folder, skipped)
    direct = [path for path in files if path.parent == folder]
    if direct and len(direct) < len(files):
        skipped["pictures in its folders"] += len(files) - len(direct)
    return direct or files


def class_folders(folder: Path, skipped: Counter[str]) -> Iterator[tuple[str, list[Path]]]:
    """Return the name and picture files of each subfolder, by name. `skipped` counts the other files by suffix.

    Raises DataError for a subfolder without pictures, for splits in place of classes, and for a name that is not UTF-8
    text, because labels are saved as text.
    """
    visible = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    classes = [path for path in visible if path.is_dir()]
    outside = len(visible) - len(classes)
    if outside:
        skipped["outside of its folders"] += outside
    direct = 0
    for path in classes:
        if not can_encode_utf8(path.name):
            raise DataError(f"{str(path)!r} is not UTF-8 text; rename the folder: its name is the label")
        files = picture_files(path, skipped)
        if not files:
            raise DataError(
                f"{path} contains no picture ({', '.join(SUFFIXES)}): put them into the folder of their class, or move "
                "the folder away"
            )
        direct += sum(file.parent == path for file in files)
        yield path.name, files
    names = [path.name for path in classes]
    if not direct and names and {name.lower() for name in names} <= _SPLITS:
        train = next((name for name in names if name.lower().startswith("train")), names[0])
        raise DataError(
            f"{folder} holds {listed(names)}, which are splits, not classes: use {folder / train} as "
            "--data, and the others as --validation and --test"
        )


def left_out(folder: str | Path, skipped: Counter[str]) -> str | None:
    """Return a note about the skipped files; None if there are none."""
    if not skipped:
        return None
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in skipped.most_common(8))
    return f"{folder}: left out: {kinds}{' and others' if len(skipped) > 8 else ''}"


def _is(kind: Callable[[], bool]) -> bool:
    """Return the result of `kind`; False for a link that leads to itself."""
    try:
        return kind()
    except OSError:
        return False
