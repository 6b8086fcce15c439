"""Splits decided by a hash of the content: the same on every machine, whatever the order of the rows.

Rows with the same key (the same text) always fall on the same side, so nothing seen in training is tested.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

TRAIN, VALIDATION, TEST = 0, 1, 2


def content_hash(key: str, seed: int = 0) -> int:
    """The first 64 bits of the SHA-256 of the seed and the key."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{key}".encode()).digest()[:8], "big")


def split_by_hash(keys: Sequence[str], validation: float, test: float, seed: int = 0) -> list[int]:
    """TRAIN, VALIDATION or TEST for each key by its hash alone: a key keeps its side when others come or go."""
    sides = []
    for key in keys:
        place = content_hash(key, seed) / 2**64
        sides.append(TEST if place < test else VALIDATION if place < test + validation else TRAIN)
    return sides


def stratified_split(
    keys: Sequence[str], classes: Sequence[int], validation: float, test: float, seed: int = 0
) -> list[int]:
    """TRAIN, VALIDATION or TEST for each row, the same shares of distinct keys from every class.

    A class with one distinct key is all in training; with two it has no validation share; with three or more each
    wanted side gets at least one, and training always does. A key seen with several classes counts with the class of
    its smallest index.
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
