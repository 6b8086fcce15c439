"""`train text --model attention`: the same folder, commands and baselines as the default, from its flags to resume."""

import json
import os
from unittest import mock

import pytest
from safetensors.numpy import load_file

from minidl.training.loop.learner import Learner
from tests.cli.conftest import edited, older, report, sentences, write_csv
from tests.cli.test_damage import refused, resumed
from tests.cli.test_predict import lines
from tests.trials.same import differences

SMALL = ("--hidden", "16", "--batch-size", "12", "--lr", "0.02", "--dropout", "0.1", "--no-plots")
ATTENTION = ("--model", "attention", "--epochs", "4", *SMALL)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return write_csv(tmp_path_factory.mktemp("data") / "few.csv", sentences(120))


@pytest.fixture(scope="module")
def run(command, few):
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        result = command("train", "text", "--data", few, "--out", few.parent / "run", *ATTENTION)
    assert result.code == 0, result.err
    assert "network        attention\n" in result.out
    return few.parent / "run"


@pytest.fixture(scope="module")
def default(command, few):
    result = command("train", "text", "--data", few, "--out", few.parent / "default", "--epochs", "1", *SMALL)
    assert result.code == 0, result.err
    return few.parent / "default"


def test_it_learns_and_has_the_default_models_terms_and_baselines(run, default):
    assert report(run)["accuracy"] > 0.8
    assert (run / "vocabulary.json").read_bytes() == (default / "vocabulary.json").read_bytes()
    weights = load_file(run / "model.safetensors")
    assert weights["embedding.weight"].shape == (report(run)["source"]["features"] + 2, 16)
    baselines, others = report(run)["baseline"], report(default)["baseline"]
    assert baselines["linear"].pop("method") == "LinearSVC(C=1), TF-IDF features and training split"
    for name in ("linear", "linear_all"):
        baselines[name].pop("method", None), others[name].pop("method")
    assert baselines == others


def test_the_default_run_has_no_trace_of_it(default):
    config = json.loads((default / "config.json").read_text())
    assert not config.keys() & {"model"}
    assert "network" not in report(default)


def test_it_answers_and_is_scored(command, run, default, tmp_path):
    asked = ("crude oil barrel of the opec oil", "wheat corn harvest", "", "qwertz")
    answer = command("predict", run, *asked)
    found, others = lines(answer), lines(command("predict", default, *asked))
    assert [each["label"] for each in found[:2]] == ["crude", "grain"]
    assert [each["known_terms"] for each in found] == [each["known_terms"] for each in others]
    assert "2 of 4" in answer.err
    assert command("evaluate", run, "--json", tmp_path / "own.json").code == 0
    assert json.loads((tmp_path / "own.json").read_text())["confusion"] == report(run)["confusion"]
    other = write_csv(tmp_path / "other.csv", sentences(30, seed=9))
    scored = command("evaluate", run, "--data", other, "--json", tmp_path / "other.json")
    assert scored.code == 0, scored.err
    assert json.loads((tmp_path / "other.json").read_text())["accuracy"] > 0.8
    asked = write_csv(tmp_path / "asked.csv", [[text] for text in asked], ["text"])
    assert lines(command("predict", run, "--file", asked)) == found


def test_a_stopped_run_goes_on_bit_for_bit(command, few, run, tmp_path):
    """Stopped before the ninth step, in the second epoch: dropout and the place in the epoch are in the checkpoint."""
    folder, steps, step = tmp_path / "run", iter(range(8)), Learner.step

    def stopping(self, *inputs):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(self, *inputs)

    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        with mock.patch.object(Learner, "step", stopping):
            result = command("train", "text", "--data", few, "--out", folder, *ATTENTION)
        assert result.code == 130, result.err
        assert not (folder / "report.json").exists()
        refused(command("train", "text", "--out", folder, "--resume", "--model", "mlp"), "--model is attention")
        result = resumed(command, folder, "text")
    assert result.code == 0, result.err
    assert "continuing after " in result.out
    assert differences(folder, run) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--features", "hash"), "--features is hash, which is for --model mlp: attention reads"),
        (("--ngrams", "2"), "--ngrams is 2, which is for --model mlp"),
        (("--hidden", "16,16"), "--hidden is 16,16, which is for --model mlp"),
        (("--lazy",), "--lazy is True, which is for --model mlp"),
        (("--model", "cnn"), "--model is cnn, expected one of mlp, attention"),
    ],
)
def test_options_that_do_not_apply(command, tmp_path, options, expected):
    result = command(
        "train", "text", "--data", "missing.csv", "--out", tmp_path / "run", "--model", "attention", *options
    )
    refused(result, expected)
    assert not (tmp_path / "run").exists()


def test_explain_and_weights_of_another_width_are_refused(command, run, tmp_path):
    refused(command("explain", run, "oil"), "has --model attention: explain requires --model mlp")
    folder = older(run, tmp_path / "run")
    edited(folder / "config.json", lambda config: config["config"].update(hidden=[8]))
    refused(command("predict", folder, "oil"), "the settings of its run expect")
