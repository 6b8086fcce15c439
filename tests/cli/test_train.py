"""Whole runs: what training leaves, what its report says, and what becomes of a folder that is there already."""

import json
import re
import shutil
import struct
from importlib.util import find_spec

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.conftest import SMALL, report

COMMON = {
    "task", "kind", "data", "device", "seconds", "epochs", "best_epoch", "steps", "skipped", "seed", "parameters",
    "optimizer", "precision", "source", "validation", "baseline", "phases", "memory",
}  # fmt: skip
ALWAYS = {
    "manifest.json",
    "config.json", "environment.json", "metrics.jsonl", "model.safetensors", "report.json", "report.txt",
    "report.html", "checkpoints",
}  # fmt: skip


def pictures():
    return find_spec("matplotlib") is not None


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_text_run_has_its_files(text_run):
    folder, _ = text_run
    expected = ALWAYS | {"labels.json", "vocabulary.json", "calibration.json"}
    if pictures():
        expected |= {"loss.png", "scores.png", "confusion.png", "reliability.png"}
    assert names(folder) == expected


def test_a_text_report_has_its_keys(text_run):
    folder, _ = text_run
    content = report(folder)
    assert content.keys() == COMMON | {"accuracy", "macro_f1", "per_class", "confusion", "calibration"}
    assert content["task"] == "classification"
    assert content["optimizer"] == {
        "name": "adamw", "variant": "dense", "lr": 0.05, "weight_decay": 0.0, "schedule": "cosine",
    }  # fmt: skip
    assert content["baseline"].keys() == {"majority", "linear", "linear_all"}
    assert content["baseline"]["linear"].keys() == {"method", "accuracy", "macro_f1"}
    assert content["source"]["sizes"] == {"train": 168, "validation": 24, "test": 48}
    assert content["epochs"] == 2
    assert content["skipped"] == 0
    assert [entry["label"] for entry in content["per_class"]] == ["crude", "grain", "trade"]
    assert np.sum(content["confusion"]) == 48


def test_a_text_run_learns(text_run):
    folder, _ = text_run
    content = report(folder)
    assert content["accuracy"] > 0.9
    assert content["baseline"]["majority"]["accuracy"] < 0.4


def test_the_report_is_printed_and_kept_as_text(text_run):
    folder, out = text_run
    text = (folder / "report.txt").read_text()
    assert text in out
    for word in ("minidl", "majority", "linear: LinearSVC(C=1)", "macro-F1", "crude", "adamw (dense)"):
        assert word in text


def test_every_epoch_is_a_line(text_run):
    folder, out = text_run
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [1, 2]
    for record in records:
        assert record["validation"].keys() == {"loss", "accuracy", "macro_f1"}
        assert f"epoch {record['epoch']}/2  loss {record['loss']:.4f}" in out


def test_what_is_kept_and_what_was_guessed_is_said(text_run):
    folder, out = text_run
    rule = f"epoch {report(folder)['best_epoch']}, the last within one standard error of the best validation score"
    text = (folder / "report.txt").read_text()
    assert f"kept: {rule} (*: the best so far)" in out
    assert f"kept           {rule}\n" in text
    assert "columns        text 'text' (guessed), label 'label' (guessed)\n" in text
    assert "\ncolumns: text 'text' (guessed), label 'label' (guessed)\n" in out
    assert report(folder)["source"]["guessed"] == ["text_column", "label_column"]
    assert "try --epochs" not in out, "the scores are good"
    assert "linear, with validation data: LinearSVC" in text
    assert "examples\n" in text
    assert "worse than" not in text


def test_the_model_is_a_safetensors_file_that_others_read(text_run):
    folder, _ = text_run
    weights = load_file(folder / "model.safetensors")
    vocabulary = json.loads((folder / "vocabulary.json").read_text())
    assert weights["0.weight"].shape == (len(vocabulary["terms"]), 8)
    assert json.loads((folder / "labels.json").read_text()) == {"labels": ["crude", "grain", "trade"]}


def test_the_environment_is_recorded(text_run):
    folder, _ = text_run
    content = json.loads((folder / "environment.json").read_text())
    assert content["threads"] == 1
    assert len(content["tile_tables"]) == 64
    assert content["kernels"] in ("interpreted", "compiled")
    assert {"torch", "triton", "numpy", "minidl", "device"} <= content.keys()


@pytest.mark.skipif(not pictures(), reason="matplotlib is not installed")
def test_the_pictures_are_png_files(text_run):
    folder, _ = text_run
    for path in folder.glob("*.png"):
        raw = path.read_bytes()
        assert raw[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", raw[16:24])) > 300


def test_the_same_seed_makes_the_same_model(command, text_run, texts, tmp_path):
    folder, _ = text_run
    again = command("train", "text", "--data", texts, "--out", tmp_path / "again", *SMALL, "--quiet")
    assert re.fullmatch(r"test: accuracy \d\.\d{4}, macro-F1 \d\.\d{4}\n", again.out)
    assert (again.code, again.err) == (0, "")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert report(tmp_path / "again")["confusion"] == report(folder)["confusion"]
    assert not list((tmp_path / "again").glob("*.png"))


def test_a_table_run_has_its_files_and_scores(table_run):
    folder, out = table_run
    expected = ALWAYS | {"schema.json"}
    if pictures():
        expected |= {"loss.png", "scores.png", "predictions.png"}
    assert names(folder) == expected
    content = report(folder)
    assert content.keys() == COMMON | {"target", "rmse", "mae", "r2"}
    assert content["baseline"].keys() == {"mean", "ridge", "mlp"}
    assert content["task"] == "regression"
    assert content["r2"] > 0.8
    for word in ("RMSE", "ridge: RidgeCV", "mlp: MLPRegressor", "target 'price', task regression (guessed)"):
        assert word in out


def test_a_table_may_be_classified(command, table, tmp_path):
    result = command(
        "train", "table", "--data", table, "--target", "kind", "--out", tmp_path / "run", "--epochs", "2",
        "--hidden", "8", "--no-plots",
    )  # fmt: skip
    assert result.code == 0, result.err
    content = report(tmp_path / "run")
    assert content["task"] == "classification"
    assert content["baseline"].keys() == {"majority", "linear", "linear_all"}
    assert {"labels.json", "schema.json"} <= names(tmp_path / "run")


def test_a_folder_in_use_is_kept_and_a_run_is_replaced_only_on_request(command, text_run, texts, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(text_run[0], folder)
    before = (folder / "model.safetensors").read_bytes()
    refused = command("train", "text", "--data", texts, "--out", folder, *SMALL)
    assert refused.code == 2
    assert "exists and is not empty: choose another folder" in refused.err
    assert (folder / "model.safetensors").read_bytes() == before
    replaced = command(
        "train", "text", "--data", texts, "--out", folder, *SMALL, "--seed", "5", "--overwrite", "--lazy"
    )
    assert replaced.code == 0, replaced.err
    assert (folder / "model.safetensors").read_bytes() != before
    assert report(folder)["optimizer"]["variant"] == "lazy"
    assert names(tmp_path) == {"run"}


def test_a_finished_run_is_not_trained_again_by_resume(command, text_run):
    folder, _ = text_run
    before = (folder / "report.json").stat().st_mtime_ns
    result = command("train", "text", "--out", folder, "--resume")
    assert result.code == 0
    assert "is already finished" in result.out
    assert (folder / "report.txt").read_text() in result.out
    assert command("train", "text", "--out", folder, "--resume", "--quiet").out == ""
    assert (folder / "report.json").stat().st_mtime_ns == before


def test_capture_is_asked_for_unless_it_is_not_wanted(command, texts, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("minidl.training.train.train", lambda kind, config, *_: asked.append(config.capture))
    for flags in ((), ("--no-capture",)):
        command("train", "text", "--data", texts, "--out", tmp_path / "run", *flags)
    assert asked == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [
        ("text", "--data", "TEXTS", "--epochs", "6", "--batch-size", "32", "--hidden", "16"),
        ("table", "--data", "diabetes", "--epochs", "8"),
        ("images", "--data", "digits", "--epochs", "4"),
        ("images", "--data", "digits", "--epochs", "4", "--precision", "float16", "--batch-size", "100"),
        ("gan", "--data", "digits", "--epochs", "1"),
    ],
    ids=["text", "table", "images", "images in float16", "gan"],
)
def test_a_captured_run_has_the_same_model_and_scores(minidl, texts, tmp_path, arguments):
    arguments = [texts if word == "TEXTS" else word for word in arguments]
    for name, flags in (("captured", ()), ("launched", ("--no-capture",))):
        result = minidl("train", *arguments, "--out", tmp_path / name, "--no-plots", *flags)
        assert result.code == 0, result.err
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("captured", "launched")]
    assert files[0] == files[1]
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("captured", "launched")]
    for one, other in zip(*lines, strict=True):
        assert {**json.loads(one), "seconds": 0} == {**json.loads(other), "seconds": 0}
