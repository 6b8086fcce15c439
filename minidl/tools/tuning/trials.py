"""Drawn shapes in every form and tile that may suit them: what each is estimated at, and how long it takes.

A problem is a matrix product, or one direction of a convolution. Its trials are the forms and tiles that are estimated
to take no more than FAR times as long as the best; they are the rows that the constants of estimates are fitted to.
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
from minidl.kernels.conv import fft, filled, pixel_choice
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.problem import Problem
from minidl.kernels.gemm import choice
from minidl.runtime import launch
from minidl.runtime.cost_model import selection
from minidl.runtime.launch import Tile
from minidl.tools.bench import drawn, drawn_conv
from minidl.tools.bench.measure import Clock, in_turn, input_sets
from minidl.tools.bench.shapes import Gemm
from minidl.training.run_folder.progress import is_number

KINDS = "gemm", "conv", "gemm", "conv", "conv_transpose"  # of shapes, in the order in which they are drawn
DTYPE = torch.float16
FAR = 4.0
MOST = 8  # trials of a problem
LONGEST = 2000.0  # us; more repeats nothing that shorter ones do not say
ROUNDS = 3
FORMS = {"gemm": "tma", "gemm_pointer": "pointer", "copied": "copied"}  # of products, by what is tried
# Families of tiles between which a form chooses.
CHOICES = {"gemm_pointer": "gemm_pointer", "pixel_tiled": "conv", "pixel_back": "conv", "boxed": "conv_box",
           "unfolded_grad_weight": "conv_unfolded_grad_weight"}  # fmt: skip
# Spectra are used on request only.
MODULES = {form.__name__.rpartition(".")[2]: form for form in plans.FORMS if form is not fft}
FILLED = "filled "  # before a module's name: with channels filled up


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
        """Trials of one problem do the same."""
        return self.of, self.index, self.what

    @property
    def name(self) -> str:
        """What the form of a convolution is asked for by."""
        return filled.NAME if self.form.startswith(FILLED) else MODULES[self.form].NAME

    @property
    def known(self) -> bool:
        """Whether it is of a shape and a form that there are, with a time above 0 or none."""
        forms = FORMS if self.of == "gemm" else MODULES
        timed = self.ms is None or (is_number(self.ms) and self.ms > 0)
        placed = self.of in KINDS and type(self.index) is int and (self.tile is not None or self.of != "gemm")
        return placed and timed and self.form.removeprefix(FILLED) in forms

    def as_json(self) -> dict[str, Any]:
        tile = self.tile
        cut = tile and {"sizes": dict(tile.sizes), "warps": tile.num_warps, "stages": tile.num_stages}
        return {**self.__dict__, "tile": cut}

    @staticmethod
    def made(row: dict[str, Any]) -> Trial:
        tile = row["tile"] and Tile(row["tile"]["sizes"], row["tile"]["warps"], row["tile"]["stages"])
        return Trial(**{**row, "tile": tile})


@dataclass(frozen=True)
class Place:
    """What shapes are drawn from, and the device that estimates are for."""

    seed: int
    target: str = field(default_factory=launch.target)
    processors: int = field(default_factory=launch.processors)

    def shape(self, of: str, index: int) -> Any:
        return _drawn(of, self.seed, index)

    def problem(self, trial: Trial) -> Problem:
        """A convolution's, asked for in the form that is tried."""
        return _problem(trial.of, self.seed, trial.index, trial.what, trial.name, self.target, self.processors)

    def trials(self, of: str, index: int) -> list[Trial]:
        """Of a shape, as many as MOST of each of its problems, drawn from the seed."""
        found = self._of_gemm(index) if of == "gemm" else self._of_conv(of, index)
        kept: list[Trial] = []
        for what in dict.fromkeys(trial.what for trial, _ in found):
            every = [(trial, time) for trial, time in found if trial.what == what]
            best = min(time for _, time in every)
            near = [trial for trial, time in every if time <= FAR * best < FAR * LONGEST]
            kept += Random(f"{self.seed}:{of}:{index}:{what}").sample(near, min(MOST, len(near)))
        return kept

    def microseconds(self, trial: Trial) -> float:
        """The estimate."""
        if trial.of != "gemm":
            problem = self.problem(trial)
            with self.under(trial):
                return plans.estimate(problem)
        a, b = _operands(self.shape("gemm", trial.index))
        family, costs = "gemm_pointer" if trial.form == "gemm_pointer" else "gemm", selection.of(self.target).gemm
        shape, copies = gemm._shape(a, b, trial.form == "gemm_pointer"), 0.0
        if trial.form == "copied":
            copies = costs.copy + 4 * sum(x.numel() for x in (a, b) if not gemm._has_box(x)) / costs.copied
        assert trial.tile is not None
        return copies + choice.microseconds(family, shape, trial.tile, trial.split, self.processors, self.target)

    @contextlib.contextmanager
    def under(self, trial: Trial) -> Iterator[None]:
        """A context in which a problem is done as this trial has it."""
        with contextlib.ExitStack() as stack:
            if trial.of != "gemm":
                stack.enter_context(plans.among(MODULES[trial.form.removeprefix(FILLED)]))
            if trial.tile is not None:
                family = CHOICES.get(trial.form, "gemm")
                stack.enter_context(launch.force(**{family: trial.tile}))
            yield

    def _of_gemm(self, index: int) -> list[tuple[Trial, float]]:
        a, b = _operands(self.shape("gemm", index))
        (M, K), N = a.shape, b.shape[1]
        if gemm._form(a, b, "ieee", None) in ("vector", "thin"):
            return []
        boxed = gemm._has_box(a) and gemm._has_box(b)
        found = []
        for form in ("gemm" if boxed else "copied", "gemm_pointer"):
            family = "gemm_pointer" if form == "gemm_pointer" else "gemm"
            shape = gemm._shape(a, b, form == "gemm_pointer")
            for tile in launch.tiles_for(family, DTYPE, floor=16, precision="ieee", target_=self.target, M=M, N=N, K=K):
                for _, shares, _ in choice._choices(family, shape, tile, self.processors, None, tail=False):
                    settled = choice._trimmed(shape, tile, shares, self.processors)
                    trial = Trial("gemm", index, "", form, settled, shares)
                    found.append((trial, self.microseconds(trial)))
        return found

    def _of_conv(self, of: str, index: int) -> list[tuple[Trial, float]]:
        found = []
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
                        found.append((trial, self.microseconds(trial)))
        return found


@cache
def _drawn(of: str, seed: int, index: int) -> Any:
    return drawn.draw(of, seed, index)


@cache
def _problem(of: str, seed: int, index: int, what: str, name: str, target: str, processors: int) -> Problem:
    made = drawn_conv.problem(_drawn(of, seed, index), what, DTYPE, target, processors)
    return made._replace(form=name)


def _operands(shape: Gemm, device: str = "meta") -> tuple[torch.Tensor, torch.Tensor]:
    M, N, K, kind, _ = shape
    make = torch.empty if device == "meta" else torch.randn
    a = make(K, M, device=device, dtype=DTYPE).t() if kind == "A^TB" else make(M, K, device=device, dtype=DTYPE)
    return a, make(N, K, device=device, dtype=DTYPE).t() if kind == "AB^T" else make(K, N, device=device, dtype=DTYPE)


def measured(place: Place, trials: Sequence[Trial], device: str, make_clock: Callable[..., Clock]) -> list[Trial]:
    """The trials of a shape with their times; its inputs are made once."""
    calls = _calls(place, trials, device)
    clocks: dict[int, Clock] = {}
    for number, trial in enumerate(trials):
        with contextlib.suppress(Exception), place.under(trial):  # what fails is a finding: it has no time
            clocks[number] = make_clock(calls(trial), False)
    times = {number: statistics.median(values) for number, values in in_turn(clocks, ROUNDS).items()}
    return [replace(trial, ms=times.get(number)) for number, trial in enumerate(trials)]


def _calls(place: Place, trials: Sequence[Trial], device: str) -> Callable[[Trial], list[Callable[[], Any]]]:
    of, index, _ = trials[0].problem
    shape = place.shape(of, index)
    if of != "gemm":
        layer = drawn_conv.Layer(shape, DTYPE, device, f"{place.seed}:{of}:{index}")
        return lambda trial: layer.ours(trial.what, trial.name)
    sets = input_sets(float(DTYPE.itemsize) * sum(shape.elements))
    pairs = [_operands(shape, device) for _ in range(sets)]
    return lambda trial: [partial(gemm.gemm, a, b, form=FORMS[trial.form], split=trial.split) for a, b in pairs]


def rehearse(place: Place, trials: Sequence[Trial], device: str) -> None:
    """Call each once: to be compiled ahead."""
    by_shape: dict[tuple[str, int], list[Trial]] = {}
    for trial in trials:
        by_shape.setdefault(trial.problem[:2], []).append(trial)
    for every in by_shape.values():
        calls = _calls(place, every, device)
        for trial in every:
            with contextlib.suppress(Exception), place.under(trial):
                calls(trial)[0]()


def shapes(seen: set[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Shapes without end, but for those that were seen."""
    number = 0
    while True:
        turn, which = divmod(number, len(KINDS))
        of = KINDS[which]
        index = turn * KINDS.count(of) + KINDS[:which].count(of)
        if (of, index) not in seen:
            yield of, index
        number += 1


def run(
    place: Place, rows: list[Trial], seconds: float, device: str, make_clock: Callable[..., Clock],
    told: Callable[[float, str], None], keep: Callable[[], None], together: int = 12,
) -> None:  # fmt: skip
    """Measure more shapes into `rows` for so many seconds, calling `keep` after each; kernels of `together` shapes are
    compiled at once."""
    started = time.monotonic()
    endless = shapes({row.problem[:2] for row in rows})
    while time.monotonic() < started + seconds:
        batch = [place.trials(*next(endless)) for _ in range(together)]
        if device == "cuda":
            told(time.monotonic() - started, f"{len(rows)} times, compiling")
            with contextlib.suppress(Exception):  # what cannot be compiled is told where it is measured
                compile_ahead(partial(rehearse, place, [trial for trials in batch for trial in trials], device))
        for trials in batch:
            if trials and time.monotonic() < started + seconds:
                rows += measured(place, trials, device, make_clock)
                keep()
                told(time.monotonic() - started, f"{len(rows)} times")
            if device == "cuda":
                torch.cuda.empty_cache()
