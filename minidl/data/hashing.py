"""TF-IDF without a vocabulary: the hash of a term gives its column, and terms that collide share a column.

    h(t)    = MurmurHash3 of the term in UTF-8, 32 bits with a sign, seed 0
    column  = |h(t)| mod columns             sign = -1 where h(t) < 0, else 1
    c(d, k) = sum of sign * count over the terms of text d in column k

Columns and counts are those of scikit-learn's HashingVectorizer (tested; Weinberger et al. 2009 for the signs). |c| is
then weighted as in `vectorizer`, where n(k) is the number of training texts with c(d, k) other than 0.
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
from minidl.data.vectorizer import TfidfOptions, damaged, parse, unit_rows, with_checksum
from minidl.data.workers import Workers

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

MOST_COLUMNS = 2**24
_FORMAT = "minidl-hashed-tfidf"


@dataclass(frozen=True)
class HashedTfidf(Checked):
    """A fitted vectorizer: `found[k]` of the `texts` it was fitted on have column k.

    `options.max_features` is the number of columns; columns in fewer than `min_df` texts stay empty.

    A network trained on one half of the training texts has an accuracy on the other half of 0.753 with weights and
    0.741 without for docstrings with 2^16 columns, and of 0.968 and 0.971 for R8. With `min_df` 2 it is 0.745 and
    0.969. Standard errors are 0.001 to 0.002.
    """

    options: TfidfOptions
    texts: Annotated[int, Field(ge=1, lt=2**31)]
    found: Annotated[list[Count], Field(min_length=1, max_length=MOST_COLUMNS)]

    @classmethod
    def fit(cls, texts: Sequence[str], options: TfidfOptions | None = None) -> HashedTfidf:
        """Return a vectorizer with the weights of texts. Raises DataError and ValueError as `of_counts`."""
        options = options or TfidfOptions()
        return cls.of_counts(terms.count_texts(texts, options.analyzer), options)

    @classmethod
    def of_counts(cls, counted: Counted, options: TfidfOptions) -> HashedTfidf:
        """Return a vectorizer with the weights of texts counted by `options.analyzer`.

        Raises DataError if no column is left, and ValueError if `max_features` is None or too large.
        """
        columns = options.max_features
        if columns is None or columns > MOST_COLUMNS:
            raise ValueError(f"max_features is {columns}, expected at most {MOST_COLUMNS} columns")
        document_counts = np.bincount(hash_counts(counted, columns).indices, minlength=columns)
        vectorizer = cls(options, len(counted), document_counts.tolist())
        if not vectorizer._weights.any():
            raise DataError(
                f"the {len(counted)} training texts contain no term that occurs in {options.min_df} of them; give more "
                "or longer texts"
            )
        return vectorizer

    @property
    def analyzer(self) -> Analyzer:
        """Return the analyzer, which splits a text into terms."""
        return self.options.analyzer

    def __len__(self) -> int:
        return len(self.found)

    def transform(self, texts: Sequence[str], workers: Workers | None = None) -> csr_matrix:
        """Return float32 CSR [len(texts), len(self)], columns ascending in each row."""
        return self.weighted(terms.count_texts(texts, self.analyzer, workers=workers))

    def weighted(self, counted: Counted) -> csr_matrix:
        """Return `transform` of texts whose terms were counted by `analyzer`."""
        from scipy.sparse import csr_matrix

        counts = hash_counts(counted, len(self))
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
        """Return the options, numbers of texts and their checksum as JSON text."""
        return with_checksum(_FORMAT, {**asdict(self), "options": self.options.saved})

    @classmethod
    def from_json(cls, text: str, source: str = "the vectorizer") -> HashedTfidf:
        """Return the vectorizer that `to_json` wrote. Raises DataError, naming `source`, for any other text."""
        vectorizer = parse(cls, _FORMAT, text, source)
        columns, most = len(vectorizer.found), max(vectorizer.found)
        if columns != vectorizer.options.max_features:
            raise damaged(source, f"found has {columns} columns, max_features is {vectorizer.options.max_features}")
        if most > vectorizer.texts:
            raise damaged(source, f"a column was found in {most} texts of {vectorizer.texts}")
        return vectorizer

    @cached_property
    def _weights(self) -> np.ndarray:
        """float32 [columns]: the idf of each column, 0 for columns in too few texts."""
        document_counts = np.array(self.found, dtype=np.float32)
        idf = np.log(np.float32(self.texts + 1) / (document_counts + np.float32(1))) + np.float32(1)
        return np.where(document_counts >= min(self.options.min_df, max(1, self.texts)), idf, np.float32(0))


def hash_counts(counted: Counted, columns: int) -> csr_matrix:
    """Return int32 CSR [texts, columns]: signed counts, summed in each column; columns ascending, without zeros."""
    from scipy.sparse import csr_matrix

    with import_lock.LOCK:
        from sklearn.utils import murmurhash3_32
    raw = (murmurhash3_32(term.encode("utf-8", "surrogatepass")) for term in counted.terms)
    hashes = np.fromiter(raw, np.int64, len(counted.terms))  # wide enough for the absolute value of -2^31
    columns_of, signs = (np.abs(hashes) % columns).astype(np.int32), np.where(hashes < 0, -1, 1).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counted.sizes, dtype=np.int64)])
    matrix = csr_matrix((counted.counts * signs[counted.ids], columns_of[counted.ids], starts), (len(counted), columns))
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix
