"""The trainer's checkpoints: what a process leaves that is killed between two of their files."""

import shutil

import numpy as np
import pytest

from minidl import nn, ops, optim, random
from minidl.data.batches import Batches
from minidl.training import files, loop
from minidl.training.display import Display
from minidl.training.errors import DamagedError
from minidl.training.loop import Judgement, Task, Trainer


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

    task = Task(model, optimizer, optim.ConstantLR(optimizer), Batches(x, y, 4), loss, validate)
    folder.mkdir(exist_ok=True)
    return Trainer(task, folder, epochs, 0, Display(quiet=True), {"config": {"seed": 0}}, "minidl")


def weights(one):
    return {name: tensor.tolist() for name, tensor in one.task.model.state_dict().items()}


def one_and_two_epochs(tmp_path, more=2):
    """Two folders of the same training, stopped after one and after two epochs, or `more`."""
    for count in (1, more):
        started = trainer(tmp_path / str(count), count)
        started.run()
        last = started.checkpoints.folder / "last.json"
        content = files.read_json(last)
        content["progress"]["finished"] = False
        files.write_json(last, content, sealed=True)
    return tmp_path / "1" / "checkpoints", tmp_path / str(more) / "checkpoints"


@pytest.mark.parametrize("best", [2, 3])
def test_a_process_killed_between_the_best_and_the_last_state_goes_on(tmp_path, best):
    """The best may be two epochs ahead, when a state between was left out."""
    first, second = one_and_two_epochs(tmp_path, best)
    for path in second.iterdir():
        if path.name != "last.json":
            shutil.copy(path, first)
    whole, again = trainer(tmp_path / "whole"), trainer(tmp_path / "1")
    whole.run()
    again.restore(again.checkpoints.last())
    again.task.validate()
    again.run()
    assert weights(again) == weights(whole)


@pytest.mark.parametrize("harm", ["gone", "other epoch", "other settings"])
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
        files.write_json(best, {**files.read_json(best), "config": {"seed": 1}}, sealed=True)
    again = trainer(tmp_path / "2")
    with pytest.raises(DamagedError, match=r"best\.json is damaged \(it is"):
        again.restore(again.checkpoints.last())


def test_a_best_state_that_is_lost_during_training_is_not_replaced_by_the_last(tmp_path):
    running = trainer(tmp_path / "run")
    judge = running.task.validate

    def worse_and_lost():
        judged = judge()
        if judged.score == 3:
            running.checkpoints.wait()
            (running.checkpoints.folder / "best.json").unlink()
            return Judgement(judged.scores, -1.0, 0.0)
        return judged

    running.task.validate = worse_and_lost
    with pytest.raises(DamagedError, match="it is gone, and epoch 2 is the best"):
        running.run()


def test_a_star_marks_a_new_highest_score_and_the_last_close_epoch_is_kept(tmp_path):
    one = trainer(tmp_path, epochs=4)
    scores = iter([0.5, 0.8, 0.75, 0.8])
    one.task.validate = lambda: Judgement({"loss": 1.0}, next(scores), 0.1)
    shown = []
    one.display.epoch = lambda epoch, epochs, record, best: shown.append(best)
    assert one.run().best_epoch == 4
    assert shown == [True, True, False, False]


def test_no_loss_is_shown_before_one_is_known(tmp_path, monkeypatch):
    one = trainer(tmp_path, epochs=1)
    monkeypatch.setattr(loop, "_FETCH_SECONDS", 100)
    shown = []
    one.display.step = lambda done, loss: shown.append(loss)
    one.run()
    assert shown == [None, None]
