"""Classes are the rules of a table; which problem meets which rule is asked of the launchers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.tools.tuning import classes, kind, problems
from minidl.tools.tuning.problem import Judge

ROOT = Path(__file__).parents[3]


def test_every_family_has_problems():
    assert sorted(problems._MAKERS) == launch.families()


@pytest.mark.skipif(not launch.INTERPRETED, reason="of the interpreter's tables")
def test_every_rule_of_the_interpreter_is_met():
    unmet = {
        shapes.name
        for family in launch.families()
        for shapes in classes.of_family(family, "interpreted")
        if not shapes.problems
    }
    # It wants float16.
    assert unmet == {"conv_batch_narrow: all other shapes"}


def test_a_problem_is_in_the_class_of_its_size():
    found = {shapes.name: shapes for shapes in classes.of_family("softmax", "interpreted")}
    assert [problem.name for problem in found["softmax: N to 64"].problems] == ["4096x64 float32"]
    assert [problem.name for problem in found["softmax: N to 512"].problems] == ["512x512 float32"]


def test_conditions_in_words():
    when = {"dtype": ["float16", "bfloat16"], "precision": ["tf32"], "M_max": 64, "K_min": 16}
    assert classes.conditions(when) == "float16 or bfloat16, tf32, M to 64, K from 16"
    assert classes.conditions({}) == "all other shapes"


def test_another_tile_changes_one_rule():
    table = launch.table("softmax")
    tile = launch.Tile({"BLOCK_M": 4, "BLOCK_N": 128}, 2, 1)
    changed = classes.with_tile(table, "sm_90", 5, tile)
    assert launch.tile_of(changed["sm_90"][5]) == tile
    assert changed["sm_90"][5]["when"] == table["sm_90"][5]["when"]
    changed["sm_90"][5] = table["sm_90"][5]
    assert changed == table
    assert "warps" not in classes.with_tile(table, "interpreted", 0, tile)["interpreted"][0]


FEW = ("bias_act", "cross_entropy", "images", "reduce_rows", "sparse", "gemm_sum", "norm_sums", "pool_grad")


@pytest.mark.parametrize("family", [*FEW, "update", "conv_fft", "conv_few", "conv_banded_grad_weight", "conv_back"])
@pytest.mark.skipif(not launch.INTERPRETED, reason="on a GPU the tuning test judges")
def test_problems_of_each_kind_are_right_with_the_present_tile(family, monkeypatch):
    monkeypatch.setattr(kind, "ELEMENTS_INTERPRETED", 2**12)
    for shapes in classes.of_family(family, "interpreted")[:1]:
        for problem in shapes.problems[:1]:
            assert Judge(problem, "cpu").right()


@pytest.mark.slow
def test_rules_of_gpus_are_met_and_families_without_rules_are_not_asked_for():
    """In a process that compiles: forms are chosen as on a GPU, and launches are recorded."""
    code = """
import json
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.tools.tuning import classes
print(json.dumps({target: {shapes.name: len(shapes.problems) for family in launch.families()
    for shapes in classes.of_family(family, target)} for target in ("sm_90", "sm_80")}))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    for target, met in json.loads(done.stdout).items():
        unmet = [name for name, count in met.items() if not count]
        assert len(unmet) <= 0.05 * len(met), unmet
        for family in launch.families():
            there = any(name.startswith(f"{family}:") for name in met)
            assert there == bool(launch.table(family)[target])


def test_gradients_are_judged_by_the_record():
    (shapes, *_) = classes.of_family("softmax_grad", "interpreted")
    judge = Judge(shapes.problems[0], default_device())
    judge._expected.exact = tuple(grad + 1e-3 for grad in judge._expected.exact)
    assert not judge.right()
    assert shapes.problems[0].dtype == torch.float32
