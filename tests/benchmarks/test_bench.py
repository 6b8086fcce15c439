"""`python -m benchmarks.bench` without a GPU: drawn shapes, networks and models in torch."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.bench import drawn_results, network_results
from benchmarks.bench.__main__ import app
from benchmarks.bench.network_rows import NETS
from minidl.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COMMAND = "python -m benchmarks.bench"
COMMITTED = RESULTS / "nvidia-h200.json"


@pytest.fixture
def bench():
    """Run the command in this process and return its code and output."""

    def run(*arguments):
        done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(map(str, arguments)))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return SimpleNamespace(code=done.exit_code, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a device to measure on."""
    machine = {key: value for key, value in json.loads(COMMITTED.read_text()).items() if key != "rows"}
    monkeypatch.setattr("minidl.tools.bench.machine.machine", lambda: {**machine, "date": "2027-01-01"})
    monkeypatch.setattr("minidl.runtime.launch.INTERPRETED", False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_drawn_shapes_are_listed_without_a_gpu(bench):
    done = bench("--drawn", "5", "--seed", "3", "--list")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == list("01234")
    assert all("images of" in line for line in lines)
    assert bench("--drawn", "9", "--seed", "3", "--list", "--from", "3").out.splitlines()[:2] == lines[3:]
    assert bench("--drawn", "5", "--seed", "4", "--list").out.splitlines() != lines
    assert "over the middle" in bench("--drawn", "1", "--of", "reduce", "--list").out
    assert "0  reduce: " in bench("--drawn", "1", "--of", "all", "--list").out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seed", "1"), "--seed requires --drawn"),
        (("--of", "gemm"), "--of requires --drawn"),
        (("--dtype", "float32", "--show", "r.json"), "--dtype requires --drawn"),
        (("--regret",), "--regret requires --drawn"),
        (("--minutes", "3"), "--minutes requires --drawn"),
        (("--from", "3"), "--from requires --drawn"),
        (("--part", "1/2"), "--part requires --drawn"),
        (("--drawn", "3", "--part", "3/2"), "expected a part as 1/2, got '3/2'"),
        (("--drawn", "0"), "--drawn is 0, expected a whole number from 1 to 1000000"),
        (("--drawn", "3", "--of", "fft"), "--of is fft, expected one of conv, conv_transpose, conv1d, conv3d"),
        (("--drawn", "3", "--from", "-1"), "--from is -1, expected a whole number from 0 to 999999"),
        (("--drawn", "3", "--minutes", "0"), "--minutes is 0.0, expected a number above 0, at most 1440"),
        (("softmax", "--drawn", "3"), "NAME is softmax, expected networks or in-torch first"),
        ((), "expected --drawn N, networks or in-torch"),
        (("--drawn", "3", "--show", "r.json"), "--show cannot be combined with --drawn"),
        (("--drawn", "3", "--plot", "r.svg"), "--plot cannot be combined with --drawn"),
        (("--drawn", "3", "--from", "3"), "--from 3 leaves none of the 3 shapes of --drawn, numbered from 0"),
        (("--drawn", "3", "--of", "gemm", "--regret"), "--regret requires convolutions"),
        (("--drawn", "3", "--list", "--json", "r.json"), "--list cannot be combined with --json"),
    ],
)
def test_bad_settings_of_drawn_shapes(bench, flags, message):
    done = bench(*flags)
    assert done.code == 2
    assert done.err.startswith(f"error: {message}")
    assert done.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_drawn_shapes_are_measured_on_a_gpu_only(bench, tmp_path):
    done = bench("--drawn", "3", "--json", tmp_path / "r.json")
    assert done.code == 2
    assert "bench requires a CUDA device with compiled kernels" in done.err
    assert not (tmp_path / "r.json").exists()


@pytest.fixture
def drawing(gpu, monkeypatch):
    """Each row takes a moment; those whose number is in the set are wrong. Returns what is measured."""
    runs, wrong = [], set()

    def run(results, rows, console, keep, minutes, regret, parts):
        runs.append((len(rows), minutes, regret, parts))
        for row in rows[:2]:
            results.rows[row.of, row.index, row.direction] = {
                "index": row.index, "direction": row.direction, "name": row.name, "of": row.of, "group": "thin",
                "shape": "a shape", "dtype": "float16", "error_ok": row.index not in wrong, "ours_ms": 1.0,
                "peer": "torch.matmul", "peer_ms": 0.5, "ratio": 0.5, "failed": "it is wrong",
            }  # fmt: skip
            keep()
        return max(0, len(rows) - 2)

    monkeypatch.setattr("benchmarks.bench.drawn_run.run", run)
    return runs, wrong


def test_drawn_shapes_are_measured_in_parts_and_shown(bench, drawing, tmp_path):
    path, (runs, wrong) = tmp_path / "r.json", drawing
    flags = "--drawn", "5", "--seed", "3", "--of", "gemm", "--json", path
    done = bench(*flags, "--from", "1", "--minutes", "2")
    assert done.code == 0, done.err
    assert "2 of 4 rows are left: repeat the command" in done.err
    assert "2 rows measured, 0 wrong or failed" in done.out
    done = bench(*flags)
    assert runs == [(4, 2.0, False, 1), (3, None, False, 1)]
    assert "1 of 3 rows are left" in done.err
    shown = bench("--show", path)
    assert (shown.code, shown.out) == (0, done.out)
    assert "4 rows measured" in shown.out
    assert "0.50  gemm 0 forward: a shape; 1.0000 ms, torch.matmul 0.5000 ms" in shown.out
    wrong.add(4)
    done = bench(*flags)
    assert done.code == 1
    assert "gemm 4 forward: a shape: it is wrong" in done.out
    assert bench("--show", path).code == 1


def test_two_gpus_measure_a_half_of_the_drawn_shapes_each(bench, drawing, tmp_path):
    flags, (runs, _) = ("--drawn", "5", "--seed", "3", "--of", "gemm"), drawing
    lines = bench(*flags, "--list").out.splitlines()
    assert bench(*flags, "--list", "--part", "2/2").out.splitlines() == lines[1::2]
    halves = [tmp_path / "1.json", tmp_path / "2.json"]
    for part, half in zip(("1/2", "2/2"), halves, strict=True):
        assert bench(*flags, "--part", part, "--json", half).code == 0
    assert runs == [(3, None, False, 2), (2, None, False, 2)]
    drawn_results.main([str(tmp_path / "whole.json"), *map(str, halves)])
    with pytest.raises(SystemExit, match="exists: give a new file"):
        drawn_results.main([str(tmp_path / "whole.json"), *map(str, halves)])
    joined = drawn_results.load(tmp_path / "whole.json")
    assert [index for _, index, _ in joined.rows] == [0, 1, 2, 3]
    other = drawn_results.Drawn({**joined.about, "of": "pool"}, joined.machine)
    assert drawn_results.joined([joined, other]).about == {**joined.about, "of": "all"}
    other.about["seed"], other.machine = 4, {**joined.machine, "device": "another"}
    with pytest.raises(ConfigError, match="parts of different runs: their seed, device differ"):
        drawn_results.joined([joined, other])


def test_a_file_of_other_drawn_shapes_or_of_rows_is_refused(bench, drawing, tmp_path):
    path = tmp_path / "r.json"
    assert bench("--drawn", "2", "--of", "gemm", "--json", path).code == 0
    before = path.read_bytes()
    done = bench("--drawn", "2", "--of", "gemm", "--seed", "8", "--json", path)
    assert (done.code, done.err) == (2, f"error: --json {path} has rows of seed 0; this is 8: give another file\n")
    content = json.loads(before)
    path.write_text(json.dumps({**content, "device": "another"}))
    done = bench("--drawn", "2", "--of", "gemm", "--json", path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "has rows of device another; this is NVIDIA H200: give another file" in done.err
    path.write_bytes(COMMITTED.read_bytes())
    done = bench("--drawn", "2", "--of", "gemm", "--json", path)
    assert "has no results of `python -m benchmarks.bench --drawn`" in done.err
    assert path.read_bytes() == COMMITTED.read_bytes()
    path.write_bytes(before)
    for flags in (("--plot", tmp_path / "r.svg"), ("--json", tmp_path / "s.json")):
        done = bench(*flags, "--show", path)
        assert done.code == 2
        assert "cannot be combined with --show of drawn shapes" in done.err
    assert "has no results of `python -m benchmarks.bench networks`" in bench("networks", "--json", path).err


def test_a_lost_device_is_told_and_what_was_measured_is_kept(bench, drawing, monkeypatch, tmp_path):
    from benchmarks.bench import drawn_run

    def lost(results, rows, console, keep, minutes, regret, parts):
        raise drawn_run.LostError("the device is lost after gemm 0 forward: it; run again to continue")

    monkeypatch.setattr(drawn_run, "run", lost)
    done = bench("--drawn", "2", "--of", "gemm", "--json", tmp_path / "r.json")
    assert done.code == 1
    assert "the device is lost after gemm 0 forward" in done.err


def test_networks_are_listed(bench):
    every = bench("networks", "--list").out.splitlines()
    assert len(every) == len(NETS)
    assert [line.split(maxsplit=1)[1] for line in bench("networks", "unet", "--list").out.splitlines()] == [
        "networks unet inference 16x256x256", "networks unet training 16x256x256"
    ]  # fmt: skip
    assert bench("networks", "--part", "2/2", "--list").out.splitlines() == every[1::2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("networks", "vgg19"),
            f"no network's row contains 'vgg19'; `{COMMAND} networks --list` shows them",
        ),
        (("networks", "--part", "3/2"), "expected a part as 1/2, got '3/2'"),
        (("networks", "--drawn", "3"), "--drawn cannot be combined with networks"),
        (("networks", "--plot", "r.pdf"), "--plot is r.pdf, expected a name that ends with .png or .svg"),
        (("networks", "--plot", "r"), "--plot is r, expected a name that ends with .png or .svg"),
        (("networks", "--show", "r.json", "--part", "1/2"), "--part cannot be combined with --show"),
        (("networks", "--list", "--minutes", "3"), "--list cannot be combined with --minutes"),
        (
            ("in-torch", "vgg19"),
            f"no model's row contains 'vgg19'; `{COMMAND} in-torch --list` shows them",
        ),
        (("in-torch", "--plot", "r.svg"), "--plot has no picture of in-torch; leave it out"),
        (
            ("--against", "graph"),
            f"--against requires networks, as in `{COMMAND} networks --against graph`",
        ),
    ],
)
def test_bad_settings_of_networks(bench, flags, message):
    done = bench(*flags)
    assert (done.code, done.err) == (2, f"error: {message}\n")


def row_of(name, ratio):
    """A row of a network that was measured."""
    ratios = {"torch": ratio}
    return {
        "name": name, "dtype": "float16", "error_ok": True, "ours_ms": 1.0, "peer": "torch", "peer_ms": ratio,
        "ratio": ratio, "share_of_floor": 0.5, "images_per_second": 16000, "peers_ms": ratios, "ratios": ratios,
        "first_step_s": {"ours": 7.0}, "peak_mb": {}, "pool_mb": {},
    }  # fmt: skip


def test_networks_are_measured_in_parts_and_shown(bench, gpu, monkeypatch, tmp_path):
    path, runs = tmp_path / "r.json", []

    def run(nets, rows, peers, keep, tell, minutes):
        runs.append((len(nets), peers, minutes))
        keep(nets[0].row, row_of("a network", 1.3))
        return len(nets) - 1, []

    monkeypatch.setattr("benchmarks.bench.network_run.run", run)
    flags = "--against", "eager,graph", "--json", path, "--minutes", "9"
    done = bench("networks", "unet", *flags)
    assert done.code == 0, done.err
    assert "1 of 2 networks are left: repeat the command" in done.err
    assert bench("networks", "--part", "1/2", *flags).code == 0
    assert runs == [(2, ["eager", "graph"], 9.0), (len(NETS) - len(NETS) // 2, ["eager", "graph"], 9.0)]
    assert len(network_results.load(path).rows) == 2
    shown = bench("networks", "--show", path)
    assert f"2 of 2 networks at their goal, 2 ahead of torch's best (bench has {len(NETS)})" in shown.out
    assert "--against has 'jit'" in bench("networks", "--against", "eager,jit").err


def test_models_are_measured_in_torch(bench, gpu, monkeypatch, tmp_path):
    path, runs = tmp_path / "r.json", []

    def run(nets, rows, peers, keep, tell, minutes, module):
        runs.append(([net.name for net in nets], module))
        keep(nets[0].row, row_of("a model", 1.25))
        return 0, []

    monkeypatch.setattr("benchmarks.bench.network_run.run", run)
    done = bench("in-torch", "dcgan_generator", "--json", path)
    assert done.code == 0, done.err
    assert runs == [(["dcgan_generator"] * 2, "benchmarks.bench.accelerated_run")]
    text = "1 of 1 rows right, 1 not behind torch's best; of 1 counted (of 18) the geometric mean is 1.250 (goal 1.1)"
    assert network_results.load(path).machine["summary"].startswith(text)
    shown = bench("in-torch", "--show", path)
    assert text in shown.out
    assert len(bench("in-torch", "--list").out.splitlines()) == 36


def test_rows_that_a_file_does_not_have_are_named(bench):
    shown = bench("in-torch", "--show", RESULTS / "networks-nvidia-h200.json")
    assert shown.code == 2
    assert "has none of these rows; it has: networks " in shown.err
    assert shown.err.endswith(" more\n")
    assert len(shown.err) < 400


def test_models_of_a_package_that_is_not_installed(bench, gpu, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = bench("in-torch", "timm")
    assert (done.code, done.err) == (2, (
        "error: timm/convnext_nano is a model of timm, which is not installed: install it, or name models of others, "
        "as in `python -m benchmarks.bench in-torch dcgan`\n"
    ))  # fmt: skip
