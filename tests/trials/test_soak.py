"""A sample of `python -m tests.trials.soak`, and that it finds what it is there for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from minidl.runtime import launch

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not launch.INTERPRETED, reason="its commands are forked, and so cannot use a GPU"),
]
# Faults in minidl: what makes them, steps that meet them, and the words that tell them.
PLANTED = {
    "unfinished files": (
        "write_files._discard = lambda temporary, folder: None",
        # One of these steps is between a temporary file and its name.
        """
for at, name in ((500, "alpha"), (520, "beta"), (540, "gamma"), (560, "delta")):
    m.train(("train", name, "text", "new", Hurt("fault", at, 0)))
""",
        r"\.part is in ",
    ),
    "writes through links": (
        "TrainingFolder.check_links = lambda self: None",
        """
m.train(("train", "alpha", "text", "new", Hurt("SIGINT", 500)))
m.link("alpha", "checkpoints", False)
m.recover("alpha")
""",
        "which is the user's, is ",
    ),
    "forgets the moments": (
        "Optimizer.load_flat_state = lambda self, state: None",
        """
m.train(("train", "alpha", "text", "new", Hurt("SIGINT", 500)))
m.recover("alpha")
""",
        "tensor .* differs in",
    ),
    "deletes the old run at once": (
        """
real = TrainingFolder._move_to_previous

def deleted(self):
    real(self)
    shutil.rmtree(self.previous)
    return False

TrainingFolder._move_to_previous = deleted
""",
        """
m.begin((("text", True), ("", True), ("", True)))
m.train(("train", "alpha", "text", "overwrite", Hurt("kill", 500)))
""",
        "is lost",
    ),
    "knows no foreign files": (
        """
manifest.RunFiles.is_own = lambda self, name, raw: True
manifest.RunFiles.weights = lambda self: files.read_tensors(self.model)
""",
        """
m.begin((("text", True), ("text-1", True), ("", True)))
m.swap("alpha", "beta", 8)  # model.safetensors
m.ask(("ask", "alpha", "predict", "", Hurt()))
""",
        "another answer of alpha",
    ),
    "locks nothing": (
        """
@contextlib.contextmanager
def lock(folder):
    yield

folder_lock.lock = lock
""",
        """
first = second = ("train", "alpha", "text", "new", Hurt())
m.two_writers(first, second, 500, False)
""",
        "a process writes without its lock",
    ),
}


IMPORTS = """
import contextlib, json, os, shutil, subprocess, sys
from pathlib import Path
from minidl.common import write_files
from minidl.optim.base import Optimizer
from minidl.training.run_folder import files, folder_lock, manifest
from minidl.training.run_folder.training_folder import TrainingFolder
from tests.trials import child, soak, world
from tests.trials.hurts import Hurt
from tests.trials.rules import ViolationError
"""
EACH = """
top = Path(sys.argv[1])
child.warm()
made = world.references(top, ("text", "text-1"))
for name, (fault, steps, _) in json.loads(sys.argv[2]).items():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        continue
    folder = top / name
    folder.mkdir()
    m = soak.alone(folder, top, made)
    exec(fault)
    try:
        exec(steps)
    except ViolationError as found:
        (folder / "found").write_text(str(found))
    os._exit(0)
"""


def python(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + code, *map(str, arguments)], cwd=ROOT, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_each_fault_in_minidl_is_seen(tmp_path):
    """Every third one, at night all."""
    planted = dict(list(PLANTED.items())[:: 1 if settings.default.max_examples > 100 else 3])
    code, said = python(EACH, tmp_path, json.dumps(planted))
    assert code == 0, said
    for name, (_, _, words) in planted.items():
        found = tmp_path / name / "found"
        assert found.exists(), (name, said)
        assert re.search(words, found.read_text()), (name, found.read_text())


@pytest.mark.skipif(settings.default.max_examples <= 100, reason="a minute; at night")
def test_a_fault_in_minidl_is_found(tmp_path):
    """By steps that are drawn, as the command tells it."""
    fault = """
real = TrainingFolder.start

def start(*values):
    subprocess.Popen(["sleep", "100"])
    return real(*values)

TrainingFolder.start = start
soak.main()
"""
    code, said = python(fault, "--minutes", 4, "--processes", 1, "--first", "--folder", tmp_path)
    assert code == 1, said
    assert re.search(r"violation, with seed 0 0, kept in .*\n(.*\n)+  wrong: a process is left: sleep 100", said), said


def test_nothing_lost_and_nothing_mixed_up(tmp_path):
    code, said = python("soak.main()", "--minutes", 0.5, "--processes", 1, "--folder", tmp_path)
    assert code == 0, said
    assert " steps, 0 violations" in said
    assert list(tmp_path.iterdir()) == []
