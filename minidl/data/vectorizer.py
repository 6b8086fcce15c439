"""TF-IDF: texts to sparse rows; the vocabulary is saved as JSON, never pickled.

For a text d and a term t with count c(d, t) > 0 (Salton and Buckley 1988):

    v(d, t) = (1 + ln c(d, t)) * idf(t)      with sublinear_tf, else c(d, t) * idf(t)
    idf(t)  = ln((1 + N) / (1 + n(t))) + 1   N texts, n(t) of them with the term
    x(d, t) = v(d, t) / ||v(d, .)||_2

Terms and weights equal those of scikit-learn's TfidfVectorizer bit for bit (tested), on all processors and without
importing it. The matrices of a fitted and a reloaded vectorizer are equal bit for bit, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from minidl.common.console import cut
from minidl.data import terms
from minidl.data.analyzers import Analyzer
from minidl.data.parsing import parse_json
from minidl.data.patterns import linear
from minidl.data.records import DataError
from minidl.data.saved import Checked, Names, validate
from minidl.data.terms import Counted
from minidl.data.threads import in_threads
from minidl.data.workers import Workers

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

V = TypeVar("V")
_FORMAT = "minidl-tfidf"
_TOGETHER = 4096  # texts that a thread weights at a time: 7 ms of work, of forty terms each
_STEP = 2**19  # entries that a thread counts at a time: 2 ms


TOKEN_PATTERN = r"(?u)[^\W\d_][^\W_]+"
MOST_NEIGHBOURS = 10
# Values of options that files of earlier versions lack; options with these values are not saved.
_EARLIER = {"ngram_min": 1, "unit": "word", "nfc": False}
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class TfidfOptions(Checked):
    """Options of term extraction and weighting, with scikit-learn's names.

    `unit` is what its `analyzer` is there: "word", "char" for characters, or "char_wb" for characters of words with a
    space at either end. Terms are runs of `ngram_min` to `ngram_max` neighbours. A term must occur in `min_df` texts;
    of these the `max_features` most frequent stay (None: all). `stop_words` is None or "english". `token_pattern`
    finds the words: two letters or digits or more, the first a letter; an underscore separates. It must be one that is
    matched in linear time on every text, see `patterns`.

    With `nfc` texts are normalised to NFC, a combining mark counts as the character that it marks, and a dotted capital
    I is an i in lower case; without it, as in scikit-learn, a mark ends a word.

    The defaults were chosen by four-fold cross-validation inside the training halves, with a linear SVM, over word
    patterns, pairs, stop words and vocabulary sizes. Pairs help short texts (docstrings: accuracy 0.779 to 0.792 with
    10,000 features) and not long ones (R8: 0.974 to 0.972), at twice the non-zeros.
    """

    ngram_max: Annotated[int, Field(ge=1, le=MOST_NEIGHBOURS)] = 1
    min_df: Positive = 2
    max_features: Positive | None = 20_000
    sublinear_tf: bool = True
    lowercase: bool = True
    stop_words: Annotated[str, Field(pattern="^english$")] | None = None
    token_pattern: Annotated[str, AfterValidator(linear)] = TOKEN_PATTERN
    ngram_min: Annotated[int, Field(ge=1, le=MOST_NEIGHBOURS)] = 1
    unit: Literal["word", "char", "char_wb"] = "word"
    nfc: bool = True

    @property
    def saved(self) -> dict[str, Any]:
        """Return the options as the files of vectorizers store them."""
        return {name: value for name, value in asdict(self).items() if (name, value) not in _EARLIER.items()}

    @property
    def analyzer(self) -> Analyzer:
        """Return the analyzer, which splits a text into terms."""
        return Analyzer(**{field.name: getattr(self, field.name) for field in fields(Analyzer)})

    def __post_init__(self) -> None:
        """Raises ValueError for a value of the wrong type or range."""
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            try:
                TypeAdapter(kind).validate_python(value, strict=True)
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"bad TF-IDF option {name}: {cut(repr(value), 60)}: {reason}") from None
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"bad TF-IDF option ngram_min: {self.ngram_min}: expected at most {self.ngram_max}, ngram_max"
            )
        if self.unit != "word" and (self.stop_words is not None or self.token_pattern != TOKEN_PATTERN):
            raise ValueError(f"bad TF-IDF option unit: {self.unit!r}: stop_words and token_pattern are for words")


@dataclass(frozen=True)
class Tfidf(Checked):
    """A fitted TF-IDF vectorizer: `terms[i]` is the term of column i and `idf[i]` its weight."""

    options: TfidfOptions
    terms: Annotated[Names, Field(min_length=1)]
    idf: list[Annotated[float, Field(gt=0, lt=1000)]]  # 1 + ln(1 + N) of N texts at most

    @classmethod
    def fit(cls, texts: Sequence[str], options: TfidfOptions | None = None) -> Tfidf:
        """Return a vectorizer with the vocabulary and weights of texts. Raises DataError if no term is left."""
        options = options or TfidfOptions()
        return cls.of_counts(terms.count_texts(texts, options.analyzer), options)

    @classmethod
    def of_counts(cls, counted: Counted, options: TfidfOptions, rows: np.ndarray | None = None) -> Tfidf:
        """Return a vectorizer of texts, or some rows of them, counted by `options.analyzer`.

        Raises DataError if no term is left.
        """
        counts = counted if rows is None else counted.select(rows)
        texts, names = len(counts), counted.terms
        document_counts = _sums(counts.ids, None, len(names))
        columns = np.flatnonzero(document_counts >= min(options.min_df, max(1, texts)))
        if not len(columns):
            raise DataError(
                f"the {texts} training texts contain no term that occurs in {options.min_df} of them; give more or "
                "longer texts"
            )
        columns = np.array(sorted(columns.tolist(), key=names.__getitem__))
        if options.max_features is not None and len(columns) > options.max_features:
            # As in scikit-learn: by float32 sums; the order of equal sums is that of numpy's unstable sort.
            sums = _sums(counts.ids, counts.counts, len(names)).astype(np.float32)[columns]
            columns = columns[np.sort((-sums).argsort()[: options.max_features])]
        divisors = document_counts[columns].astype(np.float32) + np.float32(1)
        idf = np.log(np.full(len(columns), texts + 1, dtype=np.float32) / divisors) + np.float32(1)
        return cls(options, [names[i] for i in columns], idf.astype(np.float64).tolist())

    @property
    def analyzer(self) -> Analyzer:
        """Return the analyzer, which splits a text into terms."""
        return self.options.analyzer

    def __len__(self) -> int:
        return len(self.terms)

    def transform(self, texts: Sequence[str], workers: Workers | None = None) -> csr_matrix:
        """Return float32 CSR [len(texts), len(self)], columns ascending in each row; unknown terms are ignored."""
        return self.weighted(terms.count_texts(texts, self.options.analyzer, self._columns, workers))

    def weighted(self, counted: Counted) -> csr_matrix:
        """Return `transform` of texts whose terms were counted by `options.analyzer`."""
        from scipy.sparse import vstack

        numbers = None
        if counted.terms != self.terms:
            numbers = np.fromiter((self._columns.get(term, -1) for term in counted.terms), np.int32, len(counted.terms))
        idf = np.array(self.idf, dtype=np.float32)
        parts = in_threads(lambda part: self._rows(part, numbers, idf), counted.parts(_TOGETHER))
        matrix = vstack(list(parts), format="csr")
        matrix.has_sorted_indices = True
        return matrix

    def _rows(self, counted: Counted, numbers: np.ndarray | None, idf: np.ndarray) -> csr_matrix:
        """Return `weighted` for the column `numbers` of all terms, -1 for unknown ones; None: term i is column i."""
        from scipy.sparse import csr_matrix

        columns, sizes, data = counted.ids, counted.sizes, counted.counts
        if numbers is not None:
            columns = numbers[columns]
            mask = columns >= 0
            totals = np.concatenate([[0], np.cumsum(mask)])
            ends = np.cumsum(sizes)
            sizes = totals[ends] - totals[ends - sizes]
            columns, data = columns[mask], data[mask]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        matrix = csr_matrix((data.astype(np.float32), columns, starts), shape=(len(sizes), len(self)))
        matrix.sort_indices()
        values = matrix.data
        if self.options.sublinear_tf:
            np.log(values, out=values)
            values += np.float32(1)
        values *= idf[matrix.indices]
        unit_rows(matrix)
        return matrix

    def to_json(self) -> str:
        """Return the options, terms, weights and their checksum as JSON text."""
        return with_checksum(_FORMAT, {"options": self.options.saved, "terms": self.terms, "idf": self.idf})

    @classmethod
    def from_json(cls, text: str, source: str = "the vocabulary") -> Tfidf:
        """Return the vectorizer that `to_json` wrote. Raises DataError, naming `source`, for any other text."""
        vectorizer = parse(cls, _FORMAT, text, source)
        if len(vectorizer.terms) != len(vectorizer.idf):
            raise damaged(source, "terms and idf are not two lists of one length")
        return vectorizer

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {term: column for column, term in enumerate(self.terms)}


class InOrder(Tfidf):
    """A fitted vectorizer that returns terms in order instead of features."""

    LENGTH = 256
    analyzer = None  # type: ignore[assignment]  # texts are not counted for it: counts have no order

    def transform(self, texts: Sequence[str], workers: Workers | None = None) -> Any:
        """Return the first LENGTH terms of each text, int32 [N, L]: 2 + column, or 1 for an unknown term; then zeros.

        A text without terms is one unknown term.
        """
        terms_of = self.options.analyzer.function()
        rows = [[self._columns.get(term, -1) + 2 for term in terms_of(text)[: self.LENGTH]] or [1] for text in texts]
        numbers = np.zeros((len(rows), max(map(len, rows), default=1)), dtype=np.int32)
        for i, row in enumerate(rows):
            numbers[i, : len(row)] = row
        return numbers


def _sums(ids: np.ndarray, counts: np.ndarray | None, length: int) -> np.ndarray:
    """Return [length]: how often each number is among the ids, or the sum of its counts, exact in any order."""
    step = max(_STEP, length)  # so that all sums together are no larger than the ids as int64

    def of_part(start: int) -> np.ndarray:
        part = slice(start, start + step)
        return np.bincount(ids[part], None if counts is None else counts[part], length)

    total, *others = in_threads(of_part, range(0, max(1, len(ids)), step))
    for other in others:
        total += other
    return total


def unit_rows(matrix: csr_matrix) -> None:
    """Scale the rows of a float32 CSR to length 1, in place; rows of zeros stay zero."""
    from scipy.sparse import csr_matrix

    values, starts = matrix.data, matrix.indptr
    # A product with ones adds in float64 one value after another; numpy's sums do not. With all values in column 0, one
    # factor of 1 is enough.
    squares = csr_matrix(
        ((values * values).astype(np.float64), np.zeros(len(values), np.int32), starts), shape=(matrix.shape[0], 1)
    )
    norms = np.sqrt(squares @ np.ones(1))
    norms[norms == 0] = 1.0
    values /= np.repeat(norms, np.diff(starts))


def with_checksum(kind: str, content: dict[str, Any]) -> str:
    """Return a vectorizer's content as JSON text with its format and a checksum."""
    head = {"format": kind, "version": 1, "sha256": _checksum(content)}
    return json.dumps({**head, **content}, ensure_ascii=False)


def parse(cls: type[V], kind: str, text: str, source: str) -> V:
    """Return the vectorizer of a text of `with_checksum`. Raises DataError, naming `source`, for any other text."""
    try:
        data = parse_json(text)
        if not isinstance(data, dict) or data.pop("format", None) != kind or data.pop("version", None) != 1:
            raise ValueError(f"not a {kind} file of version 1")
        if data.pop("sha256", None) != _checksum(data):
            raise ValueError("its content does not match its checksum")
        if isinstance(data.get("options"), dict):
            data["options"] = {**_EARLIER, **data["options"]}
        return validate(cls, data)
    except ValueError as error:
        raise damaged(source, error) from None


def damaged(source: str, why: object) -> DataError:
    """Return the error for a damaged file of a vectorizer."""
    return DataError(f"{source} is damaged: {cut(why)}; restore it or train again")


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
