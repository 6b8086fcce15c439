"""Splits decided by a hash of the content: the same on every machine, whatever the order of the rows.

Rows with the same key (the same text) are always in the same part, so no training text is in the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from minidl.data.digests import SIZE, content_digest, content_hash
from minidl.data.parsing import listed, shorten
from minidl.data.records import DataError
from minidl.data.threads import in_threads

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
        digests: np.ndarray,
        classes: np.ndarray,
        taken: Callable[[np.ndarray], _Part],
        read: Callable[[Path], tuple[_Part, np.ndarray]],
    ) -> tuple[list[_Part], dict[str, Any]]:
        """Training, validation and test split, and for the report how they were made and their leakage.

        `path` has the examples with these `digests` of what `by` names, and `classes`. `taken` makes a split of the
        examples with some indices, `read` one of a file, with its digests.
        """
        shares = self.shares
        sides = sides_of(digests, classes, shares.get(VALIDATION, 0.0), shares.get(TEST, 0.0))
        parts = list(in_threads(lambda side: taken(np.flatnonzero(sides == side)), (TRAIN, VALIDATION, TEST)))
        every = [(str(path), digests)]
        for side, file in self.files.items():
            parts[side], its_own = read(file)
            every.append((str(file), its_own))
        about = [f"{_NAMES[side]} from {file}" for side, file in self.files.items()]
        if shares:
            taken_shares = ", ".join(f"{share:.0%} {_NAMES[side]}" for side, share in shares.items())
            about.append(f"by class and hash of the {by}, seed {self.seed}: {taken_shares}")
        return parts, {"split": "; ".join(about), **({"leakage": leakage(every)} if self.files else {})}


def leakage(files: Sequence[tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
    """How many of a file's examples are also in another, for each pair of (name, digests of the examples)."""
    return [
        {"file": file, "also_in": other, "examples": int(np.isin(_whole(own), _whole(others)).sum()), "of": len(own)}
        for place, (file, own) in enumerate(files)
        for other, others in files[:place]
    ]


def _whole(digests: np.ndarray) -> np.ndarray:
    """Each digest as one value."""
    return np.ascontiguousarray(digests).view(np.dtype((np.void, SIZE))).reshape(-1)


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
    return sides_of(digests(keys, seed), np.asarray(classes, dtype=np.int64), validation, test).tolist()


def digests(keys: Iterable[str], seed: int = 0) -> np.ndarray:
    """uint8 [keys, SIZE]: the digest of each."""
    return np.frombuffer(b"".join(content_digest(key, seed) for key in keys), dtype=np.uint8).reshape(-1, SIZE)


def sides_of(digests: np.ndarray, classes: np.ndarray, validation: float, test: float) -> np.ndarray:
    """int8 [rows]: `stratified_split` of keys with these digests."""
    # Words of 64 bits, so that rows are ordered as their bytes are.
    words = np.ascontiguousarray(digests).view(">u8").astype(np.uint64)
    order = np.argsort(words[:, 0], kind="stable")
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = words[order[1:], 0] != words[order[:-1], 0]
    again = np.flatnonzero(~is_first)
    if (words[order[again]] != words[order[again - 1]]).any():
        # Two digests of the same first 64 bits: all bits decide.
        order = np.lexsort(words.T[::-1])
        is_first[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    key_of = np.empty(len(order), dtype=np.int64)
    key_of[order] = np.cumsum(is_first) - 1
    class_of = np.minimum.reduceat(classes[order], np.flatnonzero(is_first)) if len(order) else classes
    sides = np.full(len(class_of), TRAIN, dtype=np.int8)
    for cls in np.unique(class_of):
        group = np.flatnonzero(class_of == cls)  # in the order of the digests
        count = len(group)
        least = 3 if test > 0 else 2
        count_test = max(1, round(count * test)) if test > 0 and count >= 2 else 0
        count_validation = max(1, round(count * validation)) if validation > 0 and count >= least else 0
        count_test = min(count_test, count - 2 if validation > 0 and count >= least else count - 1)
        count_validation = min(count_validation, count - 1 - count_test)
        sides[group[:count_test]] = TEST
        sides[group[count_test : count_test + count_validation]] = VALIDATION
    return sides[key_of]
