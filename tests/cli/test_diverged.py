"""Training that leaves the numbers there are: one sentence, and nothing is saved that could be taken for a result."""

import itertools
import json
import shutil

import pytest

from minidl.training.loop.targets import Classification
from minidl.training.run_folder.checkpoints import Checkpoints
from tests.cli.conftest import SMALL, write_csv


def start(command, data, out, *more, kind="text"):
    target = ("--target", "price") if kind == "table" else ()
    return command("train", kind, "--data", data, "--out", out, *target, *SMALL, *more)


def diverged(result, what):
    assert result.code == 1, result.err
    assert result.err.startswith("error: training diverged: ")
    assert what in result.err
    assert "train again with a smaller --lr" in result.err
    assert "the run is in" not in result.out


@pytest.mark.parametrize(
    "flags",
    [
        ("--lr", "1e20"),
        ("--lr", "1e38", "--epochs", "1"),
        ("--weight-decay", "1e38"),
        ("--lr", "1e20", "--optimizer", "sgd", "--lazy"),
    ],
)
def test_a_short_run_that_diverges_is_no_success(command, texts, tmp_path, flags):
    folder = tmp_path / "run"
    diverged(start(command, texts, folder, *flags), "after epoch 1")
    assert not (folder / "report.json").exists()
    assert not (folder / "model.safetensors").exists()
    assert not (folder / "checkpoints").exists()
    assert command("predict", folder, "oil").code == 2
    diverged(command("train", "text", "--out", folder, "--resume"), "after epoch 1")


@pytest.mark.parametrize(
    "flags", [("--lr", "1e30"), ("--lr", "1e25", "--optimizer", "sgd"), ("--weight-decay", "1e38")]
)
def test_a_table_that_diverges(command, table, tmp_path, flags):
    diverged(start(command, table, tmp_path / "run", *flags, kind="table"), "epoch 1")
    assert not (tmp_path / "run" / "report.json").exists()


def test_the_run_that_was_to_be_replaced_stays(command, texts, text_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(text_run[0], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = start(command, texts, folder, "--lr", "1e20", "--overwrite")
    diverged(result, "after epoch 1")
    assert "the previous run is back in" in result.out
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert json.loads(command("predict", folder, "crude oil barrel").out)["label"] == "crude"


def test_checkpoints_before_the_epoch_that_diverged_stay(command, texts, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    judge, epochs = Classification.judge, itertools.count(1)

    def judge_the_first(*args):
        judged = judge(*args)
        if next(epochs) > 1:
            judged.scores["loss"] = float("nan")
        return judged

    monkeypatch.setattr(Classification, "judge", judge_the_first)
    diverged(start(command, texts, folder, "--epochs", "3"), "the validation loss after epoch 2 is nan")
    assert Checkpoints(folder / "checkpoints").last().state["progress"]["epoch"] == 1
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["--lr", "--weight-decay"])
def test_a_rate_beyond_float32_is_refused(command, texts, tmp_path, name):
    result = start(command, texts, tmp_path / "run", name, "1e39")
    assert result.code == 2
    assert f"{name} is 1e+39, expected a number" in result.err
    assert "that float32 holds" in result.err
    assert not (tmp_path / "run").exists()


def test_targets_beyond_what_can_be_squared_are_refused(command, tmp_path):
    data = write_csv(tmp_path / "big.csv", [(i, i * 1e150) for i in range(60)], ("size", "price"))
    result = start(command, data, tmp_path / "run", kind="table")
    assert result.code == 2
    assert "numbers too large to standardise" in result.err
