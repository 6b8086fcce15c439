"""Settings that nobody gave follow from the number of texts, and are then the run's."""

import json

import pytest

from minidl.data.corpus import load_corpus
from minidl.data.vectorizer import TfidfOptions
from minidl.errors import ConfigError
from minidl.training.settings import text_defaults
from minidl.training.tasks import TASKS
from minidl.training.tasks.text_settings import TrainText
from minidl.training.train import train


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text("text,label\n" + "".join(f"one{i} two{i % 3},{i % 2}\n" for i in range(40)))
    return path, load_corpus(path, TfidfOptions().analyzer)


def test_gradient_descent_gets_a_higher_rate():
    assert [text_defaults.text(100, 8, momentum)["lr"] for momentum in (0.0, 0.5, 0.9, 0.99)] == [5.0, 5.0, 1.5, 0.15]


@pytest.mark.parametrize("classes", [2, 8, 1000])
def test_more_texts_never_want_a_higher_rate_more_passes_or_smaller_batches(classes):
    before = text_defaults.text(1, classes)
    assert before == {"epochs": 12, "batch_size": 256, "lr": 0.01, "label_smoothing": 0.1}
    for texts in (4999, 5001, 6000, 7999, 8001, 20_001, 80_001, 100_001, 500_001, 10**8):
        defaults = text_defaults.text(texts, classes)
        assert defaults["lr"] <= before["lr"]
        assert defaults["epochs"] <= before["epochs"]
        assert defaults["batch_size"] >= before["batch_size"]
        before = defaults
    assert 0.0004 <= before["lr"] <= 0.004


def test_the_run_has_the_settings_that_were_used(data, tmp_path):
    path, dataset = data
    out = tmp_path / "run"
    train("text", TrainText(data=str(path), out=out, lr=0.02, epochs=2, quiet=True, plots=False), dataset)
    saved = json.loads((out / "config.json").read_text())["config"]
    assert (saved["lr"], saved["epochs"], saved["batch_size"], saved["label_smoothing"]) == (0.02, 2, 256, 0.1)


def test_given_settings_are_kept_and_checked_with_the_others(data, tmp_path):
    path, dataset = data
    task = TASKS["text"]
    settings = {"data": str(path), "out": tmp_path / "run"}
    config = task.settled(TrainText(**settings, batch_size=7), dataset)
    assert (config.batch_size, config.epochs) == (7, 12)
    assert task.settled(config, dataset) is config
    with pytest.raises(ConfigError, match="--warmup 12 must be less than --epochs 12"):
        task.settled(TrainText(**settings, warmup=12), dataset)
