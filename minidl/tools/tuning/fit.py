"""The fit of the estimates' constants to the times of trials.

A group has the constants that the estimates of some forms use. They are fitted together, by least squares of
log(estimate / time), in which trials far slower than the best of their problem and outliers have less weight. Constants
that no trial depends on keep their values. Groups are fitted in order, because some estimates use those of other forms.
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
from minidl.tools.tuning.trials import FILLED, Setup, Trial

Path = tuple[str | int, ...]
# A change of a constant by PRIOR costs as much as an error of OUTLIER in a trial; larger errors have less weight. No
# constant changes by more than the factor FURTHEST. With log 2 as PRIOR, 331 trials changed 44 constants by more than
# 5 %, and the regret of the held-out shapes rose from 1.041 to 1.078.
PRIOR, OUTLIER, FURTHEST = math.log(1.15), 0.2, 4.0
HELD_OUT = 5  # one shape in this many is held out for validation
EVALUATIONS = 8
DIGITS = 4

# Forms, and prefixes of the constants that are fitted to their trials.
GROUPS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("gemm", "copied"), ("gemm.gemm.", "gemm.cop")),
    (("gemm_pointer",), ("gemm.gemm_pointer.",)),
    (
        ("pixel_tiled", "pixel_back", "boxed", "paired_box", "batch_tiled", "batch_back"),
        ("tiles.pixel", "tiles.run", "tiles.box", "steps.launch", "steps.edges", "steps.alone", "steps.per_block",
         "steps.flat.", "steps.strided", "steps.waited", "steps.pages", "steps.narrow.8", "steps.narrow.4",
         "steps.narrow.2", "steps.shares", "steps.cached", "steps.uncached", "steps.rounds.pixel",
         "steps.rounds.flat", "steps.rounds.b", "reached"),
    ),
    (
        ("pixel_grad_weight", "batch_grad_weight"),
        ("tiles.weight ", "steps.flat_weight", "steps.patches", "steps.short.", "steps.rounds.weight",
         "steps.rounds.even"),
    ),
    (("unfolded_grad_weight",), ("tiles.weight unfolded",)),
    (("depthwise", "depthwise_grad_weight"), ("channels.",)),
)  # fmt: skip


class Score(NamedTuple):
    """error: median relative error of the estimates; regret, worst: geometric mean and maximum over problems of the
    time of the trial with the least estimate, divided by the least time."""

    trials: int
    error: float
    regret: float
    worst: float

    def __str__(self) -> str:
        return f"{self.error:.1%} off in the median, regret {self.regret:.3f}, at worst {self.worst:.2f}"


def fitted(setup: Setup, trials: Sequence[Trial], start: Constants) -> Constants:
    """Return the constants that fit the trials best, starting from `start`."""
    timed = [trial for trial in trials if trial.ms]
    best = _best(timed)
    constants = schema.as_json(start)
    for forms, parts in GROUPS:
        rows = [trial for trial in timed if trial.form.removeprefix(FILLED) in forms]
        paths = [path for path in _paths(constants) if f"{'.'.join(map(str, path))}.".startswith(parts)]
        if rows:
            weights = [math.sqrt(best[row.problem] / (row.ms or 1.0)) for row in rows]
            constants = _fit_group(setup, rows, weights, constants, paths)
    return schema.from_json(constants)


def score(setup: Setup, trials: Iterable[Trial], constants: Constants) -> Score:
    """Return how good the estimates and the choices by them are."""
    timed = [trial for trial in trials if trial.ms]
    with selection.use(constants):
        estimates = [(setup.microseconds(trial), 1e3 * (trial.ms or 1.0), trial.problem) for trial in timed]
    errors = [abs(math.log(estimate / us)) for estimate, us, _ in estimates]
    by_problem: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for estimate, us, problem in estimates:
        by_problem.setdefault(problem, []).append((estimate, us))
    regrets = [min(choices)[1] / min(us for _, us in choices) for choices in by_problem.values() if len(choices) > 1]
    mean = statistics.geometric_mean(regrets) if regrets else 1.0
    return Score(len(timed), math.expm1(statistics.median(errors)) if errors else 0.0, mean, max(regrets, default=1.0))


def halves(trials: Iterable[Trial]) -> tuple[list[Trial], list[Trial]]:
    """Return the trials for the fit, and those of the held-out shapes."""
    trials = list(trials)
    fitting = [trial for trial in trials if trial.index % HELD_OUT]
    return fitting, [trial for trial in trials if not trial.index % HELD_OUT]


def _fit_group(setup: Setup, rows: list[Trial], weights: list[float], constants: Any, paths: list[Path]) -> Any:
    """Return the constants with those at `paths` fitted to the rows."""
    start = np.log([_get(constants, path) for path in paths])
    times = np.log([1e3 * (row.ms or 1.0) for row in rows])

    def with_logs(logs: Any) -> Any:
        changed = copy.deepcopy(constants)
        for path, value in zip(paths, np.exp(logs), strict=True):
            _set(changed, path, float(value))
        return changed

    def residuals(logs: Any) -> Any:
        with selection.use(schema.from_json(with_logs(logs))):
            estimates = np.log([setup.microseconds(row) for row in rows])
        errors = (estimates - times) * weights
        # As scipy's soft_l1, for the trials but not for the prior.
        soft = np.sign(errors) * OUTLIER * np.sqrt(2 * (np.sqrt(1 + (errors / OUTLIER) ** 2) - 1))
        return np.concatenate([soft, (logs - start) * OUTLIER / PRIOR])

    limit = math.log(FURTHEST)
    result = least_squares(
        residuals, start, bounds=(start - limit, start + limit), max_nfev=EVALUATIONS, diff_step=0.01, x_scale=1.0
    )  # fmt: skip
    return with_logs(result.x)


def rounded(constants: Any) -> Any:
    """Return constants for JSON, rounded to significant digits."""
    if isinstance(constants, dict):
        return {name: rounded(value) for name, value in constants.items()}
    if isinstance(constants, list):
        return [rounded(value) for value in constants]
    return float(f"{constants:.{DIGITS}g}") if isinstance(constants, float) else constants


def _best(trials: Iterable[Trial]) -> dict[tuple[str, int, str], float]:
    best: dict[tuple[str, int, str], float] = {}
    for trial in trials:
        if trial.ms:
            best[trial.problem] = min(trial.ms, best.get(trial.problem, math.inf))
    return best


def _paths(constants: Any, prefix: Path = ()) -> Iterable[Path]:
    """Yield the paths of numbers that may change: not those of programs that run together, and none that is 0."""
    if isinstance(constants, int | float):
        if constants > 0 and not (prefix[0] == schema.TILES and prefix[-1] == 0):
            yield prefix
        return
    for name, value in constants.items() if isinstance(constants, dict) else enumerate(constants):
        yield from _paths(value, (*prefix, name))


def _get(constants: Any, path: Path) -> float:
    for name in path:
        constants = constants[name]
    return float(constants)


def _set(constants: Any, path: Path, value: float) -> None:
    for name in path[:-1]:
        constants = constants[name]
    constants[path[-1]] = value
