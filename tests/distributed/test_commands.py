"""`minidl train` on several processes: with wrong uses, and with processes that are killed."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from minidl.runtime import launch
from minidl.training.run_folder import files
from tests.distributed.conftest import SHORT
from tests.trials import kills
from tests.trials.kills import ALONE, alone, command, ended, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not launch.INTERPRETED, reason="processes on one GPU are for gloo"),
]


def test_several_processes_give_the_model_that_one_gives(tmp_path, expected):
    """By --devices, with the optimizer's state shared out."""
    alone(*command(tmp_path / "run", *SHORT, "--devices", "3", "--zero"))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    config = files.read_json(tmp_path / "run" / "config.json")
    assert len(config.pop("starters")) == 3
    assert config == files.read_json(expected / "config.json")


@pytest.mark.parametrize("later", [3600, -3600])
def test_a_finished_run_is_not_taken_for_one_that_was_begun_just_now(tmp_path, expected, later):
    """Whatever its clock says: it is refused, and replaced by --overwrite."""
    run = shutil.copytree(expected, tmp_path / "run")
    os.utime(run / "config.json", (time.time() + later, time.time() + later))
    line = [sys.executable, "-m", "minidl", *command(run, "--devices", "2", "--epochs", "1", "--quiet")]
    refused = subprocess.run(line, env=ALONE, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert f"--out {run} exists and is not empty" in refused.stderr
    alone(*line[3:], "--overwrite")
    assert files.read_json(run / "report.json")["epochs"] == 1


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((), ("--epochs", "2"), "error: process 1 has another command than process 0: start all processes with"),
        (("--shards", "1"), ("--shards", "1"), "error: 2 processes are more than the 1 shards of the run"),
    ],
)
def test_wrong_uses_have_one_error(tmp_path, first, second, message):
    codes, said = ended(start([command(tmp_path / "run", *each) for each in (first, second)]))
    assert message in said
    assert said.count("\n") == 1, said
    assert codes[0] == codes[1] != 0
    assert not (tmp_path / "run").exists()


def test_one_that_is_killed_ends_all(tmp_path):
    processes = start([command(tmp_path / "run", "--epochs", "1000")] * 2)
    wait_for(tmp_path / "run" / "checkpoints" / "last.json")
    processes[1].kill()
    codes, said = ended(processes)
    assert codes == [1, -signal.SIGKILL]
    assert said.startswith("error: no answer from process 1 of 2 (killed or stopped?), the others were in ")
    assert said.count("\n") == 1, said


def wait_for(path, seconds=90.0):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.exists()


def test_killed_anywhere_and_resumed_on_another_number_gives_the_same_bits(tmp_path, expected):
    """A sample of `python -m tests.trials.kills`."""
    kills.run(tmp_path, 1, expected, SHORT)
