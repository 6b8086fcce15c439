"""Splits decided by a hash of the content: the same on every machine, whatever the order of the rows.

Rows with the same key (the same text) are always in the same part, so no training text is in the test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from minidl.data.parsing import listed, shorten
from minidl.data.records import DataError

TRAIN, VALIDATION, TEST = 0, 1, 2
_NAMES = {VALIDATION: "validation", TEST: "test"}
_Part = TypeVar("_Part")


@dataclass(frozen=True)
class Splitter:
    """Makes the validation and the test split: each is a share of the data, or all of another file or folder.

    Raises DataError unless the shares are positive and leave something for training.
    """

    validation: float | str | Path
    test: float | str | Path
    seed: int = 0

    def __post_init__(self) -> None:
        shares = self.shares
        if not (all(0 < share < 1 for share in shares.values()) and sum(shares.values()) < 1):
            given = " and ".join(f"the {_NAMES[side]} share {share}" for side, share in shares.items())
            raise DataError(f"{given} must lie between 0 and 1 and add up to less than 1")

    @property
    def shares(self) -> dict[int, float]:
        """The splits that are taken from the data."""
        return {side: part for side, part in self._parts.items() if not isinstance(part, str | Path)}

    @property
    def files(self) -> dict[int, Path]:
        """The splits that are files or folders of their own."""
        return {side: Path(part) for side, part in self._parts.items() if isinstance(part, str | Path)}

    @property
    def _parts(self) -> dict[int, float | str | Path]:
        return {VALIDATION: self.validation, TEST: self.test}

    def split(
        self,
        path: str | Path,
        by: str,
        keys: Sequence[str],
        classes: Sequence[int],
        taken: Callable[[list[int]], _Part],
        read: Callable[[Path], tuple[_Part, Sequence[str]]],
    ) -> tuple[list[_Part], dict[str, Any]]:
        """Training, validation and test split, and for the report how they were made and their leakage.

        `path` has the examples with these `keys`, what `by` names, and `classes`. `taken` makes a split of the examples
        with some indices, `read` one of a file, with its keys.
        """
        shares = self.shares
        sides = stratified_split(keys, classes, shares.get(VALIDATION, 0.0), shares.get(TEST, 0.0), self.seed)
        parts = [taken([i for i, its in enumerate(sides) if its == side]) for side in (TRAIN, VALIDATION, TEST)]
        every = [(str(path), keys)]
        for side, file in self.files.items():
            parts[side], its_keys = read(file)
            every.append((str(file), its_keys))
        about = [f"{_NAMES[side]} from {file}" for side, file in self.files.items()]
        if shares:
            taken_shares = ", ".join(f"{share:.0%} {_NAMES[side]}" for side, share in shares.items())
            about.append(f"by class and hash of the {by}, seed {self.seed}: {taken_shares}")
        return parts, {"split": "; ".join(about), **({"leakage": leakage(every)} if self.files else {})}


def leakage(files: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """How many of a file's examples are also in another, for each pair of (name, keys of the examples)."""
    return [
        {"file": file, "also_in": other, "examples": sum(map(set(others).__contains__, keys)), "of": len(keys)}
        for place, (file, keys) in enumerate(files)
        for other, others in files[:place]
    ]


def check_labels(file: Path, found: Iterable[str], labels: Sequence[str], path: str | Path) -> None:
    """Raises DataError when a validation or test file has labels that are not among those of the training file."""
    unknown = sorted(set(found).difference(labels))
    if unknown:
        raise DataError(
            f"{file} has labels that {path} lacks, so that no model can learn them: {listed(unknown)}; add examples of "
            f"them to {path}, or remove them from {file}"
        )


def check_classes(path: str | Path, labels: Sequence[str], column: str) -> None:
    """Raises DataError when there is nothing to tell apart."""
    if len(labels) < 2:
        raise DataError(
            f"{path} has one class only ({shorten(labels[0])} in column {column!r}): "
            "a classifier needs rows of at least two classes"
        )


def content_hash(key: str, seed: int = 0) -> int:
    """The first 64 bits of the SHA-256 of the seed and the key."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{key}".encode()).digest()[:8], "big")


def split_by_hash(keys: Sequence[str], validation: float, test: float) -> list[int]:
    """TRAIN, VALIDATION or TEST for each key by its hash alone: adding or removing others does not move it."""
    sides = []
    for key in keys:
        place = content_hash(key) / 2**64
        sides.append(TEST if place < test else VALIDATION if place < test + validation else TRAIN)
    return sides


def stratified_split(
    keys: Sequence[str], classes: Sequence[int], validation: float, test: float, seed: int = 0
) -> list[int]:
    """TRAIN, VALIDATION or TEST for each row, the same shares of distinct keys from every class.

    A class with one distinct key is all in training; with two, it has none in validation; with three or more, each
    wanted part gets at least one, and training always does. A key with several classes counts as the class of the
    smallest index.
    """
    class_of: dict[str, int] = {}
    for key, cls in zip(keys, classes, strict=True):
        class_of[key] = min(cls, class_of.get(key, cls))
    members: dict[int, list[str]] = {}
    for key, cls in class_of.items():
        members.setdefault(cls, []).append(key)
    side_of: dict[str, int] = {}
    for group in members.values():
        group.sort(key=lambda key: (content_hash(key, seed), key))
        count_test = max(1, round(len(group) * test)) if test > 0 and len(group) >= 2 else 0
        least = 3 if test > 0 else 2
        count_validation = max(1, round(len(group) * validation)) if validation > 0 and len(group) >= least else 0
        count_test = min(count_test, len(group) - 2 if validation > 0 and len(group) >= least else len(group) - 1)
        count_validation = min(count_validation, len(group) - 1 - count_test)
        for position, key in enumerate(group):
            if position < count_test:
                side_of[key] = TEST
            elif position < count_test + count_validation:
                side_of[key] = VALIDATION
            else:
                side_of[key] = TRAIN
    return [side_of[key] for key in keys]
