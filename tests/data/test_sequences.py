"""Texts as numbers of terms in order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minidl.data import Tfidf, TfidfOptions
from minidl.data.sequences import Sequences, known_terms

FITTED = Tfidf.fit(["alpha beta", "alpha gamma beta", "gamma delta alpha"], TfidfOptions(min_df=2))


def test_terms_keep_their_order_and_the_rest_is_unknown():
    assert FITTED.terms == ["alpha", "beta", "gamma"]
    sequences = Sequences(FITTED, 4)
    numbers = sequences.transform(["Gamma, alpha delta gamma beta", "", "beta"])
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [[4, 2, 1, 4], [1, 0, 0, 0], [3, 0, 0, 0]]
    assert known_terms(numbers).tolist() == [2, 0, 1]
    assert len(sequences) == 5
    assert sequences.transform([]).shape == (0, 1)


@given(st.lists(st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta", "omega"]), max_size=6), max_size=5))
def test_known_terms_are_those_of_the_features(words):
    texts = [" ".join(each) for each in words]
    counts = np.diff(FITTED.transform(texts).indptr)
    assert known_terms(Sequences(FITTED, 6).transform(texts)).tolist() == counts.tolist()
