"""The processes of a command: plain Python, which starts at once."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from minidl.data import DataError
from minidl.data.workers import WorkerError
from minidl.distributed import group, workers
from minidl.distributed.started import DistributedError
from minidl.generation import sharing

CHILD = """
import os, pathlib, subprocess, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[2])
(folder / f"{rank}.{os.getpid()}").touch()
print("hello from", rank, "of", os.environ["WORLD_SIZE"], flush=True)
exec(sys.argv[1])
"""
# What a worker has started ends with it, also where nobody ends its group: it reads from the worker.
READER = "subprocess.Popen(['cat'], stdin=subprocess.PIPE); time.sleep(100)"
# `run` in a process of its own, which may be killed.
STARTS = "import sys; from minidl.distributed import workers; workers.run(sys.argv[2:], int(sys.argv[1]), 1)"


def child(does, folder):
    return [sys.executable, "-c", CHILD, does, str(folder)]


def numbers(folder, count):
    """The processes that have begun, once there are so many."""
    end = time.monotonic() + 20
    while len(found := [int(path.suffix[1:]) for path in folder.iterdir() if path.suffix]) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def left(group):
    """Whether a process of a group is left that is no zombie."""
    found = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(int(line.split()[0]) == group and line.split()[1][0] != "Z" for line in found.splitlines())


def none_is_left(groups):
    end = time.monotonic() + 20
    while any(map(left, groups)):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_all_do_their_work_and_what_they_print_is_passed_on(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "0")
    workers.run(child("print(os.environ['MASTER_ADDR'], file=sys.stderr)", tmp_path), 3)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"hello from {rank} of 3" for rank in range(3)]
    assert err == "127.0.0.1\n" * 3
    none_is_left(numbers(tmp_path, 3))


LEAVES = f"def leave(code): sys.exit(print({workers.LEFT!r}, file=sys.stderr) or code)\n"


@pytest.mark.parametrize(
    ("does", "error", "message"),
    [
        ("subprocess.Popen(['sleep', '100'])\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(100)", WorkerError,
         "process 1 was ended by SIGKILL (its last line: hello from 1 of 3); some are left"),
        ("if rank == 2: sys.exit(3)\ntime.sleep(100)", WorkerError, "process 2 ended with exit code 3 (its last line"),
        ("sys.exit(print('error: no such file', file=sys.stderr) or 2)", DataError, "no such file; some are left"),
        # Others find the same, leave it to one to say it, and end before that one.
        (LEAVES + "if rank: leave(2)\ntime.sleep(1)\nsys.exit(print('error: too many', file=sys.stderr) or 2)",
         DataError, "too many; some are left"),
        (LEAVES + "if rank != 1: leave(1)\ntime.sleep(1)\nsys.exit(print('error: full', file=sys.stderr) or 1)",
         WorkerError, "full; some are left"),
    ],
)  # fmt: skip
def test_the_first_that_fails_ends_all(tmp_path, capfd, does, error, message):
    with pytest.raises(error) as told:
        workers.run(
            child(does, tmp_path),
            3,
            restarts=0 if "time.sleep(100)" in does else 3,
            together=True,
            left=lambda: "some are left",
        )
    assert str(told.value).startswith(message)
    none_is_left(numbers(tmp_path, 1))
    assert capfd.readouterr().err == ""


def test_one_that_is_killed_is_replaced_once(tmp_path, capfd):
    does = "if rank == 1 and not (folder / 'died').exists():\n (folder / 'died').touch()\n os.kill(os.getpid(), 9)"
    workers.run(child(does, tmp_path), 2, restarts=1)
    assert len(numbers(tmp_path, 3)) == 3
    assert capfd.readouterr().err.startswith("note: process 1 was ended by SIGKILL (its last line: hello from 1 of 2)")
    with pytest.raises(WorkerError, match="process 1 was ended by SIGKILL"):
        workers.run(child("if rank == 1: os.kill(os.getpid(), 9)", tmp_path), 2, restarts=1)


def test_all_are_started_anew_when_one_crashes_though_others_say_that_it_is_gone(tmp_path, capfd):
    does = (
        "died = folder / 'died'\nif rank == 1 and not died.exists():\n died.touch()\n sys.exit(1)\n"
        "if rank == 0 and not (folder / 'told').exists():\n (folder / 'told').touch()\n"
        " while not died.exists(): time.sleep(0.01)\n"
        " time.sleep(0.5)\n sys.exit(print('error: no answer from process 1', file=sys.stderr) or 1)"
    )
    workers.run(child(does, tmp_path), 2, restarts=1, first=True, together=True)
    assert capfd.readouterr().err.startswith("note: process 1 ended with exit code 1")


def test_one_that_is_stopped_is_killed_and_replaced(tmp_path, capfd):
    """It does not end by itself, and is no reason to wait; one that goes on in time does its work."""
    does = (
        "if rank == 1 and not (folder / 'stopped').exists():\n (folder / 'stopped').touch()\n os.kill(os.getpid(), 19)"
    )
    workers.run(child(does, tmp_path), 2, restarts=1, stopped=0.3)
    assert len(numbers(tmp_path, 3)) == 3
    assert capfd.readouterr().err.startswith(
        "note: process 1 was stopped for 0.3 s, as by SIGSTOP, and killed (its last"
    )
    with pytest.raises(WorkerError, match=r"process 0 was stopped for 0\.3 s, as by SIGSTOP, and killed"):
        workers.run(child("if rank == 0: os.kill(os.getpid(), 19)\ntime.sleep(1)", tmp_path), 2, stopped=0.3)
    goes_on = "subprocess.Popen(['sh', '-c', f'sleep 0.3; kill -CONT {os.getpid()}'])\nos.kill(os.getpid(), 19)"
    workers.run(child(goes_on, tmp_path), 2, stopped=20)


def test_those_that_are_stopped_are_not_waited_for_at_the_end(tmp_path):
    begun = time.monotonic()
    does = "if rank: os.kill(os.getpid(), 19)\ntime.sleep(0.5)\nsys.exit(1)"
    with pytest.raises(WorkerError, match="process 0 ended with exit code 1"):
        workers.run(child(does, tmp_path), 3)
    assert time.monotonic() - begun < 8
    none_is_left(numbers(tmp_path, 3))


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(4))
def test_none_is_left_whichever_is_killed_whenever(tmp_path, trial):
    draw = random.Random(trial)
    begun = subprocess.Popen(
        [sys.executable, "-c", STARTS, "3", *child(READER, tmp_path)], stderr=subprocess.PIPE, start_new_session=True
    )
    groups = numbers(tmp_path, draw.randint(1, 3))
    time.sleep(draw.uniform(0, 0.05))
    os.kill(begun.pid, draw.choice([signal.SIGKILL, signal.SIGINT]))
    begun.communicate(timeout=20)
    none_is_left({*groups, *numbers(tmp_path, 1)})


def test_a_place_without_an_address_is_told(monkeypatch):
    message = "WORLD_SIZE=2 is set, but not MASTER_ADDR and MASTER_PORT: start the processes with torchrun"
    assert workers.missing_address({"RANK": "0", "WORLD_SIZE": "2"}).startswith(message)
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert workers.missing_address(whole) == ""
    for name, value in {**whole, "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="WORLD_SIZE=2 is set, but not MASTER_PORT: start"):
        group.init()
    with pytest.raises(DataError, match="WORLD_SIZE=2 is set, but not MASTER_PORT: start"):
        sharing.run_of(workers.ranks())


def test_places():
    assert workers.ranks({}) is None
    assert workers.ranks({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}) == (5, 8, 1, 4)
    assert workers.ranks({"RANK": "1", "WORLD_SIZE": "2"}) == (1, 2, 1, 2)
    for wrong in ({"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": ""}):
        with pytest.raises(DataError):
            workers.ranks(wrong)


def test_a_port_in_use_is_told(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for port, why in ((str(taken.getsockname()[1]), "Address already in use"), ("x", "not a number of a port")):
            monkeypatch.setenv("MASTER_PORT", port)
            with pytest.raises(DataError, match=f"MASTER_PORT is {port}: {why}; unset it"):
                workers.run(child("", tmp_path), 2)


def test_a_process_sees_one_of_the_gpus_that_there_are(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1a")
    assert [workers.only(i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1, 2)] == ["3", "GPU-1a", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert workers.only(1) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_gpus_are_counted_by_another_process(monkeypatch):
    """CUDA that was asked here would go on seeing all of them, and every process would use the first."""

    class Cuda:
        def __init__(self, name):
            assert name == "libcuda.so.1"

    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "4\n", "")

    monkeypatch.setattr(workers.ctypes, "CDLL", Cuda)  # without cuInit
    monkeypatch.setattr(workers.subprocess, "run", run)
    assert workers.gpus() == 4
    assert "cuInit" in asked[0][-1]
    monkeypatch.undo()
    assert workers.gpus() == torch.cuda.device_count()
