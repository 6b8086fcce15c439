import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error, precision_recall_fscore_support, r2_score

from minidl.training.report import metrics

pairs = st.integers(1, 6).flatmap(
    lambda classes: st.tuples(
        st.just(classes),
        st.lists(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=1, max_size=40),
    )
)


@given(pairs)
def test_scores_are_scikit_learns(case):
    classes, both = case
    truth, predicted = np.array(both).T
    scores = metrics.classification(truth, predicted, classes)
    assert scores["accuracy"] == pytest.approx(accuracy_score(truth, predicted), abs=1e-12)
    assert scores["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro", zero_division=0), abs=1e-12)
    table = metrics.per_class(metrics.counts(truth, predicted, classes), [str(i) for i in range(classes)])
    expected = precision_recall_fscore_support(truth, predicted, labels=range(classes), zero_division=0)
    for i, row in enumerate(table):
        got = (row["precision"], row["recall"], row["f1"], row["support"])
        assert got == pytest.approx(tuple(float(column[i]) for column in expected), abs=1e-12)


@given(pairs)
def test_confusions_are_those_of_the_matrix(case):
    classes, both = case
    truth, predicted = np.array(both).T
    rows = list(zip(*(part.tolist() for part in metrics.confusions(truth, predicted)), strict=True))
    matrix = metrics.confusion_matrix(truth, predicted, classes)
    assert {row[:2]: row[2] for row in rows} == {(i, j): n for (i, j), n in np.ndenumerate(matrix) if n}
    assert rows == sorted(rows, key=lambda row: (-row[2], *row[:2]))


def test_regression_scores_are_scikit_learns():
    rng = np.random.default_rng(0)
    truth, predicted = rng.normal(100, 20, 50), rng.normal(100, 25, 50)
    scores = metrics.regression(truth, predicted)
    assert scores["r2"] == pytest.approx(r2_score(truth, predicted))
    assert scores["mae"] == pytest.approx(mean_absolute_error(truth, predicted))
    assert scores["rmse"] == pytest.approx(float(np.sqrt(((truth - predicted) ** 2).mean())))


def test_nothing_scores_nothing_and_does_not_divide_by_zero():
    none = np.zeros(0, dtype=np.int64)
    assert metrics.classification(none, none, 3) == {"accuracy": 0.0, "macro_f1": 0.0}
    assert metrics.regression(np.ones(3), np.zeros(3))["r2"] == 0.0


@pytest.mark.parametrize(
    ("truth", "predicted", "message"),
    [([0, 1], [0], "one length"), ([0, 3], [0, 1], "0 .. 2"), ([0, 1], [0, -1], "0 .. 2")],
)
def test_what_is_no_pair_of_class_vectors_is_refused(truth, predicted, message):
    with pytest.raises(ValueError, match=message):
        metrics.counts(np.array(truth), np.array(predicted), 3)
