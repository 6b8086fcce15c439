"""TF-IDF: the published formula, and a saved vocabulary that gives the same bits."""

import json
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.data import Batches, DataError, Tfidf, TfidfOptions
from minidl.data.terms import count_texts
from minidl.data.vectorizer import InOrder

TEXTS = [
    "crude oil output rose", "oil prices fell again", "the trade deficit rose", "wheat and corn exports fell",
    "the bank raised its interest rate", "corn prices rose", "crude prices and trade", "interest in wheat \N{SNOWMAN}",
]  # fmt: skip


def equal(a, b):
    return (
        a.shape == b.shape
        and a.dtype == b.dtype == np.float32
        and a.data.tobytes() == b.data.tobytes()
        and (a.indices == b.indices).all()
        and (a.indptr == b.indptr).all()
    )


def test_the_formula():
    tfidf = Tfidf.fit(["oil oil oil rose", "oil fell", "rose"], TfidfOptions(min_df=1))
    assert tfidf.terms == ["fell", "oil", "rose"]
    idf = [math.log(4 / (1 + n)) + 1 for n in (1, 2, 2)]
    np.testing.assert_allclose(tfidf.idf, idf, rtol=1e-6)
    row = np.array([0, (1 + math.log(3)) * idf[1], idf[2]])
    np.testing.assert_allclose(tfidf.transform(["oil oil oil rose"]).toarray()[0], row / np.linalg.norm(row), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        TfidfOptions(min_df=1),
        TfidfOptions(min_df=1, ngram_max=2, max_features=9),
        TfidfOptions(min_df=1, sublinear_tf=False, lowercase=False, stop_words="english", token_pattern=r"\w+"),
        TfidfOptions(min_df=1, unit="char", ngram_min=2, ngram_max=3, nfc=False),
    ],
)
def test_a_reloaded_vocabulary_gives_the_same_bits(options):
    tfidf = Tfidf.fit(TEXTS, options)
    again = Tfidf.from_json(tfidf.to_json())
    assert again == tfidf
    texts = [*TEXTS, "", "unknown words only", "OIL \0 oil"]
    assert equal(tfidf.transform(texts), again.transform(texts))


def test_a_vocabulary_of_an_earlier_version_keeps_its_words():
    """It has none of the options that came later, and is written without them again."""
    tfidf = Tfidf.fit(["re\u0301sume\u0301 \u0130stanbul"], TfidfOptions(min_df=1, nfc=False))
    assert tfidf.terms == ["re", "stanbul", "sume"]
    saved = json.loads(tfidf.to_json())["options"]
    assert sorted(saved) == [
        "lowercase", "max_features", "min_df", "ngram_max", "stop_words", "sublinear_tf", "token_pattern"
    ]  # fmt: skip
    assert Tfidf.from_json(tfidf.to_json()) == tfidf
    assert json.loads(Tfidf.fit(TEXTS).to_json())["options"].keys() - saved.keys() == {"nfc"}


@pytest.mark.parametrize("processors", [1, 5])
def test_any_number_of_threads_gives_the_same_bits(processors, monkeypatch):
    texts = [*TEXTS, "", "unknown", *TEXTS[::-1], "oil oil oil rose"]
    options = TfidfOptions(min_df=1, max_features=9)
    whole = Tfidf.fit(TEXTS, options)
    monkeypatch.setattr("minidl.data.threads.available", lambda: processors)
    monkeypatch.setattr("minidl.data.vectorizer._STEP", 2)
    assert Tfidf.fit(TEXTS, options) == whole
    for some in (texts, texts[:3], texts[:1], []):
        counted = count_texts(some, options.analyzer)
        monkeypatch.setattr("minidl.data.vectorizer._TOGETHER", 3)
        parted = whole.weighted(counted)
        monkeypatch.setattr("minidl.data.vectorizer._TOGETHER", 100)
        assert equal(parted, whole.weighted(counted))
        assert parted.has_sorted_indices


def test_words_are_letters_first_and_split_at_underscores():
    tfidf = Tfidf.fit(["get_name x 1987 4th na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve x2"], TfidfOptions(min_df=1))
    assert tfidf.terms == ["get", "name", "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve", "th", "x2"]


def test_empty_and_unknown_texts_become_empty_rows_of_a_batch():
    tfidf = Tfidf.fit(TEXTS, TfidfOptions(min_df=1))
    matrix = tfidf.transform(["", "zzz qqq", "oil"])
    assert np.diff(matrix.indptr).tolist() == [0, 0, 1]
    ((batch, _),) = Batches(matrix, [0, 0, 0], 3, shuffle=False).epoch(0)
    assert batch.crow.tolist() == [0, 0, 0, 1]
    assert tfidf.transform([]).shape == (0, len(tfidf))


def test_a_text_of_ten_megabytes():
    text = "crude oil output rose and prices fell " * (10_000_000 // 38)
    tfidf = Tfidf.fit(TEXTS, TfidfOptions(min_df=1))
    matrix = tfidf.transform([text])
    assert abs(np.linalg.norm(matrix.toarray()) - 1) < 1e-6
    ((batch, _),) = Batches(matrix, [0], 1).epoch(0)
    assert batch.nnz == 7


def test_no_terms_is_a_clear_error():
    for texts in ([], [""], ["1 2 3"]):
        with pytest.raises(DataError, match=r"training texts contain no term .*give more or longer texts"):
            Tfidf.fit(texts)
    with pytest.raises(DataError, match="no term that occurs in 2 of them"):
        Tfidf.fit(["one", "two"])


@pytest.mark.parametrize(
    "option",
    [{"ngram_max": 0}, {"ngram_max": True}, {"min_df": 0}, {"max_features": 0}, {"stop_words": "klingon"},
     {"token_pattern": "("}, {"token_pattern": "(a)(b)"}, {"lowercase": 1}, {"sublinear_tf": None}, {"ngram_min": 2},
     {"unit": "chars"}, {"unit": "char", "stop_words": "english"}, {"unit": "char_wb", "token_pattern": "x+"},
     {"nfc": None}],
)  # fmt: skip
def test_bad_options(option):
    with pytest.raises(ValueError, match=f"bad TF-IDF option {next(iter(option))}"):
        TfidfOptions(**option)


@cache
def vocabulary():
    return Tfidf.fit(TEXTS, TfidfOptions(min_df=1)).to_json()


def tampered(change):
    data = json.loads(vocabulary())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["terms"].pop(),
        lambda data: data["idf"].__setitem__(0, data["idf"][0] + 1e-12),
        lambda data: data["terms"].reverse(),
        lambda data: data["options"].update(lowercase=False),
        lambda data: data["options"].update(surprise=1),
        lambda data: data.update(version=2),
        lambda data: data.pop("sha256"),
        lambda data: data.pop("terms"),
        lambda data: data.update(terms="oil"),
        lambda data: data.update(idf=None),
    ],
)
def test_a_tampered_vocabulary_is_refused(change):
    with pytest.raises(DataError, match=r"^run/vocabulary.json is damaged: .*; restore it or train again$"):
        Tfidf.from_json(tampered(change), "run/vocabulary.json")


def test_a_consistent_checksum_does_not_hide_nonsense():
    from minidl.data import vectorizer

    good = json.loads(vocabulary())
    for key, value in [
        ("terms", ["oil"] * len(good["terms"])),
        ("terms", [1] * len(good["terms"])),
        ("terms", {}),
        ("idf", [-1.0] * len(good["idf"])),
        ("idf", [float("nan")] * len(good["idf"])),
        ("options", {"ngram_max": 10**9}),
        ("options", [1]),
    ]:
        bad = {**good, key: value}
        bad["sha256"] = vectorizer._checksum({name: bad[name] for name in ("options", "terms", "idf")})
        with pytest.raises(DataError, match="is damaged"):
            Tfidf.from_json(json.dumps(bad))


@settings(max_examples=60)
@given(st.integers(0, 600))
def test_a_truncated_vocabulary_is_refused(length):
    text = vocabulary()
    with pytest.raises(DataError, match="the vocabulary is damaged"):
        Tfidf.from_json(text[: min(length, len(text) - 1)])


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["terms", "idf", "options", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(json_values)
def test_any_json_is_refused_with_the_one_error(value):
    text = json.dumps(
        {"format": "minidl-tfidf", "version": 1, "sha256": "", "options": {}, "terms": value, "idf": value}
    )
    for attempt in (text, json.dumps(value)):
        with pytest.raises(DataError):
            Tfidf.from_json(attempt)
    with pytest.raises(DataError):
        Tfidf.from_json("[" * 100_000)


def test_terms_in_order():
    fitted = InOrder.fit(["alpha beta", "alpha gamma beta", "gamma delta alpha"], TfidfOptions(min_df=2))
    assert fitted.terms == ["alpha", "beta", "gamma"]
    numbers = fitted.transform(["Gamma, alpha delta gamma beta", "", "beta"])
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [[4, 2, 1, 4, 3], [1, 0, 0, 0, 0], [3, 0, 0, 0, 0]]
    assert fitted.transform([]).shape == (0, 1)
    assert fitted.transform(["beta " * 300]).tolist() == [[3] * 256]
    assert fitted.to_json() == Tfidf(fitted.options, fitted.terms, fitted.idf).to_json()
    assert InOrder.from_json(fitted.to_json()) == fitted
