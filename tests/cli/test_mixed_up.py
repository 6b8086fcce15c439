"""Files of another run, and edited ones, in a run: told or refused."""

import hashlib
import json
import shutil

import pytest

from minidl.training.run_folder import files
from tests.cli.conftest import SMALL, older, write_csv
from tests.cli.test_errors import refused

ROW = '{"size": 100, "age": 10, "kind": "house"}'


def trained(command, data, out, *more):
    result = command("train", "text", "--data", data, "--out", out, *SMALL[:-1], *more)
    assert result.code == 0, result.err
    return out


@pytest.fixture(scope="module")
def other_run(command, texts, tmp_path_factory):
    """A run of other settings (its seed) on the same data: every file has the shape of `text_run`'s."""
    return trained(command, texts, tmp_path_factory.mktemp("other") / "run", "--seed", "1")


@pytest.fixture
def run(text_run, tmp_path):
    return shutil.copytree(text_run[0], tmp_path / "run")


def questions(command, folder):
    return [command("predict", folder, "oil"), command("evaluate", folder)]


def test_the_manifest_has_every_file_of_a_run(run):
    found = files.read_json(run / "manifest.json")
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert found["files"].keys() == names - {"manifest.json"}
    for name, digest in found["files"].items():
        assert hashlib.sha256((run / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_another_run_is_refused(command, run, other_run, name):
    shutil.copy(other_run / name, run / name)
    for result in questions(command, run):
        refused(result, f"{name} is damaged (it is not the file that training wrote: its SHA-256 is not that in")
        assert result.out == ""


def test_a_file_of_another_run_with_its_manifest_is_refused(command, run, other_run):
    for name in ("model.safetensors", "manifest.json"):
        shutil.copy(other_run / name, run / name)
    for result in questions(command, run):
        refused(result, "config.json is damaged (it is not the file that training wrote")


def test_a_model_of_another_run_is_known_without_a_manifest(command, run, other_run, tmp_path):
    run = older(run, tmp_path / "older")
    shutil.copy(other_run / "model.safetensors", run / "model.safetensors")
    for result in questions(command, run):
        assert result.code == 2
        assert "model.safetensors is damaged (it is the model of another run)" in result.err


def test_a_run_without_its_manifest_is_refused(command, run):
    (run / "manifest.json").unlink()
    for result in questions(command, run):
        refused(result, "manifest.json is missing; restore it or train again")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": "minidl-manifest", "version": 1, "run": "", "files": {"config.json": 3}}']
)
def test_a_damaged_manifest_is_told(command, run, content):
    (run / "manifest.json").write_text(content)
    refused(command("predict", run, "oil"), "manifest.json is damaged (")


def test_a_run_of_an_earlier_version_is_read_with_a_note(command, text_run, tmp_path):
    before, run = [result.out for result in questions(command, text_run[0])], older(text_run[0], tmp_path / "older")
    for result, expected in zip(questions(command, run), before, strict=True):
        assert result.err.startswith(
            f"note: {run} was written by an earlier version of minidl and has no manifest.json"
        )
        assert result.out.replace(str(run), str(text_run[0])) == expected


def test_an_edited_report_is_told(command, run):
    report = json.loads((run / "report.json").read_text())
    (run / "report.json").write_text(json.dumps({**report, "accuracy": 1.0}))
    for result in (*questions(command, run), command("train", "text", "--out", run, "--resume")):
        assert result.code == 0
        assert f"note: {run / 'report.json'} was changed after training" in result.err + result.out
    (run / "report.txt").write_text((run / "report.txt").read_text().replace("minidl", "MINIDL"))
    refused(command("train", "text", "--out", run, "--resume"), "report.txt is damaged (it is not the file that")


def test_a_command_looks_only_at_the_files_that_it_reads(command, run):
    for path in (run / "environment.json", run / "metrics.jsonl", *(run / "checkpoints").iterdir()):
        path.write_bytes(b"other")
    for result in questions(command, run):
        assert (result.code, result.err) == (0, "")


def test_what_a_later_command_adds_is_in_the_manifest(command, run):
    result = command("predict", run, "oil", "--profile")
    assert result.code == 0
    digest = hashlib.sha256((run / "trace-predict.json").read_bytes()).hexdigest()
    assert files.read_json(run / "manifest.json")["files"]["trace-predict.json"] == digest
    assert command("predict", run, "oil").err == ""


def test_checkpoints_of_a_run_on_other_data_are_refused(command, texts, tmp_path):
    """The settings are the same, the name of the data's file, too."""
    runs = []
    for kind in ("one", "two"):
        (tmp_path / kind).mkdir()
        lines = texts.read_text().splitlines()
        lines = lines if kind == "one" else [line.replace("oil", "oils") for line in lines]
        (tmp_path / "texts.csv").write_text("\n".join(lines) + "\n")
        runs.append(trained(command, tmp_path / "texts.csv", tmp_path / kind / "run"))
    mine, other = runs
    (tmp_path / "texts.csv").write_text(texts.read_text())
    for made in ("report.json", "report.txt", "manifest.json", "model.safetensors"):
        (mine / made).unlink()
    shutil.rmtree(mine / "checkpoints")
    shutil.copytree(other / "checkpoints", mine / "checkpoints")
    refused(command("train", "text", "--out", mine, "--resume"), "last.json is damaged (it is of another run, on other")


def table_trained(command, path, header, rows, out):
    write_csv(path, rows, header)
    return command("train", "table", "--data", path, "--out", out, "--epochs", "1", "--hidden", "4")


@pytest.mark.parametrize("change", ["renamed labels", "renamed columns", "swapped columns"])
def test_a_table_whose_names_changed_is_other_data(command, tmp_path, change):
    """The numbers that the model sees are the same in each case."""
    rows = [[i, i * i % 7, "ab"[i % 2]] for i in range(60)]
    path, out, header = tmp_path / "t.csv", tmp_path / "run", ("x", "y", "target")
    result = table_trained(command, path, header, rows, out)
    assert result.code == 0, result.err
    if change == "renamed labels":
        rows = [[x, y, {"a": "c", "b": "d"}[label]] for x, y, label in rows]
    header = {"renamed columns": ("x", "z", "target"), "swapped columns": ("y", "x", "target")}.get(change, header)
    write_csv(path, rows, header)
    refused(command("evaluate", out), "is not what the run was started on; restore the data, or train again")
    for made in ("report.json", "report.txt", "manifest.json"):
        (out / made).unlink()
    refused(command("train", "table", "--out", out, "--resume"), "is not what the run was started on")


def test_evaluate_reads_a_run_once(run, table_run, monkeypatch):
    """Between two readings another command may put a run of another kind there."""
    from minidl.training.prediction import predict
    from minidl.training.run_folder.folder import RunFolder
    from minidl.training.settings.command import Evaluate

    read, real = [], RunFolder.read_config

    def replaced(folder):
        read.append(folder.path)
        found = real(folder)
        shutil.copy(table_run[0] / "config.json", run / "config.json")
        return found

    monkeypatch.setattr(RunFolder, "read_config", replaced)
    assert predict.evaluate(Evaluate(run=run))["task"] == "classification"
    assert read == [run]
