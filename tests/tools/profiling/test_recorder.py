"""The recorder: what it counts, what it joins, what it leaves as it was."""

import json
import re

import pytest
import torch

import minidl
from minidl import nn, ops, optim
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.tools.profiling.recorder import Profile
from minidl.tools.profiling.table import rows_of
from minidl.tools.profiling.work import Work


def steps(count):
    """The loss of so many training steps from one start."""
    minidl.manual_seed(0)
    model = nn.MLP(8, [16], 3, act="relu", dropout=0.1)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    x = minidl.randn(32, 8)
    y = (x[:, 0] > 0).to(torch.int64)
    for _ in range(count):
        optimizer.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss)


def test_every_launch_is_counted_and_results_stay(tmp_path):
    plain = steps(3)
    launched = []

    def watcher(kernel, grid, args, meta, go):
        launched.append(kernel.__name__)
        go()

    with launch.watch(watcher):
        steps(3)
    with minidl.profile(tmp_path / "trace.json") as profile:
        assert steps(3) == plain
    ours = [event.kernel for event in profile.events if event.kinds]
    assert sorted(ours) == sorted(launched)
    assert profile.launches_per_step == (len(launched) - launched.index("update_kernel") - 1) / 2
    assert sum(row.calls for row in profile.rows) == len(profile.events)
    assert sum(row.share for row in profile.rows) == pytest.approx(1)
    assert all(event.duration > 0 for event in profile.events)
    trace = json.loads((tmp_path / "trace.json").read_text())
    named = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert sorted(name for name in named if name in launched) == sorted(ours)
    assert trace["minidl"]["rows"][0]["kernel"] == profile.rows[0].kernel
    text = str(profile)
    assert f"{profile.launches_per_step:g} launches per training step" in text
    assert "update_kernel" in text


def test_nothing_is_watched_afterwards_also_after_an_error():
    x = Tensor(torch.zeros(4, 4, device=default_device()))
    profile = minidl.profile()

    def fail():
        with profile:
            ops.relu(x)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    seen = len(profile.events)
    assert seen >= 1
    ops.relu(x)
    assert len(profile.events) == seen
    assert not launch.handed_over()


def test_an_empty_profile_says_so(tmp_path):
    with minidl.profile(tmp_path / "trace.json") as profile:
        pass
    assert "no kernel ran" in str(profile)
    assert (profile.rows, profile.launches_per_step) == ([], None)
    assert not (tmp_path / "trace.json").exists()


def test_bytes_and_operations_become_rates():
    with minidl.profile() as profile:
        a = torch.zeros(64, 32, device=default_device())
        ops.matmul(Tensor(a), Tensor(a.t().contiguous()))
    (row,) = [row for row in profile.rows if row.kernel.startswith("gemm")]
    assert row.flop == 2 * 64 * 64 * 32
    assert row.teraflop_per_second == pytest.approx(row.flop / row.total_us / 1e6)
    assert row.gigabytes_per_second == pytest.approx(row.bytes / row.total_us / 1e3)
    assert re.fullmatch(r"M=\d+ N=\d+ K=\d+ .*warps=\d+ stages=\d+", row.tile)


def work(kernel, grid=(1, 1, 1), threads=128, tile="M=16", bytes=100, flop=None):
    return Work(kernel, grid, threads, tile, bytes, flop, None)


def run_of(kernel, ts, dur=2.0, grid=(1, 1, 1), threads=128, cat="kernel"):
    return {
        "name": kernel, "cat": cat, "ph": "X", "ts": ts, "dur": dur,
        "args": {"grid": list(grid), "block": [threads, 1, 1]},
    }  # fmt: skip


@pytest.fixture
def joined():
    """A function from launches with their numbers, and events of CUPTI's trace, to the events of a profile."""

    def join(launched, events):
        profile = Profile()
        profile._launched.update(launched)
        profile.events = profile._join(events)
        return profile

    return join


def test_a_launch_in_a_graph_runs_as_often_as_it_is_replayed(joined):
    launched = {work("gemm"): 1, work("update_kernel", bytes=None): 1}
    events = [
        event for i in range(5) for event in (run_of("gemm", 10.0 * i), run_of("update_kernel", 10.0 * i + 5, dur=1.0))
    ]
    profile = joined(launched, events[::-1])
    assert [(row.kernel, row.calls, row.total_us, row.bytes) for row in profile.rows] == [
        ("gemm", 5, 10.0, 500.0), ("update_kernel", 5, 5.0, None),
    ]  # fmt: skip
    assert profile.launches_per_step == 2


def test_the_updates_of_a_step_are_one_whatever_their_number(joined):
    launched = {work("gemm"): 1, work("update_kernel", bytes=None): 1}
    kernels = ["gemm", *(["gemm"] * 2 + ["update_kernel"] * 2 + ["gemm"] * 5 + ["update_kernel"]) * 3]
    profile = joined(launched, [run_of(kernel, float(i)) for i, kernel in enumerate(kernels)])
    # Two optimisers, the first of two dtypes.
    profile.updates = 2
    assert profile.launches_per_step == 10
    for updates in (0, True, 1.5):
        with pytest.raises(ValueError, match=r"profile: updates is .*, expected a number of at least 1"):
            minidl.profile(updates=updates)


def test_a_profile_in_a_profile_is_refused():
    x = Tensor(torch.zeros(4, 4, device=default_device()))
    with minidl.profile() as profile:
        for another in (minidl.profile(), profile):
            with pytest.raises(RuntimeError, match="another profile is running"):
                another.__enter__()
        ops.relu(x)
    assert [row.calls for row in profile.rows if row.tile] == [1]
    assert not launch.handed_over()
    # The same one again begins anew.
    with profile:
        ops.relu(x)
    assert [row.calls for row in profile.rows if row.tile] == [1]


def test_a_trace_that_cannot_be_written_is_told_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    for path, message in (
        (tmp_path, "is a folder"), (tmp_path / "file" / "t", "is not a folder; create it"), ("", "is a folder"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"profile: trace .*{message}"):
            minidl.profile(path).__enter__()
    with minidl.profile():
        pass


def test_a_missing_folder_of_a_trace_is_made(tmp_path):
    with minidl.profile(tmp_path / "new" / "folder" / "trace.json"):
        ops.relu(Tensor(torch.zeros(4, device=default_device())))
    assert json.loads((tmp_path / "new" / "folder" / "trace.json").read_text())["minidl"]["rows"]


def test_a_trace_that_is_not_written_does_not_hide_an_error(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()

    def fail(error):
        with minidl.profile(folder / "t.json"):
            ops.relu(Tensor(torch.zeros(4, device=default_device())))
            folder.rmdir()
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        fail(KeyError("mine"))
    folder.mkdir()
    with pytest.raises(FileNotFoundError):
        fail(None)


def test_waiting_for_the_kernel_before_is_not_time(joined):
    """On one stream; what runs on another one beside it takes its own time."""
    waits, inside, beside = (
        run_of("join", 11.0, dur=55.0),
        run_of("short", 12.0, dur=3.0),
        run_of("nccl", 20.0, dur=9.0),
    )
    for event, stream in ((waits, 7), (inside, 7), (beside, 20)):
        event["args"]["stream"] = stream
    first = run_of("statistics", 0.0, dur=64.0)
    first["args"]["stream"] = 7
    found = joined({}, [waits, first, beside, inside]).events
    assert [(event.kernel, event.duration) for event in found] == [
        ("statistics", 64.0), ("join", 2.0), ("short", 0.0), ("nccl", 9.0),
    ]  # fmt: skip


def test_runs_are_told_apart_by_grid_and_warps(joined):
    launched = {
        work("k", tile="small"): 1, work("k", grid=(2, 3, 1), tile="wide"): 1, work("k", threads=256, tile="many"): 1,
    }  # fmt: skip
    events = [run_of("k", 1), run_of("k", 2, grid=(2, 3, 1)), run_of("k", 3, threads=256)]
    assert [event.kinds[0][0].tile for event in joined(launched, events).events] == ["small", "wide", "many"]


def test_runs_that_cannot_be_told_apart_count_in_part(joined):
    launched = {work("k", tile="a", bytes=100): 3, work("k", tile="b", bytes=500): 1}
    (row,) = joined(launched, [run_of("k", float(i)) for i in range(4)]).rows
    assert (row.tile, row.calls, row.bytes) == ("a or b", 4, 800.0)


def test_launches_without_a_time_are_told(joined):
    profile = joined({work("k"): 5}, [run_of("k", 0.0), run_of("k", 4.0), run_of("torch's", 8.0)])
    assert profile.missing == 0
    profile._at_once = 5
    assert profile.missing == 3
    assert "3 launches or more have no time" in str(profile)
    profile.events = []
    assert "5 kernels were launched, but the GPU's recorder (CUPTI) gave no times" in str(profile)


def test_work_that_is_not_of_minidl_has_time_and_no_tile(joined):
    events = [
        run_of("elementwise", 0),
        run_of("Memcpy HtoD", 5, cat="gpu_memcpy"),
        {"cat": "cuda_runtime", "name": "x"},
    ]
    profile = joined({work("k"): 1}, events)
    assert {(row.kernel, row.tile, row.bytes) for row in profile.rows} == {
        ("elementwise", "", None), ("Memcpy HtoD", "", None),
    }  # fmt: skip
    assert profile.launches_per_step is None


def test_the_share_of_the_floor_is_of_all_runs():
    from minidl.tools.profiling.recorder import Event

    events = [Event("k", ((work("k", bytes=4_300_000 * us), 1),), 0, 2.0) for us in (1, 3)]
    (row,) = rows_of(events, "NVIDIA H200")
    assert row.share_of_floor == pytest.approx(1.0)


def test_a_long_table_ends_with_what_is_left_out(joined):
    launched = {work(f"kernel_{i}"): 1 for i in range(35)}
    text = str(joined(launched, [run_of(f"kernel_{i}", float(i), dur=i + 1.0) for i in range(35)]))
    assert "5 more" in text
    assert "kernel_34" in text
    assert "kernel_0 " not in text


@pytest.mark.gpu
def test_times_are_the_devices(tmp_path):
    a = Tensor(torch.randn(2048, 2048, device="cuda", dtype=torch.float16))
    ops.matmul(a, a)
    with minidl.profile(tmp_path / "trace.json") as profile:
        for _ in range(10):
            ops.matmul(a, a)
    (row,) = [row for row in profile.rows if row.kernel.startswith("gemm")]
    assert row.calls == 10
    assert 20 < row.teraflop_per_second < 2000
    assert row.tile
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.gpu
def test_kernels_in_a_graph_are_seen_at_every_replay():
    x = Tensor(torch.randn(4096, 256, device="cuda"))
    ops.relu(x)
    with minidl.profile() as profile:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ops.relu(x)
        for _ in range(7):
            graph.replay()
    (row,) = [row for row in profile.rows if row.kernel == "flat_kernel"]
    assert row.calls == 7
    assert row.bytes == 7 * 2 * 4 * 4096 * 256
    assert torch.equal(y.data, torch.relu(x.data))
