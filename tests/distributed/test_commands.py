"""`minidl train` on several processes: by torchrun, with wrong uses, and with processes that are killed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from minidl.runtime import launch
from tests.distributed.test_together import free_ports

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="processes on one GPU are for gloo")
ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


def command(out, *more):
    return ["train", "table", "--data", "diabetes", "--batch-size", "64", "--no-plots", "--out", str(out), *more]


def start(commands):
    """A process for each command, of one training."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0], "WORLD_SIZE": str(len(commands))}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "minidl", *each], env={**ALONE, **place, "RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank, each in enumerate(commands)
    ]  # fmt: skip


def ended(processes):
    """(exit codes, all that was said on standard error), once all have ended."""
    said = [process.communicate(timeout=120)[1] for process in processes]
    return [process.returncode for process in processes], "".join(said)


def alone(*arguments):
    return subprocess.run([sys.executable, "-m", "minidl", *arguments], env=ALONE, check=True, capture_output=True)


def test_several_processes_give_the_model_that_one_gives(tmp_path):
    """Started by torchrun and by --devices."""
    more = "--epochs", "1", "--quiet"
    by = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "minidl"]
    ran = subprocess.run([*by, *command(tmp_path / "a", *more)], env=ALONE, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    alone(*command(tmp_path / "b", *more, "--shards", "8"))
    alone(*command(tmp_path / "c", *more, "--devices", "3"))
    for file in ("model.safetensors", "config.json"):
        contents = {(tmp_path / folder / file).read_bytes() for folder in "abc"}
        assert len(contents) == 1


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
    assert said.startswith("error: process 1 of 2 ended without a word (killed?), the others were in ")
    assert said.count("\n") == 1, said


def wait_for(path, seconds=90.0):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.exists()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_anywhere_and_resumed_on_another_number_gives_the_same_bits(tmp_path):
    """Fifty kills of any process, at any moment; after each, another number of processes goes on."""
    draw, kills, runs = random.Random(0), 0, 0
    more = "--epochs", "12", "--quiet", "--shards", "4"
    alone(*command(tmp_path / "alone", *more))
    expected = (tmp_path / "alone" / "model.safetensors").read_bytes()
    while kills < 50:
        out = tmp_path / f"run-{runs}"
        runs += 1
        while not (out / "report.json").exists():
            processes = start([command(out, *more, "--resume")] * draw.randint(1, 4))
            before = out / "checkpoints" / "last.json"
            was = before.stat().st_mtime_ns if before.exists() else 0
            end = time.monotonic() + (draw.uniform(2, 8) if draw.random() < 0.25 else 60)
            while time.monotonic() < end and any(process.poll() is None for process in processes):
                if before.exists() and before.stat().st_mtime_ns != was:  # an epoch further: soon
                    was, end = before.stat().st_mtime_ns, time.monotonic() + draw.uniform(0, 1.5)
                time.sleep(0.02)
            victim = draw.choice(processes)
            if victim.poll() is None:
                victim.kill()
                kills += 1
            patience = time.monotonic() + 20
            while time.monotonic() < patience and any(process.poll() is None for process in processes):
                time.sleep(0.05)
            for process in processes:  # they have not met yet, and would wait for the victim; torchrun ends them, too
                process.kill()
            ended(processes)
        assert (out / "model.safetensors").read_bytes() == expected
