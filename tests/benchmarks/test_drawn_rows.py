"""Drawn shapes measured end to end without a GPU, wrong and failing ones, and their results file."""

import contextlib
import json
import subprocess
import sys
from functools import partial
from random import Random
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from benchmarks.bench import (
    drawn_ahead,
    drawn_conv,
    drawn_other,
    drawn_peers,
    drawn_reference,
    drawn_results,
    drawn_run,
    drawn_volume,
)
from benchmarks.bench.drawn_results import Drawn
from minidl.compilation import rehearsal
from minidl.errors import ConfigError
from minidl.kernels import conv
from minidl.runtime import launch
from minidl.tools.bench import measure
from minidl.tools.bench.measure import HostClock, Replay, in_turn
from minidl.tools.tuning import drawn_conv as layers
from minidl.tools.tuning import shapes

CLOCK = partial(HostClock, target_ms=0.1)
CONV = shapes.Conv(2, 6, 9, (4, 5), (3, 2), (2, 1), (1, 0), (1, 2), 3)
DEPTHWISE = shapes.Conv(1, 3, 6, (4, 3), (3, 3), padding=(1, 1), groups=3, source="a net")
SEQUENCE = shapes.Conv(2, 6, 9, (1, 9), (1, 3), (1, 2), (0, 1), (1, 2), 3, sequence=True)
COLUMN = shapes.Conv(2, 6, 6, (1, 9), (1, 4), padding=(0, 3), groups=6, sequence=True)
VOLUME = shapes.Conv(2, 6, 9, (3, 4, 5), (3, 1, 2), (2, 1, 2), (1, 0, 1), (1, 1, 2), 3, ends=(0, 0, 0))
TRANSPOSED = shapes.Conv(2, 6, 9, (2, 3), (3, 2), (2, 3), (1, 0), (1, 2), 3, "", True, (1, 2))
OTHERS = {
    "gemm": [shapes.Gemm(5, 7, 9, "AB^T"), shapes.Gemm(9, 5, 6, "A^TB")],
    "softmax": [shapes.Rows(5, 50)],
    "norm": [shapes.Images(2, 3, (3, 4), "batch norm")],
    "pool": [shapes.Images(2, 3, (5, 4), "max pool", 3, 2, 1), shapes.Images(2, 3, (5, 4), "average pool", 2, 2)],
    "reduce": [shapes.Reduced(3, 40, 5, what) for what in ("sum", "mean", "max")],
}
MACHINE = {"device": "a device", "torch": "2", "triton": "3", "date": "2026-01-01"}


@pytest.fixture(autouse=True)
def _one_set(monkeypatch):
    """Use one set of inputs, because they need not exceed a cache here."""
    monkeypatch.setattr(layers, "input_sets", lambda size: 1)
    monkeypatch.setattr(drawn_other, "input_sets", lambda size: 1)


@pytest.fixture
def drawing(monkeypatch):
    """Draw these shapes in turn."""

    def draws(*shapes):
        monkeypatch.setattr(drawn_run, "draw", lambda of, seed, index, itemsize: shapes[index])

    return draws


def empty_results(of, dtype="float32"):
    return Drawn({"of": of, "seed": 1, "dtype": dtype}, dict(MACHINE))


def run(results, count, regret=False, **how):
    rows = drawn_run.remaining(results, range(count), "cpu", regret)
    saved = []
    left = drawn_run.run(
        results, rows, Console(quiet=True), lambda: saved.append(1), regret=regret, make_clock=CLOCK, **how
    )
    assert left == len(rows) - len(saved)
    return left


def test_tf32_is_used_on_both_sides(drawing, monkeypatch):
    drawing(CONV)
    measured, settings = drawn_run.measured, set()

    def watched(*args, **named):
        settings.add((
            launch.float32_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        ))  # fmt: skip
        return measured(*args, **named)

    monkeypatch.setattr(drawn_run, "measured", watched)
    results = empty_results("conv", "tf32")
    assert run(results, 1) == 0
    assert settings == {("tf32", True, True)}
    assert [row["dtype"] for row in results.rows.values() if row["error_ok"]] == ["float32"] * 3
    assert (launch.float32_precision(), torch.backends.cuda.matmul.allow_tf32) == ("tf32x3", False)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [CONV, DEPTHWISE, TRANSPOSED, SEQUENCE, COLUMN, VOLUME],
    ids=["plain", "depthwise", "transposed", "sequence", "column", "volume"],
)
def test_a_convolution_agrees_with_torch_and_its_reference_and_a_wrong_one_is_told(shape, dtype):
    kind = drawn_volume.Layer if shape is VOLUME else drawn_conv.Layer
    layer = kind(shape, getattr(torch, dtype), "cpu", "a seed")
    for direction in drawn_conv.DIRECTIONS:
        work = drawn_conv.work(layer, direction, "name")
        result = work.ours[0]()
        for calls in work.peers.values():
            torch.testing.assert_close(calls[0](), result, rtol=0.03, atol=0.03 * float(result.abs().max()))
        assert work.judge(result)
        for index in (0, -1):
            wrong = result.clone()
            wrong[(index,) * result.ndim] += 1.0
            assert not work.judge(wrong)
        assert not work.judge(result * float("nan"))
        if shape not in (CONV, DEPTHWISE, TRANSPOSED):
            continue
        (function,) = {call.func for call in work.ours}
        assert function in (conv.grad_weight, layers._first)
        assert layer.choice(direction)["plan"].split(": ")[0].split()[-1] in drawn_conv.FORMS


def test_the_plan_that_is_named_is_the_one_that_runs(monkeypatch):
    seen = []
    plan = conv.plans.plan
    monkeypatch.setattr(conv.plans, "plan", lambda problem: seen.append(problem) or plan(problem))
    for shape in (CONV, DEPTHWISE, TRANSPOSED, COLUMN):
        layer = drawn_conv.Layer(shape, torch.float16, "cpu", "a seed")
        for direction in drawn_conv.DIRECTIONS:
            layer.ours(direction)[0]()
            assert layer.problem(direction) == seen.pop()


@pytest.mark.parametrize("budget", [300, 3000])
@pytest.mark.parametrize("shape", [CONV, TRANSPOSED, shapes.Conv(5, 3, 4, (6, 6), (3, 3))])
def test_a_sample_of_a_large_one_is_compared(monkeypatch, budget, shape):
    monkeypatch.setattr(drawn_reference, "BUDGET", budget)
    monkeypatch.setattr(drawn_reference, "CHUNK", 200)
    layer = drawn_conv.Layer(shape, torch.float32, "cpu", "a seed")
    for direction in drawn_conv.DIRECTIONS:
        result = layer.ours(direction)[0]()
        assert layer.right(direction, result)
        assert not layer.right(direction, result + 1.0)
        M, C = layer.w.shape[0] // shape.groups, layer.w.shape[1]
        kind = drawn_conv.kind_of(shape, direction)
        sample = drawn_reference.sample(kind, layer.geometry, shape.images, M, C, Random(0))
        assert all(sample)
        sizes = (shape.images, shape.groups, M, C)
        assert any(len(some) < size for some, size in zip(sample, sizes, strict=True)) or budget == 3000


def test_indices_of_a_sample():
    for count, of in ((1, 5), (2, 5), (3, 5), (4, 90), (9, 3)):
        some = drawn_reference._picked(Random(1), count, of)
        assert len(set(some)) == min(count, of)
        assert some == sorted(some)
        assert count == 1 or {0, of - 1} <= set(some)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("of", OTHERS)
def test_other_operations_agree_with_torch_and_wrong_ones_are_told(of, dtype):
    for shape in OTHERS[of]:
        for direction in drawn_run.directions(shape, of):
            work = drawn_other.work(shape, direction, "name", getattr(torch, dtype), "cpu", "a seed")
            result = work.ours[0]()
            assert work.judge(result)
            for calls in work.peers.values():
                theirs = calls[0]()
                pairs = zip(theirs, result, strict=True) if isinstance(result, tuple) else [(theirs, result)]
                for one, other in pairs:
                    torch.testing.assert_close(one.detach(), other.detach(), rtol=0.02, atol=0.02)
            if not isinstance(result, tuple):
                assert not work.judge(result + 0.5)
                continue
            for index in range(len(result)):
                assert not work.judge(tuple(t + 0.5 * (i == index) for i, t in enumerate(result)))


def test_two_shapes_end_to_end_and_again_in_parts(drawing, tmp_path):
    drawing(CONV, DEPTHWISE)
    results = empty_results("conv")
    assert run(results, 1) == 0
    assert run(results, 2, minutes=0) == 3
    assert len(results.rows) == 3
    path = tmp_path / "r.json"
    results.save(path)
    loaded = drawn_results.continued(path, results.about, {**MACHINE, "date": "2027-01-01"})
    before = {key: dict(row) for key, row in loaded.rows.items()}
    assert run(loaded, 2) == 0
    assert len(loaded.rows) == 6
    assert {key: loaded.rows[key] for key in before} == before
    assert not drawn_run.remaining(loaded, range(2), "cpu", False)
    row = loaded.rows["conv", 1, "forward"]
    assert (row["name"], row["of"], row["group"], row["dtype"]) == ("conv 1 forward", "conv", "depthwise", "float32")
    assert row["shape"] == "3x3 3->6, 1 images of 4x3, padding 1x1, 3 groups (a net)"
    assert row["error_ok"] is True
    assert row["plan"]
    assert row["peer"].startswith("cuDNN")
    assert row["peer_ms"] == min(row["peers_ms"].values())
    assert {"ours_ms", "ratio", "floor_ms", "share_of_floor", "goal", "estimated_ms", "seconds"} <= set(row)
    assert list(row["seconds_of"]) == ["made", "peers", "called", "checked", "captured", "timed"]
    assert row["seconds"] == pytest.approx(sum(row["seconds_of"].values()), abs=0.01)
    loaded.save(path)
    assert drawn_results.load(path).in_order == json.loads(json.dumps(loaded.in_order))
    text = "\n".join(drawn_results.summary(loaded))
    assert "6 rows measured, 0 wrong or failed, 0 that torch cannot run" in text
    assert "depthwise" in text
    assert "gradient of the weight" in text


def test_operations_take_turns(drawing, tmp_path):
    drawing(shapes.Rows(3, 5), OTHERS["gemm"][0])
    results = empty_results("all")
    rows = drawn_run.remaining(results, range(2), "cpu", False)
    assert [row.name for row in rows[:2]] == ["conv 0 forward", "conv_transpose 0 forward"]
    assert [row.index for row in rows] == sorted(row.index for row in rows)
    assert {row.of for row in rows} == set(drawn_run.KINDS)
    some = [row for row in rows if row.of in ("softmax", "gemm")]
    drawn_run.run(results, some, Console(quiet=True), lambda: None, make_clock=CLOCK)
    results.save(tmp_path / "r.json")
    loaded = drawn_results.load(tmp_path / "r.json")
    assert set(loaded.rows) == set(results.rows)
    assert len(drawn_run.remaining(loaded, range(2), "cpu", False)) == len(rows) - len(some)
    assert "softmax, forward+backward" in "\n".join(drawn_results.summary(loaded))


def test_the_regret_is_added_to_rows_that_have_none(drawing):
    drawing(shapes.Conv(2, 1, 2, (4, 4), (1, 1)))
    results = empty_results("conv")
    run(results, 1)
    assert not any("regret" in row for row in results.rows.values())
    assert len(drawn_run.remaining(results, range(1), "cpu", True)) == 3
    run(results, 1, regret=True)
    for row in results.rows.values():
        assert row["regret"] >= 1.0
        assert row["best_form"] in row["forms_ms"]
        assert len(row["forms_ms"]) > 1
        assert set(row["forms_ms"]) <= set(drawn_conv.FORMS)
    assert "worst regret" in "\n".join(drawn_results.summary(results))
    assert not drawn_run.remaining(results, range(1), "cpu", True)


def test_what_is_wrong_or_fails_is_a_row_and_the_others_go_on(drawing, monkeypatch):
    drawing(CONV, CONV._replace(images=1), CONV._replace(images=3))
    forward = conv.forward

    def broken(x, *args, **how):
        if len(x) == 1:
            raise RuntimeError("no kernel\nmore")
        y, z = forward(x, *args, **how)
        return (y + 1 if len(x) == 2 else y), z

    monkeypatch.setattr(conv, "forward", broken)
    results = empty_results("conv")
    assert run(results, 3) == 0
    first, second, third = (results.rows["conv", index, "forward"] for index in range(3))
    assert (first["error_ok"], first["failed"]) == (False, "the result is not within its error bound")
    assert (second["error_ok"], second["failed"]) == (False, "RuntimeError: no kernel")
    assert third["error_ok"]
    assert len(results.rows) == 9
    assert len(results.failed) == 2
    assert "  conv 1 forward: " in "\n".join(drawn_results.summary(results))


def test_what_torch_cannot_run_is_skipped_with_the_reason(drawing, monkeypatch):
    def fail(*args, **how):
        raise RuntimeError("not implemented")

    drawing(shapes.Rows(3, 5))
    monkeypatch.setattr(torch, "softmax", fail)
    row = drawn_run.measured(drawn_run.Row("softmax", 1, 0, "forward", torch.float32, "cpu"), CLOCK)
    assert (row["error_ok"], row["skipped"]) == (None, "RuntimeError: not implemented")
    results = empty_results("softmax")
    results.rows["softmax", 0, "forward"] = row
    assert "0 rows measured, 0 wrong or failed, 1 that torch cannot run" in "\n".join(drawn_results.summary(results))


def test_one_order_that_fails_is_left_out(drawing, monkeypatch):
    pool = F.max_pool2d

    def fail(x, *how):
        if not x.is_contiguous():
            raise RuntimeError("no channels-last")
        return pool(x, *how)

    drawing(OTHERS["pool"][0])
    monkeypatch.setattr(F, "max_pool2d", fail)
    monkeypatch.setattr(drawn_other.sides, "right", lambda *args, **how: True)
    row = drawn_run.measured(drawn_run.Row("pool", 1, 0, "forward", torch.float32, "cpu"), CLOCK)
    assert row["left_out"] == {"torch, channels last": "RuntimeError: no channels-last"}
    assert row["peer"] == "torch, contiguous"


def test_kernels_of_rows_are_found_before_they_run(drawing):
    drawing(CONV, TRANSPOSED)
    rows = drawn_run.remaining(empty_results("conv", "float16"), range(2), "cpu", False)

    def launches(*args):
        seen = []
        with rehearsal.rehearsal(lambda *launch: seen.append(launch), "sm_90"):
            drawn_ahead.rehearsed(*args)
        return len(seen)

    assert 0 < launches(rows[:1]) < launches(rows) < launches(rows, True)


def test_a_rehearsal_launches_what_the_row_does_and_makes_no_values(drawing, monkeypatch):
    def refuse(*args, **how):
        raise AssertionError("values are made")

    for of, shapes_ in {"conv": [CONV, DEPTHWISE], "conv3d": [VOLUME], **OTHERS}.items():
        drawing(*shapes_)
        rows = drawn_run.remaining(empty_results(of, "float16"), range(len(shapes_)), "cpu", False)

        def launches(of_row, rows=rows):
            seen = []
            with rehearsal.rehearsal(lambda kernel, grid, args, meta: seen.append((kernel, grid, meta)), "sm_90"):
                for row in rows:
                    of_row(row)
            return seen

        real = launches(lambda row: row.inputs()[0].ours[0]())
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randn", refuse)
            patched.setattr(drawn_conv.Layer, "theirs", refuse)
            assert launches(lambda row: drawn_ahead.rehearsed([row])) == real != []


def test_kernels_of_the_next_rows_are_compiled_while_these_are_measured(monkeypatch):
    compiled = []

    class Slow(drawn_ahead.Compilers):
        def compile(self, jobs, progress=None, processes=0):
            compiled.extend(jobs)
            if 2 in jobs:
                raise RuntimeError("a kernel that no compiler takes")

    monkeypatch.setattr(drawn_ahead, "missing", lambda work: list(work.args[0]))
    monkeypatch.setattr(drawn_ahead, "Compilers", Slow)
    rows = list(range((drawn_ahead.BATCHES + 1) * drawn_ahead.AHEAD + 1))
    ahead = drawn_ahead.Compiled(rows, False)
    for number in rows:
        ahead.wait(number)
        assert number in compiled
        requested = (number // drawn_ahead.AHEAD + drawn_ahead.BATCHES) * drawn_ahead.AHEAD
        assert set(compiled) <= set(rows[:requested])
    ahead.end()
    assert sorted(compiled) == rows


def test_cudnn_does_not_search_where_it_would_take_long(monkeypatch):
    """A search takes 0.5 s to compile, plus a time per image."""
    layer = drawn_conv.Layer(CONV._replace(images=64), torch.float32, "cpu", "a seed")
    seen, last = {}, []

    def theirs(self, direction):
        def call(name):
            seen.setdefault(name, []).append((self.shape.images, torch.backends.cudnn.benchmark))
            last[:] = self.shape.images, {"slow": 0.2, "fast": 0.01}[name]

        return {name: [partial(call, name)] for name in ("slow", "fast")}

    def once(call):
        call()
        return 1e3 * (0.5 + last[0] * last[1])

    monkeypatch.setattr(drawn_conv.Layer, "theirs", theirs)
    monkeypatch.setattr(drawn_conv, "once", once)
    assert drawn_peers.searches(layer, "forward") == {}
    monkeypatch.setattr(drawn_peers, "SOON", 1.0)
    assert drawn_peers.searches(layer.of_images(1), "forward") == {}
    assert drawn_peers.searches(layer, "forward") == {"slow": pytest.approx(12.8), "fast": pytest.approx(0.64)}
    monkeypatch.setattr(drawn_conv, "SLOW", 1e9)
    monkeypatch.setattr(drawn_peers, "FAR", 1e9)
    for search, reason, some in ((True, "a search of about 13 s", {"slow"}), (False, "a search did", {"slow", "fast"})):
        seen.clear()
        work = drawn_conv.work(layer, "forward", "name")
        with drawn_peers.torch_at_its_best():
            left_out, unsearched = drawn_peers.chosen(work, layer, "forward", search)
        assert (left_out, set(work.peers), set(unsearched)) == ({}, {"slow", "fast"}, some)
        assert unsearched["slow"].startswith(reason)
        for name, calls in seen.items():
            searched = [benchmark for images, benchmark in calls if images == 64][
                9 if search else 0 :
            ]  # the first are not searched
            assert set(searched) == {name not in some}
    monkeypatch.setattr(drawn_peers, "FAR", 3.0)
    monkeypatch.setattr(drawn_peers, "SOON", 1e10)
    work = drawn_conv.work(layer, "forward", "name")
    with drawn_peers.torch_at_its_best():
        _, unsearched = drawn_peers.chosen(work, layer, "forward")
    assert unsearched == {"slow": "11.7 times as long as in another order"}


def test_a_row_that_had_no_end_is_measured_once_more_without_a_search(drawing):
    drawing(CONV)
    results = empty_results("conv")
    (row, *_), saved = drawn_run.remaining(results, range(1), "cuda", False), []
    for search in (True, False):
        assert row.search is search
        with pytest.raises(KeyError), drawn_run._no_longer_than(60, results, row, lambda: saved.append(1)):
            raise KeyError
        row = next(
            (row for row in drawn_run.remaining(results, range(1), "cuda", False) if row.direction == "forward"), None
        )
    assert row is None
    assert results.rows["conv", 0, "forward"]["skipped"] == "no end within 60 s, also without cuDNN's search"


def test_rounds_that_agree_are_enough():
    class Clock:
        def __init__(self, *times):
            self.times = list(times)

        def time(self):
            return self.times.pop(0)

    def rounds(agree, **clocks):
        return in_turn({name: Clock(*times) for name, times in clocks.items()}, 4, agree)

    assert rounds(0.01, a=(1, 1.005), b=(2, 2.0)) == {"a": [1, 1.005], "b": [2, 2.0]}
    assert rounds(0.01, a=(1, 1.02, 1, 1), b=(2, 2, 2, 2)) == {"a": [1, 1.02, 1, 1], "b": [2] * 4}
    assert rounds(0.0, a=(1, 1.01, 1, 1)) == {"a": [1, 1.01, 1, 1]}


@pytest.mark.parametrize(
    ("ms", "sets", "captures", "replays"),
    [(0.002, 32, [32, 128], 3), (0.1, 3, [3, 39], 1), (5.0, 1, [1], 1), (0.001, 300, [300], 1)],
)
def test_a_short_graph_is_replayed_several_times(monkeypatch, ms, sets, captures, replays):
    """Enough calls to last 4 ms, at most 400, of which a graph has up to 128."""
    captured, runs = [], []

    class Pretended(Replay):
        def _capture(self, count):
            self.count = count
            captured.append(count)

        def time(self):
            runs.append(self.count * self.replays)
            return ms

    monkeypatch.setattr(measure, "_side_stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    clock = Pretended([lambda: None] * sets, False, 4.0, longest=128)
    assert (captured, clock.replays) == (captures, replays)
    assert len(runs) == (1 if ms * sets >= 4 else 3)


def test_memory_is_given_back_where_little_is_free_and_a_capture_ends_whatever_is_raised(monkeypatch):
    cuda, events = torch.cuda, []
    monkeypatch.setattr(measure, "_side_stream", mock.MagicMock())
    monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "empty_cache", lambda: events.append("emptied"))
    graph = mock.MagicMock()
    monkeypatch.setattr(cuda, "CUDAGraph", lambda: graph)
    clock = Replay.__new__(Replay)
    clock.calls, clock.pool = [lambda: events.append("called")], None
    for free, first in ((60, []), (30, ["emptied"])):
        events.clear()
        monkeypatch.setattr(cuda, "mem_get_info", lambda free=free: (free, 80))
        clock._capture(2)
        assert events == [*first, "called", "called"]
    clock.calls, clock.pool = [mock.Mock(side_effect=ValueError)], (1, 2)
    graph.reset_mock()
    with pytest.raises(ValueError):  # noqa: PT011
        clock._capture(1)
    assert graph.mock_calls == [mock.call.capture_begin((1, 2)), mock.call.capture_end()]


def test_a_row_that_does_not_come_back_is_skipped_by_the_next_process():
    """In a separate process, which is ended."""
    code = """
import time, torch
from tests.benchmarks.test_drawn_rows import empty_results
from benchmarks.bench import drawn_run
results = empty_results("conv")
row = drawn_run.Row("conv", 1, 0, "forward", torch.float32, "cuda")
with drawn_run._no_longer_than(0.2, results, row, lambda: print(results.rows["conv", 0, "forward"]["skipped"])):
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-u", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "no end within 0.2 s\n"


def test_figures_by_hand():
    ratios = [0.5, 0.85, 1.0, 2.0, 4.0]
    rows = [{"ratio": ratio} for ratio in ratios]
    figures = drawn_results.figures(rows)
    assert figures["5 %"] == pytest.approx(0.5 + 0.2 * 0.35)
    assert (figures["rows"], figures["worst"], figures["median"], figures["< 0.8"], figures["< 0.9"]) == (
        5,
        0.5,
        1.0,
        1,
        2,
    )
    assert figures["mean"] == pytest.approx((0.5 * 0.85 * 8.0) ** 0.2)
    assert "regret" not in figures
    figures = drawn_results.figures([{"ratio": 1.0, "regret": regret} for regret in (1.0, 4.0)])
    assert (figures["regret"], figures["worst regret"]) == (pytest.approx(2.0), 4.0)


def file_of(path, **about):
    row = {
        "index": 0, "direction": "forward", "name": "gemm 0 forward", "of": "gemm", "group": "thin",
        "shape": "AB 1x1x1", "dtype": "float16", "error_ok": True,
        "ours_ms": 1.0, "peer": "torch.matmul", "peer_ms": 0.5, "ratio": 0.5,
    }  # fmt: skip
    content = {"drawn": {"of": "gemm", "seed": 1, "dtype": "float16", **about}, **MACHINE, "rows": [row]}
    path.write_text(json.dumps(content))
    return content


@pytest.mark.parametrize(
    ("name", "about", "machine"),
    [
        ("seed", {"seed": 2}, {}), ("of", {"of": "conv"}, {}), ("dtype", {"dtype": "float32"}, {}),
        ("device", {}, {"device": "another"}), ("torch", {}, {"torch": "3"}),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_refused(tmp_path, name, about, machine):
    path = tmp_path / "r.json"
    file_of(path)
    settings = {"of": "gemm", "seed": 1, "dtype": "float16", **about}
    with pytest.raises(ConfigError, match=f"r.json has rows of {name} .*; this is .*: give another file"):
        drawn_results.continued(path, settings, {**MACHINE, **machine})


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("rows"),
        lambda content: content.pop("drawn"),
        lambda content: content.pop("device"),
        lambda content: content["drawn"].update(seed="1"),
        lambda content: content["rows"].append(3),
        lambda content: content["rows"][0].pop("error_ok"),
        lambda content: content["rows"][0].update(ratio=0.0),
        lambda content: content["rows"][0].update(ours_ms="fast"),
        lambda content: content["rows"][0].update(direction="\x1b"),
        lambda content: content["rows"][0].update(regret=None),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "r.json"
    content = file_of(path)
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"has no results of `python -m benchmarks\.bench --drawn`"):
        drawn_results.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        drawn_results.load(tmp_path / "none")
