"""TF-IDF: texts to sparse rows; the vocabulary is saved as JSON, never pickled.

For a text d and a term t with count c(d, t) > 0 (Salton and Buckley 1988):

    v(d, t) = (1 + ln c(d, t)) * idf(t)      with sublinear_tf, else c(d, t) * idf(t)
    idf(t)  = ln((1 + N) / (1 + n(t))) + 1   N texts, n(t) of them with the term
    x(d, t) = v(d, t) / ||v(d, .)||_2

Terms, weights and their bits are those of scikit-learn's TfidfVectorizer (tested), on all processors and without
importing it. A fitted and a reloaded vectorizer run the same code on the same numbers: their matrices are equal bit for
bit.
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
from minidl.data.saved import Checked, Names, made
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
# What the options that earlier versions lacked are in their files; they are left out where they are that.
_EARLIER = {"ngram_min": 1, "unit": "word", "nfc": False}
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class TfidfOptions(Checked):
    """How texts become terms and weights; scikit-learn's names.

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
        """The options as in the files of vectorizers."""
        return {name: value for name, value in asdict(self).items() if (name, value) not in _EARLIER.items()}

    @property
    def analyzer(self) -> Analyzer:
        """What finds the terms of a text."""
        return Analyzer(**{each.name: getattr(self, each.name) for each in fields(Analyzer)})

    def __post_init__(self) -> None:
        """Raises ValueError for a value of the wrong type or range."""
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            try:
                TypeAdapter(kind).validate_python(value, strict=True)
            except ValidationError as error:
                what = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"bad TF-IDF option {name}: {cut(repr(value), 60)}: {what}") from None
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
        """Vocabulary and weights of the texts. Raises DataError when no term is left."""
        options = options or TfidfOptions()
        return cls.of_counts(terms.count_texts(texts, options.analyzer), options)

    @classmethod
    def of_counts(cls, counted: Counted, options: TfidfOptions, rows: np.ndarray | None = None) -> Tfidf:
        """Vocabulary and weights of texts whose terms were counted by `options.analyzer`, of all or of some rows.

        Raises DataError when no term is left.
        """
        taken = counted if rows is None else counted.select(rows)
        texts, names = len(taken), counted.terms
        found = _sums(taken.ids, None, len(names))
        kept = np.flatnonzero(found >= min(options.min_df, max(1, texts)))
        if not len(kept):
            raise DataError(
                f"the {texts} training texts contain no term that occurs in {options.min_df} of them; give more or "
                "longer texts"
            )
        kept = np.array(sorted(kept.tolist(), key=names.__getitem__))
        if options.max_features is not None and len(kept) > options.max_features:
            # As scikit-learn: by sums in float32, and where they are equal by the order that numpy's sort leaves.
            sums = _sums(taken.ids, taken.counts, len(names)).astype(np.float32)[kept]
            kept = kept[np.sort((-sums).argsort()[: options.max_features])]
        idf = np.full(len(kept), texts + 1, dtype=np.float32) / (found[kept].astype(np.float32) + np.float32(1))
        return cls(options, [names[i] for i in kept], (np.log(idf) + np.float32(1)).astype(np.float64).tolist())

    @property
    def analyzer(self) -> Analyzer:
        """What finds the terms of a text."""
        return self.options.analyzer

    def __len__(self) -> int:
        return len(self.terms)

    def transform(self, texts: Sequence[str], workers: Workers | None = None) -> csr_matrix:
        """float32 CSR [len(texts), len(self)], columns ascending in each row; unknown words are ignored."""
        return self.weighted(terms.count_texts(texts, self.options.analyzer, self._columns, workers))

    def weighted(self, counted: Counted) -> csr_matrix:
        """`transform` of texts whose terms were counted by `options.analyzer`."""
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
        """`weighted`, where `numbers` has the column of each term, -1 for others; None if the terms are the columns."""
        from scipy.sparse import csr_matrix

        columns, sizes, data = counted.ids, counted.sizes, counted.counts
        if numbers is not None:
            columns = numbers[columns]
            known = columns >= 0
            before = np.concatenate([[0], np.cumsum(known)])
            ends = np.cumsum(sizes)
            sizes = before[ends] - before[ends - sizes]
            columns, data = columns[known], data[known]
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
        """Options, terms, weights and a checksum of them as JSON text."""
        return sealed(_FORMAT, {"options": self.options.saved, "terms": self.terms, "idf": self.idf})

    @classmethod
    def from_json(cls, text: str, source: str = "the vocabulary") -> Tfidf:
        """The vectorizer that `to_json` wrote. Raises DataError, naming `source`, for anything else."""
        found = opened(cls, _FORMAT, text, source)
        if len(found.terms) != len(found.idf):
            raise damaged(source, "terms and idf are not two lists of one length")
        return found

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {term: column for column, term in enumerate(self.terms)}


def _sums(ids: np.ndarray, counts: np.ndarray | None, length: int) -> np.ndarray:
    """[length]: how often each number is among the ids, or the sum of its counts, exact in any order."""
    step = max(_STEP, length)  # so that all sums together are no larger than the ids as int64

    def of_part(start: int) -> np.ndarray:
        part = slice(start, start + step)
        return np.bincount(ids[part], None if counts is None else counts[part], length)

    whole, *others = in_threads(of_part, range(0, max(1, len(ids)), step))
    for other in others:
        whole += other
    return whole


def unit_rows(matrix: csr_matrix) -> None:
    """Scale the rows of a float32 CSR to length 1, in place; a row of zeros stays."""
    from scipy.sparse import csr_matrix

    values, starts = matrix.data, matrix.indptr
    # Sums in float64, one value after another: a product with ones does so, numpy's sums do not. As all columns are
    # taken for one, the product needs no ones for each.
    squares = csr_matrix(
        ((values * values).astype(np.float64), np.zeros(len(values), np.int32), starts), shape=(matrix.shape[0], 1)
    )
    norms = np.sqrt(squares @ np.ones(1))
    norms[norms == 0] = 1.0
    values /= np.repeat(norms, np.diff(starts))


def sealed(kind: str, content: dict[str, Any]) -> str:
    """JSON text of a vectorizer's content with its format and a checksum."""
    head = {"format": kind, "version": 1, "sha256": _checksum(content)}
    return json.dumps({**head, **content}, ensure_ascii=False)


def opened(cls: type[V], kind: str, text: str, source: str) -> V:
    """The vectorizer whose content was `sealed`. Raises DataError, naming `source`, for anything else."""
    try:
        data = parse_json(text)
        if not isinstance(data, dict) or data.pop("format", None) != kind or data.pop("version", None) != 1:
            raise ValueError(f"not a {kind} file of version 1")
        if data.pop("sha256", None) != _checksum(data):
            raise ValueError("its content does not match its checksum")
        if isinstance(data.get("options"), dict):
            data["options"] = {**_EARLIER, **data["options"]}
        return made(cls, data)
    except ValueError as error:
        raise damaged(source, error) from None


def damaged(source: str, why: object) -> DataError:
    """The error of a vectorizer's file that cannot be used."""
    return DataError(f"{source} is damaged: {cut(why)}; restore it or train again")


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
