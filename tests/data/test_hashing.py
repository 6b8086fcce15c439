"""Hashed TF-IDF: scikit-learn's columns and counts, the published weights, and a file that gives the same bits."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import sklearn.utils
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import HashingVectorizer

from minidl.data import DataError, HashedTfidf, TfidfOptions, hashing, terms, vectorizer
from minidl.data.hashing import hash_counts
from minidl.data.workers import Workers
from tests.data.test_terms import of_analyzer, options, same, texts, zipf
from tests.data.test_vectorizer import TEXTS, equal

FEW = TfidfOptions(min_df=1, max_features=16)


def theirs(chosen):
    """scikit-learn's vectorizer of these options, which counts."""
    return HashingVectorizer(
        **of_analyzer(chosen), n_features=chosen.max_features, norm=None, dtype=np.float32
    )  # fmt: skip


def expected(chosen, training, others):
    """The rows of `others` by the formula, in float64."""
    document_counts = (theirs(chosen).transform(training).toarray() != 0).sum(0)
    idf = np.log((1 + len(training)) / (1 + document_counts)) + 1
    counts = theirs(chosen).transform(others).toarray().astype(np.float64)
    sizes = np.abs(counts)
    if chosen.sublinear_tf:
        sizes = np.where(counts != 0, 1 + np.log(np.where(counts != 0, sizes, 1)), 0)
    rows = np.sign(counts) * sizes * idf * (document_counts >= min(chosen.min_df, len(training)))
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)


@settings(deadline=None)
@given(texts, options, st.integers(1, 40) | st.just(2**20), texts)
def test_columns_and_counts_are_those_of_scikit_learn(training, chosen, columns, others):
    chosen = replace(chosen, max_features=columns)
    counts = theirs(chosen).transform(training)
    counts.eliminate_zeros()
    counted = terms.count_texts(training, chosen.analyzer)
    matrix = hash_counts(counted, columns)
    assert matrix.dtype == np.int32
    same(matrix.astype(np.float32), counts)
    if columns > 40:
        return
    rows = expected(chosen, training, training)
    if not rows.any():
        with pytest.raises(DataError, match=f"the {len(training)} training texts contain no term that occurs in"):
            HashedTfidf.fit(training, chosen)
        return
    fitted = HashedTfidf.fit(training, chosen)
    for some in (training, others):
        matrix = fitted.transform(some)
        assert matrix.dtype == np.float32
        assert matrix.has_canonical_format
        assert (matrix.data != 0).all()
        np.testing.assert_allclose(matrix.toarray(), expected(chosen, training, some), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 7, 1000, 2**16])
def test_the_hash_without_a_counterpart_has_scikit_learns_column(monkeypatch, columns):
    monkeypatch.setattr(sklearn.utils, "murmurhash3_32", lambda _: -(2**31))
    matrix = hash_counts(terms.count_texts(["oil oil"], FEW.analyzer), columns)
    assert matrix.indices.tolist() == [(2**31 - 1 - (columns - 1)) % columns]
    assert matrix.data.tolist() == [-2]


def test_terms_that_collide_are_added_and_may_cancel(monkeypatch):
    hashes = {b"oil": 3, b"rose": 19, b"fell": -3, b"corn": -4}
    monkeypatch.setattr(sklearn.utils, "murmurhash3_32", hashes.__getitem__)
    some = ["oil oil rose", "oil fell", "corn"]
    counts = hash_counts(terms.count_texts(some, FEW.analyzer), 16)
    assert counts.toarray()[:, 3:5].tolist() == [[3, 0], [0, 0], [0, -1]]
    assert counts.nnz == 2
    fitted = HashedTfidf.fit(some, FEW)
    assert [fitted.found[column] for column in (3, 4)] == [1, 1]
    two, one = 1 + math.log(2), -1.0  # oil oil; corn: with equal weights of the columns
    row = np.array([two, one]) / math.hypot(two, one)
    np.testing.assert_allclose(fitted.transform(["corn oil oil"]).toarray()[0, 3:5], row, rtol=1e-6)


def test_a_column_of_too_few_texts_is_empty():
    chosen = TfidfOptions(min_df=2, max_features=2**16)
    fitted = HashedTfidf.fit(TEXTS, chosen)
    assert np.diff(fitted.transform(["", "zzz qqq", "oil", "deficit oil"]).indptr).tolist() == [0, 0, 1, 1]
    assert fitted.transform([]).shape == (0, 2**16)


@pytest.mark.parametrize(
    "chosen",
    [
        FEW,
        TfidfOptions(max_features=1000, ngram_max=2),
        TfidfOptions(max_features=5, sublinear_tf=False, lowercase=False, stop_words="english", token_pattern=r"\w+"),
    ],
)
def test_a_reloaded_vectorizer_gives_the_same_bits(chosen):
    fitted = HashedTfidf.fit(TEXTS, chosen)
    restored = HashedTfidf.from_json(fitted.to_json())
    assert restored == fitted
    some = [*TEXTS, "", "unknown words only", "OIL \0 oil"]
    assert equal(fitted.transform(some), restored.transform(some))


def test_a_half_of_a_surrogate_pair_is_hashed():
    chosen = TfidfOptions(min_df=1, max_features=16, token_pattern=r"\S+")
    assert HashedTfidf.fit(["\ud800 oil", "\ud800"], chosen).transform(["\ud800"]).nnz == 1


def test_any_number_of_processes_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(terms, "_CHUNK", 2000)
    some = zipf(60)
    chosen = TfidfOptions(max_features=512)
    alone = HashedTfidf.fit(some, chosen)
    with Workers(2) as pool:
        shared = HashedTfidf.of_counts(terms.count_texts(some, chosen.analyzer, workers=pool), chosen)
        assert shared == alone
        assert equal(shared.transform(some, pool), alone.transform(some))
    assert HashedTfidf.fit(some[::-1], chosen) == alone


@pytest.mark.parametrize("columns", [None, hashing.MOST_COLUMNS + 1])
def test_a_number_of_columns_that_cannot_be(columns):
    with pytest.raises(ValueError, match=f"max_features is {columns}, expected at most 16777216 columns"):
        HashedTfidf.fit(TEXTS, TfidfOptions(max_features=columns))


def test_no_terms_is_a_clear_error():
    for some in ([], [""], ["1 2 3"]):
        with pytest.raises(DataError, match=r"training texts contain no term .*give more or longer texts"):
            HashedTfidf.fit(some, FEW)


def content():
    return json.loads(HashedTfidf.fit(TEXTS, FEW).to_json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"found": [1] * 15}, "found has 15 columns, max_features is 16"),
        ({"found": []}, "found is"),
        ({"found": [-1] * 16}, "found.0 is -1"),
        ({"found": [1.5] * 16}, "found.0 is 1.5"),
        ({"found": [9] * 16}, "a column was found in 9 texts of 8"),
        ({"found": [10**400] * 16}, "found"),
        ({"found": {}}, "found is {}"),
        ({"texts": 0}, "texts is 0"),
        ({"texts": 2**31}, "texts is 2147483648"),
        ({"texts": None}, "texts is None"),
        ({"options": {}}, "lacks"),
        ({"options": [1]}, "options is"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_consistent_checksum_does_not_hide_nonsense(change, message):
    bad = {name: value for name, value in content().items() if name not in ("format", "version", "sha256")} | change
    with pytest.raises(DataError, match=r"^run/hashing.json is damaged: .*; restore it or train again$") as error:
        HashedTfidf.from_json(vectorizer.with_checksum("minidl-hashed-tfidf", bad), "run/hashing.json")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change",
    [{"format": "minidl-tfidf"}, {"version": 2}, {"sha256": ""}, {"texts": 9}, {"found": [0] * 16}, {"options": None}],
)
def test_a_tampered_file_is_refused(change):
    with pytest.raises(DataError, match="the vectorizer is damaged"):
        HashedTfidf.from_json(json.dumps(content() | change))


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_a_truncated_file_is_refused(length):
    text = HashedTfidf.fit(TEXTS, FEW).to_json()
    with pytest.raises(DataError, match="is damaged"):
        HashedTfidf.from_json(text[: length % len(text)])
