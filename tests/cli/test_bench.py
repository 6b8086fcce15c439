"""`minidl bench` where there is no GPU, and the results of another machine."""

import json

import pytest
import torch

from minidl.bench.goals import GOALS
from tests.bench.test_peers import install
from tests.cli.conftest import ROOT

COMMITTED = ROOT / "benchmarks" / "results" / "nvidia-h200.json"


def test_list_names_the_rows_with_their_goals(command):
    lines = command("bench", "--list").out.splitlines()
    assert [line.split("  ", 1)[1] for line in (line.strip() for line in lines)] == list(GOALS)
    few = command("bench", "cross-entropy", "dcgan", "--list").out.splitlines()
    assert len(few) == 4
    assert few[0].split() == ["1.4", "cross-entropy", "forward+backward", "8192x32000"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_it_measures_on_a_gpu_only(command, tmp_path):
    done = command("bench", "softmax", "--json", str(tmp_path / "r.json"))
    assert done.code == 2
    assert "bench measures on a CUDA device with compiled kernels, and there is none here" in done.err
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
    assert "--json goes with measuring, not with --show" in done.err
    assert json.loads(COMMITTED.read_text())["rows"]
    missing = command("bench", "--show", str(tmp_path / "none.json"))
    assert missing.code == 2
    assert "none.json has no results" in missing.err


def test_without_any_peer_the_flag_says_what_to_install(command, monkeypatch, tmp_path):
    install(monkeypatch)
    done = command("bench", "softmax", "--peers")
    assert done.code == 2
    assert "--peers: attorch is not installed: pip install" in done.err
    shown = command("bench", "--peers", "--show", tmp_path / "r.json")
    assert "--peers goes with measuring, not with --show" in shown.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_with_some_peers_it_goes_on(command, monkeypatch):
    install(monkeypatch, "flag_gems")
    done = command("bench", "softmax", "--peers")
    assert "with FlagGems unknown" in done.out
    assert "Liger is not installed: pip install liger-kernel" in done.err
    assert "there is none here" in done.err  # the GPU
