"""TF-IDF without a vocabulary: the column of a term follows from its hash, and terms that collide share a column.

    h(t)    = MurmurHash3 of the term in UTF-8, 32 bits with a sign, seed 0
    column  = |h(t)| mod columns             sign = -1 where h(t) < 0, else 1
    c(d, k) = sum of sign * count over the terms of text d in column k

Columns and counts are those of scikit-learn's HashingVectorizer (tested; Weinberger et al. 2009 for the signs). |c| is
then weighted as `vectorizer` describes, with n(k), the number of training texts where c(d, k) is not 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from minidl.common import import_lock
from minidl.data import terms
from minidl.data.analyzers import Analyzer
from minidl.data.records import DataError
from minidl.data.saved import Checked, Count
from minidl.data.terms import Counted
from minidl.data.vectorizer import TfidfOptions, damaged, opened, sealed, unit_rows
from minidl.data.workers import Workers

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

MOST_COLUMNS = 2**24
_FORMAT = "minidl-hashed-tfidf"


@dataclass(frozen=True)
class HashedTfidf(Checked):
    """A fitted vectorizer: `found[k]` of the `texts` it was fitted on have column k.

    In the options `max_features` is the number of columns, and those that fewer than `min_df` texts have stay empty.

    The weights are worth their array: a network that learned from one half of the training texts is right about 0.753
    of the other with them and 0.741 without, of docstrings with 2^16 columns, and about 0.968 and 0.971 of R8. With
    `min_df` 2 it is 0.745 and 0.969. Standard errors are 0.001 to 0.002.
    """

    options: TfidfOptions
    texts: Annotated[int, Field(ge=1, lt=2**31)]
    found: Annotated[list[Count], Field(min_length=1, max_length=MOST_COLUMNS)]

    @classmethod
    def fit(cls, texts: Sequence[str], options: TfidfOptions | None = None) -> HashedTfidf:
        """The weights of the texts. Raises DataError and ValueError as `of_counts`."""
        options = options or TfidfOptions()
        return cls.of_counts(terms.count_texts(texts, options.analyzer), options)

    @classmethod
    def of_counts(cls, counted: Counted, options: TfidfOptions) -> HashedTfidf:
        """The weights of texts whose terms were counted by `options.analyzer`.

        Raises DataError when no column is left, ValueError for too many columns or no number of them.
        """
        columns = options.max_features
        if columns is None or columns > MOST_COLUMNS:
            raise ValueError(f"max_features is {columns}, expected at most {MOST_COLUMNS} columns")
        found = np.bincount(hashed(counted, columns).indices, minlength=columns)
        fitted = cls(options, len(counted), found.tolist())
        if not fitted._weights.any():
            raise DataError(
                f"the {len(counted)} training texts contain no term that occurs in {options.min_df} of them; give more "
                "or longer texts"
            )
        return fitted

    @property
    def analyzer(self) -> Analyzer:
        """What finds the terms of a text."""
        return self.options.analyzer

    def __len__(self) -> int:
        return len(self.found)

    def transform(self, texts: Sequence[str], workers: Workers | None = None) -> csr_matrix:
        """float32 CSR [len(texts), len(self)], columns ascending in each row."""
        return self.weighted(terms.count_texts(texts, self.analyzer, workers=workers))

    def weighted(self, counted: Counted) -> csr_matrix:
        """`transform` of texts whose terms were counted by `analyzer`."""
        from scipy.sparse import csr_matrix

        counts = hashed(counted, len(self))
        values = np.abs(counts.data).astype(np.float32)
        if self.options.sublinear_tf:
            np.log(values, out=values)
            values += np.float32(1)
        values *= self._weights[counts.indices]
        values *= np.sign(counts.data)
        matrix = csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)
        matrix.eliminate_zeros()
        unit_rows(matrix)
        return matrix

    def to_json(self) -> str:
        """Options, numbers of texts and a checksum of them as JSON text."""
        return sealed(_FORMAT, {**asdict(self), "options": self.options.saved})

    @classmethod
    def from_json(cls, text: str, source: str = "the vectorizer") -> HashedTfidf:
        """The vectorizer that `to_json` wrote. Raises DataError, naming `source`, for anything else."""
        read = opened(cls, _FORMAT, text, source)
        if len(read.found) != read.options.max_features:
            raise damaged(source, f"found has {len(read.found)} columns, max_features is {read.options.max_features}")
        if max(read.found) > read.texts:
            raise damaged(source, f"a column was found in {max(read.found)} texts of {read.texts}")
        return read

    @cached_property
    def _weights(self) -> np.ndarray:
        """float32 [columns]: the idf of each column, 0 where too few texts have it."""
        found = np.array(self.found, dtype=np.float32)
        idf = np.log(np.float32(self.texts + 1) / (found + np.float32(1))) + np.float32(1)
        return np.where(found >= min(self.options.min_df, max(1, self.texts)), idf, np.float32(0))


def hashed(counted: Counted, columns: int) -> csr_matrix:
    """int32 CSR [texts, columns]: counts with their signs, summed in each column; columns ascending, without zeros."""
    from scipy.sparse import csr_matrix

    with import_lock.LOCK:
        from sklearn.utils import murmurhash3_32
    raw = (murmurhash3_32(term.encode("utf-8", "surrogatepass")) for term in counted.terms)
    hashes = np.fromiter(raw, np.int64, len(counted.terms))  # wide enough for the absolute value of -2^31
    places, signs = (np.abs(hashes) % columns).astype(np.int32), np.where(hashes < 0, -1, 1).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counted.sizes, dtype=np.int64)])
    matrix = csr_matrix((counted.counts * signs[counted.ids], places[counted.ids], starts), (len(counted), columns))
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix
