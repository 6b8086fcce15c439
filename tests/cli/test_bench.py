"""`minidl bench` where there is no GPU, and the results of another machine."""

import json

import pytest
import torch

from minidl.errors import ConfigError
from minidl.tools.bench import drawn_results, results, table
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
    assert table.fingerprint(alone) in (tmp_path / "r.svg").read_text()
    few = tmp_path / "few.json"
    alone.machine.pop("rows")
    alone.save(few)
    none = command("bench", "gemm", "--show", few)
    assert none.code == 2
    assert "few.json has none of these rows; it has: cross-entropy" in none.err
    none = command("bench", "networks", "--show", COMMITTED)
    assert none.code == 2
    assert " more\n" in none.err
    assert len(none.err) < 300


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


def test_drawn_shapes_are_listed_without_a_gpu(command):
    done = command("bench", "--drawn", "5", "--seed", "3", "--list")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == list("01234")
    assert all("images of" in line for line in lines)
    assert command("bench", "--drawn", "9", "--seed", "3", "--list", "--from", "3").out.splitlines()[:2] == lines[3:]
    assert command("bench", "--drawn", "5", "--seed", "4", "--list").out.splitlines() != lines
    assert "over the middle" in command("bench", "--drawn", "1", "--of", "reduce", "--list").out
    assert "0  reduce: " in command("bench", "--drawn", "1", "--of", "all", "--list").out


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
        (("softmax", "--drawn", "3"), "NAME cannot be combined with --drawn"),
        (("--drawn", "3", "--show", "r.json"), "--show cannot be combined with --drawn"),
        (("--drawn", "3", "--plot", "r.svg"), "--plot cannot be combined with --drawn"),
        (("--drawn", "3", "--peers"), "--peers cannot be combined with --drawn"),
        (("--drawn", "3", "--profile"), "--profile cannot be combined with --drawn"),
        (("--drawn", "3", "--from", "3"), "--from 3 leaves none of the 3 shapes of --drawn, numbered from 0"),
        (("--drawn", "3", "--of", "gemm", "--regret"), "--regret requires convolutions"),
        (("--drawn", "3", "--list", "--json", "r.json"), "--list cannot be combined with --json"),
    ],
)
def test_bad_settings_of_drawn_shapes(command, flags, message):
    done = command("bench", *flags)
    assert done.code == 2
    assert done.err.startswith(f"error: {message}")
    assert done.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_drawn_shapes_are_measured_on_a_gpu_only(command, tmp_path):
    done = command("bench", "--drawn", "3", "--json", tmp_path / "r.json")
    assert done.code == 2
    assert "bench requires a CUDA device with compiled kernels" in done.err
    assert not (tmp_path / "r.json").exists()


@pytest.fixture
def drawing(gpu, monkeypatch):
    """Each row takes a moment; those whose number is in the set are wrong. Returns what is measured."""
    asked, wrong = [], set()

    def run(found, rows, console, keep, minutes, regret, parts):
        asked.append((len(rows), minutes, regret, parts))
        for row in rows[:2]:
            found.rows[row.of, row.index, row.direction] = {
                "index": row.index, "direction": row.direction, "name": row.name, "of": row.of, "group": "thin",
                "shape": "a shape", "dtype": "float16", "error_ok": row.index not in wrong, "ours_ms": 1.0,
                "peer": "torch.matmul", "peer_ms": 0.5, "ratio": 0.5, "failed": "it is wrong",
            }  # fmt: skip
            keep()
        return max(0, len(rows) - 2)

    monkeypatch.setattr("minidl.tools.bench.drawn_run.run", run)
    return asked, wrong


def test_drawn_shapes_are_measured_in_parts_and_shown(command, drawing, tmp_path):
    path, (asked, wrong) = tmp_path / "r.json", drawing
    flags = "bench", "--drawn", "5", "--seed", "3", "--of", "gemm", "--json", path
    done = command(*flags, "--from", "1", "--minutes", "2")
    assert done.code == 0, done.err
    assert "2 of 4 rows are left: run the same command again" in done.err
    assert "2 rows measured, 0 wrong or failed" in done.out
    done = command(*flags)
    assert asked == [(4, 2.0, False, 1), (3, None, False, 1)]
    assert "1 of 3 rows are left" in done.err
    shown = command("bench", "--show", path)
    assert (shown.code, shown.out) == (0, done.out)
    assert "4 rows measured" in shown.out
    assert "0.50  gemm 0 forward: a shape; 1.0000 ms, torch.matmul 0.5000 ms" in shown.out
    wrong.add(4)
    done = command(*flags)
    assert done.code == 1
    assert "gemm 4 forward: a shape: it is wrong" in done.out
    assert command("bench", "--show", path).code == 1


def test_two_gpus_measure_a_half_of_the_drawn_shapes_each(command, drawing, tmp_path):
    flags, (asked, _) = ("bench", "--drawn", "5", "--seed", "3", "--of", "gemm"), drawing
    lines = command(*flags, "--list").out.splitlines()
    assert command(*flags, "--list", "--part", "2/2").out.splitlines() == lines[1::2]
    halves = [tmp_path / "1.json", tmp_path / "2.json"]
    for part, half in zip(("1/2", "2/2"), halves, strict=True):
        assert command(*flags, "--part", part, "--json", half).code == 0
    assert asked == [(3, None, False, 2), (2, None, False, 2)]
    drawn_results.main([str(tmp_path / "whole.json"), *map(str, halves)])
    whole = drawn_results.load(tmp_path / "whole.json")
    assert [index for _, index, _ in whole.rows] == [0, 1, 2, 3]
    other = drawn_results.Drawn({**whole.about, "of": "pool"}, whole.machine)
    assert drawn_results.joined([whole, other]).about == {**whole.about, "of": "all"}
    other.about["seed"], other.machine = 4, {**whole.machine, "device": "another"}
    with pytest.raises(ConfigError, match="parts of different runs: their seed, device differ"):
        drawn_results.joined([whole, other])


def test_a_file_of_other_drawn_shapes_or_of_rows_is_refused(command, drawing, tmp_path):
    path = tmp_path / "r.json"
    assert command("bench", "--drawn", "2", "--of", "gemm", "--json", path).code == 0
    before = path.read_bytes()
    done = command("bench", "--drawn", "2", "--of", "gemm", "--seed", "8", "--json", path)
    assert (done.code, done.err) == (2, f"error: --json {path} has rows of seed 0; this is 8: give another file\n")
    content = json.loads(before)
    path.write_text(json.dumps({**content, "device": "another"}))
    done = command("bench", "--drawn", "2", "--of", "gemm", "--json", path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "has rows of device another; this is NVIDIA H200: give another file" in done.err
    path.write_bytes(COMMITTED.read_bytes())
    done = command("bench", "--drawn", "2", "--of", "gemm", "--json", path)
    assert "has no results of `minidl bench --drawn`" in done.err
    assert path.read_bytes() == COMMITTED.read_bytes()
    path.write_bytes(before)
    for flags in (("softmax",), ("--plot", tmp_path / "r.svg"), ("--json", tmp_path / "s.json")):
        done = command("bench", *flags, "--show", path)
        assert done.code == 2
        assert "cannot be combined with --show of drawn shapes" in done.err
    assert "has no results of `minidl bench`" in command("bench", "softmax", "--json", path).err


def test_a_lost_device_is_told_and_what_was_measured_is_kept(command, drawing, monkeypatch, tmp_path):
    from minidl.tools.bench import drawn_run

    def lost(found, rows, console, keep, minutes, regret, parts):
        raise drawn_run.LostError("the device is lost after gemm 0 forward: it; run again to go on")

    monkeypatch.setattr(drawn_run, "run", lost)
    done = command("bench", "--drawn", "2", "--of", "gemm", "--json", tmp_path / "r.json")
    assert done.code == 1
    assert "the device is lost after gemm 0 forward" in done.err


def test_networks_are_listed(command):
    every = command("bench", "networks", "--list").out.splitlines()
    assert len(every) == 21
    assert [line.split(maxsplit=1)[1] for line in command("bench", "networks", "unet", "--list").out.splitlines()] == [
        "networks unet inference 16x256x256", "networks unet training 16x256x256"
    ]  # fmt: skip
    assert command("bench", "networks", "--part", "2/2", "--list").out.splitlines() == every[1::2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("networks", "vgg19"), "no network's row contains 'vgg19'; `minidl bench networks --list` shows them"),
        (("networks", "--part", "3/2"), "expected a part as 1/2, got '3/2'"),
        (("networks", "--peers"), "--peers cannot be combined with networks"),
        (("networks", "--drawn", "3"), "--drawn cannot be combined with networks"),
        (("networks", "--plot", "r.pdf"), "--plot is r.pdf, expected a name that ends with .png or .svg"),
        (("--plot", "r"), "--plot is r, expected a name that ends with .png or .svg"),
        (("networks", "--show", "r.json", "--part", "1/2"), "--part cannot be combined with --show"),
        (("networks", "--list", "--minutes", "3"), "--list cannot be combined with --minutes"),
        (("in-torch", "vgg19"), "no model's row contains 'vgg19'; `minidl bench in-torch --list` shows them"),
        (("in-torch", "--plot", "r.svg"), "--plot has no picture of in-torch; leave it out"),
        (("in-torch", "--peers"), "--peers cannot be combined with in-torch"),
        (("--against", "graph"), "--against requires networks, as in `minidl bench networks --against graph`"),
    ],
)
def test_bad_settings_of_networks(command, flags, message):
    done = command("bench", *flags)
    assert (done.code, done.err) == (2, f"error: {message}\n")


def row_of(name, ratio):
    """A row of a network that was measured."""
    ratios = {"torch": ratio}
    return {
        "name": name, "dtype": "float16", "error_ok": True, "ours_ms": 1.0, "peer": "torch", "peer_ms": ratio,
        "ratio": ratio, "share_of_floor": 0.5, "images_per_second": 16000, "peers_ms": ratios, "ratios": ratios,
        "first_step_s": {"ours": 7.0}, "peak_mb": {}, "pool_mb": {},
    }  # fmt: skip


def test_networks_are_measured_in_parts_and_shown(command, gpu, monkeypatch, tmp_path):
    path, asked = tmp_path / "r.json", []

    def run(nets, rows, peers, keep, tell, minutes):
        asked.append((len(nets), peers, minutes))
        keep(nets[0].row, row_of("a network", 1.3))
        return len(nets) - 1, []

    monkeypatch.setattr("minidl.tools.bench.network_run.run", run)
    flags = "--against", "eager,graph", "--json", path, "--minutes", "9"
    done = command("bench", "networks", "unet", *flags)
    assert done.code == 0, done.err
    assert "1 of 2 networks are left: run the same command again" in done.err
    assert command("bench", "networks", "--part", "1/2", *flags).code == 0
    assert asked == [(2, ["eager", "graph"], 9.0), (11, ["eager", "graph"], 9.0)]
    assert len(results.load(path).rows) == 2
    shown = command("bench", "networks", "--show", path)
    assert "2 of 2 networks at their goal, 2 ahead of torch's best (bench has 21)" in shown.out
    assert "--against has 'jit'" in command("bench", "networks", "--against", "eager,jit").err


def test_models_are_measured_in_torch(command, gpu, monkeypatch, tmp_path):
    path, asked = tmp_path / "r.json", []

    def run(nets, rows, peers, keep, tell, minutes, module):
        asked.append(([net.name for net in nets], module))
        keep(nets[0].row, row_of("a model", 1.25))
        return 0, []

    monkeypatch.setattr("minidl.tools.bench.network_run.run", run)
    done = command("bench", "in-torch", "dcgan_generator", "--json", path)
    assert done.code == 0, done.err
    assert asked == [(["dcgan_generator"] * 2, "minidl.tools.bench.accelerated_run")]
    said = "1 of 1 rows right, 1 not behind torch's best; of 1 counted (of 18) the geometric mean is 1.250 (goal 1.1)"
    assert results.load(path).machine["summary"].startswith(said)
    shown = command("bench", "in-torch", "--show", path)
    assert said in shown.out
    assert len(command("bench", "in-torch", "--list").out.splitlines()) == 36


def test_models_of_a_package_that_is_not_installed(command, gpu, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = command("bench", "in-torch", "timm")
    assert (done.code, done.err) == (2, (
        "error: timm/convnext_nano is a model of timm, which is not installed: install it, or name models of others, "
        "as in `minidl bench in-torch dcgan`\n"
    ))  # fmt: skip
