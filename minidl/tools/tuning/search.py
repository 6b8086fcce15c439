"""The search of one shape class: candidates near the best tile so far are tried until the time limit.

A candidate is dropped when it launches the same as another one, does not compile, spills or exceeds a limit, fails, or
gives a wrong result; the others are timed against the current tile. The best one replaces the current tile if it is
faster by more than the noise over all problems of the class, slower by more than the noise on none of them, and both
hold in a second measurement.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from minidl.runtime import launch
from minidl.runtime.launch import Tile
from minidl.testing.specs.make import EmptyMake
from minidl.tools.bench.goals import NOISE
from minidl.tools.bench.measure import Clock, HostClock, Replay, in_turn, input_sets
from minidl.tools.first_line import first_line
from minidl.tools.tuning import space
from minidl.tools.tuning.check import Check, launches, signature, spread, under
from minidl.tools.tuning.classes import ShapeClass
from minidl.tools.tuning.problem import SEED, Call, Judge, Problem

# The host's clock includes other work of the processor.
HOST_NOISE = 0.05
ROUNDS, CONFIRMING_ROUNDS = 3, 7
MOST_PROBLEMS = 4
# How many of the best are measured a second time before the search keeps the current tile.
FINALISTS = 3
TIMED, SAME, REFUSED, FAILED, WRONG = "timed", "same", "refused", "failed", "wrong"


@dataclass(frozen=True)
class Trial:
    """A candidate and its outcome: ms by problem, and `ratio`, the geometric mean of current / candidate."""

    tile: Tile
    outcome: str
    why: str = ""
    ms: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Return the geometric mean of the ratios; 0 for a candidate that was not timed."""
        return statistics.geometric_mean(self.ratios.values()) if self.ratios else 0.0

    def is_faster(self, noise: float) -> bool:
        """Return whether the tile is faster by more than the noise, and slower by more than that on no problem."""
        return self.ratio > 1.0 + noise and min(self.ratios.values()) > 1.0 - noise


@dataclass
class SearchResult:
    """The result of a search.

    `confirmed` is the second measurement of the `chosen` tile; `error` says why nothing could be measured.
    """

    shape_class: ShapeClass
    trials: list[Trial] = field(default_factory=list)
    chosen: Tile | None = None
    confirmed: Trial | None = None
    candidates: int = 0
    error: str = ""

    @property
    def dropped(self) -> Counter[str]:
        """The number of candidates with each outcome other than TIMED."""
        return Counter(trial.outcome for trial in self.trials if trial.outcome != TIMED)


def noise() -> float:
    """Return the relative difference that two measurements of the same tile may have."""
    return HOST_NOISE if launch.ON_CPU else NOISE


class Searcher:
    """The search for one class; the inputs of all its problems are in device memory."""

    def __init__(self, shape_class: ShapeClass, check: Check, device: torch.device | str) -> None:
        shape_class = replace(shape_class, problems=tuple(spread(shape_class.problems, MOST_PROBLEMS)))
        self.shape_class, self.check = shape_class, check
        self.judges = [Judge(problem, device) for problem in shape_class.problems]
        self.calls = [(problem, _calls(problem, device)) for problem in shape_class.problems]
        self.seen = {signature(launches(shape_class, shape_class.tile))}

    def search(self, deadline: float, report: Callable[[SearchResult], None], step: int) -> SearchResult:
        """Try candidates, `step` at a time, until `deadline` (in time.monotonic()) or the last candidate.

        `report` is called after each step; there is at least one step.
        """
        candidates = space.candidates(self.shape_class.family, self.shape_class.target, self.shape_class.tile)
        result, best = SearchResult(self.shape_class, candidates=len(candidates)), self.shape_class.tile
        while candidates and (not result.trials or time.monotonic() < deadline):
            candidates = space.nearest(candidates, best)
            result.trials += self.try_tiles(candidates[:step])
            candidates = candidates[step:]
            leader = max(result.trials, key=lambda trial: trial.ratio)
            best = leader.tile if leader.ratio > 1.0 else self.shape_class.tile
            report(result)
        self._choose(result)
        return result

    def try_tiles(self, tiles: Sequence[Tile]) -> list[Trial]:
        """Return the outcome of each tile, in order."""
        trials: dict[int, Trial] = {}
        launched: dict[int, list[Any]] = {}
        for index, tile in enumerate(tiles):
            try:
                tile_launches = launches(self.shape_class, tile)
            except Exception as error:  # noqa: BLE001 (any error of a launcher is an outcome)
                trials[index] = Trial(tile, FAILED, first_line(error))
                continue
            mark = signature(tile_launches)
            if mark in self.seen:
                trials[index] = Trial(tile, SAME)
            else:
                launched[index] = tile_launches
                self.seen.add(mark)
        refused = self.check.problems(self.shape_class, launched)
        for index in launched:
            tile = tiles[index]
            trials[index] = Trial(tile, REFUSED, refused[index]) if index in refused else self._check_results(tile)
        timed = [index for index in trials if trials[index].outcome == TIMED]
        trials |= dict(zip(timed, self._time([tiles[index] for index in timed], ROUNDS), strict=True))
        return [trials[index] for index in range(len(tiles))]

    def _check_results(self, tile: Tile) -> Trial:
        """Check the results of a tile: TIMED if they are right, else WRONG or FAILED."""
        try:
            with under(self.shape_class, tile):
                wrong = next((judge.problem.name for judge in self.judges if not judge.right()), None)
        except Exception as error:  # noqa: BLE001 (any error is an outcome)
            return Trial(tile, FAILED, first_line(error))
        return Trial(tile, TIMED) if wrong is None else Trial(tile, WRONG, wrong)

    def _time(self, tiles: Sequence[Tile], rounds: int) -> list[Trial]:
        """Time the tiles against the current one; a tile that cannot be set up for timing is FAILED."""
        trials = [Trial(tile, TIMED) for tile in tiles]
        for problem, calls in self.calls if trials else ():
            clocks: dict[int, Clock] = {-1: self._clock(calls, self.shape_class.tile)}
            for i, trial in enumerate(trials):
                if trial.outcome == TIMED:
                    try:
                        clocks[i] = self._clock(calls, trial.tile)
                    except Exception as error:  # noqa: BLE001 (no memory for its graph, say)
                        trials[i] = Trial(trial.tile, FAILED, first_line(error))
            times = in_turn(clocks, rounds)
            current = times.pop(-1)
            for i, candidate in times.items():
                ratios = [a / b for a, b in zip(current, candidate, strict=True)]
                trials[i].ms[problem.name] = round(statistics.median(candidate), 5)
                trials[i].ratios[problem.name] = round(statistics.median(ratios), 4)
        return trials

    def _clock(self, calls: Sequence[Call], tile: Tile) -> Clock:
        if launch.ON_CPU:
            return HostClock([under(self.shape_class, tile)(call) for call in calls])
        with under(self.shape_class, tile):
            return Replay(calls, whole_step=False)

    def _choose(self, result: SearchResult) -> None:
        """Choose the best tile that is faster in a second measurement, too."""
        faster = [trial for trial in result.trials if trial.is_faster(noise())]
        for trial in sorted(faster, key=lambda trial: -trial.ratio)[:FINALISTS]:
            (second,) = self._time([trial.tile], CONFIRMING_ROUNDS)
            if second.is_faster(noise()):
                result.chosen, result.confirmed = trial.tile, second
                return


def _calls(problem: Problem, device: torch.device | str) -> list[Call]:
    """Return calls on enough inputs to exceed the L2 cache; one call on a CPU."""
    case = problem.inputs(EmptyMake(SEED, problem.dtype))
    sets = 1 if launch.ON_CPU else input_sets(sum(t.nbytes for t in case.tensors()))
    return [problem.call(SEED + i, device) for i in range(sets)]
