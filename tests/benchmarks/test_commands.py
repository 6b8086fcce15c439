"""`python -m benchmarks.commands`: its results file, and the errors without one. Measures nothing."""

import json

import pytest

from benchmarks import commands


def row(name, **more):
    figures = {"name": name, "ours_ms": 5000.0, "ratio": None, "goal": {}, "error_ok": True, **more}
    return {**figures, "behind": commands.behind(figures)}


@pytest.mark.parametrize(
    ("more", "behind"),
    [
        ({}, False),
        ({"goal": {"seconds": 5.0}}, False),
        ({"goal": {"seconds": 4.9}}, True),
        ({"goal": {"ratio": 1.0}, "ratio": 0.995}, False),
        ({"goal": {"ratio": 1.0}, "ratio": 0.9}, True),
        ({"goal": {"rate": 100.0}, "rate": 98.0}, True),
        ({"accuracy": 0.8, "peer_accuracy": 0.9}, True),
        ({"error_ok": False}, True),
    ],
)
def test_a_row_is_behind_its_goal(more, behind):
    assert row("a", **more)["behind"] is behind


def test_rows_of_other_parts_are_kept(tmp_path, capsys):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(commands.merged(file, [row("a"), row("b")])))
    file.write_text(json.dumps(commands.merged(file, [row("b", goal={"seconds": 1.0})])))
    stored = json.loads(file.read_text())
    assert {"device", "torch", "python", "processors"} <= stored.keys()
    assert [(r["name"], r["behind"]) for r in stored["rows"]] == [("a", False), ("b", True)]
    with pytest.raises(SystemExit, match="1"):
        commands.main(["--check", str(file)])
    printed = capsys.readouterr().out
    assert printed == "behind: b: 5.00 s, goal {'seconds': 1.0}\n1 of 2 rows are at their goals\n"


def test_what_is_no_results_file_is_told(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    for flag in ("--check", "--plot"):
        for name in ("nothing.json", "other.json"):
            with pytest.raises(SystemExit, match=rf"{name} has no results of this benchmark \("):
                commands.main([flag, str(tmp_path / name)])


def test_a_plot_needs_rows_of_texts(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(commands.merged(file, [row("a")])))
    with pytest.raises(SystemExit, match="has no rows of the parts text-"):
        commands.main(["--plot", str(file)])


def test_a_peer_that_was_not_measured_everywhere_is_plotted(tmp_path):
    file = tmp_path / "rows.json"
    peers = {"fastText": {"seconds": 1.0}, "linear": {"seconds": 2.0}}
    few = row("10, cold", texts=10, host_kilobytes=9.0, peers=peers)
    many = row("20, cold", texts=20, host_kilobytes=9.0, peers={"fastText": {"seconds": 2.0}})
    file.write_text(json.dumps(commands.merged(file, [many, few])))
    commands.main(["--plot", str(file)])
    assert (tmp_path / "rows.svg").read_text().lstrip().startswith("<?xml")


def test_a_command_without_a_part_is_told(capsys):
    with pytest.raises(SystemExit, match="2"):
        commands.main([])
    assert "name parts, or give --list, --check FILE or --plot FILE" in capsys.readouterr().err
