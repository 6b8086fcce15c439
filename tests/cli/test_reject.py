"""Probabilities of finished runs: the temperature of the report, and `--reject`."""

import json

import pytest

from tests.cli.conftest import edited, older, report


def answers(result):
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


def test_answers_below_a_probability_have_no_label(command, text_run):
    texts = [f"a text of word{i}" for i in range(9)]
    plain, top = (answers(command("predict", text_run[0], *texts, *flags)) for flags in ((), ("--reject", "1")))
    assert all(answer["label"] == answer["top"][0]["label"] for answer in plain)
    assert [answer["top"] for answer in top] == [answer["top"] for answer in plain]
    assert all(answer["label"] is None for answer in top if answer["probability"] < 1)
    half = answers(command("predict", text_run[0], *texts, "--reject", "0.4"))
    assert [answer["label"] is None for answer in half] == [answer["probability"] < 0.4 for answer in plain]


def test_an_evaluation_shows_coverage_and_accuracy(command, text_run, tmp_path):
    assert command("evaluate", text_run[0], "--reject", "0.4", "--json", tmp_path / "scores.json").code == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["rejected"]["threshold"] == 0.4
    assert 0 <= scores["rejected"]["coverage"] <= 1
    assert scores["calibration"]["error"] == pytest.approx(report(text_run[0])["calibration"]["error"], abs=1e-6)


def test_the_temperature_scales_the_probabilities(command, text_run, tmp_path):
    run = older(text_run[0], tmp_path / "run")
    edited(run / "calibration.json", lambda content: content.update(temperature=20.0))
    (flat,) = answers(command("predict", run, "a text of word1"))
    assert 0.3 < flat["probability"] < 0.4  # three classes
    edited(run / "calibration.json", lambda content: content.update(temperature=0.0))
    result = command("predict", run, "a text of word1")
    assert result.code == 2
    assert "calibration.json is damaged" in result.err


def test_a_run_of_an_earlier_version_has_the_temperature_1(command, text_run, tmp_path):
    run = older(text_run[0], tmp_path / "run")
    edited(run / "calibration.json", lambda content: content.update(temperature=1.0))
    expected = command("predict", run, "a text of word1").out
    (run / "calibration.json").unlink()
    assert command("predict", run, "a text of word1").out == expected


def test_only_classifications_reject(command, table_run, table):
    result = command("predict", table_run[0], "--file", table, "--reject", "0.5")
    assert result.code == 2
    assert "--reject is for classifications, and this run predicts numbers" in result.err
    result = command("predict", table_run[0], "--file", table, "--reject", "1.5")
    assert result.code == 2
    assert "--reject is 1.5, expected a number" in result.err
