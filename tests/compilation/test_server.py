"""The processes that compile kernels: what they do before they are asked, and that none of them stays."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidl.compilation import compiler_processes
from minidl.compilation.compiler_processes import Compilers
from minidl.compilation.job import Job
from tests.runtime.test_fast_launch import ROOT

NOTHING = Job("no.such.module:no_kernel", 90, {}, [], [], {}, [])


def children(process):
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_what_cannot_be_compiled_is_left_to_the_launch():
    done = []
    with Compilers() as processes:
        processes.compile([NOTHING, NOTHING], lambda number, of: done.append((number, of)), processes=2)
        processes.compile([NOTHING])
    assert done == [(0, 2), (1, 2), (2, 2)]
    assert not processes.started


def test_a_process_that_is_killed_ends_the_wait(monkeypatch):
    monkeypatch.setattr(compiler_processes, "_START", "import os; input(); os.kill(os.getpid(), 9)")
    with Compilers() as processes:
        processes.compile([NOTHING])
        processes.compile([NOTHING])


SLOW = """
import os, time
from minidl.compilation import launch_jobs, server
def compile_job(job):
    os.write(2, b"%d\\n" % os.getpid())
    time.sleep(600)
launch_jobs.compile_job = compile_job
server.serve()
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
        assert set(forked) <= set(children(process.pid))
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
        with compiler_processes.started("text", device), compiler_processes.current() as own:
            assert own.command == "text"
        return len(started)

    monkeypatch.setattr(compiler_processes, "_DRIVERS", (tmp_path / "no driver",))
    assert begun("auto") == 0
    monkeypatch.setattr(compiler_processes, "_DRIVERS", (tmp_path,))
    assert [begun(device) for device in ("auto", "cuda", "cpu")] == [1, 1, 0]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert begun("auto") == 0
    with compiler_processes.current() as other:
        assert other.command == ""


def output(code, **environment):
    """What Python prints in a process that does not interpret."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, stdin=subprocess.DEVNULL,
        env={**os.environ, "TRITON_INTERPRET": "0", **environment},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


KEYS = """
import importlib, json, sys
from minidl.compilation import command_kernels, launch_jobs
jobs = [job for command in ("text", "table", "images", "gan", "generate") for job in command_kernels.jobs(command, 90)]
print(json.dumps([len(sys.modules["torch"].__path__ or []), {job.key: launch_jobs.cache_key(job) for job in jobs}]))
"""


FAKE_TORCH = "from minidl.compilation import fake_torch; fake_torch.install()"


def test_keys_do_not_depend_on_torch():
    (real, keys), (pretended, same) = output(KEYS), output(FAKE_TORCH + KEYS)
    assert (real, pretended) == (1, 0)
    assert len(keys) > 200
    assert keys == same


EARLY = """
import os, sys, time
from minidl.compilation import launch_jobs, server
def compile_job(job):
    os.write(2, f"{job.options['number']} {os.nice(0)}\\n".encode())
    while job.options["number"] < 2 and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    raise RuntimeError
launch_jobs.compile_job = compile_job
launch_jobs.is_compiled = lambda job: job.options["number"] == 4
server._architecture = lambda devices: 90
def usual(command, arch):
    return [server.Job("no.module:none", arch, {}, [], [], {"number": n}, []) for n in range(9)]
server.command_kernels.jobs = usual
os.sched_getaffinity = lambda process: range(4)
server.serve("text")
"""


def test_usual_kernels_are_compiled_until_others_are_asked_for(tmp_path):
    """Two are under way: of the others none is begun any more, and what is under way comes last."""
    go = tmp_path / "go"
    with subprocess.Popen(
        [sys.executable, "-c", EARLY, str(go)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=ROOT, text=True, env={**os.environ, "TRITON_INTERPRET": "0"},
    ) as process:  # fmt: skip
        begun = {tuple(map(int, process.stderr.readline().split())) for _ in range(2)}
        assert begun == {(0, 10), (1, 10)}
        asked = [Job("no.module:none", 90, {}, [], [], {"number": n}, []).as_json() for n in (0, 7, 8)]
        process.stdin.write(json.dumps({"jobs": asked, "processes": 1}) + "\n")
        process.stdin.flush()
        then = [tuple(map(int, process.stderr.readline().split())) for _ in range(3)]
        assert then == [(7, 0), (8, 0), (0, 0)]
        go.touch()
        assert [process.stdout.readline() for _ in range(4)] == ["done\n"] * 3 + ["end\n"]
        process.stdin.close()
        assert process.stderr.read() == ""
