"""The text classifier as an estimator of scikit-learn: fits, predictions, errors, pipelines and searches."""

import copy

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from minidl import random
from minidl.data import DataError
from minidl.errors import ConfigError
from minidl.sklearn import TextClassifier

WORDS = {"sea": ["wave ship", "ship sail wind", "wave wind"], "land": ["tree road", "road hill stone", "tree stone"]}
TEXTS = [f"{text} word{i % 3}" for i in range(10) for group in WORDS.values() for text in group]
LABELS = np.array([label for _ in range(10) for label, group in WORDS.items() for _ in group])
SMALL = {"hidden": (8,), "epochs": 3, "batch_size": 16, "lr": 0.05, "min_df": 1, "random_state": 0}


@pytest.fixture(scope="module")
def fitted():
    return TextClassifier(**SMALL).fit(TEXTS, LABELS)


def test_it_learns_and_answers(fitted):
    assert list(fitted.classes_) == ["land", "sea"]
    shares = fitted.predict_proba(TEXTS)
    assert shares.shape == (60, 2)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-6)
    assert (fitted.predict(TEXTS) == fitted.classes_[shares.argmax(1)]).all()
    assert fitted.score(TEXTS, LABELS) > 0.9
    assert 1 <= fitted.best_epoch_ <= fitted.n_iter_ <= 3
    assert fitted.predict_proba([]).shape == (0, 2)
    assert fitted.predict(np.array(["ship wind", "hill road"])).tolist() == ["sea", "land"]


def test_the_same_seed_gives_the_same_bits_and_leaves_the_random_state(fitted):
    state, torch_state = random.get_state(), torch.get_rng_state()
    second = clone(fitted).fit(TEXTS, LABELS)
    assert random.get_state() == state
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all((second.weights_[name] == weight).all() for name, weight in fitted.weights_.items())
    assert (second.predict_proba(TEXTS) == fitted.predict_proba(TEXTS)).all()


def test_a_copy_answers_alike(fitted):
    fitted.predict(TEXTS)
    twin = copy.deepcopy(fitted)  # by its state, as joblib does
    assert "_model" in vars(fitted)
    assert "_model" not in vars(twin)
    assert (twin.predict_proba(TEXTS) == fitted.predict_proba(TEXTS)).all()


def test_it_stands_in_the_tools_of_scikit_learn():
    with pytest.warns(SkipTestWarning, match="requires input"):  # the other checks need numbers as X
        check_estimator(TextClassifier(**SMALL))
    pipeline = make_pipeline(
        FunctionTransformer(lambda texts: [text.upper() for text in texts]), TextClassifier(**SMALL)
    )
    assert cross_val_score(pipeline, TEXTS, LABELS, cv=2).min() > 0.8
    search = GridSearchCV(TextClassifier(**SMALL), {"hidden": [(4,), (8,)], "dropout": [0.0]}, cv=2).fit(TEXTS, LABELS)
    assert search.best_params_["dropout"] == 0.0


def test_numbers_as_labels_and_a_new_fit():
    model = TextClassifier(**SMALL).fit(TEXTS, (LABELS == "sea") + 5)
    assert set(model.predict(TEXTS)) <= {5, 6}
    model.set_params(hidden=(4,)).fit(TEXTS[:30], LABELS[:30])
    assert set(model.predict(TEXTS)) <= {"sea", "land"}


@pytest.mark.parametrize(
    ("texts", "labels", "changes", "kind", "message"),
    [
        ("one text", ["a"], {}, TypeError, r"X is one text \(str\), expected a sequence of texts"),
        (["a", None], [0, 1], {}, TypeError, r"X\[1\] is of type NoneType, expected a text \(str\)"),
        (TEXTS, LABELS[:5], {}, ValueError, "X has 60 texts and y 5 labels, expected as many"),
        (TEXTS, ["sea"] * 60, {}, ValueError, "labels of 1 class, expected at least 2 classes"),
        (TEXTS, np.linspace(0, 1, 60), {}, ValueError, "continuous"),
        (
            TEXTS,
            LABELS,
            {"validation_fraction": 0.0},
            ValueError,
            "validation_fraction is 0.0, expected a number between",
        ),
        (TEXTS, LABELS, {"lr": -1.0}, ConfigError, "--lr is -1"),
        (TEXTS, LABELS, {"min_df": 1000}, DataError, "no term"),
    ],
)
def test_bad_input_is_refused(texts, labels, changes, kind, message):
    with pytest.raises(kind, match=message):
        TextClassifier(**{**SMALL, **changes}).fit(texts, labels)


def test_answers_need_a_fit():
    with pytest.raises(NotFittedError):
        TextClassifier().predict(TEXTS)
