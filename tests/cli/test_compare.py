"""`minidl compare`: the scores of runs side by side, where they differ, and a page of their curves."""

import re

from tests.cli.conftest import SMALL


def test_runs_side_by_side(command, text_run, table_run, texts, tmp_path):
    other = tmp_path / "other"
    done = command("train", "text", "--data", texts, "--out", other, *SMALL, "--seed", "3", "--lr", "0.01", "--quiet")
    assert done.code == 0, done.err
    first, page = text_run[0], tmp_path / "all.html"
    done = command("compare", first, other, table_run[0], "--html", page)
    assert (done.code, done.err) == (0, "")
    rows = {line.split("  ")[0]: re.split(r" {2,}", line)[1:] for line in done.out.splitlines()}
    assert rows["task"][:2] == ["classification"] * 2
    assert len(rows["accuracy"]) == 3
    assert rows["--seed"][1] == "3"
    assert rows["--lr"][:2] == ["0.05", "0.01"]
    assert "--batch-size" not in rows or len(set(rows["--batch-size"])) > 1
    text = page.read_text()
    assert text.count(str(other)) >= 2  # in the table, and in the curves
    assert "<script" not in text
    assert "<polyline" in text


def test_what_cannot_be_compared(command, text_run, tmp_path):
    done = command("compare", text_run[0])
    assert (done.code, done.err) == (2, f"error: only one run was given, {text_run[0]}: name two or more to compare\n")
    done = command("compare", text_run[0], tmp_path)
    assert done.code == 2
    assert done.err.startswith(f"error: {tmp_path} is not a minidl run: it has no config.json")
    done = command("compare", text_run[0], text_run[0], "--html", text_run[0] / "report.html")
    assert done.code == 2
    assert done.err.startswith("error: --html ")
    assert "comparison" not in (text_run[0] / "report.html").read_text()
