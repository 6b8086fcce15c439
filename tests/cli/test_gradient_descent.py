"""`--activation`, `--optimizer sgd` and `--momentum` of text classifiers: training, predictions, old runs, refusals."""

import json

import pytest

from tests.cli.conftest import SMALL, edited, older, report

OPTIONS = "--activation", "tanh", "--optimizer", "sgd", "--momentum", "0.5"


@pytest.fixture(scope="module")
def run(command, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sgd") / "run"
    result = command("train", "text", "--data", texts, "--out", folder, "--epochs", "8", *SMALL[2:6], *OPTIONS)
    assert result.code == 0, result.err
    return folder


def test_the_run_has_the_settings_and_answers_as_its_report_says(command, run):
    config = json.loads((run / "config.json").read_text())["config"]
    assert (config["activation"], config["optimizer"], config["momentum"]) == ("tanh", "sgd", 0.5)
    result = command("evaluate", run)
    assert f"{report(run)['accuracy']:.4f}" in result.out
    assert report(run)["accuracy"] > 0.5
    answers = [json.loads(line) for line in command("predict", run, "a text", "another").out.splitlines()]
    assert all(0 <= answer["probability"] <= 1 for answer in answers)
    assert command("explain", run, "a text of word1").code == 0


def test_another_activation_gives_other_answers(command, run, tmp_path):
    changed = older(run, tmp_path / "run")
    edited(changed / "config.json", lambda content: content["config"].update(activation="relu"))
    text = "a text of word1 word2"
    assert command("predict", changed, text).out != command("predict", run, text).out


def test_a_run_of_an_earlier_version_has_relu_and_momentum(command, text_run, tmp_path):
    run = older(text_run[0], tmp_path / "run")

    def forget(content):
        for name in ("activation", "momentum"):
            content["config"].pop(name, None)

    edited(run / "config.json", forget)
    assert command("predict", run, "a text").out == command("predict", text_run[0], "a text").out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--momentum", "0.5"), "--momentum is for --optimizer sgd, not for adamw"),
        (("--momentum", "1", "--optimizer", "sgd"), "--momentum is 1.0, expected a number"),
        (("--momentum", "nan", "--optimizer", "sgd"), "--momentum is nan"),
        (("--activation", "softmax"), "--activation is softmax, expected"),
        (("--activation", "tanh", "--model", "attention"), "--activation is tanh, which is for --model mlp"),
    ],
)
def test_settings_that_do_not_fit_are_refused(command, texts, tmp_path, options, message):
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *options)
    assert result.code == 2
    assert message in result.err
    assert not (tmp_path / "run").exists()
