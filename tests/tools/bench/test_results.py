"""Results on disk, the rows that there are, and what the README and docs/performance.md show of the committed ones."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from minidl.errors import ConfigError
from minidl.tools.bench import goals, results, run, table
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
    found = results.Results(dict(MACHINE))
    for row, ratio, reached in (("softmax 65536x128", 1.19, True), ("softmax 65536x1024", 1.03, False)):
        found.add(row, measured(ratio))
        assert found.rows[row]["at_goal"] is reached
    found.add("gemm 4096x4096x4096", measured(right=False))
    assert not found.rows["gemm 4096x4096x4096"]["at_goal"]
    assert not found.right
    assert run.summary(found) == "1 of 3 rows at their goal, 2 ahead of the best other (bench has 59 rows)"
    found.save(tmp_path / "r.json")
    again = results.load(tmp_path / "r.json")
    assert again.machine == MACHINE
    assert again.in_order == found.in_order
    assert [row["row"] for row in again.in_order] == ["gemm 4096x4096x4096", "softmax 65536x128", "softmax 65536x1024"]
    assert run.table(again, list(GOALS)).row_count == 3


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
    found = results.Results(dict(MACHINE))
    found.add("softmax 65536x128", {**measured(5.0), "error_ok": False})
    found.save(tmp_path / "r.json")
    assert not results.load(tmp_path / "r.json").rows["softmax 65536x128"]["at_goal"]


def test_text_in_a_file_is_shown_as_it_is():
    pytest.importorskip("matplotlib")
    found = results.Results({**MACHINE, "device": r"GPU $\frac$"})
    found.add("softmax 65536x128", {**measured(), "dtype": "[/red]"})
    shown = io.StringIO()
    Console(file=shown, width=140).print(run.table(found, list(GOALS)))
    assert "[/red]" in shown.getvalue()
    assert b"<svg" in table.picture(found)
    assert table.picture(found, "png").startswith(b"\x89PNG")


def test_a_kept_row_is_judged_by_the_goal_of_today(tmp_path, monkeypatch):
    found = results.Results(dict(MACHINE))
    found.add("softmax 65536x128", measured(1.5))
    found.save(tmp_path / "r.json")
    monkeypatch.setitem(GOALS, "softmax 65536x128", 2.0)
    again = results.load(tmp_path / "r.json").rows["softmax 65536x128"]
    assert (again["goal"], again["at_goal"]) == (2.0, False)


def test_the_committed_results_have_every_row_right():
    found = results.load(COMMITTED)
    assert list(found.rows) == goals.chosen([])
    assert json.loads(COMMITTED.read_text())["rows"] == found.in_order
    assert found.right
    for row in found.in_order:
        assert row["goal"] == GOALS[row["row"]]
        assert row["at_goal"] == (row["ratio"] >= row["goal"] - goals.NOISE)


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_pages_show_the_chart_of_the_committed_results(page):
    """Otherwise run `make results`."""
    path = ROOT / page
    chart = re.search(r"!\[[^]]*\]\(([^)]*svg)\)", path.read_text())[1]
    assert table.fingerprint(results.load(COMMITTED)) in (path.parent / chart).read_text()


def test_the_page_shows_the_table_of_the_committed_results():
    """Otherwise run `make results`."""
    text = (ROOT / "docs/performance.md").read_text()
    assert table.inserted(text, table.markdown(results.load(COMMITTED))) == text


def test_the_short_chart_shows_eight_rows():
    pytest.importorskip("matplotlib")
    assert set(table.SHORT) <= set(GOALS)
    chart = table.short_picture(results.load(COMMITTED)).decode()
    assert len(table.SHORT) == 8
    assert all(row.replace(">", "&gt;") in chart for row in table.SHORT)


def test_a_text_without_marks_is_refused():
    with pytest.raises(ConfigError, match="results: begin"):
        table.inserted("no marks", "table")


def test_the_picture_shows_every_row_and_is_the_same_each_time():
    pytest.importorskip("matplotlib")
    found = results.load(COMMITTED)
    drawn = table.picture(found)
    assert drawn == table.picture(found)
    assert table.fingerprint(found).encode() in drawn
    del found.rows["softmax 65536x128"]
    assert table.picture(found) != drawn
