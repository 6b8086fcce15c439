"""The table of pictures by GPUs, made from the committed measurements."""

import copy
import json
from pathlib import Path

import pytest

from benchmarks import generation_scaling as scaling

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "generation-nvidia-h200-x2.json"
RESULTS = json.loads(FILE.read_text())


def test_peers_ratios_and_bits():
    rows = [{k: v for k, v in row.items() if k not in ("peer", "ratio", "error_ok")} for row in RESULTS["rows"]]
    scaling.compare(rows)
    assert json.loads(json.dumps(rows)) == RESULTS["rows"]
    assert all(row["error_ok"] for row in rows)
    rows[1]["hash"] = "another"
    scaling.compare(rows)
    assert [row["error_ok"] for row in rows[:2]] == [True, False]


def test_auto_is_compared_with_the_best_number(capsys):
    files = [
        {"what": "files", "count": 1000, "dtype": "float32", "devices": devices, "hash": "h", "ours_ms": ms,
         "without_start_ms": ms - 5000}
        for devices, ms in ((1, 9000), (2, 8000), ("auto", 8800))
    ]  # fmt: skip
    rows = [*copy.deepcopy(RESULTS["rows"]), *files]
    scaling.compare(rows)
    assert (rows[-1]["peer"], rows[-1]["ratio"], rows[-1]["goal"]) == ("2 GPUs", 0.909, 0.9)
    scaling.show(rows)
    printed = capsys.readouterr().out
    assert "8.8 s, 3.8 (1)" in printed
    assert "to memory, float32: 2 GPUs are faster from 1,000 pictures on" in printed
    assert "same bits as on one GPU: 23 of 23 rows" in printed


def test_the_median_run_has_all_times():
    rows = [{"ours_ms": ms, "hash": str(ms)} for ms in (30, 10, 20)]
    assert scaling.median_of(rows) == {"ours_ms": 20, "hash": "20", "runs_ms": [30, 10, 20]}


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    scaling.draw(RESULTS, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("<path") > 50
