"""Thousands of classes: no C x C table, bounded outputs, and what is left out is said."""

import json
import tracemalloc

import numpy as np
import pytest
from scipy import sparse

from minidl import models, random
from minidl.training.loop import forward
from minidl.training.loop.targets import Classification
from minidl.training.process import memory_limit
from minidl.training.report import baselines, report_files

CLASSES = 6072
LABELS = [f"class {i}" for i in range(CLASSES)]


@pytest.fixture(scope="module")
def answers():
    """(truth, predicted): the first classes are taken for one of three, the others for themselves."""
    truth = np.arange(2 * CLASSES) % CLASSES
    return truth, np.where(truth < 300, truth % 3, truth)


def test_a_report_needs_no_matrix(answers):
    tracemalloc.start()
    scores = report_files.classification(*answers, LABELS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6  # a matrix takes 295 MB
    assert len(json.dumps(scores, indent=2)) < 1e6
    assert "confusion" not in scores
    assert scores["accuracy"] == 1 - 297 / CLASSES
    assert len(scores["per_class"]) == CLASSES
    assert scores["confusions"][0] == {"true": "class 3", "predicted": "class 0", "count": 2}
    assert len(scores["confusions"]) == 100


def test_a_report_of_few_classes_has_its_matrix():
    scores = report_files.classification(np.array([0, 0, 1]), np.array([0, 1, 1]), ["a", "b"])
    assert scores["confusion"] == [[1, 1], [0, 1]]
    assert "confusions" not in scores


@pytest.mark.parametrize(
    ("of", "elsewhere"), [({"run": "r"}, "--json FILE writes"), ({"seconds": 1.0}, "report.json has")]
)
def test_the_text_has_the_most_frequent_classes_and_says_where_the_others_are(answers, of, elsewhere):
    source = {"name": "a", "examples": 9, "sizes": {"train": 1, "validation": 1, "test": 1}}
    training = {
        **dict.fromkeys(("epochs", "steps", "best_epoch", "seed", "parameters", "skipped"), 1),
        "optimizer": {"name": "adamw", "variant": "dense", "lr": 0.1}, "precision": "float32", "device": "cpu",
    }  # fmt: skip
    report = {"task": "classification", "data": "a", "source": source, **training, **of}
    left_out = {"method": "LinearSVC", baselines.LEFT_OUT: "it would take long"}
    scores = report_files.classification(*answers, LABELS)
    text = report_files.as_text(
        {**report, **scores, "baseline": {"majority": {"accuracy": 0.1, "macro_f1": 0.1}, "linear": left_out}}
    )
    assert text.count("\nclass ") == 51
    assert text.endswith(f"\nthe 50 most frequent of 6,072 classes; {elsewhere} all of them\n")
    assert "linear: LinearSVC         -         -\n" in text
    assert "\nlinear: skipped because it would take long\n" in text


@pytest.fixture
def split():
    """(targets, model, features, truth) with 3,000 examples of 40 classes."""
    random.manual_seed(0)
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 40, 3000)
    return (
        Classification(LABELS[:40]),
        models.TableMLP(5, 40, (8,)),
        rng.normal(size=(3000, 5)).astype(np.float32),
        truth,
    )


def test_outputs_in_parts_are_those_of_the_whole(split, monkeypatch):
    targets, model, features, truth = split
    (complete,) = forward.outputs(model, features, 40)
    before, predictions = targets.judge(model, features, truth), targets.predictions([complete], confidence=True)
    monkeypatch.setattr(forward, "_PART_VALUES", 50_000)
    parts = list(forward.outputs(model, features, 40))
    assert [len(part) for part in parts] == [2048, 952]
    assert np.array_equal(np.concatenate(parts), complete)
    in_parts = targets.predictions(parts, confidence=True)
    assert np.array_equal(in_parts.values, predictions.values)
    assert np.array_equal(in_parts.confidence, predictions.confidence)
    assert targets.answers(parts, 3) == targets.answers([complete], 3)
    after = targets.judge(model, features, truth)
    assert after.scores.pop("loss") == pytest.approx(before.scores.pop("loss"), rel=1e-6)
    assert after == before


def test_batches_of_wide_outputs_are_smaller(split, monkeypatch):
    targets, model, features, _ = split
    sizes = []
    monkeypatch.setattr(forward, "_BATCH_VALUES", 4000)
    real = forward._apply
    monkeypatch.setattr(forward, "_apply", lambda m, f, size: (sizes.append(size), real(m, f, size))[1])
    assert sum(map(len, forward.outputs(model, features, targets.outputs))) == 3000
    assert sizes == [100]


def test_no_example_has_no_answer(split):
    targets, model, _, _ = split
    parts = list(forward.outputs(model, np.zeros((0, 5), dtype=np.float32), 40))
    assert targets.answers(parts, 3) == []
    assert len(targets.predictions(parts).values) == 0


def examples(classes, features=50):
    rng = np.random.default_rng(0)
    y = np.arange(3 * classes) % classes
    x = sparse.csr_matrix(rng.normal(size=(len(y), features)).astype(np.float32))
    return x, y


def test_a_linear_machine_that_does_not_fit_is_left_out(monkeypatch):
    part = examples(30)
    assert "accuracy" in baselines.classification(part, part, part, 30)["linear"]
    monkeypatch.setattr(memory_limit, "free", lambda: 60_000)
    scores = baselines.classification(part, part, part, 30)
    assert scores["linear"][baselines.LEFT_OUT] == (
        "its coefficients, 30 x 50 in float64, take 35.16 KiB in all, expected at most 29.30 KiB"
    )
    assert scores["majority"]["accuracy"] == pytest.approx(1 / 30)


def test_a_linear_machine_that_takes_long_is_left_out(monkeypatch):
    part = examples(30)
    monkeypatch.setattr(baselines, "_MOST_SECONDS", 0.01)
    scores = baselines.classification(part, part, part, 30)
    assert scores["linear"][baselines.LEFT_OUT] == (
        "its 4,590 values for each of 30 classes take about 0 minutes, expected at most 0"
    )
    assert scores["linear_all"].keys() == {"method", baselines.LEFT_OUT}


def test_a_linear_machine_decides_in_parts(monkeypatch):
    part = examples(30)
    expected = baselines.classification(part, part, part, 30)
    monkeypatch.setattr(baselines, "_MOST_DECISIONS", 300)
    assert baselines.classification(part, part, part, 30) == expected
