"""A sample of `python -m tests.trials.faults`, and planted bugs that it must find."""

import contextlib
import errno
import os
import random
import shutil
from pathlib import Path
from unittest import mock

import pytest

from minidl.common import write_files
from minidl.errors import RunError
from minidl.runtime import launch
from minidl.training.run_folder import files
from minidl.training.run_folder.training_folder import TrainingFolder
from minidl.training.tasks.table import TrainTable
from tests.trials import faults, writers
from tests.trials.failpoints import Failpoints, Fault, PowerCuts, leftovers

SAMPLE = {"write": 30, "harm": 12, "train": 1, "generate": 1, "signal": 1, "taken": 1, "numbers": 1}


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    if not launch.INTERPRETED:
        pytest.skip("children of a process that uses the GPU cannot use it")
    return faults.Trials(tmp_path_factory.mktemp("faults"), ("text", "gan"))


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample_of_the_trials(trials, tmp_path, kind):
    for number in range(SAMPLE[kind]):
        folder = tmp_path / str(number)
        folder.mkdir()
        _, what, found = faults.trial(trials, 7, number, folder, kind)
        assert not found, (number, what)


def test_the_points_of_writing_a_file(tmp_path):
    with Failpoints(tmp_path) as points:
        files.write_text(tmp_path / "a", "text")
    assert points.points == [
        "before open", "after open", "before write", "amid write", "after write", "before fsync", "after fsync",
        "before rename", "after rename", "before fsync", "after fsync",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "memory"])
def test_every_point_of_a_checkpoint_is_survived(tmp_path, kind):
    at, more = 0, True
    while more:
        place = tmp_path / str(at)
        place.mkdir()
        writers.checkpoint(place, 1)
        points = Failpoints(place, Fault(kind, at))
        try:
            with points:
                writers.checkpoint(place, 2)
        except (OSError, MemoryError):
            assert points.struck
        kept = writers.checkpoints.Checkpoints(place / "checkpoints")
        for state in (kept.last(), kept.best()):
            assert state.state["progress"]["steps"] in (1, 2)
            assert float(state.weights["a"][0, 0]) == state.state["progress"]["steps"]
        assert leftovers(place) == []
        at, more = at + 1, at < len(points.points)
    assert at > 30


@pytest.mark.parametrize("ends", ["well", "before the first state"])
def test_folders_are_flushed_before_what_they_replace_is_deleted(command, table, table_run, tmp_path, ends):
    """So a power cut leaves the run that was there, or the whole new one."""
    run = tmp_path / "runs" / "run"
    shutil.copytree(table_run[0], run)
    argv = ["train", "table", "--data", table, "--target", "price", "--out", run, "--overwrite", "--epochs", 1]
    argv += [*faults.PLAIN, "--hidden", 4]
    with PowerCuts(tmp_path) as cuts, contextlib.ExitStack() as stack:
        if ends != "well":
            full = OSError(errno.ENOSPC, "No space left on device")
            stack.enter_context(mock.patch.object(writers.checkpoints.Checkpoints, "_write", side_effect=full))
        result = command(*argv)
    assert result.code == (0 if ends == "well" else 1), result.err
    assert cuts.points.count("after rename") > 5
    assert cuts.lost == []
    assert cuts.unflushed == set()


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_a_folder_that_cannot_be_flushed_keeps_the_run_that_was_there(tmp_path, kind):
    """At whichever point of the start of a run that replaces another."""
    at, more = 0, True
    while more:
        run = tmp_path / str(at) / "run"
        run.mkdir(parents=True)
        files.write_json(run / "config.json", {"format": "minidl-run", "version": 1, "kind": "table"})
        config = TrainTable(data="diabetes", out=run, overwrite=True)
        points = Failpoints(run.parent, Fault(kind, at))
        failed = False
        try:
            with points:
                TrainingFolder(run).start(config, "table", "0" * 64, {})
        except RunError:
            failed = True
        more = points.struck is not None or at < len(points.points)
        if failed:
            assert files.read_json(run / "config.json").keys() == {"format", "version", "kind"}, points.struck
            assert not run.with_name("run.previous").exists()
        at += 1
    assert at > 20


def in_place(path, content):
    """The bug that most programs have."""
    with Path(path).open("wb") as file:
        file.write(content)


def rename_first(path, content):
    part = path.with_name(f".{path.name}.part")
    in_place(part, content[:1])
    os.replace(part, path)
    in_place(path, content)


def leaves_its_part(path, content):
    part = path.with_name(f".{path.name}.part")
    in_place(part, content)
    os.replace(part, path)


@pytest.mark.parametrize("planted", [in_place, rename_first, leaves_its_part])
def test_trials_find_a_planted_bug(tmp_path, monkeypatch, planted):
    trials = object.__new__(faults.Trials)
    trials.points, trials.idle = {}, 0
    monkeypatch.setattr(files, "write_bytes", planted)
    monkeypatch.setattr(writers, "WRITERS", (writers.vocabulary,))
    told = 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        told += bool(trials.run("write", random.Random(number), folder)[1])
    assert told


def test_trials_find_a_checksum_that_is_not_looked_at(trials, tmp_path, monkeypatch):
    monkeypatch.setattr(write_files, "checksum", lambda *_: mock.ANY)
    monkeypatch.setattr(trials, "targets", [one for one in trials.targets if one.name == "exported generator"])
    monkeypatch.setattr(trials, "answers", {})
    told = 0
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        told += bool(trials.run("harm", random.Random(number), folder)[1])
    assert told
