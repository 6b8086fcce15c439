"""Tuning on a GPU: candidates are compiled by child processes, checked, and timed as CUDA graphs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minidl.runtime import launch
from minidl.tools.tuning import classes, files
from minidl.tools.tuning.check import Compiles, launches

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.gpu


def test_a_family_is_tuned_with_a_small_budget(tmp_path):
    out, record = tmp_path / "tiles", tmp_path / "sweep.json"
    flags = ("--only", "N to 64", "--budget", "90", "--out", str(out), "--json", str(record))
    done = subprocess.run(
        [sys.executable, "-m", "minidl", "tune", "bias_act", *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    classes_ = json.loads(record.read_text())["classes"]
    assert {each["family"] for each in classes_} == {"bias_act", "bias_act_grad"}
    timed = [trial for each in classes_ for trial in each["trials"] if trial["outcome"] == "timed"]
    assert timed
    assert all(ms > 0 for trial in timed for ms in trial["ms"].values())
    assert not any("error" in each for each in classes_)
    for path in out.glob("*.json"):
        assert json.loads(path.read_text())["interpreted"] == launch.table(path.stem)["interpreted"]


def test_what_spills_or_needs_too_much_memory_is_refused():
    shapes = next(
        s for s in classes.of_family("gemm", launch.target()) if s.problems and s.problems[0].dtype == torch.float16
    )
    large = launch.Tile({**shapes.tile.sizes, "BLOCK_M": 256, "BLOCK_N": 256, "BLOCK_K": 256}, 4, 5)
    check = Compiles()
    try:
        wrong = check.problems(shapes, {0: launches(shapes, large), 1: launches(shapes, shapes.tile)})
    finally:
        check.close()
    assert list(wrong) == [0]


def test_the_device_has_a_folder_of_its_own():
    assert files.usual_folder().name == files.slug(torch.cuda.get_device_name())
