"""Texts as numbers of their terms in order, for models that read sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from minidl.data.vectorizer import Tfidf

UNKNOWN = 1


@dataclass(frozen=True)
class Sequences:
    """The first `length` terms of texts: 2 + i is `tfidf.terms[i]`, 1 a term that is not among these, 0 padding."""

    tfidf: Tfidf
    length: int
    analyzer: ClassVar[None] = None  # texts are not counted: counts have no order

    def __len__(self) -> int:
        return len(self.tfidf) + UNKNOWN + 1

    def transform(self, texts: Sequence[str], workers: Any = None) -> np.ndarray:
        """Return int32 [len(texts), L], padded to the longest; a text without terms is one unknown term."""
        terms_of, columns = self.tfidf.analyzer.function(), self.tfidf.columns
        rows = [[columns.get(term, -1) + 2 for term in terms_of(text)[: self.length]] or [UNKNOWN] for text in texts]
        numbers = np.zeros((len(rows), max(map(len, rows), default=1)), dtype=np.int32)
        for row, values in zip(numbers, rows, strict=True):
            row[: len(values)] = values
        return numbers


def known_terms(numbers: np.ndarray) -> np.ndarray:
    """Return how many different terms of the vocabulary each row of `Sequences.transform` has, int64 [N]."""
    ordered = np.sort(numbers, axis=1)
    return ((ordered > UNKNOWN) & (np.diff(ordered, axis=1, prepend=0) > 0)).sum(axis=1)
