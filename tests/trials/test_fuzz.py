"""A sample of `python -m tests.trials.fuzz`, and that what watches it sees what it is there for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidl.runtime import launch
from tests.trials.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
# They take a second and more to begin with; what they read has tests of its own.
SLOW = {
    "command",
    "checkpoint",
    "stdin",
    "picture",
    "archive",
    "texts",
    "table",
    "idx",
    "generator",
    "run",
    "tiles",
}
PLANTED = """
import os, pickle, socket, subprocess, sys, time, urllib.request
from pathlib import Path
from tests.trials.fuzz import limits
from tests.trials.fuzz.target import Target
from tests.trials.fuzz.worker import Trial

class Own(ValueError): pass

def long(): raise Own("x" * 5000)
def wrong(): raise KeyError("a")
def derived(): raise UnicodeDecodeError("utf-8", b"", 0, 1, "a")
def fine(): raise Own("what was got and what to do")

limits.SECONDS = 0.2
deeds = {
    "fine": fine,
    "long": long,
    "wrong": wrong,
    "derived": derived,
    "inside": lambda: Path("a").write_text("b"),
    "writes": lambda: Path("../../outside").write_text("b"),
    "removes": lambda: os.remove("/outside"),
    "reads": lambda: Path("/etc/passwd").read_text(),
    "starts": lambda: subprocess.run(["true"]),
    "system": lambda: os.system("true"),
    "unpickles": lambda: pickle.loads(b"cos\\nsystem\\n."),
    "connects": lambda: socket.socket(),
    "executes": lambda: exec(compile("1", "/planted/code.py", "exec")),
    "allocates": lambda: bytearray(os.urandom(1) * (limits.MEMORY + 2**24)),
    "waits": lambda: [None for _ in iter(int, 1)],
}
target = Target(lambda data: deeds[data.decode()](), [], (Own, ValueError))
trial = Trial(lambda folder: target, Path(sys.argv[1]))
for name in deeds:
    found = trial.of(name.encode())
    print(name, "|", found and found[0])
"""


def python(*arguments, folder):
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **one, "TRITON_INTERPRET": "1", "MINIDL_DATA": str(folder)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_what_an_input_must_not_do_is_seen(tmp_path):
    (tmp_path / "here").mkdir()
    found = dict(line.split(" | ") for line in python("-c", PLANTED, tmp_path / "here", folder=tmp_path))
    assert found.pop("fine") == found.pop("inside") == "None"
    expected = {
        "long": "message", "wrong": "KeyError", "derived": "UnicodeDecodeError", "writes": "open: writes",
        "removes": "os.remove: writes", "reads": "reads '/etc/passwd'", "starts": "subprocess.Popen",
        "system": "os.system", "unpickles": "pickle.find_class", "connects": "socket.", "executes": "executes",
        "allocates": "memory", "waits": "TooSlow",
    }  # fmt: skip
    assert found.keys() == expected.keys()
    for name, start in expected.items():
        assert found[name].startswith(start), (name, found[name])
    assert not (tmp_path / "outside").exists()


@pytest.mark.slow
@pytest.mark.skipif(not launch.INTERPRETED, reason="the sample is for the interpreter, which the workers use")
def test_hostile_files_get_one_error_each(tmp_path):
    names = [name for name in TARGETS if name not in SLOW]
    said = [
        json.loads(line)
        for line in python("-m", "tests.trials.fuzz.worker", ",".join(names), tmp_path, 60, 0, 30, folder=tmp_path)
    ]
    assert [line for line in said if "key" in line] == []
    last = [line for line in said if line["inputs"] >= 30]
    assert len(last) >= len(names)
    assert all(line["ways"] > 10 and line["refused"] > 0 for line in last)
