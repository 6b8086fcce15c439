"""Results files, the list of rows, and the chart of the committed results."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from minidl.errors import ConfigError
from minidl.tools.bench import chart, goals, results, run
from minidl.tools.bench.goals import GOALS

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "benchmarks" / "results" / "nvidia-h200.json"
MACHINE = {"device": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-01"}


def measured(ratio=1.5, right=True):
    figures = {"ours_ms": 1.0, "peer": "torch", "peer_ms": ratio, "ratio": ratio, "share_of_floor": 0.5}
    return {"name": "softmax", "dtype": "float16", "error_ok": right} | {
        k: v if right else None for k, v in figures.items()
    }


def test_every_row_has_a_name_of_its_own_and_a_goal():
    assert len(goals.ROWS) == len(GOALS) == 59
    assert all(goal >= 1.0 for goal in GOALS.values())


def test_words_choose_rows():
    assert goals.chosen([]) == list(GOALS)
    assert goals.chosen(["softmax 65536", "text training"]) == [
        "softmax 65536x128", "softmax 65536x1024", "text training step 1024x65 of 32754, 128 hidden",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no row's name contains 'sofmax'"):
        goals.chosen(["sofmax"])
    with pytest.raises(ValueError, match="no row's name contains ''"):
        goals.chosen(["softmax", ""])


def test_a_row_is_at_its_goal_from_the_noise_below_it_on(tmp_path):
    stored = results.Results(dict(MACHINE))
    for row, ratio, reached in (("softmax 65536x128", 1.19, True), ("softmax 65536x1024", 1.03, False)):
        stored.add(row, measured(ratio))
        assert stored.rows[row]["at_goal"] is reached
    stored.add("gemm 4096x4096x4096", measured(right=False))
    assert not stored.rows["gemm 4096x4096x4096"]["at_goal"]
    assert not stored.right
    assert run.summary(stored) == "1 of 3 rows at their goal, 2 ahead of the best other (bench has 59 rows)"
    stored.save(tmp_path / "r.json")
    loaded = results.load(tmp_path / "r.json")
    assert loaded.machine == MACHINE
    assert loaded.in_order == stored.in_order
    assert [row["row"] for row in loaded.in_order] == ["gemm 4096x4096x4096", "softmax 65536x128", "softmax 65536x1024"]
    assert run.table(loaded, list(GOALS)).row_count == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("rows"),
        lambda content: content.pop("device"),
        lambda content: content["rows"][0].pop("row"),
        lambda content: content["rows"][0].update(row="another"),
        lambda content: content["rows"][0].update(ratio="fast"),
        lambda content: content["rows"][0].update(ratio=float("nan")),
        lambda content: content["rows"][0].pop("dtype"),
        lambda content: content["rows"][0].pop("peer"),
        lambda content: content.pop("driver"),
        lambda content: content.update(rows=3),
        lambda content: content.update(rows=["gemm"]),
        lambda content: content.update(device="NVIDIA\x1b[31m"),
        lambda content: content["rows"].append(content["rows"][0]),
        lambda content: content["rows"][0].update(row=["gemm"]),
        lambda content: content["rows"][0].update(dtype="float16\n"),
        lambda content: content["rows"][0].update(ratio=10**400),
        lambda content: content["rows"][0].update(ratio=0.0),
        lambda content: content["rows"][0].update(share_of_floor=-0.5),
        lambda content: content["rows"][0].update(error_ok="yes"),
        lambda content: content["rows"][0].pop("error_ok"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, damage):
    content = json.loads(COMMITTED.read_text())
    damage(content)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="has no results of `minidl bench`"):
        results.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"\0" * 50, b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_object_is_refused(tmp_path, content):
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"r\.json has no results of `minidl bench` \(.*give a file that"):
        results.load(tmp_path / "r.json")


def test_what_is_no_file_is_told_as_the_system_does(tmp_path):
    with pytest.raises(ConfigError, match=r"none has no results of `minidl bench` \(No such file or directory\)"):
        results.load(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"\(Is a directory\)"):
        results.load(tmp_path)


def test_a_wrong_row_is_not_at_its_goal_whatever_ratio_it_has(tmp_path):
    stored = results.Results(dict(MACHINE))
    stored.add("softmax 65536x128", {**measured(5.0), "error_ok": False})
    stored.save(tmp_path / "r.json")
    assert not results.load(tmp_path / "r.json").rows["softmax 65536x128"]["at_goal"]


def test_text_in_a_file_is_shown_as_it_is():
    pytest.importorskip("matplotlib")
    stored = results.Results({**MACHINE, "device": r"GPU $\frac$"})
    stored.add("softmax 65536x128", {**measured(), "dtype": "[/red]"})
    shown = io.StringIO()
    Console(file=shown, width=140).print(run.table(stored, list(GOALS)))
    assert "[/red]" in shown.getvalue()
    assert b"<svg" in chart.picture(stored)
    assert chart.picture(stored, "png").startswith(b"\x89PNG")


def test_a_kept_row_is_judged_by_the_goal_of_today(tmp_path, monkeypatch):
    stored = results.Results(dict(MACHINE))
    stored.add("softmax 65536x128", measured(1.5))
    stored.save(tmp_path / "r.json")
    monkeypatch.setitem(GOALS, "softmax 65536x128", 2.0)
    loaded = results.load(tmp_path / "r.json").rows["softmax 65536x128"]
    assert (loaded["goal"], loaded["at_goal"]) == (2.0, False)


def test_the_committed_results_have_every_row_right():
    stored = results.load(COMMITTED)
    assert list(stored.rows) == goals.chosen([])
    assert json.loads(COMMITTED.read_text())["rows"] == stored.in_order
    assert stored.right
    for row in stored.in_order:
        assert row["goal"] == GOALS[row["row"]]
        assert row["at_goal"] == (row["ratio"] >= row["goal"] - goals.NOISE)


def test_the_picture_shows_every_row_and_is_the_same_each_time():
    pytest.importorskip("matplotlib")
    stored = results.load(COMMITTED)
    drawn = chart.picture(stored)
    assert drawn == chart.picture(stored)
    assert chart.fingerprint(stored).encode() in drawn
    del stored.rows["softmax 65536x128"]
    assert chart.picture(stored) != drawn
