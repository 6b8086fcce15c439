"""Worker processes: the same results in the same order, their errors, and none that is left behind."""

import errno
import os
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest

from minidl.data import DataError, workers
from minidl.data.workers import Message, WorkerError, Workers


def doubled(asked):
    return Message({"n": 2 * asked.values["n"], "process": os.getpid()}, [bytes(asked.buffers[0]) * 2])


def failing(asked):
    kind = asked.values["kind"]
    if kind == "disk":
        raise OSError(errno.ENOSPC, "No space left on device", Path("a") / "b")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "noisy":
        print("not an answer")
        return Message({"fine": True})
    raise {"data": DataError, "memory": MemoryError, "bug": KeyError}[kind]("what went wrong")


def numbers(count):
    return (Message({"n": n}, [bytes([n])]) for n in range(count))


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_order_from_as_many_processes(count):
    with Workers(count) as pool:
        found = list(pool.map(doubled, numbers(20)))
        again = list(pool.map(doubled, numbers(2)))
    assert [message.values["n"] for message in found] == list(range(0, 40, 2))
    assert [bytes(message.buffers[0]) for message in found] == [bytes([n, n]) for n in range(20)]
    processes = {message.values["process"] for message in found}
    assert (processes == {os.getpid()}) == (count == 1)
    assert len(processes) <= count
    assert len(again) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_asked_of_no_items(count):
    with Workers(count) as pool:
        assert list(pool.map(doubled, [])) == []


@pytest.mark.parametrize(
    "buffer", [b"", array("i"), array("q", [1, -2]), memoryview(bytearray(5)), b"x" * 3_000_000], ids=type
)
def test_buffers_arrive_as_their_bytes(buffer):
    with Workers(2) as pool:
        (found,) = pool.map(doubled, [Message({"n": 0}, [buffer])])
    assert found.buffers == [bytes(memoryview(buffer)) * 2]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("data", DataError, "what went wrong"),
        ("memory", MemoryError, "what went wrong"),
        ("disk", OSError, r"\[Errno 28\] No space left on device: 'a/b'"),
        ("bug", RuntimeError, "KeyError: 'what went wrong'"),
        ("killed", WorkerError, "a worker process was ended by SIGKILL, as by the system where memory runs out; "),
    ],
)
def test_errors_of_a_worker_are_raised_here(kind, error, message):
    with Workers(2) as pool, pytest.raises(error, match=message):
        list(pool.map(failing, [Message({"kind": kind})]))


def test_a_signal_without_a_name(monkeypatch):
    monkeypatch.setattr(workers, "_START", "import os; os.kill(os.getpid(), 40)  # {path}")
    with Workers(2) as pool, pytest.raises(WorkerError, match="a worker process was ended by signal 40, as"):
        list(pool.map(doubled, numbers(1)))


def test_processes_that_cannot_be_started_are_told(monkeypatch):
    made = []

    def process(*given):
        if made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(Process(*given))
        return made[0]

    Process = workers._Process
    monkeypatch.setattr(workers, "_Process", process)
    with Workers(3) as pool:
        for _ in range(2):  # nothing waits for those that are not there
            with pytest.raises(WorkerError, match="3 worker processes cannot be started: Too many open"):
                next(pool.map(doubled, numbers(1)))
    assert made[0]._popen.poll() is not None


def test_what_a_library_prints_is_no_answer(capfd):
    with Workers(2) as pool:
        assert [found.values for found in pool.map(failing, [Message({"kind": "noisy"})])] == [{"fine": True}]
    assert capfd.readouterr().err == "not an answer\n"


def test_results_that_nobody_asks_for_any_more():
    with Workers(2) as pool:
        first = next(pool.map(doubled, numbers(200)))
    assert first.values["n"] == 0


def children(pid):
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_its_command(number):
    code = (
        "import signal, time\nfrom minidl.data.workers import Workers\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
        "with Workers(2) as pool:\n    pool.start()\n    print('on', flush=True)\n    time.sleep(60)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert command.stdout.readline() == b"on\n"
    working = children(command.pid)
    assert len(working) == 2
    command.send_signal(number)
    command.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while any(map(alive, working)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, working))


def refuses(pid, number):
    """Whether a process blocks or ignores a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(status[name], 16) >> (number - 1) & 1 for name in ("SigBlk", "SigIgn"))


def test_a_terminals_ctrl_c_is_left_to_the_command_while_workers_start():
    """A terminal sends it to the workers, too, and Python's start would answer with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with Workers(3) as pool:
        pool.start()
        working = [process._popen.pid for process in pool._processes]
        assert all(refuses(pid, signal.SIGINT) for pid in working)
        list(pool.map(doubled, numbers(9)))
        assert all(refuses(pid, signal.SIGINT) for pid in working)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_processors_are_those_of_this_process():
    assert workers.available() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("more", [1, 2**24])
def test_one_that_is_stopped_is_told(monkeypatch, more):
    """Whoever reads its answer, or writes what does not fit into a pipe, would wait without end."""
    monkeypatch.setattr(workers, "STOPPED", 0.4)
    monkeypatch.setattr(workers, "_TICK", 0.1)
    items = [Message({"kind": "stopped"}, [b"0" * more]), Message({"kind": "noisy"}, [b"0" * more])]
    with Workers(2) as pool, pytest.raises(WorkerError, match=r"was stopped for 0\.4 s, as by SIGSTOP, and ended"):
        list(pool.map(failing, [*items, *items]))
