"""The trainer's checkpoints: what a process leaves that is killed between two of their files."""

import contextlib
import errno
import itertools
import os
import shutil
from unittest import mock

import numpy as np
import pytest
import torch

from minidl import nn, ops, optim, random
from minidl.data.batches import Batches
from minidl.errors import DamagedError
from minidl.training.loop import trainer as trainer_module
from minidl.training.loop.averages import ModelAverage, averaging_rate
from minidl.training.loop.epochs import Trainer
from minidl.training.loop.learner import Judgement, Learner
from minidl.training.process.display import Display
from minidl.training.run_folder import files
from minidl.training.run_folder.checkpoints import Checkpoints


def trainer(folder, epochs=3):
    """A trainer of a tiny regression whose every epoch is the best so far."""
    random.manual_seed(0)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(8, 2)).astype(np.float32), draw.normal(size=8).astype(np.float32)
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scores = iter(range(1, 10))

    def validate():
        score = float(next(scores))
        return Judgement({"loss": -score}, score, 0.0)

    def loss(x, y):
        return ops.mse_loss(ops.flatten(model(x), 0), y)

    learner = Learner(model, optimizer, optim.WarmupLR(optimizer), Batches(x, y, 4), loss, validate)
    folder.mkdir(exist_ok=True)
    return Trainer(learner, folder, epochs, 0, Display(quiet=True), {"config": {"seed": 0}}, "minidl")


def weights(one):
    return {name: tensor.tolist() for name, tensor in one.learner.model.state_dict().items()}


def one_and_two_epochs(tmp_path, more=2):
    """Two folders of the same training, stopped after one and after two epochs, or `more`."""
    for count in (1, more):
        started = trainer(tmp_path / str(count), count)
        started.run()
        for name in ("last.json", "best.json"):
            path = started.checkpoints.folder / name
            content = files.read_json(path)
            content["progress"]["finished"] = count == 3  # of three
            files.write_json(path, content, sealed=True)
    return tmp_path / "1" / "checkpoints", tmp_path / str(more) / "checkpoints"


@pytest.mark.parametrize("best", [2, 3])
def test_a_process_killed_between_the_best_and_the_last_state_goes_on_from_the_best(tmp_path, best):
    """It may be two epochs ahead, when a state between was left out."""
    first, second = one_and_two_epochs(tmp_path, best)
    for path in second.iterdir():
        if path.name != "last.json":
            shutil.copy(path, first)
    complete, resumed = trainer(tmp_path / "complete"), trainer(tmp_path / "1")
    complete.run()
    resumed.restore(resumed.checkpoints.last())
    assert resumed.progress.epoch == best
    for _ in range(best):
        resumed.learner.validate()
    resumed.run()
    assert weights(resumed) == weights(complete)
    newest = [one.checkpoints.folder / "last.json" for one in (resumed, complete)]
    assert [files.read_json(path)["tensors"] for path in newest] == ["step-000006.safetensors"] * 2


def test_a_fault_at_any_rename_is_survived_where_the_epoch_is_then_no_longer_the_best(tmp_path):
    """As under other versions or another device, whose scores differ: the best state is one that was saved."""

    def renames(folder, at=None):
        """Train for three epochs; the number of renames, of which that number `at` fails."""
        count, real = itertools.count(), os.replace

        def replace(source, target, **keywords):
            if next(count) == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
            real(source, target, **keywords)

        # Written before the next step: else a state is left out where training is faster than writing.
        alone = mock.patch.object(Checkpoints, "_start_writer", return_value=False)
        with mock.patch.object(os, "replace", replace), alone, contextlib.suppress(OSError):
            trainer(folder).run()
        return next(count)

    saved = []
    for epochs in (1, 2, 3):
        short = trainer(tmp_path / f"of {epochs}", epochs)
        short.run()
        saved.append(weights(short))
    met = set()
    for at in range(renames(tmp_path / "whole")):
        folder = tmp_path / str(at)
        renames(folder, at)
        resumed = trainer(folder)
        last = resumed.checkpoints.last()
        if last is None:
            continue
        resumed.learner.validate = lambda: Judgement({"loss": 9.0}, -9.0, 0.0)
        resumed.restore(last)
        met.add(resumed.progress.epoch)
        best = resumed.run().best_epoch
        assert best == len(resumed.progress.history) or resumed.progress.history[best]["validation"]["loss"] == 9.0
        assert weights(resumed) == saved[best - 1]
    assert met == {1, 2, 3}


@pytest.mark.parametrize("harm", ["gone", "other epoch", "other settings", "other run"])
def test_a_best_state_that_is_not_the_best_is_refused(tmp_path, harm):
    first, second = one_and_two_epochs(tmp_path)
    best = second / "best.json"
    if harm == "gone":
        best.unlink()
    elif harm == "other epoch":
        for path in first.iterdir():
            if path.name != "last.json":
                shutil.copy(path, second)
    else:
        change = {"config": {"seed": 1}} if harm == "other settings" else {"run": "other"}
        files.write_json(best, {**files.read_json(best), **change}, sealed=True)
    resumed = trainer(tmp_path / "2")
    if harm == "other run":
        resumed.state["run"] = "this"
    with pytest.raises(DamagedError, match=r"best\.json is damaged \(it is"):
        resumed.restore(resumed.checkpoints.last())


def test_a_best_state_that_is_lost_during_training_is_not_replaced_by_the_last(tmp_path):
    running = trainer(tmp_path / "run")
    judge = running.learner.validate

    def worse_and_lost():
        judged = judge()
        if judged.score == 3:
            running.checkpoints.wait()
            (running.checkpoints.folder / "best.json").unlink()
            return Judgement(judged.scores, -1.0, 0.0)
        return judged

    running.learner.validate = worse_and_lost
    with pytest.raises(DamagedError, match="it is missing, and epoch 2 is the best"):
        running.run()


def test_a_star_marks_a_new_highest_score_and_the_last_close_epoch_is_kept(tmp_path):
    one = trainer(tmp_path, epochs=4)
    scores = iter([0.5, 0.8, 0.75, 0.8])
    one.learner.validate = lambda: Judgement({"loss": 1.0}, next(scores), 0.1)
    shown = []
    one.display.epoch = lambda *line: shown.append(line[-1])
    assert one.run().best_epoch == 4
    assert shown == [True, True, False, False]


def test_no_loss_is_shown_before_one_is_known(tmp_path, monkeypatch):
    one = trainer(tmp_path, epochs=1)
    monkeypatch.setattr(trainer_module, "_FETCH_SECONDS", 100)
    shown = []
    one.display.step = lambda done, loss: shown.append(loss)
    one.run()
    assert shown == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_averages_a_shared_weight_once(dtype):
    def shared():
        model = nn.Sequential(nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 3, dtype=dtype))
        model[1].weight = model[0].weight
        return model

    model = shared()
    average = ModelAverage(model, shared(), 0.999)
    before = model[0].weight.data.to(torch.float32, copy=True)
    model[0].weight.data += 1
    average.prepare(1)
    average.update()
    expected = before + averaging_rate(0.999, 1) * (model[0].weight.data - before)
    torch.testing.assert_close(average.update_model()[1].weight.data, expected.to(dtype))
    assert {"0.weight", "1.weight"} <= average.state_dict().keys()
