"""The search of a class: what is dropped and why, what is measured, and when a tile is replaced."""

import time

import pytest
import torch

from minidl.runtime import launch, tiles
from minidl.runtime.launch import Tile
from minidl.testing.specs import Case
from minidl.tools.tuning import classes, run, search, space
from minidl.tools.tuning.check import Check, Compiles, for_device, signature, spread, under
from minidl.tools.tuning.classes import ShapeClass
from minidl.tools.tuning.problem import Judge, Problem, kernel
from minidl.tools.tuning.search import FAILED, REFUSED, SAME, TIMED, WRONG, Searcher

FAMILY = "random"
PRESENT = Tile({"BLOCK_N": 1024})


class Sleepy:
    """In place of a kernel: it takes as long as `seconds` says for its block, and is wrong or fails for some."""

    __name__ = "sleepy_kernel"

    def __init__(self, seconds, wrong=(), failing=()):
        self.seconds, self.wrong, self.failing = seconds, wrong, failing

    def __getitem__(self, grid):
        def launched(y, *, BLOCK_N, **options):
            if BLOCK_N in self.failing:
                raise RuntimeError("out of resources\nshared memory")
            time.sleep(self.seconds.get(BLOCK_N, 0.008))
            y.fill_(2.0 if BLOCK_N in self.wrong else 1.0)

        return launched


def sleepy_class(sleepy, monkeypatch, count=1):
    """A class of a table of one rule, and problems that run `sleepy` with its tile."""
    table = {target: [{"tile": {"BLOCK_N": 1024}}] for target in launch.table(FAMILY)}
    monkeypatch.setattr(tiles._State, "tables", {FAMILY: table})

    def call(x):
        y = torch.empty_like(x)
        tile = launch.tile(FAMILY, x.dtype, N=2**20)
        launch.run(sleepy, (2**20 // tile["BLOCK_N"],), y, **tile.options)
        return y

    problems = tuple(
        Problem(f"{i + 1}", torch.float32, lambda make, i=i: Case((make.tensor(i + 1),)), kernel(call))
        for i in range(count)
    )
    return ShapeClass(FAMILY, launch.target(), 0, {}, PRESENT, problems)


@pytest.fixture(autouse=True)
def interpreted():
    if not launch.INTERPRETED:
        pytest.skip("sleeping kernels are timed by the host's clock")
    launch.forget()
    yield
    launch.forget()


def searched(shapes, check=None, width=2, seconds=60.0):
    return Searcher(shapes, check or Check(), "cpu").search(time.monotonic() + seconds, lambda found: None, width)


def block(trial):
    return trial.tile["BLOCK_N"]


def test_the_fastest_right_tile_is_chosen_and_the_others_are_counted(monkeypatch):
    sleepy = Sleepy({1024: 0.008, 2048: 0.004, 4096: 0.001, 512: 0.0005}, wrong=(512,), failing=(8192,))
    found = searched(sleepy_class(sleepy, monkeypatch, count=2))
    by_block = {block(trial): trial for trial in found.trials}
    assert set(by_block) == {64, 128, 256, 512, 2048, 4096, 8192, 16384}
    assert found.chosen == Tile({"BLOCK_N": 4096})
    assert found.confirmed.is_faster(search.noise())
    assert found.confirmed.ratio > 3.0
    assert (by_block[512].outcome, by_block[512].why) == (WRONG, "1")
    assert (by_block[8192].outcome, by_block[8192].why) == (FAILED, "RuntimeError: out of resources")
    assert found.dropped == {WRONG: 1, FAILED: 1}
    assert set(by_block[2048].ms) == {"1", "2"}
    assert by_block[2048].outcome == TIMED
    # The nearest to the best so far come first: 4096 after 2048, and what is beyond before what lies behind.
    order = [block(trial) for trial in found.trials]
    assert set(order[:2]) == {512, 2048}
    assert order[2] == 4096


def test_a_tile_that_is_not_ahead_by_more_than_the_noise_stays(monkeypatch):
    monkeypatch.setattr(search, "HOST_NOISE", 0.3)  # of sleeping on a busy machine
    found = searched(sleepy_class(Sleepy({}), monkeypatch))
    assert found.chosen is None
    assert all(trial.outcome == TIMED for trial in found.trials)


def test_one_that_is_behind_on_a_problem_does_not_replace(monkeypatch):
    fast = search.Trial(PRESENT, TIMED, ratios={"a": 4.0, "b": 0.9})
    assert fast.ratio > 1.8
    assert not fast.is_faster(0.05)
    assert search.Trial(PRESENT, TIMED, ratios={"a": 1.2, "b": 0.97}).is_faster(0.05)
    assert search.Trial(PRESENT, WRONG).ratio == 0.0


def test_a_winner_must_win_again(monkeypatch):
    monkeypatch.setattr(search, "HOST_NOISE", 0.3)
    sleepy = Sleepy({2048: 0.002})
    shapes = sleepy_class(sleepy, monkeypatch)
    searcher = Searcher(shapes, Check(), "cpu")

    def told(found):
        sleepy.seconds = {2048: 0.002} if len(found.trials) < found.candidates else {}

    found = searcher.search(time.monotonic() + 60, told, 4)
    assert max(trial.ratio for trial in found.trials) > 2
    assert found.chosen is None


def test_one_that_cannot_be_set_up_for_timing_fails_and_the_others_are_timed(monkeypatch):
    clock = Searcher._clock

    def failing(self, calls, tile):
        if tile["BLOCK_N"] == 2048:
            raise RuntimeError("out of memory")
        return clock(self, calls, tile)

    monkeypatch.setattr(Searcher, "_clock", failing)
    found = searched(sleepy_class(Sleepy({512: 0.001}), monkeypatch, count=2))
    assert found.dropped == {FAILED: 1}
    assert found.chosen == Tile({"BLOCK_N": 512})


def test_what_the_check_refuses_does_not_run(monkeypatch):
    class Refusing(Check):
        def problems(self, shapes, launched):
            assert all(kernel.__name__ == "sleepy_kernel" for every in launched.values() for kernel, *_ in every)
            return {
                index: "spills 8 bytes of registers" for index in launched if launched[index][0][3]["BLOCK_N"] > 1024
            }

    found = searched(sleepy_class(Sleepy({}, failing=(2048, 4096, 8192, 16384)), monkeypatch), Refusing())
    assert found.dropped == {REFUSED: 4}
    assert {trial.why for trial in found.trials if trial.outcome == REFUSED} == {"spills 8 bytes of registers"}


def test_the_time_is_kept_but_the_first_step_is_made(monkeypatch):
    found = searched(sleepy_class(Sleepy({}), monkeypatch), seconds=-1.0)
    assert len(found.trials) == 2 < found.candidates


def test_a_size_beyond_the_shape_is_not_measured_twice():
    (shapes,) = classes.of_family("conv_few", launch.target()) if launch.INTERPRETED else (None,)
    found = searched(shapes, width=50)
    assert found.dropped[SAME] > 0
    marks = {signature(search.launches(shapes, trial.tile)) for trial in found.trials if trial.outcome != SAME}
    assert len(marks) == len([trial for trial in found.trials if trial.outcome != SAME])


def test_a_real_family_is_tuned_within_seconds():
    (shapes,) = classes.of_family("gemm_sum", launch.target())
    found = searched(shapes, seconds=2.0)
    assert {trial.outcome for trial in found.trials} <= {TIMED, SAME}
    assert any(trial.outcome == TIMED for trial in found.trials)
    assert run.line(found).startswith("gemm_sum: all other shapes: ")


def test_a_present_tile_that_is_wrong_is_told(monkeypatch):
    import numpy as np

    values = iter(np.arange(100))
    problem = Problem(
        "changing", torch.float32, lambda make: Case((make.tensor(3),)), kernel(lambda x: x + float(next(values)))
    )
    with pytest.raises(AssertionError, match="the result of the current tile is wrong"):
        Judge(problem, "cpu")


def test_the_tiles_of_others_stay_while_one_is_tried(monkeypatch):
    before = launch.tile("softmax", torch.float32, M=4, N=4)
    (shapes,) = classes.of_family("gemm_sum", launch.target())
    with under(shapes, Tile({"BLOCK": 16})):
        assert launch.tile("gemm_sum", torch.float32, total=10**6)["BLOCK"] == 16
        assert launch.tile("softmax", torch.float32, M=4, N=4) == before
    assert launch.tile("gemm_sum", torch.float32, total=10**6)["BLOCK"] != 16


def test_spread_takes_evenly():
    assert spread(range(10), 4) == [0, 2, 5, 7]
    assert spread(range(3), 4) == [0, 1, 2]


def test_the_interpreter_has_nothing_to_compile():
    assert type(for_device()) is Check
    assert not isinstance(for_device(), Compiles)
    assert space.candidates(FAMILY, "interpreted", PRESENT)[0].num_warps == PRESENT.num_warps
