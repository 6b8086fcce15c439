"""The search of one shape class: candidates near the best tile so far are tried until the time limit.

A candidate is dropped when it launches the same as another one, does not compile, spills or exceeds a limit, fails, or
gives a wrong result; the others are timed beside the present tile. The best one replaces the present tile if it is
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
from minidl.tools.bench.goals import NOISE
from minidl.tools.bench.measure import Clock, HostClock, Replay, in_turn, input_sets
from minidl.tools.first_line import first_line
from minidl.tools.tuning import space
from minidl.tools.tuning.check import Check, launches, signature, spread, under
from minidl.tools.tuning.classes import ShapeClass
from minidl.tools.tuning.problem import SEED, Call, Empty, Judge, Problem

# The host's clock includes other work of the processor.
HOST_NOISE = 0.05
ROUNDS, CONFIRMING_ROUNDS = 3, 7
MOST_PROBLEMS = 4
# How many of the best are measured a second time before the present tile stays.
FINALISTS = 3
TIMED, SAME, REFUSED, FAILED, WRONG = "timed", "same", "refused", "failed", "wrong"


@dataclass(frozen=True)
class Trial:
    """A candidate and its outcome: ms by problem, and `ratio`, the geometric mean of present / candidate."""

    tile: Tile
    outcome: str
    why: str = ""
    ms: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Geometric mean of the ratios; 0 for a candidate that was not timed."""
        return statistics.geometric_mean(self.ratios.values()) if self.ratios else 0.0

    def better(self, noise: float) -> bool:
        """Whether it is faster by more than the noise, and on no problem slower by more than that."""
        return self.ratio > 1.0 + noise and min(self.ratios.values()) > 1.0 - noise


@dataclass
class Found:
    """The result of a search.

    `confirmed` is the second measurement of the `chosen` tile; `error` says why nothing could be measured.
    """

    shapes: ShapeClass
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
    """By which share two measurements of the same thing may differ."""
    return HOST_NOISE if launch.INTERPRETED else NOISE


class Searcher:
    """One class with its problems on the device, which needs memory for all of their inputs."""

    def __init__(self, shapes: ShapeClass, check: Check, device: torch.device | str) -> None:
        shapes = replace(shapes, problems=tuple(spread(shapes.problems, MOST_PROBLEMS)))
        self.shapes, self.check = shapes, check
        self.judges = [Judge(problem, device) for problem in shapes.problems]
        self.calls = [(problem, _calls(problem, device)) for problem in shapes.problems]
        self.seen = {signature(launches(shapes, shapes.tile))}

    def search(self, deadline: float, told: Callable[[Found], None], width: int) -> Found:
        """Try candidates, `width` at a time, until `deadline` (in time.monotonic()) or the last candidate.

        `told` is called after each step; at least one step is made.
        """
        left = space.candidates(self.shapes.family, self.shapes.target, self.shapes.tile)
        found, best = Found(self.shapes, candidates=len(left)), self.shapes.tile
        while left and (not found.trials or time.monotonic() < deadline):
            left = space.nearest(left, best)
            step, left = left[:width], left[width:]
            found.trials += self.try_tiles(step)
            leader = max(found.trials, key=lambda trial: trial.ratio)
            best = leader.tile if leader.ratio > 1.0 else self.shapes.tile
            told(found)
        self._choose(found)
        return found

    def try_tiles(self, tiles: Sequence[Tile]) -> list[Trial]:
        """The outcome of each tile, in order."""
        trials: dict[int, Trial] = {}
        launched: dict[int, list[Any]] = {}
        for index, tile in enumerate(tiles):
            try:
                found = launches(self.shapes, tile)
            except Exception as error:  # noqa: BLE001 (whatever a launcher says of a tile is the finding)
                trials[index] = Trial(tile, FAILED, first_line(error))
                continue
            mark = signature(found)
            if mark in self.seen:
                trials[index] = Trial(tile, SAME)
            else:
                launched[index] = found
                self.seen.add(mark)
        refused = self.check.problems(self.shapes, launched)
        for index in launched:
            tile = tiles[index]
            trials[index] = Trial(tile, REFUSED, refused[index]) if index in refused else self._judged(tile)
        rest = [index for index in trials if trials[index].outcome == TIMED]
        trials |= dict(zip(rest, self._timed([tiles[index] for index in rest], ROUNDS), strict=True))
        return [trials[index] for index in range(len(tiles))]

    def _judged(self, tile: Tile) -> Trial:
        """The outcome of the checks of the results, TIMED if it may be timed."""
        try:
            with under(self.shapes, tile):
                wrong = next((judge.problem.name for judge in self.judges if not judge.right()), None)
        except Exception as error:  # noqa: BLE001 (whatever a tile raises is the finding)
            return Trial(tile, FAILED, first_line(error))
        return Trial(tile, TIMED) if wrong is None else Trial(tile, WRONG, wrong)

    def _timed(self, tiles: Sequence[Tile], rounds: int) -> list[Trial]:
        """Time the tiles beside the present one; a tile that cannot be set up for timing is FAILED."""
        found = [Trial(tile, TIMED) for tile in tiles]
        for problem, calls in self.calls if found else ():
            sides: dict[int, Clock] = {-1: self._clock(calls, self.shapes.tile)}
            for i, trial in enumerate(found):
                if trial.outcome == TIMED:
                    try:
                        sides[i] = self._clock(calls, trial.tile)
                    except Exception as error:  # noqa: BLE001 (no memory for its graph, say)
                        found[i] = Trial(trial.tile, FAILED, first_line(error))
            times = in_turn(sides, rounds)
            present = times.pop(-1)
            for i, own in times.items():
                ratios = [a / b for a, b in zip(present, own, strict=True)]
                found[i].ms[problem.name] = round(statistics.median(own), 5)
                found[i].ratios[problem.name] = round(statistics.median(ratios), 4)
        return found

    def _clock(self, calls: Sequence[Call], tile: Tile) -> Clock:
        if launch.INTERPRETED:
            return HostClock([under(self.shapes, tile)(call) for call in calls])
        with under(self.shapes, tile):
            return Replay(calls, whole_step=False)

    def _choose(self, found: Found) -> None:
        """Choose the best tile that is also faster in a second measurement."""
        ahead = [trial for trial in found.trials if trial.better(noise())]
        for trial in sorted(ahead, key=lambda trial: -trial.ratio)[:FINALISTS]:
            (again,) = self._timed([trial.tile], CONFIRMING_ROUNDS)
            if again.better(noise()):
                found.chosen, found.confirmed = trial.tile, again
                return


def _calls(problem: Problem, device: torch.device | str) -> list[Call]:
    """Calls on enough inputs to exceed the L2 cache; one call for the interpreter."""
    case = problem.inputs(Empty(SEED, problem.dtype))
    sets = 1 if launch.INTERPRETED else input_sets(sum(t.nbytes for t in case.tensors()))
    return [problem.call(SEED + i, device) for i in range(sets)]
