"""The report's text: what is said of columns, of the epoch that is kept, and of a model that learnt nothing."""

import numpy as np
import pytest

from minidl.training.report import metrics, report_files
from minidl.training.run_folder.progress import Progress

SCORES = {"accuracy": 0.5, "macro_f1": 0.4}


def evaluation(**change):
    source = {"name": "a.csv", "examples": 1200, "text_column": "body", "label_column": "kind", "guessed": []}
    report = {"task": "classification", "data": "a.csv", "run": "runs/a", "source": source, **SCORES}
    return {**report, "baseline": {"majority": {"accuracy": 0.4, "macro_f1": 0.1}}, **change}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"accuracy": 0.4}, None),
        ({"accuracy": 0.39}, "The model is worse than always predicting the majority class: train longer (--epochs)"),
    ],
)
def test_a_model_below_the_majority_class_is_told(change, line):
    text = report_files.as_text(evaluation(**change))
    assert ("worse than" in text) == (line is not None)
    assert line is None or line in text


def test_a_regression_below_the_mean_is_told():
    scores = {"rmse": 2.0, "mae": 1.0, "r2": -0.5}
    report = {"task": "regression", "data": "a", "run": "r", "source": {"examples": 1}, **scores}
    text = report_files.as_text({**report, "baseline": {"mean": {"rmse": 1.5, "mae": 1.0, "r2": -0.1}}})
    assert "worse than always predicting the mean:" in text


def test_an_evaluation_says_what_it_read():
    text = report_files.as_text(evaluation())
    assert "run       runs/a\ncolumns   text 'body', label 'kind'\nexamples  1,200\n" in text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({}, ""),
        ({"text_column": "a", "label_column": "b", "guessed": ["label_column"]}, "text 'a', label 'b' (guessed)"),
        ({"target": "y", "task": "regression", "guessed": ["task"]}, "target 'y', task regression (guessed)"),
    ],
)
def test_columns(source, text):
    assert report_files.columns(source) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("accuracy", 0.98765, "0.9877"),
        ("r2", -0.00001, "0.0000"),
        ("rmse", 84706.8254, "84706.8"),
        ("mae", 561437059.8, "561437000"),
        ("mae", 0.000123456789, "0.000123457"),
        ("rmse", 1e80, "1e+80"),
        ("macro_f1", None, "not finite"),
    ],
)
def test_scores_have_no_more_digits_than_they_mean(name, value, text):
    assert metrics.format_score(name, value) == text


@pytest.mark.parametrize(
    ("epoch", "step", "text"),
    [(0, 1, "1 step"), (0, 5, "5 steps"), (1, 2, "epoch 1 and 2 steps"), (3, 0, "epoch 3")],
)
def test_a_place_in_training(epoch, step, text):
    assert Progress(epoch=epoch, step=step).text == text


LABELS = ["a\nb", "\x1b[31mred"]


def test_a_label_stays_on_its_line():
    content = evaluation(
        per_class=metrics.per_class(
            metrics.counts(np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1]), 2), LABELS
        )
    )
    assert "\na\\nb        " in report_files.as_text(content)
    assert "\n\\u001b[31mred  " in report_files.as_text(content)


def test_where_a_run_went_on_under_another_environment_is_told():
    changes = {"torch": ["2.11.0", "2.13.0"], "tile_tables": ["a" * 64, "b" * 64]}
    report = {"resumed": [{"after": "epoch 1 and 2 steps", "changes": changes}, {"after": "epoch 3", "changes": {}}]}
    first, second = report_files.resumptions(report)
    told = "after epoch 1 and 2 steps with torch 2.13.0 (was 2.11.0), tile_tables bbbbbbbbbbbb (was aaaaaaaaaaaa)"
    assert first == ("resumed", f"{told}: the last bits may differ")
    assert second[1].startswith("after epoch 3 with ")
    assert report_files.resumptions({}) == []


@pytest.mark.parametrize(
    ("accuracy", "linear", "expected"),
    [
        (1.0, 1.0, ""),
        (0.6, 0.7, "worse than the linear baseline"),
        (0.3, 0.7, "worse than the majority baseline"),
        (0.6, None, ""),
    ],
)
def test_a_model_is_compared_with_the_baselines(accuracy, linear, expected):
    baseline = {"majority": {"accuracy": 0.4}, "linear": {} if linear is None else {"accuracy": linear}}
    assert report_files.shortfall({"accuracy": accuracy, "baseline": baseline}) == expected


def test_the_scores_fit_in_one_line():
    assert report_files.summary({"accuracy": 0.5, "macro_f1": 0.25}) == "test: accuracy 0.5000, macro-F1 0.2500"
    assert report_files.summary({"rmse": 2.0, "mae": 1.0, "r2": -0.5}) == "test: RMSE 2, MAE 1, R2 -0.5000"
    assert report_files.summary({"task": "gan"}) == ""
