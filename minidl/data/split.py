"""Split data by a hash of the content: the splits are the same on every machine and for every order of the rows.

Rows with the same key (the same text) are in the same split, so no training text is in the test split.
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
_Examples = TypeVar("_Examples")


@dataclass(frozen=True)
class Splitter:
    """Makes the validation and the test split: each is a share of the data, or all of another file or folder.

    Raises DataError unless the shares are positive and leave a share for training.
    """

    validation: float | str | Path
    test: float | str | Path
    seed: int = 0

    def __post_init__(self) -> None:
        shares = self.shares
        if not (all(0 < share < 1 for share in shares.values()) and sum(shares.values()) < 1):
            values = " and ".join(f"the {_NAMES[split]} share {share}" for split, share in shares.items())
            raise DataError(f"{values} must lie between 0 and 1 and add up to less than 1")

    @property
    def shares(self) -> dict[int, float]:
        """Return the splits that are shares of the data."""
        return {split: origin for split, origin in self._origins.items() if not isinstance(origin, str | Path)}

    @property
    def files(self) -> dict[int, Path]:
        """Return the splits that are other files or folders."""
        return {split: Path(origin) for split, origin in self._origins.items() if isinstance(origin, str | Path)}

    @property
    def _origins(self) -> dict[int, float | str | Path]:
        return {VALIDATION: self.validation, TEST: self.test}

    def split(
        self,
        path: str | Path,
        by: str,
        digests: np.ndarray,
        classes: np.ndarray,
        select: Callable[[np.ndarray], _Examples],
        read: Callable[[Path], tuple[_Examples, np.ndarray]],
    ) -> tuple[list[_Examples], dict[str, Any]]:
        """Return the training, validation and test split and, for the report, their description and leakage.

        `digests` and `classes` describe the examples in `path`; `by` names the hashed content. `select` returns the
        examples with some indices, `read` the split of a file with its digests.
        """
        shares = self.shares
        split_of_rows = splits_of(digests, classes, shares.get(VALIDATION, 0.0), shares.get(TEST, 0.0))
        rows_in = (np.flatnonzero(split_of_rows == split) for split in (TRAIN, VALIDATION, TEST))
        splits = list(in_threads(select, rows_in))
        sources = [(str(path), digests)]
        for split, file in self.files.items():
            splits[split], file_digests = read(file)
            sources.append((str(file), file_digests))
        about = [f"{_NAMES[split]} from {file}" for split, file in self.files.items()]
        if shares:
            listed_shares = ", ".join(f"{share:.0%} {_NAMES[split]}" for split, share in shares.items())
            about.append(f"by class and hash of the {by}, seed {self.seed}: {listed_shares}")
        return splits, {"split": "; ".join(about), **({"leakage": leakage(sources)} if self.files else {})}


def leakage(files: Sequence[tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Return for each pair of files, as (name, digests), how many examples of one are in the other."""
    return [
        {"file": file, "also_in": other, "examples": int(np.isin(_as_values(a), _as_values(b)).sum()), "of": len(a)}
        for i, (file, a) in enumerate(files)
        for other, b in files[:i]
    ]


def _as_values(digests: np.ndarray) -> np.ndarray:
    """Return each digest as one value."""
    return np.ascontiguousarray(digests).view(np.dtype((np.void, SIZE))).reshape(-1)


def check_labels(file: Path, names: Iterable[str], labels: Sequence[str], path: str | Path) -> None:
    """Raise DataError if a validation or test file has `names` outside of the training file's `labels`."""
    unknown = sorted(set(names).difference(labels))
    if unknown:
        raise DataError(
            f"{file} has labels that {path} lacks, so that no model can learn them: {listed(unknown)}; add examples of "
            f"them to {path}, or remove them from {file}"
        )


def check_classes(path: str | Path, labels: Sequence[str], column: str) -> None:
    """Raise DataError if there is only one class."""
    if len(labels) < 2:
        raise DataError(
            f"{path} has one class only ({shorten(labels[0])} in column {column!r}): "
            "a classifier needs rows of at least two classes"
        )


def split_by_hash(keys: Sequence[str], validation: float, test: float) -> list[int]:
    """Return TRAIN, VALIDATION or TEST for each key; it depends only on the hash of the key."""
    splits = []
    for key in keys:
        position = content_hash(key) / 2**64
        splits.append(TEST if position < test else VALIDATION if position < test + validation else TRAIN)
    return splits


def stratified_split(
    keys: Sequence[str], classes: Sequence[int], validation: float, test: float, seed: int = 0
) -> list[int]:
    """Return TRAIN, VALIDATION or TEST for each row, with the same shares of distinct keys in every class.

    A class with one distinct key is in training; with two keys, none is in validation; with three or more, each split
    with a share gets at least one, and so does training. A key with several classes counts for the smallest index.
    """
    return splits_of(digests(keys, seed), np.asarray(classes, dtype=np.int64), validation, test).tolist()


def digests(keys: Iterable[str], seed: int = 0) -> np.ndarray:
    """Return uint8 [keys, SIZE]: the digest of each key."""
    return np.frombuffer(b"".join(content_digest(key, seed) for key in keys), dtype=np.uint8).reshape(-1, SIZE)


def splits_of(digests: np.ndarray, classes: np.ndarray, validation: float, test: float) -> np.ndarray:
    """Return int8 [rows]: `stratified_split` of keys with these digests."""
    # Big-endian words of 64 bits sort in the order of the bytes.
    words = np.ascontiguousarray(digests).view(">u8").astype(np.uint64)
    order = np.argsort(words[:, 0], kind="stable")
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = words[order[1:], 0] != words[order[:-1], 0]
    repeats = np.flatnonzero(~is_first)
    if (words[order[repeats]] != words[order[repeats - 1]]).any():
        # Different digests share their first 64 bits: compare all bits.
        order = np.lexsort(words.T[::-1])
        is_first[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    key_of = np.empty(len(order), dtype=np.int64)
    key_of[order] = np.cumsum(is_first) - 1
    class_of = np.minimum.reduceat(classes[order], np.flatnonzero(is_first)) if len(order) else classes
    splits = np.full(len(class_of), TRAIN, dtype=np.int8)
    for cls in np.unique(class_of):
        group = np.flatnonzero(class_of == cls)  # in the order of the digests
        count = len(group)
        least = 3 if test > 0 else 2
        count_test = max(1, round(count * test)) if test > 0 and count >= 2 else 0
        count_validation = max(1, round(count * validation)) if validation > 0 and count >= least else 0
        count_test = min(count_test, count - 2 if validation > 0 and count >= least else count - 1)
        count_validation = min(count_validation, count - 1 - count_test)
        splits[group[:count_test]] = TEST
        splits[group[count_test : count_test + count_validation]] = VALIDATION
    return splits[key_of]
