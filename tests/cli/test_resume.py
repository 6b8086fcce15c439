"""A run that is stopped and continued ends as the run that was left alone, bit for bit."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest

from minidl.errors import DamagedError
from minidl.runtime import launch, tile_tables
from minidl.training import train
from minidl.training.loop.epochs import Trainer
from minidl.training.process import environment
from minidl.training.process.display import Display
from minidl.training.run_folder import files
from minidl.training.run_folder.checkpoints import Checkpoint, Checkpoints
from minidl.training.run_folder.training_folder import mark
from tests.cli.conftest import edited, report, start, unfinished, wait_for
from tests.trials.same import differences

LONGER = ("--epochs", "3", "--batch-size", "16", "--hidden", "8", "--lr", "0.02", "--dropout", "0.3", "--no-plots")


@pytest.fixture(scope="module")
def whole(command, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # as the processes that are stopped have it
        result = command("train", "text", "--data", texts, "--out", folder, *LONGER)
    assert result.code == 0, result.err
    return folder


def stop(arguments, folder, run, number, again=False):
    """Start training, stop it by a signal after its first checkpoint, and return its exit code and output."""
    process = start("train", "text", *arguments, "--out", run, folder=folder)
    wait_for((run / "checkpoints" / "last.json").exists, process)
    process.send_signal(number)
    if again:
        time.sleep(0.01)
        process.send_signal(number)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def test_ctrl_c_saves_and_the_run_goes_on_bit_for_bit(command, texts, whole, tmp_path):
    run = tmp_path / "run"
    code, _, err = stop(["--data", texts, *LONGER], tmp_path, run, signal.SIGINT)
    assert code == 130, err
    assert "interrupted after epoch " in err
    assert "everything is saved" in err
    advice = next(line for line in err.splitlines() if "--resume" in line).split()
    assert advice == ["minidl", "train", "text", "--out", str(run), "--resume"]
    progress = json.loads((run / "checkpoints" / "last.json").read_text())["progress"]
    assert 0 < progress["steps"] < 33
    assert not (run / "report.json").exists()
    resumed = command(*advice[1:], "--no-plots")
    assert resumed.code == 0, resumed.err
    place = err.partition("interrupted after ")[2].partition(";")[0]
    assert f"continuing after {place}\n" in resumed.out
    assert differences(run, whole) == []


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_epoch(command, texts, whole, tmp_path):
    run = tmp_path / "run"
    code, _, _ = stop(["--data", texts, *LONGER], tmp_path, run, signal.SIGKILL)
    assert code == -signal.SIGKILL
    resumed = command("train", "text", "--out", run, "--resume", "--data", texts, "--no-plots")
    assert resumed.code == 0, resumed.err
    assert differences(run, whole) == []


def test_a_second_signal_stops_at_once(texts, tmp_path):
    code, _, err = stop(["--data", texts, *LONGER], tmp_path, tmp_path / "run", signal.SIGINT, again=True)
    assert code == 130
    assert "Traceback" not in err
    assert Checkpoints(tmp_path / "run" / "checkpoints").last() is not None


def test_sigterm_saves_and_the_run_is_not_continued_with_other_settings_or_data(command, texts, tmp_path):
    run, data = tmp_path / "run", tmp_path / "texts.csv"
    data.write_text(texts.read_text())
    code, _, err = stop(["--data", data, *LONGER], tmp_path, run, signal.SIGTERM)
    assert code == 130, err
    assert "everything is saved" in err
    before = (run / "checkpoints" / "last.json").read_bytes()
    other = command("train", "text", "--out", run, "--resume", "--epochs", "9", "--seed", "1")
    assert other.code == 2
    assert "--epochs is 3 in the run, 9 was given; --seed is 0 in the run, 1 was given" in other.err
    unfinished = command("predict", run, "text")
    assert unfinished.code == 2
    assert f"continue it with: minidl train text --out {run} --resume" in unfinished.err
    data.write_text(texts.read_text() + "one more line,crude\n")
    changed = command("train", "text", "--out", run, "--resume")
    assert changed.code == 2
    assert "is not what the run was started on" in changed.err
    assert (run / "checkpoints" / "last.json").read_bytes() == before


@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("loop.supervised.outputs", signal.SIGTERM),
        ("report.baselines.Linear", signal.SIGINT),
        ("report.plots.curves", signal.SIGTERM),
        ("run_folder.training_folder.TrainingFolder.complete", signal.SIGINT),
    ],
)
def test_a_signal_after_training_says_how_to_go_on(command, texts, whole, tmp_path, monkeypatch, place, number):
    run, arguments = tmp_path / "run", LONGER
    if place == "report.plots.curves":
        pytest.importorskip("matplotlib")
        arguments = LONGER[:-1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with monkeypatch.context() as patched:
        patched.setattr(f"minidl.training.{place}", lambda *_: signal.raise_signal(number))
        done = command("train", "text", "--data", texts, "--out", run, *arguments)
    advice = f"minidl train text --out {run} --resume"
    assert (done.code, done.err) == (130, f"interrupted; the last checkpoint is kept. To continue:\n  {advice}\n")
    assert not (run / "report.json").exists()
    monkeypatch.setattr(Trainer, "_steps", lambda self: pytest.fail("it trains again"))
    resumed = command(*advice.split()[1:], "--no-plots")
    assert resumed.code == 0, resumed.err
    assert differences(run, whole) == []


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_report_is_written_after_everything_else(command, text_run, tmp_path, monkeypatch):
    """With it a run is finished: what a killed process had not written before would be missing for good."""
    run, names, write = unfinished(text_run[0], tmp_path / "run"), [], files.write_bytes

    def note(path, content):
        names.append(path.name)
        write(path, content)

    monkeypatch.setattr(files, "write_bytes", note)
    assert command("train", "text", "--out", run, "--resume").code == 0
    assert names[-1] == "report.json"
    assert {"model.safetensors", "report.txt", "loss.png", "scores.png", "confusion.png"} <= set(names)


def test_a_finished_run_that_was_killed_before_the_one_it_replaced_was_gone(command, text_run, tmp_path):
    run, aside = tmp_path / "run", tmp_path / "run.previous"
    for folder in (run, aside):
        shutil.copytree(text_run[0], folder)
    files.write_json(aside / "replaced", mark(aside, aside.name))
    (aside / "notes.txt").write_text("mine")
    done = command("train", "text", "--out", run, "--resume")
    assert done.code == 0, done.err
    assert "is already finished" in done.out
    assert f"the replaced run contained other files; they are kept in {aside}" in done.out
    assert [path.name for path in aside.iterdir()] == ["notes.txt"]
    assert differences(run, text_run[0]) == []


OTHER = {"torch": "2.0.0", "threads": 1, "tile_tables": "0" * 64, "estimates": "1" * 64, "blas": "mkl 1.0 x 1"}


def test_a_resume_under_another_environment_is_told_and_reported(command, text_run, tmp_path):
    run = unfinished(text_run[0], tmp_path / "run")
    edited(run / "checkpoints" / "last.json", lambda state: state["environment"].update(OTHER))
    resumed = command("train", "text", "--out", run, "--resume")
    assert resumed.code == 0, resumed.err
    now = json.loads((run / "environment.json").read_text())
    assert resumed.out.count("warning: ") == 1
    warning = resumed.out.partition("warning: ")[2].splitlines()[:6]
    assert warning == [
        f"{run}/checkpoints/last.json was written in another environment:",
        f"  torch: 2.0.0 then, {now['torch']} now",
        f"  blas: mkl 1.0 x 1 then, {now['blas']} now",
        f"  tile_tables: 000000000000 then, {now['tile_tables'][:12]} now",
        f"  estimates: 111111111111 then, {now['estimates'][:12]} now",
        "Training continues, but its results may differ in the last bits from those of an uninterrupted run.",
    ]
    changes = {name: [OTHER[name], now[name]] for name in ("torch", "blas", "tile_tables", "estimates")}
    assert report(run)["resumed"] == [{"after": "epoch 2", "changes": changes}]
    told = f"after epoch 2 with torch {now['torch']} (was 2.0.0), blas {now['blas']} (was mkl 1.0 x 1), tile_tables "
    line = next(line for line in (run / "report.txt").read_text().splitlines() if line.startswith("resumed "))
    assert told in line
    assert (run / "model.safetensors").read_bytes() == (text_run[0] / "model.safetensors").read_bytes()


def test_a_checkpoint_that_says_less_is_taken_as_it_is(command, text_run, tmp_path, monkeypatch):
    """As older versions wrote it; and threads are those of the checkpoint, whatever is set now."""
    run = unfinished(text_run[0], tmp_path / "run")
    for name in ("libc", "processor", "blas", "float32_precision"):
        edited(run / "checkpoints" / "last.json", lambda state, name=name: state["environment"].pop(name) and None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    resumed = command("train", "text", "--out", run, "--resume", "--no-plots")
    assert resumed.code == 0, resumed.err
    assert "warning" not in resumed.out
    assert "resumed" not in report(run)
    assert json.loads((run / "environment.json").read_text())["threads"] == 1


def test_other_tile_tables_are_told(minidl, text_run, tmp_path, monkeypatch):
    run, tiles = unfinished(text_run[0], tmp_path / "run"), tmp_path / "tiles"
    tiles.mkdir()
    table = json.loads((tile_tables.FOLDER / "softmax.json").read_text())
    table[launch.target()][-1]["tile"]["BLOCK_M"] *= 2
    (tiles / "softmax.json").write_text(json.dumps(table))
    monkeypatch.setenv("MINIDL_TILES", str(tiles))
    resumed = minidl("train", "text", "--out", run, "--resume", "--no-plots")
    assert resumed.code == 0, resumed.err
    assert "warning: " in resumed.out
    assert list(report(run)["resumed"][0]["changes"]) == ["tile_tables"]


def test_each_change_of_environment_stays_in_the_checkpoints_to_come(tmp_path):
    now = environment.describe(1)
    first = Checkpoint(tmp_path / "last.json", tmp_path, {}, {}, {"environment": {**now, "torch": "2.0.0"}})
    one = train.resumed(first, now, "epoch 1", Display(quiet=True))
    second = replace(first, state={"environment": {**now, "numpy": "1.0"}, **one})
    two = train.resumed(second, now, "epoch 2", Display(quiet=True))
    assert [(entry["after"], list(entry["changes"])) for entry in two["resumed"]] == [
        ("epoch 1", ["torch"]),
        ("epoch 2", ["numpy"]),
    ]
    third = replace(first, state={"environment": now, **two})
    assert train.resumed(third, now, "epoch 3", Display(quiet=True)) == two
    assert train.resumed(replace(first, state={"environment": now}), now, "epoch 1", Display(quiet=True)) == {}


@pytest.mark.parametrize(
    "junk", [5, [5], [{"after": "x"}], [{"after": 1, "changes": {}}], [{"after": "", "changes": {"a": 1}}]]
)
def test_changes_that_were_altered_are_damage(tmp_path, junk):
    now = environment.describe(1)
    bad = Checkpoint(tmp_path / "last.json", tmp_path, {}, {}, {"environment": now, "resumed": junk})
    with pytest.raises(DamagedError, match=r"last\.json is damaged \(resumed: "):
        train.resumed(bad, now, "epoch 1", Display(quiet=True))
