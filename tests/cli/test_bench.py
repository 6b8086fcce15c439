"""`minidl bench` where there is no GPU, and the results of another machine."""

import json

import pytest
import torch

from minidl.tools.bench import chart, results
from minidl.tools.bench.goals import chosen
from tests.cli.conftest import ROOT
from tests.tools.bench.test_peers import install

COMMITTED = ROOT / "benchmarks" / "results" / "nvidia-h200.json"
COMMITTED_ROWS = {row["row"]: row for row in json.loads(COMMITTED.read_text())["rows"]}


def test_list_names_the_rows_with_their_goals(command):
    lines = command("bench", "--list").out.splitlines()
    assert [line.split("  ", 1)[1] for line in (line.strip() for line in lines)] == chosen([])
    few = command("bench", "cross-entropy", "dcgan", "--list").out.splitlines()
    assert len(few) == 4
    assert few[0].split() == ["1.4", "cross-entropy", "forward+backward", "8192x32000"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_it_measures_on_a_gpu_only(command, tmp_path):
    done = command("bench", "softmax", "--json", str(tmp_path / "r.json"))
    assert done.code == 2
    assert "bench requires a CUDA device with compiled kernels" in done.err
    assert not (tmp_path / "r.json").exists()


def test_an_unknown_row(command):
    done = command("bench", "sofmax")
    assert done.code == 2
    assert "no row's name contains 'sofmax'" in done.err


def test_results_of_another_machine_are_shown_and_drawn(command, tmp_path):
    done = command("bench", "softmax", "--show", str(COMMITTED), "--plot", str(tmp_path / "r.svg"))
    assert done.code == 0, done.err
    assert "softmax 2048x131072" in done.out
    assert "gemm" not in done.out
    assert "rows at their goal" in done.out
    assert (tmp_path / "r.svg").read_text().count("<svg") == 1


def test_what_does_not_go_together(command, tmp_path):
    done = command("bench", "--show", str(COMMITTED), "--json", str(tmp_path / "r.json"))
    assert done.code == 2
    assert "--json cannot be combined with --show" in done.err
    assert json.loads(COMMITTED.read_text())["rows"]
    for flags in (("--profile",), ("--trace", tmp_path / "t.json")):
        done = command("bench", "--show", COMMITTED, *flags)
        assert (done.code, done.err) == (2, f"error: {flags[0]} cannot be combined with --show\n")
    for flags in (("--peers",), ("--show", COMMITTED), ("--json", tmp_path / "r.json")):
        done = command("bench", "--list", *flags)
        assert (done.code, done.err) == (2, f"error: --list cannot be combined with {flags[0]}\n")
    missing = command("bench", "--show", str(tmp_path / "none.json"))
    assert missing.code == 2
    assert "none.json has no results" in missing.err


def test_the_rows_asked_for_are_those_shown_drawn_and_counted(command, tmp_path):
    pytest.importorskip("matplotlib")
    done = command("bench", "cross-entropy", "--show", COMMITTED, "--plot", tmp_path / "r.svg")
    assert done.code == 0, done.err
    assert "of 1 rows at their goal" in done.out
    assert results.load(COMMITTED).rows.keys() > {"cross-entropy forward+backward 8192x32000"}
    alone = results.Results(json.loads(COMMITTED.read_text()), {
        name: row for name, row in results.load(COMMITTED).rows.items() if "cross-entropy" in name
    })  # fmt: skip
    assert chart.fingerprint(alone) in (tmp_path / "r.svg").read_text()
    few = tmp_path / "few.json"
    alone.machine.pop("rows")
    alone.save(few)
    none = command("bench", "gemm", "--show", few)
    assert none.code == 2
    assert "few.json has none of these rows; it has: cross-entropy" in none.err


def test_no_file_is_written_over_another_that_is_named(command, tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_bytes(COMMITTED.read_bytes())
    done = command("bench", "--show", kept, "--plot", tmp_path / "." / "kept.json")
    assert done.code == 2
    assert "kept.json exists and was not written by --plot" in done.err
    assert kept.read_bytes() == COMMITTED.read_bytes()
    assert "--json and --plot name the same file" in command("bench", "--json", kept, "--plot", kept).err
    assert kept.read_bytes() == COMMITTED.read_bytes()


@pytest.fixture
def gpu(monkeypatch):
    """A device to measure on: each row takes a moment, and the second one is stopped by Ctrl-C."""

    def measuring(names, found, console, keep, peers):
        for name in names[:1]:
            found.add(name, {**COMMITTED_ROWS[name], "ratio": 7.0})
            keep()
        raise KeyboardInterrupt

    described = {key: value for key, value in json.loads(COMMITTED.read_text()).items() if key != "rows"}
    monkeypatch.setattr("minidl.tools.bench.machine.machine", lambda: {**described, "date": "2027-01-01"})
    monkeypatch.setattr("minidl.tools.bench.run.run", measuring)
    monkeypatch.setattr("minidl.runtime.launch.INTERPRETED", False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.parametrize("words", [(), ("gemm",)])
def test_results_in_the_file_stay_until_they_are_measured_again(command, gpu, tmp_path, words):
    path = tmp_path / "r.json"
    path.write_bytes(COMMITTED.read_bytes())
    assert command("bench", *words, "--json", path).code == 130
    again = results.load(path)
    assert list(again.rows) == chosen([])
    first, *others = again.in_order
    assert (first["ratio"], first["date"]) == (7.0, "2027-01-01")
    assert others == results.load(COMMITTED).in_order[1:]


@pytest.mark.parametrize("words", [(), ("gemm",)])
def test_a_file_of_something_else_is_not_written_over(command, gpu, tmp_path, words):
    path = tmp_path / "package.json"
    path.write_text('{"name": "mine"}')
    done = command("bench", *words, "--json", path)
    assert done.code == 2
    assert "package.json exists and was not written by --json" in done.err
    assert path.read_text() == '{"name": "mine"}'
    other = json.loads(COMMITTED.read_text())
    path.write_text(json.dumps({**other, "device": "NVIDIA A100"}))
    done = command("bench", *words, "--json", path)
    assert "has results of a NVIDIA A100; this is a NVIDIA H200; use another file" in done.err
    assert json.loads(path.read_text())["device"] == "NVIDIA A100"


def test_without_any_peer_the_flag_says_what_to_install(command, monkeypatch, tmp_path):
    install(monkeypatch)
    done = command("bench", "softmax", "--peers")
    assert done.code == 2
    assert "--peers: attorch is not installed: pip install" in done.err
    shown = command("bench", "--peers", "--show", tmp_path / "r.json")
    assert "--peers cannot be combined with --show" in shown.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_with_some_peers_it_goes_on(command, monkeypatch):
    install(monkeypatch, "flag_gems")
    done = command("bench", "softmax", "--peers")
    assert "with FlagGems unknown" in done.out
    assert "Liger is not installed: pip install liger-kernel" in done.err
    assert "requires a CUDA device" in done.err  # the GPU


def test_a_wrong_row_is_not_drawn(command, tmp_path):
    content = json.loads(COMMITTED.read_text())
    wrong = next(row for row in content["rows"] if row["row"].startswith("softmax"))
    wrong.update(ours_ms=None, peer=None, peer_ms=None, ratio=None, error_ok=False, at_goal=False)
    del wrong["share_of_floor"]
    (tmp_path / "r.json").write_text(json.dumps(content))
    done = command("bench", "softmax", "--show", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg"))
    assert done.code == 1
    assert "wrong" in done.out
    assert "rows at their goal" in done.out
    assert (tmp_path / "r.svg").read_text().count("<svg") == 1


def test_a_plot_is_no_file_of_a_run(command, text_run):
    config = text_run[0] / "config.json"
    before = config.read_bytes()
    done = command("bench", "--show", str(COMMITTED), "--plot", str(config))
    assert done.code == 2
    assert "is a file of the run in" in done.err
    assert config.read_bytes() == before


def test_results_of_drawn_shapes_and_of_networks_are_no_fixed_rows(command):
    for name in ("drawn", "networks"):
        done = command("bench", "--show", COMMITTED.with_name(f"{name}-nvidia-h200.json"))
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "has no results of `minidl bench`" in done.err
