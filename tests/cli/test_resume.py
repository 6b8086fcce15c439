"""A run that is stopped and continued ends as the run that was left alone, bit for bit."""

import json
import signal
import time

import pytest

from minidl.training.checkpoints import Checkpoints
from tests.cli.conftest import report, start

LONGER = ("--epochs", "3", "--batch-size", "16", "--hidden", "8", "--lr", "0.02", "--dropout", "0.3", "--no-plots")


@pytest.fixture(scope="module")
def whole(command, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = command("train", "text", "--data", texts, "--out", folder, *LONGER)
    assert result.code == 0, result.err
    return folder


def wait_for(condition, process, seconds=100):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "the process did not get there"
        time.sleep(0.005)


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


def same_run(one, other):
    """Weights and reports are equal, the times aside."""
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    for folder in (one, other):
        assert not list(folder.glob("**/.*"))
    histories = []
    for folder in (one, other):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        histories.append([{key: value for key, value in record.items() if key != "seconds"} for record in records])
    assert histories[0] == histories[1]
    reports = [{key: value for key, value in report(folder).items() if key != "seconds"} for folder in (one, other)]
    assert reports[0] == reports[1]


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
    resumed = command(*advice[1:])
    assert resumed.code == 0, resumed.err
    place = err.partition("interrupted after ")[2].partition(";")[0]
    assert f"going on after {place}\n" in resumed.out
    same_run(run, whole)


def test_a_killed_run_goes_on_from_its_last_epoch(command, texts, whole, tmp_path):
    run = tmp_path / "run"
    code, _, _ = stop(["--data", texts, *LONGER], tmp_path, run, signal.SIGKILL)
    assert code == -signal.SIGKILL
    resumed = command("train", "text", "--out", run, "--resume", "--data", texts)
    assert resumed.code == 0, resumed.err
    same_run(run, whole)


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
