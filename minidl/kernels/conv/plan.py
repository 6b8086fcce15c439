"""Plans: which form computes a convolution, and everything about its launches that does not depend on addresses.

`plan` compares all `forms`, once per problem, and takes the cheapest. A problem may also be split into parts with
separate plans: one per backward phase, or a convolution followed by a pool or a sum.
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch

from minidl.kernels import elementwise
from minidl.kernels import pool as pools
from minidl.kernels.conv import costs, filled, forms, phase_weights, pixel_choice, pixel_tiled
from minidl.kernels.conv.forms import Rewrite
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import (
    DIRECTION_NAMES,
    GRAD_WEIGHT,
    PHASE,
    TRANSPOSED,
    Problem,
    Tensors,
    Unsupported,
    backward_phases,
)
from minidl.runtime import launch

# us to launch each phase after the first. 16x16 stride 8, 21->21: 251 us in eight launches, 221 in one.
PHASE_LAUNCH = 1.5
# Factor for many phases, which all read x. 8x8 stride 4, 594->472, 29 images of 20x20: 1.69 ms, in one launch 1.26.
MANY_PHASES = 1.2

_logger = logging.getLogger("minidl")


class UnableError(ValueError):
    """The requested form does not support the shape. The message, built on demand, lists the forms that do."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        able = [name for name in forms.names() if cheapest(self.problem._replace(form=name)) is not None]
        return f"conv2d: the {self.problem.form} form does not support this shape; use one of: {', '.join(able)}"


class Plan(NamedTuple):
    """How to run a problem: one form with its prepared launches, or parts followed by an optional pool or sum.

    shape    of the result, channels-last
    reorder  copies the weights of a part into the order its form reads; None if they are read in place
    rewrite  converts between this problem and its one part, of another shape (`filled`, `columns`, ...); else None
    bands    number of bands whose statistics are returned as z
    """

    problem: Problem
    name: str
    microseconds: float
    shape: tuple[int, ...]
    form: Any = None
    prepared: Any = None
    parts: tuple[Plan, ...] = ()
    reorder: Copy | None = None
    rewrite: forms.Rewriting | None = None
    bands: int = 0

    def run(
        self, x: Any, w: torch.Tensor, bias: Any = None, scale: Any = None, added: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """Return (y, z), channels-last, for x, w, bias and scale as in `Tensors`; z is None unless requested."""
        if self.rewrite is not None:
            return self.rewrite.run(self.problem, self.parts[0], x, w, bias, scale, added)
        if self.parts and self.problem.pool:
            return self._pooled(x, w, bias, scale), None
        if self.parts and self.problem.added:
            y, _ = self.parts[0].run(x, w, bias, scale)
            return elementwise.add_act(y, added, self.problem.act), None
        if self.problem.direction == GRAD_WEIGHT:
            return self.form.run(self.prepared, Tensors(x, w)), None
        y = torch.empty(self.shape, dtype=self.problem.result, device=x.device)
        z = torch.empty_like(y) if self.problem.preactivation else None
        if self.bands:
            z = torch.empty(self.bands, 2, y.shape[-1], dtype=launch.acc_torch(y.dtype), device=y.device)
        tensors = Tensors(x, w, y, bias, scale, added if self.problem.added else z)
        if self.form is not None:
            self.form.run(self.prepared, tensors)
        for part in self.parts:
            weights = w if part.reorder is None else part.reorder.of(w)
            part.form.run(part.prepared, tensors._replace(w=weights))
        return y, z

    def _pooled(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        (part,) = self.parts
        y = part.run(*tensors)[0].permute(0, 3, 1, 2)
        windows = pools.windows("conv2d", part.shape[1:3], 2)
        pooled = pools.max_pool2d(y, windows)[0] if self.problem.pool == "max" else pools.avg_pool2d(y, windows)
        return pooled.permute(0, 2, 3, 1)


def takes(problem: Problem) -> bool:
    """Return whether any form supports a problem."""
    return cheapest(problem) is not None


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
        in_place = cheapest(problem._replace(statistics=False))
        if in_place is not None and in_place.microseconds <= best.microseconds + _join_time(problem):
            best = in_place
        problem = problem._replace(concat_pair=best.problem.concat_pair)
    if problem.statistics and hasattr(best.form, "statistics_bands") and (bands := best.form.statistics_bands(problem)):
        best = best._replace(problem=problem, bands=bands)
    return _prepared(best)


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
        results.append((joined._replace(microseconds=time), f"joined, {_plan_label(joined)}"))
    best = min((candidate for candidate, _ in results if candidate is not None), key=_microseconds, default=None)
    lines = [str(problem)]
    for candidate, label in results:
        estimated = f"{label:<34}{candidate.microseconds:>12.1f} us" if candidate is not None else label
        lines.append(f"  {estimated}{'  taken' if candidate is best and candidate is not None else ''}")
    return "\n".join(lines)


def _microseconds(candidate: Plan) -> float:
    return candidate.microseconds


def candidates(problem: Problem) -> list[tuple[Plan | None, str]]:
    """Return (plan, label) of every form, of the problem in parts and of its rewrites.

    Plans have an estimate but no prepared launches; if a form is unable the plan is None and the label says why."""
    results: list[tuple[Plan | None, str]] = []
    counted = problem._replace(N=problem.images)
    for form in forms.FORMS:
        label = _label(form)
        if problem.direction not in form.DIRECTIONS or problem.form not in (None, form.NAME):
            continue
        if problem.dtype.itemsize == 1 and not getattr(form, "FLOAT8", False):
            continue
        if problem.added and not _adds(form, problem):
            continue
        if problem.pitches and not getattr(form, "OVERLAPS", False):
            continue
        able = form.able(problem) and _reads(form, problem)
        if not able:
            results.append((None, f"{label:<34} unable: {able}"))
            continue
        time = costs.interpreted(counted, form) if problem.target == "interpreted" else form.estimate(counted)
        time += costs.sum_time(counted)
        results.append((Plan(problem, form.NAME, time, problem.shape, form), label))
    parts = _in_parts(problem)
    if parts is not None:
        results.append((parts, _plan_label(parts)))
    if not problem.pitches and not problem.concat_pair:
        results += [_by_rewrite(problem, rewrite) for rewrite in forms.REWRITES if problem.form in (None, rewrite.name)]
    return results


def cheapest(problem: Problem) -> Plan | None:
    """Return the cheapest plan without prepared launches; None if no form is able."""
    return min((each for each, _ in candidates(problem) if each is not None), key=_microseconds, default=None)


def _adds(form: Any, problem: Problem) -> bool:
    """Return whether a form adds a tensor. With other M it would be read value by value, and the addresses would
    spill registers (64->41 1x1 in tiles of 128x128: 3.4 KB)."""
    return hasattr(form, "ADDED") and problem.M % form.ADDED == 0


def _reads(form: Any, problem: Problem) -> bool | Unsupported:
    """Return whether a form that supports the problem also reads x in place."""
    reads = not problem.concat_pair or (hasattr(form, "reads_concat_pair") and form.reads_concat_pair(problem))
    return reads or Unsupported("a ConcatPair, which this form does not read")


def _by_rewrite(problem: Problem, rewrite: Rewrite) -> tuple[Plan | None, str]:
    """Return the candidate that computes a problem by a rewrite, or None and the reason."""
    other = rewrite.make(problem)
    if not isinstance(other, Problem):
        return None, f"{rewrite.name:<34} unable: {other}"
    best = cheapest(other)
    if best is None:
        return None, f"{rewrite.name:<34} unable: no form for the rewritten problem"
    counted = (one._replace(N=problem.images) for one in (problem, other))
    time = best.microseconds + rewrite.cost(*counted, best.microseconds)
    result = Plan(problem, rewrite.name, time, problem.shape, parts=(best,), rewrite=rewrite.prepare(problem, other))
    return result, _plan_label(result)


def _in_parts(problem: Problem) -> Plan | None:
    """Return the backward phases one by one, or a convolution and its pool or sum; None if not applicable."""
    cost = 0.0
    if problem.direction == TRANSPOSED:
        parts = [cheapest(problem._replace(direction=PHASE, phases=at)) for at in backward_phases(problem.geometry)]
        cost = PHASE_LAUNCH * (len(parts) - 1)
    elif problem.pool and min(problem.at.h.count, problem.at.v.count) > 1:
        parts = [cheapest(problem._replace(pool=None))]
        cost = costs.pool_time(problem._replace(N=problem.images))
    elif problem.added:
        parts = [cheapest(problem._replace(added=False, act=None))]
        cost = costs.sum_time(problem._replace(N=problem.images), separate=True)
    else:
        return None
    if None in parts:
        return None
    name = "+".join(dict.fromkeys(part.name for part in parts))
    factor = MANY_PHASES if len(parts) > filled.MOST_PHASES else 1.0
    cost += factor * sum(part.microseconds for part in parts)
    return Plan(problem, name, cost, problem.shape, parts=tuple(parts))


def _prepared(chosen: Plan) -> Plan:
    """Return the plan with the launches of its form, or of its parts, prepared."""
    problem = chosen.problem
    if chosen.form is None:
        return chosen._replace(parts=tuple(_prepared(part) for part in chosen.parts))
    in_place = problem.in_place and getattr(chosen.form, "IN_PLACE", False)
    if in_place and chosen.form is pixel_tiled:
        in_place = not pixel_choice.turns(problem, chosen.microseconds)
    if problem.direction == PHASE and not in_place:
        reorder = phase_weights.prepare(problem, problem.at.h, problem.at.v)
        return chosen._replace(reorder=reorder, prepared=chosen.form.prepare(problem._replace(strides=())))
    return chosen._replace(prepared=chosen.form.prepare(problem))


def _label(form: Any) -> str:
    module = form.__name__.rpartition(".")[2]
    return f"{form.NAME}: {module}"


def _plan_label(parts: Plan) -> str:
    if parts.form is not None:
        return _part_label(parts)
    if parts.rewrite is not None:
        return f"{parts.name}, {_plan_label(parts.parts[0])}"
    if parts.problem.pool:
        return f"{_part_label(parts.parts[0])}, then a pool"
    if parts.problem.added:
        return f"{_part_label(parts.parts[0])}, then a sum"
    names = "+".join(dict.fromkeys(_part_label(part) for part in parts.parts))
    return names if len(parts.parts) == 1 else f"{len(parts.parts)} phases by {names}"


def _part_label(part: Plan) -> str:
    return _plan_label(part) if part.form is None else _label(part.form)
