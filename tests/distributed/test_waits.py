"""Processes that wait for others: signals are heard, and no wait is without end."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict

import numpy as np
import pytest

from minidl.distributed import rendezvous, started
from minidl.distributed.workers import Ranks
from minidl.errors import RunError
from minidl.generation import sharing
from minidl.runtime import launch
from minidl.training.run_folder import files
from tests.distributed.test_elastic import CHILD
from tests.distributed.test_together import free_ports
from tests.trials.kills import ALONE, command, ended

PIPED = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
gloo = pytest.mark.skipif(not launch.INTERPRETED, reason="processes on one GPU are for gloo")


def alone(rank, port, *arguments):
    """One of two processes, of which the other never comes."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    return subprocess.Popen([sys.executable, "-m", "minidl", *map(str, arguments)], env={**ALONE, **place}, **PIPED)


@contextlib.contextmanager
def silent():
    """(what waits for a connection, the port) of a first process that is stopped: it answers nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(90)
        with contextlib.ExitStack() as connections:
            yield lambda: connections.enter_context(listening.accept()[0]), listening.getsockname()[1]


def listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.mark.slow
@gloo
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["train", "generate"])
def test_a_signal_while_processes_meet(tmp_path, number, rank, what):
    line = command(tmp_path / "run") if what == "train" else ["generate", "--out", tmp_path / "out", "--seeds", "0-3"]
    with silent() as (connected, port):
        port = port if rank else int(free_ports(1)[0])
        process = alone(rank, port, *line)
        if rank:
            connected()
        else:
            end = time.monotonic() + 90
            while not listens(port):
                assert time.monotonic() < end
                time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert time.monotonic() - begun < 10
    assert (process.returncode, said) == (130, "interrupted\n")


@pytest.mark.slow
@gloo
def test_a_first_process_that_is_stopped_is_told_after_the_time_out(tmp_path):
    with silent() as (connected, port):
        process = alone(1, port, *command(tmp_path / "run", "--timeout", "2"))
        connected()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith(f"error: the processes cannot meet at 127.0.0.1:{port}: ")
    assert said.count("\n") == 1, said


@pytest.mark.slow
@gloo
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_in_an_exchange_ends_it(rank):
    """The others, which do something else for long, are not waited for."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0], "WORLD_SIZE": "2"}
    does = f"print('met', flush=True)\nif here.rank != {rank}: time.sleep(60)\nhere.gathered(1, 'the second step')"
    line = [sys.executable, "-c", CHILD, does, "60"]
    both = [subprocess.Popen(line, env={**ALONE, **place, "RANK": each}, **PIPED) for each in "01"]
    assert [process.stdout.readline() for process in both] == ["met\n"] * 2
    time.sleep(0.5)
    begun = time.monotonic()
    both[rank].send_signal(signal.SIGTERM)
    both[rank].wait(60)
    assert time.monotonic() - begun < 5
    codes, said = ended(both)
    assert codes == [130, 130]
    assert said == "interrupted\n" if rank == 0 else "interrupted" in said


def test_work_in_a_thread_is_answered_or_given_up():
    assert rendezvous.call_within(lambda: 3, 60) == 3
    with pytest.raises(KeyError, match="what went wrong"):
        rendezvous.call_within(lambda: {}["what went wrong"], 60)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        rendezvous.call_within(lambda: time.sleep(30), 0.1)


def test_a_store_that_is_silent_is_asked_once():
    class Silent:
        def check(self, _):
            time.sleep(30)

    store, begun = rendezvous.Store(Silent(), 0.1), time.monotonic()
    for _ in range(20):
        with pytest.raises(RuntimeError, match="does not answer"):
            store.check(["a"])
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "harm", [{"count": 10**12}, {"world": 10**12}, {"missing": [[0, 1, 2]]}, {"missing": [5]}, {"run": 1}]
)
def test_a_plan_whose_numbers_cannot_be_is_none(tmp_path, harm):
    """They decide how much memory is taken."""
    sharing.begin(tmp_path, Ranks(0, 2, 0, 2), "run", {"pictures": 4}, [], None).close()
    plan = sharing.read(tmp_path)
    assert plan.count == 4
    files.write_json(tmp_path / sharing.PLAN, {**asdict(plan), **harm})
    assert sharing.read(tmp_path) is None
    assert sharing.left(tmp_path, range(4)) == ""


def test_notes_that_no_process_wrote_are_left_out(tmp_path):
    part = sharing.begin(tmp_path, Ranks(0, 2, 0, 2), "run", {"pictures": 4}, [], None)
    (tmp_path / "made-1.txt").write_bytes(b"x 3 .\n2 " + b"9" * 5000 + b" .\n-1 2 .\n3 " + b"a" * 32 + b"\n")
    assert part._logs.read().tolist() == [False, False, False, True]
    part.close()


def test_pictures_that_others_do_not_make_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(started, "TIMEOUT", 0.3)
    part = sharing.begin(tmp_path, Ranks(0, 2, 0, 2), "run", {"pictures": 4}, [], None)
    part.log(np.arange(2), ["a" * 32] * 2)
    told = []
    with pytest.raises(RunError, match=r"2 of 4 images are finished, but for 0\.3 s no process has finished another"):
        part.wait(told.append)
    assert told == [2]
    part.close()
