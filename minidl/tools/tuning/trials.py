"""Random shapes in all promising forms and tiles: the estimated and the measured times.

A problem is a matrix product, or one direction of a convolution. Its trials are the forms and tiles whose estimate is
at most FAR times the best one. The constants of the estimates are fitted to their times.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random
from typing import Any

import torch

from minidl.compilation.rehearsal import compile_ahead
from minidl.kernels import gemm
from minidl.kernels.conv import fft, forms, pixel_choice
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.problem import Problem
from minidl.kernels.conv.rewrites.fill import Fill
from minidl.kernels.gemm import choice
from minidl.kernels.gemm.operands import Operand
from minidl.kernels.gemm.plan import form_of
from minidl.runtime import launch
from minidl.runtime.cost_model import selection
from minidl.runtime.launch import Tile
from minidl.tools.bench.measure import Clock, in_turn, input_sets
from minidl.tools.tuning import drawn, drawn_conv
from minidl.tools.tuning.shapes import Gemm
from minidl.training.run_folder.progress import is_number

KINDS = "gemm", "conv", "gemm", "conv", "conv_transpose"  # of shapes, in the order of drawing
DTYPE = torch.float16
FAR = 4.0
MOST = 8  # trials of a problem
LONGEST = 2000.0  # us; longer trials add no information
ROUNDS = 3
FORMS = {"gemm": "tma", "gemm_pointer": "pointer", "copied": "copied"}  # of products, by form of the trial
# Families of tiles between which a form chooses.
CHOICES = {"gemm_pointer": "gemm_pointer", "pixel_tiled": "conv", "pixel_back": "conv", "boxed": "conv_box",
           "unfolded_grad_weight": "conv_unfolded_grad_weight"}  # fmt: skip
# Spectra are used on request only.
MODULES = {form.__name__.rpartition(".")[2]: form for form in forms.FORMS if form is not fft}
FILLED = "filled "  # prefix of a module's name: with padded channels


@dataclass(frozen=True)
class Trial:
    """form: a family of tiles of `gemm`, "copied", or a module of a convolution's form; ms: None where it failed."""

    of: str
    index: int
    what: str
    form: str
    tile: Tile | None = None
    split: int = 1
    ms: float | None = None

    @property
    def problem(self) -> tuple[str, int, str]:
        """The key of the problem, which is the same for trials that compute the same."""
        return self.of, self.index, self.what

    @property
    def name(self) -> str:
        """The name by which a convolution's form is requested."""
        return Fill.name if self.form.startswith(FILLED) else MODULES[self.form].NAME

    @property
    def is_valid(self) -> bool:
        """Whether shape and form exist, and the time is above 0 or None."""
        forms = FORMS if self.of == "gemm" else MODULES
        timed = self.ms is None or (is_number(self.ms) and self.ms > 0)
        placed = self.of in KINDS and type(self.index) is int and (self.tile is not None or self.of != "gemm")
        return placed and timed and self.form.removeprefix(FILLED) in forms

    def as_json(self) -> dict[str, Any]:
        tile = self.tile
        cut = tile and {"sizes": dict(tile.sizes), "warps": tile.num_warps, "stages": tile.num_stages}
        return {**self.__dict__, "tile": cut}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Trial:
        tile = row["tile"] and Tile(row["tile"]["sizes"], row["tile"]["warps"], row["tile"]["stages"])
        return Trial(**{**row, "tile": tile})


@dataclass(frozen=True)
class Setup:
    """The seed of the shapes, and the device that estimates are for."""

    seed: int
    target: str = field(default_factory=launch.target)
    processors: int = field(default_factory=launch.processors)

    def shape(self, of: str, index: int) -> Any:
        return _drawn(of, self.seed, index)

    def problem(self, trial: Trial) -> Problem:
        """Return the problem of a convolution in the form of the trial."""
        return _problem(trial.of, self.seed, trial.index, trial.what, trial.name, self.target, self.processors)

    def trials(self, of: str, index: int) -> list[Trial]:
        """Return at most MOST trials for each problem of a shape, drawn from the seed."""
        estimates = self._gemm_trials(index) if of == "gemm" else self._conv_trials(of, index)
        trials: list[Trial] = []
        for direction in dict.fromkeys(trial.what for trial, _ in estimates):
            timed = [(trial, microseconds) for trial, microseconds in estimates if trial.what == direction]
            best = min(microseconds for _, microseconds in timed)
            candidates = [trial for trial, microseconds in timed if microseconds <= FAR * best < FAR * LONGEST]
            trials += Random(f"{self.seed}:{of}:{index}:{direction}").sample(candidates, min(MOST, len(candidates)))
        return trials

    def microseconds(self, trial: Trial) -> float:
        """Return the estimate."""
        if trial.of != "gemm":
            problem = self.problem(trial)
            with self.under(trial):
                return plans.estimate(problem)
        product, costs, copies = self._product(trial.index), selection.of(self.target).gemm, 0.0
        family = "gemm_pointer" if trial.form == "gemm_pointer" else "gemm"
        shape = product.shape(trial.form == "gemm_pointer")
        if trial.form == "copied":
            copied = sum(x.rows * x.columns for x in (product.a, product.b) if not x.has_box(DTYPE))
            copies = costs.copy + 4 * copied / costs.copied
        assert trial.tile is not None
        return copies + choice.microseconds(family, shape, trial.tile, trial.split, self.processors, self.target)

    @contextlib.contextmanager
    def under(self, trial: Trial) -> Iterator[None]:
        """Return a context in which a problem runs in the form and tile of this trial."""
        with contextlib.ExitStack() as stack:
            if trial.of != "gemm":
                stack.enter_context(forms.among(MODULES[trial.form.removeprefix(FILLED)]))
            if trial.tile is not None:
                family = CHOICES.get(trial.form, "gemm")
                stack.enter_context(launch.force(**{family: trial.tile}))
            yield

    def _product(self, index: int) -> gemm.Problem:
        """Return the problem of a matrix product."""
        a, b = map(Operand.of, _operands(self.shape("gemm", index)))
        return gemm.Problem(a, b, DTYPE, "ieee", target=self.target, processors=self.processors)

    def _gemm_trials(self, index: int) -> list[tuple[Trial, float]]:
        product = self._product(index)
        M, N, K = product.sizes
        if form_of(product) in ("vector", "thin"):
            return []
        estimates = []
        for form in ("gemm" if product.boxed else "copied", "gemm_pointer"):
            family = "gemm_pointer" if form == "gemm_pointer" else "gemm"
            shape = product.shape(form == "gemm_pointer")
            for tile in launch.tiles_for(family, DTYPE, floor=16, precision="ieee", target_=self.target, M=M, N=N, K=K):
                for _, shares, _ in choice._choices(family, shape, tile, self.processors, None, tail=False):
                    trimmed = choice._trimmed(shape, tile, shares, self.processors)
                    trial = Trial("gemm", index, "", form, trimmed, shares)
                    estimates.append((trial, self.microseconds(trial)))
        return estimates

    def _conv_trials(self, of: str, index: int) -> list[tuple[Trial, float]]:
        estimates = []
        for what in drawn_conv.DIRECTIONS:
            for form in (*MODULES, *(FILLED + form for form in MODULES)):
                trial = Trial(of, index, what, form)
                tiles: Sequence[Tile | None] = (None,)
                problem = self.problem(trial)
                if form in CHOICES and not pixel_choice.flat(problem.C, problem.taps):
                    pixels = problem.images * math.prod(problem.written)
                    sizes = (problem.M, pixels) if form == "boxed" else (pixels, problem.M)
                    tiles = problem.tiles(CHOICES[form], M=sizes[0], N=sizes[1], K=problem.C & -problem.C)
                for tile in tiles:
                    trial = replace(trial, tile=tile)
                    with contextlib.suppress(plans.UnableError):
                        estimates.append((trial, self.microseconds(trial)))
        return estimates


@cache
def _drawn(of: str, seed: int, index: int) -> Any:
    return drawn.draw(of, seed, index)


@cache
def _problem(of: str, seed: int, index: int, what: str, name: str, target: str, processors: int) -> Problem:
    problem = drawn_conv.problem(_drawn(of, seed, index), what, DTYPE, target, processors)
    return problem._replace(form=name)


def _operands(shape: Gemm, device: str = "meta") -> tuple[torch.Tensor, torch.Tensor]:
    M, N, K, kind, _ = shape
    make = torch.empty if device == "meta" else torch.randn
    a = make(K, M, device=device, dtype=DTYPE).t() if kind == "A^TB" else make(M, K, device=device, dtype=DTYPE)
    return a, make(N, K, device=device, dtype=DTYPE).t() if kind == "AB^T" else make(K, N, device=device, dtype=DTYPE)


def measured(setup: Setup, trials: Sequence[Trial], device: str, make_clock: Callable[..., Clock]) -> list[Trial]:
    """Return the trials of a shape with their times; all use the same inputs."""
    calls = _calls(setup, trials, device)
    clocks: dict[int, Clock] = {}
    for number, trial in enumerate(trials):
        with contextlib.suppress(Exception), setup.under(trial):  # a trial that fails has no time
            clocks[number] = make_clock(calls(trial), False)
    times = {number: statistics.median(values) for number, values in in_turn(clocks, ROUNDS).items()}
    return [replace(trial, ms=times.get(number)) for number, trial in enumerate(trials)]


def _calls(setup: Setup, trials: Sequence[Trial], device: str) -> Callable[[Trial], list[Callable[[], Any]]]:
    of, index, _ = trials[0].problem
    shape = setup.shape(of, index)
    if of != "gemm":
        layer = drawn_conv.Layer(shape, DTYPE, device, f"{setup.seed}:{of}:{index}")
        return lambda trial: layer.ours(trial.what, trial.name)
    sets = input_sets(float(DTYPE.itemsize) * sum(shape.elements))
    pairs = [_operands(shape, device) for _ in range(sets)]
    return lambda trial: [partial(gemm.gemm, a, b, form=FORMS[trial.form], split=trial.split) for a, b in pairs]


def rehearse(setup: Setup, trials: Sequence[Trial], device: str) -> None:
    """Call each trial once, to compile its kernels ahead."""
    by_shape: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        by_shape.setdefault(trial.problem[:2], []).append(trial)
    for same_shape in by_shape.values():
        calls = _calls(setup, same_shape, device)
        for trial in same_shape:
            with contextlib.suppress(Exception), setup.under(trial):
                calls(trial)[0]()


def shapes(seen: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield shapes without end, except those in `seen`."""
    number = 0
    while True:
        turn, which = divmod(number, len(KINDS))
        of = KINDS[which]
        index = turn * KINDS.count(of) + KINDS[:which].count(of)
        if (of, index) not in seen:
            yield of, index
        number += 1


def run(
    setup: Setup, rows: list[Trial], seconds: float, device: str, make_clock: Callable[..., Clock],
    report: Callable[[float, str], None], keep: Callable[[], None], together: int = 12,
) -> None:  # fmt: skip
    """Measure more shapes into `rows` for `seconds`, calling `keep` after each; the kernels of `together` shapes are
    compiled at once."""
    started = time.monotonic()
    endless = shapes({row.problem[:2] for row in rows})
    while time.monotonic() < started + seconds:
        batch = [setup.trials(*next(endless)) for _ in range(together)]
        if device == "cuda":
            report(time.monotonic() - started, f"{len(rows)} times, compiling")
            with contextlib.suppress(Exception):  # a failure to compile shows up when the trial is measured
                compile_ahead(partial(rehearse, setup, [trial for trials in batch for trial in trials], device))
        for trials in batch:
            if trials and time.monotonic() < started + seconds:
                rows += measured(setup, trials, device, make_clock)
                keep()
                report(time.monotonic() - started, f"{len(rows)} times")
            if device == "cuda":
                torch.cuda.empty_cache()
