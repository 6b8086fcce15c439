"""Counted terms are scikit-learn's, whatever the number of processes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

from minidl.data import DataError, Tfidf, TfidfOptions, terms
from minidl.data.terms import Analyzer
from minidl.data.workers import Workers

PATTERN = TfidfOptions().token_pattern
words = st.sampled_from(
    ["the", "The", "cat", "CAT", "cats", "x1", "1x", "don't", "straße", "İstanbul", "ΣΑΣ", "à", "été"]
)
texts = st.lists(st.lists(words | st.text(max_size=4), max_size=8).map(" ".join), min_size=1, max_size=12)
options = st.builds(
    lambda least, most, unit, **others: TfidfOptions(
        ngram_min=min(least, most),
        ngram_max=max(least, most),
        unit=unit,
        nfc=False,
        **(others if unit == "word" else {**others, "stop_words": None, "token_pattern": PATTERN}),
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["word", "word", "char", "char_wb"]),
    min_df=st.integers(1, 3),
    max_features=st.none() | st.integers(1, 6),
    sublinear_tf=st.booleans(),
    lowercase=st.booleans(),
    stop_words=st.sampled_from([None, "english"]),
    token_pattern=st.sampled_from([PATTERN, r"(?u)\b\w\w+\b", r"\w+"]),
)


def of_analyzer(chosen):
    """The options of scikit-learn that say what the terms are; it warns of a pattern where there are no words."""
    return {
        "lowercase": chosen.lowercase, "stop_words": chosen.stop_words, "analyzer": chosen.unit,
        "token_pattern": chosen.token_pattern if chosen.unit == "word" else r"(?u)\b\w\w+\b",
        "ngram_range": (chosen.ngram_min, chosen.ngram_max),
    }  # fmt: skip


def theirs(chosen, count):
    """scikit-learn's vectorizer of these options."""
    return TfidfVectorizer(
        **of_analyzer(chosen), min_df=min(chosen.min_df, max(1, count)),
        max_features=chosen.max_features, sublinear_tf=chosen.sublinear_tf, dtype=np.float32,
    )  # fmt: skip


def same(matrix, other):
    other.sort_indices()
    assert matrix.shape == other.shape
    assert matrix.indptr.tolist() == other.indptr.tolist()
    assert matrix.indices.tolist() == other.indices.tolist()
    assert matrix.data.tobytes() == other.data.tobytes()


@settings(deadline=None)
@given(texts, options, texts)
def test_terms_weights_and_bits_are_those_of_scikit_learn(training, chosen, others):
    reference = theirs(chosen, len(training))
    try:
        reference.fit(training)
    except ValueError:
        with pytest.raises(DataError, match=f"the {len(training)} training texts contain no term that occurs in"):
            Tfidf.fit(training, chosen)
        return
    found = Tfidf.fit(training, chosen)
    assert found.terms == reference.get_feature_names_out().tolist()
    assert np.array(found.idf, dtype=np.float32).tobytes() == reference.idf_.tobytes()
    for some in (training, others):
        same(found.transform(some), reference.transform(some))
        counted = terms.count_texts(some, chosen.analyzer)
        same(found.weighted(counted), reference.transform(some))


def zipf(count, seed=0):
    draw = np.random.default_rng(seed)
    return [" ".join(f"w{n}" for n in draw.zipf(1.3, 45).clip(max=5000)) for _ in range(count)]


@pytest.mark.slow
def test_as_many_processes_as_there_are_give_the_same_bits():
    some = zipf(30_000)
    assert sum(map(len, some)) > 2 * terms._CHUNK
    chosen = TfidfOptions(max_features=1000)
    alone = terms.count_texts(some, chosen.analyzer)
    with Workers(3) as pool:
        shared = terms.count_texts(some, chosen.analyzer, workers=pool)
        found = Tfidf.of_counts(shared, chosen)
        fixed = found.transform(some, pool)
    expected = Tfidf.of_counts(alone, chosen)
    assert found == expected
    same(found.weighted(shared), expected.weighted(alone))
    same(fixed, expected.weighted(alone))


def test_rows_of_counts():
    some = ["a b a", "", "c", "b c d"]
    counted = terms.count_texts(some, Analyzer(r"\w+", True, None, 1))
    part = counted.select(np.array([3, 1, 0]))
    assert part.sizes.tolist() == [3, 0, 2]
    pairs = [(part.terms[i], int(n)) for i, n in zip(part.ids, part.counts, strict=True)]
    assert sorted(pairs[:3]) == [("b", 1), ("c", 1), ("d", 1)]
    assert sorted(pairs[3:]) == [("a", 2), ("b", 1)]


def test_parts_of_counts():
    analyzer = Analyzer(r"\w+", True, None, 1)
    counted = terms.count_texts(["a b a", "", "c", "b c d"], analyzer)
    parts = list(counted.parts(3))
    assert [part.sizes.tolist() for part in parts] == [[2, 0, 1], [3]]
    for name in ("ids", "counts"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(counted, name).tolist()
    assert [len(part) for part in terms.count_texts([], analyzer).parts(3)] == [0]


def test_no_texts_have_no_terms():
    counted = terms.count_texts([], TfidfOptions().analyzer)
    assert (len(counted), counted.terms, counted.ids.dtype) == (0, [], np.int32)
    vocabulary = Tfidf.fit(["one two", "two one"])
    assert vocabulary.transform([]).shape == (0, 2)
    assert vocabulary.transform([""]).nnz == 0


def test_halves_of_surrogate_pairs_travel(monkeypatch):
    monkeypatch.setattr(terms, "_CHUNK", 4)
    some = ["a\ud800b cd", "cd ef", "é cd"]
    analyzer = Analyzer(r"(?u)\w+", True, None, 1)
    with Workers(2) as pool:
        shared = terms.count_texts(some, analyzer, workers=pool)
    alone = CountVectorizer(token_pattern=r"(?u)\w+").fit(some)
    assert sorted(shared.terms) == alone.get_feature_names_out().tolist()
