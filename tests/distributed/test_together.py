"""The same bits on one, two and three processes: sums, users' steps, and training, also resumed on another number
of them. Three processes are started once and work as one, as two and as three."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidl.runtime import launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="processes on one GPU are for gloo")
SIZES = (1, 2, 3)


def free_ports(count):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process found, by their number and its own."""
    folder = tmp_path_factory.mktemp("together")
    ports = free_ports(len(SIZES))
    script, environment = Path(__file__).with_name("together.py"), {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, folder, str(rank), *ports], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(SIZES[-1])
    ]  # fmt: skip
    try:
        while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
            time.sleep(0.1)
    finally:
        for process in processes:
            if any(p.poll() for p in processes):
                process.kill()
        said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return {
        (size, rank): json.loads((folder / f"found-{size}-{rank}.json").read_text())
        for size in SIZES
        for rank in range(size)
    }


@pytest.mark.slow
def test_the_number_of_processes_changes_no_bit(found):
    """One test: the processes are started once, on whichever worker it runs."""
    alone = found[1, 0]
    for (size, rank), each in found.items():
        for what in alone.keys() - {"optimizers", "bytes"}:
            assert each[what] == alone[what], f"{what}: process {rank} of {size}"
        assert len(each["optimizers"]) == (15 if rank else 30)
        for what, value in each["optimizers"].items():
            assert value == alone["optimizers"][what], f"{what}: process {rank} of {size}"
    for size in SIZES:
        for name, whole in alone["bytes"].items():
            held = [found[size, rank]["bytes"][name] for rank in range(size)]
            # Parts begin at multiples of 16 values.
            assert sum(held) == whole
            assert max(held) < whole / size + 18 * 16 * 4, f"{name}: {size} processes"
    for of in ("pictures", "adversaries"):
        assert alone[of] != alone[f"{of}, joined statistics"]
