"""`minidl train` on several processes: with wrong uses, and with processes that are killed."""

import signal
import time

import pytest

from minidl.runtime import launch
from tests.distributed.conftest import SHORT
from tests.trials import kills
from tests.trials.kills import alone, command, ended, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not launch.INTERPRETED, reason="processes on one GPU are for gloo"),
]


def test_several_processes_give_the_model_that_one_gives(tmp_path, expected):
    """By --devices, with the optimizer's state shared out."""
    alone(*command(tmp_path / "run", *SHORT, "--devices", "3", "--zero"))
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "run" / file).read_bytes() == (expected / file).read_bytes()


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
