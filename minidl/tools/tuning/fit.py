"""Constants of estimates, fitted to the times of trials.

A group is the constants that the estimates of some forms count with; they are moved together, by least squares of the
logarithm of estimate / time, where a trial far behind the best of its problem weighs less and an outlier pulls less.
What the trials say nothing of stays where it was. Groups follow one another, as some forms are estimated by others.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from minidl.runtime.cost_model import schema, selection
from minidl.runtime.cost_model.schema import Constants
from minidl.tools.tuning.trials import FILLED, Place, Trial

Path = tuple[str | int, ...]
# A constant that moves so far costs as much as a trial that is off by OUTLIER, above which trials pull less; none moves
# further than so many times. Held by log 2, 331 trials moved 44 constants by more than 5 %, and the regret of what was
# left out rose from 1.041 to 1.078.
HELD, OUTLIER, FURTHEST = math.log(1.15), 0.2, 4.0
HELD_OUT = 5  # every so many shapes one is left out, to be judged by
EVALUATIONS = 8
DIGITS = 4

# Forms, and the parts of the constants that are fitted to their trials.
GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("gemm", "copied"), ("gemm.gemm.", "gemm.cop")),
    (("gemm_pointer",), ("gemm.gemm_pointer.",)),
    (("product", "patches_back"), ("whole.product", "relative.product")),
    (
        ("pixel_tiled", "pixel_back", "boxed", "paired_box", "batch_tiled", "batch_back"),
        ("tiles.", "boxes.", "boxed.", "steps.launch", "steps.edges", "steps.a", "steps.flat", "steps.flat_values",
         "steps.narrow.8", "steps.narrow.4", "steps.narrow.2", "steps.turned", "steps.farther", "steps.shares",
         "steps.cached", "steps.uncached", "steps.rounds.pixel", "steps.rounds.flat", "steps.rounds.b", "images.pages",
         "images.many", "reached", "relative.pixel"),
    ),
    (
        ("pixel_grad_weight", "batch_grad_weight", "even_grad_weight", "boxed_grad_weight"),
        ("weights.", "steps.flat_weight", "steps.rounds.weight", "steps.rounds.even", "relative.batch, weight",
         "relative.weight"),
    ),
    (("unfolded_grad_weight",), ("weights.unfolded",)),
    (("banded",), ("whole.banded.", "relative.banded, odd")),
    (("held", "two_rows"), ("relative.held", "relative.two rows", "whole.held")),
    (("banded_grad_weight",), ("whole.banded, weight.", "relative.banded, weight")),
    (("few_outputs",), ("forms.few", "whole.few.1", "relative.few")),
    (("merged",), ("relative.merge",)),
    (("paired",), ("forms.pair", "relative.pair")),
    (("depthwise", "depthwise_grad_weight"), ("channels.", "forms.depthwise")),
)  # fmt: skip


class Score(NamedTuple):
    """error: median of how far estimates are off, as a share; regret, worst: geometric mean and largest of the time of
    what has the least estimate, divided by that of the fastest."""

    trials: int
    error: float
    regret: float
    worst: float

    def __str__(self) -> str:
        return f"{self.error:.1%} off in the median, regret {self.regret:.3f}, at worst {self.worst:.2f}"


def fitted(place: Place, trials: Sequence[Trial], start: Constants) -> Constants:
    """The constants that fit the trials best, from `start`."""
    timed = [trial for trial in trials if trial.ms]
    best = _best(timed)
    known = schema.as_json(start)
    for forms, parts in GROUPS:
        rows = [trial for trial in timed if trial.form.removeprefix(FILLED) in forms]
        paths = [path for path in _paths(known) if f"{'.'.join(map(str, path))}.".startswith(parts)]
        if rows:
            known = _moved(place, rows, [math.sqrt(best[row.problem] / (row.ms or 1.0)) for row in rows], known, paths)
    return schema.from_json(known)


def score(place: Place, trials: Iterable[Trial], constants: Constants) -> Score:
    """How good estimates and choices are."""
    timed = [trial for trial in trials if trial.ms]
    with selection.use(constants):
        guessed = [(place.microseconds(trial), 1e3 * (trial.ms or 1.0), trial.problem) for trial in timed]
    errors = [abs(math.log(guess / us)) for guess, us, _ in guessed]
    by_problem: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for guess, us, problem in guessed:
        by_problem.setdefault(problem, []).append((guess, us))
    regrets = [min(every)[1] / min(us for _, us in every) for every in by_problem.values() if len(every) > 1]
    mean = statistics.geometric_mean(regrets) if regrets else 1.0
    return Score(len(timed), math.expm1(statistics.median(errors)) if errors else 0.0, mean, max(regrets, default=1.0))


def halves(trials: Iterable[Trial]) -> tuple[list[Trial], list[Trial]]:
    """Those to fit to, and those of shapes that are left out."""
    trials = list(trials)
    kept = [trial for trial in trials if trial.index % HELD_OUT]
    return kept, [trial for trial in trials if not trial.index % HELD_OUT]


def _moved(place: Place, rows: list[Trial], weights: list[float], known: Any, paths: list[Path]) -> Any:
    """The constants with those at `paths` moved to where the estimates of the rows are best."""
    before = np.log([_at(known, path) for path in paths])
    times = np.log([1e3 * (row.ms or 1.0) for row in rows])

    def changed(logs: Any) -> Any:
        now = copy.deepcopy(known)
        for path, value in zip(paths, np.exp(logs), strict=True):
            _put(now, path, float(value))
        return now

    def residuals(logs: Any) -> Any:
        with selection.use(schema.from_json(changed(logs))):
            found = np.log([place.microseconds(row) for row in rows])
        off = (found - times) * weights
        # Soft for outliers, as scipy's soft_l1, but not of what holds the constants.
        soft = np.sign(off) * OUTLIER * np.sqrt(2 * (np.sqrt(1 + (off / OUTLIER) ** 2) - 1))
        return np.concatenate([soft, (logs - before) * OUTLIER / HELD])

    far = math.log(FURTHEST)
    found = least_squares(
        residuals, before, bounds=(before - far, before + far), max_nfev=EVALUATIONS, diff_step=0.01, x_scale=1.0
    )  # fmt: skip
    return changed(found.x)


def rounded(known: Any) -> Any:
    """Constants as JSON with the digits that were measured."""
    if isinstance(known, dict):
        return {name: rounded(value) for name, value in known.items()}
    if isinstance(known, list):
        return [rounded(value) for value in known]
    return float(f"{known:.{DIGITS}g}") if isinstance(known, float) else known


def _best(trials: Iterable[Trial]) -> dict[tuple[str, int, str], float]:
    found: dict[tuple[str, int, str], float] = {}
    for trial in trials:
        if trial.ms:
            found[trial.problem] = min(trial.ms, found.get(trial.problem, math.inf))
    return found


def _paths(known: Any, under: Path = ()) -> Iterable[Path]:
    """Where there are numbers that may be moved: not how many programs run together, and nothing that is 0."""
    if isinstance(known, int | float):
        if known > 0 and not (under[0] in schema.TILES and under[-1] == 0):
            yield under
        return
    for name, value in known.items() if isinstance(known, dict) else enumerate(known):
        yield from _paths(value, (*under, name))


def _at(known: Any, path: Path) -> float:
    for name in path:
        known = known[name]
    return float(known)


def _put(known: Any, path: Path, value: float) -> None:
    for name in path[:-1]:
        known = known[name]
    known[path[-1]] = value
