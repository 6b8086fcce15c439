"""Who keeps what when a run that replaces another is stopped before its first state is on the disk."""

import threading

import pytest
import torch

from minidl.training import train
from minidl.training.process.display import Display
from minidl.training.run_folder import files
from minidl.training.run_folder.checkpoints import FOLDER, Checkpoints
from minidl.training.run_folder.training_folder import TrainingFolder
from minidl.training.tasks.text_settings import TrainText


def save(folder, step):
    kept = Checkpoints(folder / FOLDER)
    kept.save(step, {"w": torch.full((3,), float(step))}, {}, {"step": step}, best=True)
    return kept


def last(folder):
    return Checkpoints(folder / FOLDER).last().state["step"]


@pytest.fixture
def unfinished(tmp_path):
    """The settings by which a run is replaced that has a state after step 7."""
    config = TrainText(data="docstrings", out=tmp_path / "run", overwrite=True)
    TrainingFolder(config.out).start(config, "text", "0" * 64, {})
    save(config.out, 7).wait()
    return config


def replaced(config, fit):
    TrainingFolder(config.out).start(config, "text", "0" * 64, {})
    with pytest.raises(KeyboardInterrupt), train.replacing(config, "text", Display(True)):
        fit(None)


def test_a_run_that_was_to_be_replaced_comes_back(unfinished):
    def fit(checkpoint):
        raise KeyboardInterrupt

    replaced(unfinished, fit)
    assert last(unfinished.out) == 7
    assert not unfinished.out.with_name("run.previous").exists()


def test_a_state_that_is_still_being_written_does_not_get_into_the_run_that_was_to_be_replaced(unfinished, monkeypatch):
    begun, go, write = threading.Event(), threading.Event(), files.write_tensors
    saved = []

    def slowly(path, tensors):
        begun.set()
        assert go.wait(60)
        return write(path, tensors)

    def fit(checkpoint):
        monkeypatch.setattr(files, "write_tensors", slowly)
        saved.append(save(unfinished.out, 1))
        assert begun.wait(60)
        raise KeyboardInterrupt  # while the state is waited for

    replaced(unfinished, fit)
    go.set()
    saved[0].wait()
    assert last(unfinished.out) == 1
    assert last(unfinished.out.with_name("run.previous")) == 7
