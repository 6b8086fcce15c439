"""Kernels compiled ahead of their launches: Triton finds each, and no process stays."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidl import compilers
from minidl.compilers import Compilers
from minidl.jobs import Job
from tests.runtime.test_direct import ROOT, seen

__all__ = ["seen"]

NOTHING = Job("no.such.module:no_kernel", 90, {}, [], [], {}, [])


def children(process):
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_every_kernel_has_the_key_that_triton_looks_for(seen):
    assert len(seen["keys"]) > 60
    assert {name: wrong for name, wrong in seen["keys"].items() if wrong} == {}


def test_kernels_are_compiled_by_processes_and_then_found(seen):
    assert seen["ahead"] == {"jobs": 4, "before": 0, "after": 4, "seen": [[0, 4], [1, 4], [2, 4], [3, 4], [4, 4]]}


def test_what_cannot_be_compiled_is_left_to_the_launch():
    done = []
    with Compilers() as processes:
        processes.compile([NOTHING, NOTHING], lambda number, of: done.append((number, of)), processes=2)
        processes.compile([NOTHING])
    assert done == [(0, 2), (1, 2), (2, 2)]
    assert not processes.started


def test_a_process_that_is_killed_ends_the_wait(monkeypatch):
    monkeypatch.setattr(compilers, "_START", "import os; input(); os.kill(os.getpid(), 9)")
    with Compilers() as processes:
        processes.compile([NOTHING])
        processes.compile([NOTHING])


SLOW = """
import os, time
from minidl.runtime import ahead
def compile_job(job):
    os.write(2, b"%d\\n" % os.getpid())
    time.sleep(600)
ahead.compile_job = compile_job
ahead.serve([])
"""


@pytest.mark.parametrize("how", ["input ends", "killed"])
def test_no_process_outlives_the_command(how):
    with subprocess.Popen(
        [sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"},
    ) as process:  # fmt: skip
        process.stdin.write(json.dumps({"jobs": [NOTHING.as_json()] * 3, "processes": 2}).encode() + b"\n")
        process.stdin.flush()
        forked = [int(process.stderr.readline()) for _ in range(2)]
        assert sorted(children(process.pid)) == sorted(forked)
        if how == "killed":
            process.kill()
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in forked):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_is_left_to_the_command():
    with Compilers() as processes:
        processes.start()
        processes.compile([NOTHING])
        os.kill(processes._process.pid, signal.SIGINT)
        done = []
        processes.compile([NOTHING], lambda number, of: done.append(number))
    assert done == [0, 1]


def test_processes_get_ready_where_a_gpu_seems_to_be_and_is_wanted(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(Compilers, "start", lambda self: started.append(self))  # noqa: PLW0108 (a method)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def begun(device):
        started.clear()
        with compilers.ready(["minidl.models"], device), compilers.at_hand() as own:
            assert own.modules == ["minidl.models"]
        return len(started)

    monkeypatch.setattr(compilers, "_DRIVERS", (tmp_path / "no driver",))
    assert begun("auto") == 0
    monkeypatch.setattr(compilers, "_DRIVERS", (tmp_path,))
    assert [begun(device) for device in ("auto", "cuda", "cpu")] == [1, 1, 0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert begun("auto") == 0
    with compilers.at_hand() as other:
        assert other.modules == []


HASHES = """
import importlib, json, sys
from minidl.runtime import keys
from minidl.workbench.doctor.jobs import kernels
found = {}
for name in kernels()[:: int(sys.argv[1])]:
    module, function = name.split(":")
    kernel = getattr(importlib.import_module(module), function)
    keys.settle(kernel)
    found[name] = kernel.cache_key, [(n, str(v)) for (n, _), (v, _) in kernel.used_global_vals.items()]
json.dump(found, sys.stdout)
"""


def test_the_key_of_a_kernel_does_not_depend_on_which_were_met_before():
    one, other = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", HASHES, order], capture_output=True, text=True, cwd=ROOT, check=True,
                env={**os.environ, "TRITON_INTERPRET": "0"},
            ).stdout
        )
        for order in ("1", "-1")
    )  # fmt: skip
    assert len(one) > 60
    assert {name: (one[name], other[name]) for name in one if one[name] != other[name]} == {}
    # Triton sorts constants of one name by where they lie in memory.
    twice = {name for name, (_, constants) in one.items() if len(dict(constants)) < len({(n, v) for n, v in constants})}
    assert twice == set()
