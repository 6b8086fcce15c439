"""Tuning for kernels that are compiled for the CPU: rules of their own in the same tables."""

import json
import os
import subprocess
import sys

import pytest

from minidl.cpu import build
from minidl.runtime import launch
from minidl.runtime.launch import Tile
from minidl.tools.tuning import classes, kind, space


def test_without_rules_of_its_own_the_cpu_has_those_of_its_plans(monkeypatch):
    monkeypatch.setattr(launch, "target", lambda: "sm_80")
    table = {name: rules for name, rules in launch.table("gemm_pointer").items() if name != "cpu"}
    rules = kind.rules_of(table, "cpu")
    assert [rule["tile"] for rule in rules] == [rule["tile"] for rule in table["sm_80"]]
    assert not any({"warps", "stages"} & rule.keys() for rule in rules)
    assert kind.rules_of(launch.table("gemm_pointer"), "cpu") == launch.table("gemm_pointer")["cpu"]


def test_a_tile_of_the_cpu_changes_no_other_target(monkeypatch):
    monkeypatch.setattr(launch, "target", lambda: "sm_80")
    table = launch.table("softmax")
    changed = classes.with_tile(table, "cpu", 0, Tile({"BLOCK_M": 3, "BLOCK_N": 5}, 4, 3))
    assert changed["cpu"][0]["tile"] == {"BLOCK_M": 3, "BLOCK_N": 5}
    assert "warps" not in changed["cpu"][0]
    assert {name: rules for name, rules in changed.items() if name != "cpu"} == {
        name: rules for name, rules in table.items() if name != "cpu"
    }


def test_candidates_for_the_cpu_vary_blocks_alone():
    present = launch.tile_of(launch.table("gemm_pointer")["cpu"][-1])
    tiles = space.candidates("gemm_pointer", "cpu", present)
    assert {(tile.num_warps, tile.num_stages) for tile in tiles} == {(present.num_warps, present.num_stages)}
    assert {tile["GROUP_M"] for tile in tiles} == {present["GROUP_M"]}
    assert min(tile["BLOCK_K"] for tile in tiles) >= 16


@pytest.mark.slow
@pytest.mark.skipif(build.compiler() is None, reason="no C compiler")
def test_the_command_writes_rules_of_the_cpu(tmp_path):
    command = [sys.executable, "-m", "minidl", "tune", "reduce_rows", "--only", "R to 48", "--budget", "2"]
    variables = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "MINIDL_TILES")}
    variables["MINIDL_CPU"] = "compiled"
    outputs = ["--out", str(tmp_path / "tables"), "--json", str(tmp_path / "results.json")]
    done = subprocess.run([*command, *outputs], env=variables, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "reduce_rows: R to 48" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["target"] == "cpu"
    assert any(trial["outcome"] == "timed" for trial in results["classes"][0]["trials"])
    for path in (tmp_path / "tables").glob("reduce_rows.json"):
        written, before = json.loads(path.read_text()), launch.table("reduce_rows")
        assert {name: written[name] for name in before if name != "cpu"} == {
            name: before[name] for name in before if name != "cpu"
        }
