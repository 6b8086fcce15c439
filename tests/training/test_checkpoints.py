import errno
import os
import threading
import time

import pytest
import torch

import minidl
from minidl import nn, ops, optim
from minidl.errors import DamagedError
from minidl.training.run_folder import files
from minidl.training.run_folder.checkpoints import Checkpoints


def state(step):
    weights = {"0.weight": torch.full((2, 3), float(step))}
    optimizer = {
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999)}],
        "state": [{"m": torch.full((2,), step / 3), "step": step}],
    }
    return weights, optimizer, {"progress": {"steps": step}, "generator": [7, step]}


def save(checkpoints, step, best=False):
    checkpoints.save(step, *state(step), best=best)
    checkpoints.wait()


def tensor_files(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_nothing_saved_is_none(tmp_path):
    assert Checkpoints(tmp_path / "c").last() is None
    assert Checkpoints(tmp_path / "c").best() is None


def test_a_state_comes_back_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 5, best=True)
    weights, optimizer, rest = state(5)
    for again in (checkpoints.last(), checkpoints.best()):
        assert torch.equal(again.weights["0.weight"], weights["0.weight"])
        assert again.optimizer["groups"] == [{"lr": 0.1, "betas": [0.9, 0.999]}]
        assert torch.equal(again.optimizer["state"][0]["m"], optimizer["state"][0]["m"])
        assert again.optimizer["state"][0]["step"] == 5
        assert again.state["progress"] == rest["progress"]
        assert again.state["generator"] == rest["generator"]


def test_last_and_best_are_kept_and_no_other(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1, best=True)
    save(checkpoints, 2, best=True)
    save(checkpoints, 3)
    save(checkpoints, 4)
    assert tensor_files(tmp_path / "c") == ["step-000002.safetensors", "step-000004.safetensors"]
    assert float(checkpoints.best().weights["0.weight"][0, 0]) == 2
    assert float(checkpoints.last().weights["0.weight"][0, 0]) == 4


def test_tensors_that_a_killed_process_left_are_dropped(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.drop_unnamed()
    save(checkpoints, 1, best=True)
    save(checkpoints, 2)
    for name in ("step-000003.safetensors", "step-3.txt", "mine.safetensors"):
        (tmp_path / "c" / name).write_text("")
    checkpoints.drop_unnamed()
    kept = ["mine.safetensors", "step-000001.safetensors", "step-000002.safetensors"]
    assert tensor_files(tmp_path / "c") == kept
    assert (tmp_path / "c" / "step-3.txt").exists()
    (tmp_path / "c" / "best.json").write_text("{")
    with pytest.raises(DamagedError, match=r"best\.json is damaged"):
        checkpoints.drop_unnamed()
    assert tensor_files(tmp_path / "c") == kept


@pytest.mark.parametrize("failing", range(4))
def test_a_disk_that_is_full_at_any_write_leaves_the_last_state(tmp_path, monkeypatch, failing):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1, best=True)
    real, calls = os.replace, []

    def replace(source, target, **place):
        calls.append(target)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target, **place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        if failing:
            with pytest.raises(OSError, match="No space left"):
                save(checkpoints, 2, best=True)
        else:
            save(checkpoints, 2, best=True)
    expected = 1 if failing in (1, 2) else 2  # the third is that of last.json: best.json is newer then
    assert checkpoints.last().state["progress"] == {"steps": expected}
    assert checkpoints.best() is not None
    assert not list((tmp_path / "c").glob(".*.part"))
    save(checkpoints, 3)
    assert checkpoints.last().state["progress"] == {"steps": 3}


def test_a_best_state_that_is_newer_than_the_last_becomes_the_last(tmp_path):
    """A process that stops between the two files leaves it."""
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 9)
    older = (tmp_path / "c" / "last.json").read_bytes(), (tmp_path / "c" / "step-000009.safetensors").read_bytes()
    save(checkpoints, 10, best=True)
    whole = (tmp_path / "c" / "last.json").read_bytes()
    for last in (older[0], None):
        (tmp_path / "c" / "step-000009.safetensors").write_bytes(older[1])
        (tmp_path / "c" / "last.json").write_bytes(last or b"")
        if last is None:
            (tmp_path / "c" / "last.json").unlink()
        assert checkpoints.last().state["progress"] == {"steps": 10}
        assert (tmp_path / "c" / "last.json").read_bytes() == whole
    (tmp_path / "c" / "last.json").write_bytes(older[0])
    (tmp_path / "c" / "step-000010.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"step-000010\.safetensors, which is missing"):
        checkpoints.last()
    assert (tmp_path / "c" / "last.json").read_bytes() == older[0]


def held_back(monkeypatch):
    """An event that the writing of tensors waits for, and the steps that are written."""
    go, written, write = threading.Event(), [], files.write_tensors

    def wait(path, tensors):
        written.append(int(path.stem.removeprefix("step-")))
        assert go.wait(60)
        return write(path, tensors)

    monkeypatch.setattr(files, "write_tensors", wait)
    return go, written


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_training_goes_on_while_a_state_is_written(tmp_path, monkeypatch):
    """And changes its tensors: written is what was saved."""
    go, _ = held_back(monkeypatch)
    checkpoints = Checkpoints(tmp_path / "c")
    weights, optimizer, rest = state(1)
    checkpoints.save(1, weights, optimizer, rest, best=True)
    weights["0.weight"].fill_(9.0)
    optimizer["state"][0]["m"].fill_(9.0)
    assert not (tmp_path / "c" / "last.json").exists()
    go.set()
    kept = checkpoints.last()
    assert kept.weights["0.weight"].eq(1.0).all()
    assert kept.optimizer["state"][0]["m"].eq(1 / 3).all()


@pytest.mark.parametrize(
    ("best", "written", "kept"),
    [((1,), [1, 4], 1), ((1, 3), [1, 3, 4], 3), ((1, 2, 3), [1, 3, 4], 3), ((4,), [1, 4], 4)],
)
def test_a_state_that_a_newer_one_overtakes_is_left_out_unless_it_is_the_best(
    tmp_path, monkeypatch, best, written, kept
):
    go, steps = held_back(monkeypatch)
    checkpoints = Checkpoints(tmp_path / "c")
    for step in range(1, 5):
        checkpoints.save(step, *state(step), best=step in best)
        until(lambda: steps)
    go.set()
    checkpoints.wait()
    assert steps == written
    assert checkpoints.last().state["progress"] == {"steps": 4}
    assert checkpoints.best().state["progress"] == {"steps": kept}


@pytest.mark.parametrize("ask", ["save", "wait", "last"])
def test_a_state_that_could_not_be_written_is_told_at_the_next_call(tmp_path, monkeypatch, ask):
    checkpoints = Checkpoints(tmp_path / "c")
    with monkeypatch.context() as patched:

        def full(path, tensors):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(files, "write_tensors", full)
        checkpoints.save(1, *state(1), best=True)
        until(lambda: checkpoints._writer is None)
    calls = {"save": lambda: save(checkpoints, 2), "wait": checkpoints.wait, "last": checkpoints.last}
    with pytest.raises(OSError, match="No space left"):
        calls[ask]()
    assert checkpoints.last() is None
    save(checkpoints, 3)
    assert checkpoints.last().state["progress"] == {"steps": 3}


def test_without_a_thread_a_state_is_written_at_once(tmp_path, monkeypatch):
    def none(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    kept = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        save(kept, step)
        assert tensor_files(tmp_path / "checkpoints") == [f"step-00000{step}.safetensors"]
    assert kept.last().state["progress"] == {"steps": 2}


def test_ctrl_c_while_the_thread_starts_leaves_nothing_to_wait_for(tmp_path, monkeypatch):
    def stopped(thread):
        raise KeyboardInterrupt

    kept = Checkpoints(tmp_path / "checkpoints")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", stopped)
        with pytest.raises(KeyboardInterrupt):
            save(kept, 1)
    kept.wait()
    save(kept, 2)
    assert kept.last().state["progress"] == {"steps": 2}


def test_a_lost_or_changed_file_is_told(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1)
    tensors = tmp_path / "c" / "step-000001.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-3])
    with pytest.raises(DamagedError, match=r"step-000001\.safetensors is damaged"):
        checkpoints.last()
    tensors.unlink()
    with pytest.raises(DamagedError, match="which is missing"):
        checkpoints.last()


def test_another_file_under_the_name_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1)
    files.write_tensors(tmp_path / "c" / "step-000001.safetensors", {"weights.0.weight": torch.zeros(2, 3)})
    with pytest.raises(DamagedError, match="not those saved under this name"):
        checkpoints.last()


@pytest.mark.parametrize("name", ["../../etc/passwd", "step-1.txt", ""])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1)
    content = files.read_json(tmp_path / "c" / "last.json")
    files.write_json(tmp_path / "c" / "last.json", {**content, "tensors": name})
    with pytest.raises(DamagedError, match="as its tensor file"):
        checkpoints.last()


@pytest.mark.parametrize("given", ["tensor:weights.0.weight", None, 5, []])
def test_a_state_of_the_optimiser_that_is_none_is_refused(tmp_path, given):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1)
    content = files.read_json(tmp_path / "c" / "last.json")
    files.write_json(tmp_path / "c" / "last.json", {**content, "optimizer": given})
    with pytest.raises(DamagedError, match=r"last\.json is damaged \(optimizer is .*, expected its state"):
        checkpoints.last()


def test_another_version_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    save(checkpoints, 1)
    content = files.read_json(tmp_path / "c" / "last.json")
    files.write_json(tmp_path / "c" / "last.json", {**content, "version": 2})
    with pytest.raises(DamagedError, match="not a checkpoint of version 1"):
        checkpoints.last()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_convolutions_go_on_from_a_checkpoint_bit_for_bit(tmp_path, dtype):
    """Weights, moments and masters lie in channels-last memory; files are in the order of their shapes."""

    def start(seed):
        minidl.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 4, 3, dtype=dtype), nn.Conv2d(4, 3, (2, 3), dtype=dtype))
        return model, optim.AdamW(model.parameters(), lr=0.01, max_norm=1.0)

    def go_on(model, optimizer, first, end):
        for i in range(first, end):
            optimizer.zero_grad()
            x = minidl.randn(3, 2, 6, 6, seed=i, dtype=dtype)
            ops.mean(ops.square(model(x))).backward()
            optimizer.step()

    model, optimizer = start(0)
    go_on(model, optimizer, 0, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, model.state_dict(), optimizer.flat_state(), {}, best=False)
    go_on(model, optimizer, 3, 6)
    again, fresh = start(1)
    kept = checkpoints.last()
    again.load_state_dict(kept.weights)
    fresh.load_state_dict(kept.optimizer)
    go_on(again, fresh, 3, 6)
    for mine, theirs in ((again.state_dict(), model.state_dict()), (fresh.flat_state(), optimizer.flat_state())):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
