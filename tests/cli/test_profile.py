"""--profile: a table on standard error, a trace that Chrome reads, and nothing else changed."""

import errno
import json
import os
import random

import pytest
import torch
import typer
from PIL import Image

import minidl
from minidl.cli import common, profiling
from minidl.errors import Interrupted
from minidl.tensors import Tensor, default_device

TABLE = ("--epochs", "2", "--hidden", "8", "--dropout", "0", "--no-plots")


@pytest.fixture(scope="module")
def profiled(minidl, command, table, tmp_path_factory):
    """A run with and one without a profile, and what the first printed."""
    work = tmp_path_factory.mktemp("runs")
    common = ("train", "table", "--data", table, "--target", "price", *TABLE)
    plain = command(*common, "--out", work / "plain")
    result = minidl(*common, "--out", work / "profiled", "--profile")
    assert (plain.code, result.code) == (0, 0), plain.err + result.err
    return work, plain, result


def test_the_trace_is_in_chromes_format(profiled):
    work, _, _ = profiled
    trace = json.loads((work / "profiled" / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) > 50
    for event in events:
        assert event.keys() >= {"name", "cat", "ts", "dur", "pid", "tid", "args"}
        assert event["dur"] > 0
    rows = trace["minidl"]["rows"]
    assert sum(row["calls"] for row in rows) >= len(events)
    assert {row["kernel"] for row in rows} >= {"gemm_tma_kernel", "update_kernel"}
    assert trace["minidl"]["launches_per_step"] > 5


def test_the_table_is_on_standard_error(profiled):
    work, plain, result = profiled
    for word in ("kernel", "calls", "mean us", "of floor", "update_kernel", "launches per training step"):
        assert word in result.err
    assert f"trace: {work / 'profiled' / 'trace.json'}" in result.err
    assert "update_kernel" not in result.out
    assert plain.err == ""


def test_the_result_is_the_same_with_a_profile(profiled):
    work, _, _ = profiled
    names = [{path.name for path in (work / name).iterdir()} for name in ("plain", "profiled")]
    assert names[1] - names[0] == {"trace.json"}
    assert len({(work / name / "model.safetensors").read_bytes() for name in ("plain", "profiled")}) == 1


def test_predictions_are_alone_on_standard_output(command, profiled):
    work, _, _ = profiled
    run = work / "plain"
    row = '{"size": 100, "age": 3, "kind": "flat"}'
    plain = command("predict", run, row)
    result = command("predict", run, row, "--profile")
    assert (result.code, result.out) == (0, plain.out)
    assert "gemm" in result.err
    assert json.loads((run / "trace-predict.json").read_text())["traceEvents"]
    named = command("evaluate", run, "--profile", "--trace", work / "mine.json")
    assert (named.code, (work / "mine.json").exists()) == (0, True)
    assert not (run / "trace-evaluate.json").exists()


def test_what_cannot_be_is_told_before_the_work(command, profiled, tmp_path):
    work, _, _ = profiled
    run = work / "plain"
    alone = command("predict", run, "{}", "--trace", tmp_path / "t.json")
    assert (alone.code, alone.err) == (2, "error: --trace requires --profile\n")
    nowhere = command("predict", run, "{}", "--profile", "--trace", tmp_path / "no" / "t.json")
    assert nowhere.code == 2
    assert "is not a folder; create it" in nowhere.err


@pytest.mark.parametrize("arguments", [("predict", "{}"), ("evaluate",)])
def test_a_run_that_cannot_be_written_is_told_before_the_work(command, profiled, monkeypatch, arguments):
    name, *inputs = arguments
    run = profiled[0] / "plain"
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or path != run)
    done = command(name, run, *inputs, "--profile")
    advice = f"{run} cannot be written; give a file in another folder"
    assert (done.code, done.out, done.err) == (2, "", f"error: --trace {run / f'trace-{name}.json'}: {advice}\n")


def test_no_file_of_a_run_is_written_over(command, profiled, tmp_path):
    work, _, _ = profiled
    run = work / "plain"
    for name in ("config.json", "model.safetensors"):
        before = (run / name).read_bytes()
        for given in (("predict", run, "{}", "--profile", "--trace"), ("evaluate", run, "--json")):
            done = command(*given, run / name)
            assert (done.code, done.err) == (
                2, f"error: {given[-1]} {run / name} is a file of the run in {run}: give another name\n",
            )  # fmt: skip
        assert (run / name).read_bytes() == before
    # The name alone is anybody's.
    assert command("evaluate", run, "--json", tmp_path / "report.json").code == 0


def test_a_trace_may_lie_in_the_run_to_come_and_goes_with_it(command, table, tmp_path):
    out = tmp_path / "run"
    common = ("train", "table", "--data", table, "--target", "price", *TABLE, "--out", out, "--profile")
    refused = command(*common, "--trace", out / "report.json")
    assert refused.code == 2
    assert "report.json is a file of the run in" in refused.err
    assert not out.exists()
    for trace, said in (
        (out, f"--out and --trace name the same file, {out}: give two names"),
        (out / "checkpoints", f"--trace {out / 'checkpoints'} is the folder of checkpoints of the run in {out}"),
    ):
        refused = command(*common, "--trace", trace)
        assert refused.code == 2
        assert said in refused.err
        assert not out.exists()
    assert command(*common, "--trace", out / "mine.json").code == 0
    assert json.loads((out / "mine.json").read_text())["traceEvents"]
    (out / "mine.json").unlink()
    for _ in range(2):
        again = command(*common, "--overwrite")
        assert again.code == 0, again.err
        assert "contained other files" not in again.out + again.err
        assert not (tmp_path / "run.previous").exists()
        assert (out / "trace.json").exists()


@pytest.mark.parametrize("error", [None, Interrupted("To continue: minidl")])
def test_a_full_disk_does_not_hide_why_the_work_stopped(monkeypatch, capsys, tmp_path, error):
    def full(self, path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("minidl.tools.profiling.Profile.save", full)

    wanted = profiling.Profiling(profile=True, trace=tmp_path / "t.json")

    def work():
        with common.errors(), profiling.profiled(wanted, None):
            minidl.ops.relu(Tensor(torch.zeros(4, device=default_device())))
            if error is not None:
                raise error

    with pytest.raises(typer.Exit) as stopped:
        work()
    assert stopped.value.exit_code == (1 if error is None else 130)
    said = "t.json: No space left on device" if error is None else "To continue: minidl"
    assert capsys.readouterr().err.endswith(f"{said}\n")


def test_a_step_of_a_gan_has_the_launches_of_both_networks(command, tmp_path):
    draw = random.Random(0)
    for i in range(24):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("L", (8, 8), bytes(draw.randrange(256) for _ in range(64))).save(path)
    out = tmp_path / "run"
    done = command(
        "train", "gan", "--data", tmp_path / "photos", "--out", out, "--epochs", "1", "--batch-size", "8", "--width",
        "8", "--latent", "2", "--no-plots", "--profile",
    )  # fmt: skip
    assert done.code == 0, done.err
    trace = json.loads((out / "trace.json").read_text())
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X" and "minidl" not in event]
    places = [place for place, name in enumerate(names) if name == "update_kernel"]
    assert trace["minidl"]["launches_per_step"] == places[3] - places[1]


def test_pictures_are_profiled_too(command, tmp_path):
    result = command("generate", "--count", "1", "--out", tmp_path / "pictures", "--profile")
    assert result.code == 0, result.err
    assert (tmp_path / "pictures" / "trace.json").exists()
    again = command("generate", "--count", "1", "--out", tmp_path / "pictures", "--overwrite")
    assert again.code == 0, again.err
