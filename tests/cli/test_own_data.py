"""Outputs that would fall on the data of a run, and runs inside of their data."""

import shutil

import pytest

from tests.cli.conftest import SMALL
from tests.cli.test_errors import refused
from tests.cli.test_images import write_folder


@pytest.mark.parametrize("flags", [["--json"], ["--profile", "--trace"]])
@pytest.mark.parametrize("name", ["texts.csv", "./texts.csv"])
def test_an_evaluation_keeps_the_data_of_the_run(command, texts, text_run, tmp_path, monkeypatch, flags, name):
    before = texts.read_bytes()
    monkeypatch.chdir(texts.parent)
    refused(command("evaluate", text_run[0], *flags, name), "texts.csv exists and was not written by")
    assert texts.read_bytes() == before


def test_a_prediction_and_a_resumed_training_keep_it(command, texts, text_run, tmp_path):
    before = texts.read_bytes()
    refused(command("predict", text_run[0], "oil", "--profile", "--trace", texts), "was not written by --trace")
    run = tmp_path / "run"
    shutil.copytree(text_run[0], run)
    (run / "report.json").unlink()
    again = command("train", "text", "--out", run, "--resume", "--profile", "--trace", texts)
    refused(again, "was not written by --trace")
    assert texts.read_bytes() == before


@pytest.mark.parametrize("flag", ["--data", "--test"])
def test_a_run_inside_of_its_pictures_is_refused(command, tmp_path, flag):
    data, test = write_folder(tmp_path / "photos", 4), write_folder(tmp_path / "later", 4, 4)
    inside = {"--data": data, "--test": test}[flag]
    (tmp_path / "link").symlink_to(inside)
    before = sorted(tmp_path.rglob("*"))
    for out in (inside / "run", inside / "a" / "run", tmp_path / "link" / "run"):
        result = command("train", "images", "--data", data, "--test", test, "--out", out, *SMALL[:2])
        refused(result, f"is inside {flag} {inside}: choose a folder outside it")
    assert sorted(tmp_path.rglob("*")) == before
