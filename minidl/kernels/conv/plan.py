"""Plans: which form computes a convolution, and everything about its launches that does not depend on addresses.

`plan` compares all `forms` and `rewrites`, once per problem, and takes the cheapest. A form has kernels of its own; a
rewrite runs plans of other problems.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from minidl.kernels import plan as plans
from minidl.kernels.conv import costs, forms, phase_weights
from minidl.kernels.conv.forms import Form, abilities
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import (
    DIRECTION_NAMES,
    GRAD_WEIGHT,
    PHASE,
    Operands,
    Problem,
    Tensors,
    Unsupported,
)
from minidl.kernels.conv.rewrites import Conversion, Rewrite
from minidl.kernels.conv.rewrites.rewrite import Result
from minidl.runtime import launch

NO_PAIR = Unsupported("a ConcatPair, which this form does not read")
_logger = logging.getLogger("minidl")


class UnableError(ValueError):
    """The requested form does not support the shape. The message, built on demand, lists the forms that do."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        able = [name for name in forms.names() if cheapest(self.problem._replace(form=name)) is not None]
        return f"conv2d: the {self.problem.form} form does not support this shape; use one of: {', '.join(able)}"


@dataclass(frozen=True)
class Plan(plans.Plan):
    """How to run a problem, with its estimated time."""

    problem: Problem
    microseconds: float

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Return the name of the form or rewrite, as in `form=`."""

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """Return the chain of rewrites and the form that ends it."""

    @abc.abstractmethod
    def prepare(self) -> Plan:
        """Return the plan with all launches prepared."""

    @abc.abstractmethod
    def run(self, operands: Operands) -> Result:
        """Return (y, z), channels-last; z is None unless requested. The plan is prepared."""


@dataclass(frozen=True)
class FormPlan(Plan):
    """A plan with the kernels of one form.

    reorder  copies the weights of a phase into the order that the form reads; None if they are read in place
    bands    number of bands whose statistics are returned as z
    """

    form: Form
    prepared: Any = None
    reorder: Copy | None = None
    bands: int = 0

    @property
    def name(self) -> str:
        return str(self.form.NAME)

    @property
    def label(self) -> str:
        return form_label(self.form)

    def prepare(self) -> Plan:
        problem, form = self.problem, self.form
        can = abilities(form)
        in_place = problem.in_place and can.in_place and not can.reorders(problem, self.microseconds)
        if problem.direction == PHASE and not in_place:
            reorder = phase_weights.prepare(problem, problem.at.down, problem.at.across)
            return dataclasses.replace(self, reorder=reorder, prepared=form.prepare(problem._replace(strides=())))
        return dataclasses.replace(self, prepared=form.prepare(problem))

    def run(self, operands: Operands) -> Result:
        x, w, bias, scale, added = operands
        problem = self.problem
        if problem.direction == GRAD_WEIGHT:
            return self.form.run(self.prepared, Tensors(x, w)), None
        y = torch.empty(problem.shape, dtype=problem.result, device=x.device)
        z = torch.empty_like(y) if problem.preactivation else None
        if self.bands:
            z = torch.empty(self.bands, 2, y.shape[-1], dtype=launch.acc_torch(y.dtype), device=y.device)
        self.write(Tensors(x, w, y, bias, scale, added if problem.added else z))
        return y, z

    def write(self, tensors: Tensors) -> None:
        """Write y, and z if there is one; of a phase, the outputs that it computes."""
        weights = tensors.w if self.reorder is None else self.reorder.run(tensors.w)
        self.form.run(self.prepared, tensors._replace(w=weights))


@dataclass(frozen=True)
class RewritePlan(Plan):
    """A plan that runs the plans of other problems.

    conversion  converts operands and results, once prepared
    """

    rewrite: Rewrite
    parts: tuple[Plan, ...]
    conversion: Conversion | None = None

    @property
    def name(self) -> str:
        return self.rewrite.name or "+".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def label(self) -> str:
        return self.rewrite.label([part.label for part in self.parts])

    def prepare(self) -> Plan:
        conversion = self.rewrite.prepare(self.problem, [part.problem for part in self.parts])
        parts = tuple(part.prepare() for part in self.parts)
        return dataclasses.replace(self, parts=parts, conversion=conversion)

    def run(self, operands: Operands) -> Result:
        assert self.conversion is not None
        return self.conversion.run(self.problem, self.parts, operands)


@launch.cached
def plan(problem: Problem) -> Plan:
    """Return the cheapest plan, of the requested form or of all forms.

    For a `ConcatPair` return the cheapest plan that reads it in place, unless concatenating first is estimated to be
    faster; the plan's problem then has no `concat_pair`. Raises UnableError if the requested form does not support the
    problem.
    """
    best = cheapest(problem._replace(statistics=False, concat_pair=False))
    if best is None:
        raise UnableError(problem)
    if os.environ.get("MINIDL_EXPLAIN") == "1":
        # Without logging configured, only warnings are shown.
        _logger.warning("%s", explain(problem))
    if problem.concat_pair:
        best = _reading_in_place(problem, best)
    if problem.statistics:
        best = _with_statistics(problem._replace(concat_pair=best.problem.concat_pair), best)
    return best.prepare()


def _reading_in_place(problem: Problem, joined: Plan) -> Plan:
    """Return the plan that reads a `ConcatPair` in place, or `joined` if that and concatenating first is faster."""
    in_place = cheapest(problem._replace(statistics=False))
    if in_place is None or in_place.microseconds > joined.microseconds + _join_time(problem):
        return joined
    return in_place


def _with_statistics(problem: Problem, best: Plan) -> Plan:
    """Return the plan with statistics of bands as z, if its form returns them."""
    if isinstance(best, FormPlan) and (bands := abilities(best.form).statistics_bands(problem)):
        return dataclasses.replace(best, problem=problem, bands=bands)
    return best


def _join_time(problem: Problem) -> float:
    return costs.join_time(problem._replace(N=problem.images))


def estimate(problem: Problem) -> float:
    """Return the microseconds of the cheapest plan. Raises UnableError if there is none."""
    best = cheapest(problem)
    if best is None:
        raise UnableError(problem)
    return best.microseconds


def explain(problem: Problem) -> str:
    """Return a table of all forms for a problem: the estimate or why a form is unable, and which one is taken.

    Raises ValueError for an invalid problem.
    """
    if (
        problem.direction not in DIRECTION_NAMES
        or not problem.dtype.is_floating_point
        or problem.target not in launch.TARGETS
    ):
        raise ValueError(
            f"explain: got {problem.direction!r} of {problem.dtype} on {problem.target!r}, expected one of "
            f"{', '.join(DIRECTION_NAMES)} of a floating-point dtype on one of {', '.join(launch.TARGETS)}"
        )
    if min(problem.N, problem.C, problem.M, problem.processors) < 1:
        raise ValueError(f"explain: N, C, M and processors must be at least 1, got {problem}")
    results = candidates(problem)
    if problem.concat_pair and (joined := cheapest(problem._replace(concat_pair=False))) is not None:
        time = joined.microseconds + _join_time(problem)
        results.append((dataclasses.replace(joined, microseconds=time), f"joined, {joined.label}"))
    best = min((candidate for candidate, _ in results if candidate is not None), key=_microseconds, default=None)
    lines = [str(problem)]
    for candidate, label in results:
        estimated = f"{label:<34}{candidate.microseconds:>12.1f} us" if candidate is not None else label
        lines.append(f"  {estimated}{'  taken' if candidate is best and candidate is not None else ''}")
    return "\n".join(lines)


def _microseconds(candidate: Plan) -> float:
    return candidate.microseconds


def candidates(problem: Problem) -> list[tuple[Plan | None, str]]:
    """Return (plan, label) of every form and rewrite of the problem's direction and requested form; a problem
    with pitches or a concat pair has no named rewrites.

    Plans have an estimate but no prepared launches; if a form is unable the plan is None and the label says why.
    """
    results: list[tuple[Plan | None, str]] = []
    counted = problem._replace(N=problem.images)
    for form in forms.FORMS:
        if problem.direction not in form.DIRECTIONS or problem.form not in (None, form.NAME):
            continue
        can = abilities(form)
        able = can.covers(problem) and form.able(problem)
        if able and problem.concat_pair:
            able = bool(can.reads_concat_pair(problem)) or NO_PAIR
        if able:
            interpreted = problem.target == "interpreted" and form.NAME in costs.INTERPRETED
            time = costs.interpreted(counted, form.NAME, can.programs) if interpreted else form.estimate(counted)
            time += costs.sum_time(counted)
            results.append((FormPlan(problem, time, form), form_label(form)))
        else:
            results.append((None, f"{form_label(form):<34} unable: {able}"))
    for rewrite in forms.REWRITES:
        if not rewrite.name or (problem.form in (None, rewrite.name) and not (problem.pitches or problem.concat_pair)):
            results += _by_rewrite(problem, rewrite)
    return results


def cheapest(problem: Problem) -> Plan | None:
    """Return the cheapest plan without prepared launches; None if no form is able."""
    return min((each for each, _ in candidates(problem) if each is not None), key=_microseconds, default=None)


def _by_rewrite(problem: Problem, rewrite: Rewrite) -> list[tuple[Plan | None, str]]:
    """Return the candidate that computes a problem by a rewrite, or None and the reason; nothing for unnamed ones."""
    others = rewrite.others(problem)
    parts = [] if isinstance(others, Unsupported) else [cheapest(other) for other in others]
    best = tuple(part for part in parts if part is not None)
    if isinstance(others, Unsupported) or len(best) < len(others):
        reason = others if isinstance(others, Unsupported) else "no form for the rewritten problem"
        return [(None, f"{rewrite.name:<34} unable: {reason}")] if rewrite.name else []
    counted = [one._replace(N=problem.images) for one in (problem, *others)]
    time = rewrite.cost(counted[0], counted[1:], [part.microseconds for part in best])
    result = RewritePlan(problem, time, rewrite, best)
    return [(result, result.label)]


def form_label(form: Form) -> str:
    """Return the name of a form and of its module."""
    return f"{form.NAME}: {form.__name__.rpartition('.')[2]}"
