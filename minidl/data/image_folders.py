"""Read the user's labelled pictures: a folder with a folder per class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minidl.data import pictures
from minidl.data.images import dataset
from minidl.data.picture_cache import PictureCache
from minidl.data.picture_folders import class_folders, left_out
from minidl.data.records import Augment, DataError, ImageDataset, Images
from minidl.data.split import TEST, VALIDATION, Splitter, check_labels, digests
from minidl.data.workers import Workers

_USES = {VALIDATION: "validate", TEST: "test"}


def load_folder(
    folder: str | Path,
    *,
    size: tuple[int, int] | None = None,
    validation: float | str | Path = 0.1,
    test: float | str | Path = 0.2,
    split_seed: int = 0,
    workers: Workers | None = None,
    cache: PictureCache | None = None,
) -> ImageDataset:
    """Return the image classification task of a folder that contains a folder of pictures per class.

    Pictures are resized to `size` (height, width), by default the most common size of the files; they are grey if none
    has color. Equal pictures are in the same split. `validation` and `test` are shares of the folder, or other folders
    of the same structure. `cache` stores the decoded pictures. Raises DataError for a file that cannot be read, fewer
    than two classes, a class with fewer different pictures than splits, shares that leave nothing for training, and
    classes in another folder that this one lacks.
    """
    splitter = Splitter(validation, test, split_seed)
    root = Path(folder)
    skipped = Counter[str]()
    folders = list(class_folders(root, skipped))
    if len(folders) < 2:
        raise DataError(
            f"{root} holds {'one folder' if folders else 'no folder'} of pictures, expected one for each of at least "
            f"two classes: {root}/CLASS/PICTURE.png"
        )
    paths = [path for _, files in folders for path in files]
    labels = [name for name, _ in folders]
    targets = np.repeat(np.arange(len(folders)), [len(files) for _, files in folders])
    pixels, keys = pictures.read_keyed(paths, size, None, workers, cache)
    _check_classes(root, labels, keys, targets, ["learn from", *(_USES[side] for side in splitter.shares)])
    height, width, channels = pixels.shape[1:]
    notes = _notes(root, skipped)

    def select(rows: np.ndarray) -> Images:
        return Images(pixels[rows], targets[rows])

    def read(other: Path) -> tuple[Images, np.ndarray]:
        if not other.is_dir():
            raise DataError(f"{other} is not a folder; expected one with a folder of pictures per class")
        check_labels(other, (name for name, _ in class_folders(other, Counter())), labels, root)
        images, keys, other_notes = _read_labelled(other, labels, (height, width), channels, workers, cache)
        notes.extend(other_notes)
        return images, digests(keys, split_seed)

    parts, split = splitter.split(folder, "pixels", digests(keys, split_seed), targets, select, read)
    source = {"name": str(folder), "about": f"{len(pixels):,} pictures of {root}", **split, **_with_notes(notes)}
    augment = Augment(shift=min(height, width) // 16, replicate=True)
    return dataset(str(folder), labels, parts, augment, source)


def read_labelled_pictures(
    folder: str | Path, labels: Sequence[str], size: tuple[int, int], channels: int, workers: Workers | None = None
) -> tuple[Images, dict[str, Any]]:
    """Return the pictures of a folder of class folders whose names are among `labels`, for a trained model.

    Raises DataError for another class and for a file that cannot be read.
    """
    images, _, notes = _read_labelled(Path(folder), labels, size, channels, workers)
    return images, {"name": str(folder), **_with_notes(notes)}


def _read_labelled(
    root: Path,
    labels: Sequence[str],
    size: tuple[int, int],
    channels: int,
    workers: Workers | None,
    cache: PictureCache | None = None,
) -> tuple[Images, list[str], list[str]]:
    """Return the pictures of `read_labelled_pictures`, their keys, and notes."""
    index = {label: i for i, label in enumerate(labels)}
    skipped = Counter[str]()
    folders = list(class_folders(root, skipped))
    for name, _ in folders:
        if name not in index:
            classes = ", ".join(map(repr, list(labels)[:20]))
            raise DataError(f"{root / name}: class {name!r} is unknown to the model; its classes are: {classes}")
    if not folders:
        raise DataError(f"{root} contains no folder of pictures; expected {root}/CLASS/PICTURE.png")
    paths = [path for _, files in folders for path in files]
    targets = np.array([index[name] for name, files in folders for _ in files], dtype=np.int64)
    pixels, keys = pictures.read_keyed(paths, size, channels, workers, cache)
    return Images(pixels, targets), keys, _notes(root, skipped)


def _notes(root: Path, skipped: Counter[str]) -> list[str]:
    note = left_out(root, skipped)
    return [] if note is None else [note]


def _with_notes(notes: list[str]) -> dict[str, Any]:
    """Return the entry of a source with notes, if any."""
    return {"notes": notes} if notes else {}


def _check_classes(
    root: Path, names: Sequence[str], keys: Sequence[str], targets: np.ndarray, uses: Sequence[str]
) -> None:
    """Raise DataError for a class with fewer different pictures than uses."""
    class_keys: list[set[str]] = [set() for _ in names]
    for key, label in zip(keys, targets.tolist(), strict=True):
        class_keys[label].add(key)
    for name, distinct in zip(names, class_keys, strict=True):
        if len(distinct) < len(uses):
            count = "1 picture" if len(distinct) == 1 else f"{len(distinct)} different pictures"
            needed = " and one to ".join([", one to ".join(uses[:-1]), uses[-1]])
            raise DataError(
                f"{root / name} has {count}, expected at least {len(uses)}: one to {needed}; add some, or move the "
                "folder away"
            )
