"""Which form a convolution is computed in, and all of the launch that does not depend on addresses.

A form is a module of this folder with

    NAME       what it is asked for by; forms that share a name are parts of one way to compute
    DIRECTIONS those of the problems that it is for
    FAMILIES   the tile tables that it uses
    able(problem)      True, or No with the reason why not
    estimate(problem)  microseconds, by `costs`; for problems that it is able to
    FLOAT8     optional: whether it takes values of 8 bits, forward
    ADDED      optional: of how many output channels a multiple takes a sum before the activation
    OVERLAPS   optional: whether it reads pixels that overlap (`unshuffled`)
    reads_concat_pair(problem)  optional: whether it reads two joined tensors in place
    hands_on(problem)  optional: bands of rows whose statistics its tiles hand on; 0 where they do not
    prepare(problem)   tiles, grids, flags, scalars and boxes: all that `run` needs beside tensors
    run(prepared, tensors)

and a line of FORMS. `plan` asks them all, once per problem, and takes the cheapest one. A problem may also be done in
parts, each with a plan of its own: the way back one pair of walks at a time, and a pool or a sum as an operation of its
own.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from minidl.kernels import elementwise
from minidl.kernels import pool as pools
from minidl.kernels.conv import (
    banded,
    banded_grad_weight,
    batch_back,
    batch_grad_weight,
    batch_tiled,
    boxed,
    boxed_grad_weight,
    columns,
    costs,
    depthwise,
    depthwise_grad_weight,
    depthwise_rows,
    even_grad_weight,
    few_outputs,
    fft,
    filled,
    held,
    merged,
    mirrored,
    paired,
    paired_box,
    patches_back,
    pixel_back,
    pixel_choice,
    pixel_grad_weight,
    pixel_tiled,
    product,
    tap_sums,
    turned,
    two_rows,
    unfolded_grad_weight,
    unshuffled,
)
from minidl.kernels.conv.prepared import Copy
from minidl.kernels.conv.problem import GRAD_WEIGHT, SAID, TRANSPOSED, WALK, Problem, Tensors, Unsupported, walks_back
from minidl.runtime import launch

FORMS: tuple[Any, ...] = (
    pixel_tiled,
    boxed,
    batch_tiled,
    paired,
    paired_box,
    banded,
    held,
    two_rows,
    fft,
    product,
    patches_back,
    few_outputs,
    merged,
    batch_back,
    pixel_back,
    depthwise,
    depthwise_rows,
    pixel_grad_weight,
    batch_grad_weight,
    even_grad_weight,
    boxed_grad_weight,
    unfolded_grad_weight,
    banded_grad_weight,
    depthwise_grad_weight,
)

# us that each walk but the first takes to begin. 16x16 stride 8, 21->21: 251 us in eight launches, 221 in one.
WALK_AFTER = 1.5
# Of many walks, each of which reads x again. 8x8 stride 4, 594->472, 29 images of 20x20: 1.69 ms, in one launch 1.26.
WALKS_APART = 1.2

_logger = logging.getLogger("minidl")


class UnableError(ValueError):
    """A form was asked for that cannot take the shape. Which ones can is found when someone reads it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        able = [name for name in names() if _cheapest(self.problem._replace(form=name)) is not None]
        return f"conv2d: the {self.problem.form} form cannot take this shape; these can: {', '.join(able)}"


class Plan(NamedTuple):
    """What runs a problem: one form with what it has prepared, or parts, and a pool or a sum after them.

    shape  of the result, channels-last
    turn   how the weights of a part are turned before it; None where they are read as they are
    other  how the one part, a problem of other sizes, is made of this one (`filled`, `columns`, ...); else None
    bands  of which statistics are handed on, in place of z
    """

    problem: Problem
    name: str
    microseconds: float
    shape: tuple[int, ...]
    form: Any = None
    prepared: Any = None
    parts: tuple[Plan, ...] = ()
    turn: Copy | None = None
    other: filled.Filling | columns.Columns | tap_sums.TapSums | unshuffled.Unshuffling | mirrored.Mirroring | None = (
        None
    )
    bands: int = 0

    def run(
        self, x: Any, w: torch.Tensor, bias: Any = None, scale: Any = None, added: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """(y, z), channels-last: what is computed of x (halves where the problem has them), w, bias and scale as
        `Tensors` has them; z None unless kept."""
        if self.other is not None:
            return self.other.run(self.problem, self.parts[0], x, w, bias, scale, added)
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
            turned_ = w if part.turn is None else part.turn.of(w)
            part.form.run(part.prepared, tensors._replace(w=turned_))
        return y, z

    def _pooled(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        (part,) = self.parts
        y = part.run(*tensors)[0].permute(0, 3, 1, 2)
        windows = pools.windows("conv2d", part.shape[1:3], 2)
        pooled = pools.max_pool2d(y, windows)[0] if self.problem.pool == "max" else pools.avg_pool2d(y, windows)
        return pooled.permute(0, 2, 3, 1)


@contextlib.contextmanager
def among(*modules: Any) -> Iterator[None]:
    """A context in which these forms are all there are: for measurements, as several may share a name."""
    global FORMS  # noqa: PLW0603
    before, FORMS = FORMS, modules
    launch.forget()
    try:
        yield
    finally:
        FORMS = before
        launch.forget()


def names() -> tuple[str, ...]:
    """What forms can be asked for by."""
    return (*dict.fromkeys(form.NAME for form in FORMS), *(way.name for way in _OTHERS))


def takes(problem: Problem) -> bool:
    """Whether there is a form for a problem."""
    return _cheapest(problem) is not None


@launch.cached
def plan(problem: Problem) -> Plan:
    """The cheapest plan, of the form asked for or of all. Of halves of x it is the cheapest one that reads them where
    they lie, if that takes no longer than the cheapest of all and a copy; else that one, whose problem has no halves.

    Raises UnableError where the form asked for cannot take the problem.
    """
    best = _cheapest(problem._replace(statistics=False, concat_pair=False))
    if best is None:
        raise UnableError(problem)
    if os.environ.get("MINIDL_EXPLAIN") == "1":
        # A warning: nothing less is shown where no one has set up logging.
        _logger.warning("%s", explain(problem))
    if problem.concat_pair:
        read = _cheapest(problem._replace(statistics=False))
        if read is not None and read.microseconds <= best.microseconds + _of_join(problem):
            best = read
        problem = problem._replace(concat_pair=best.problem.concat_pair)
    if problem.statistics and hasattr(best.form, "hands_on") and (bands := best.form.hands_on(problem)):
        best = best._replace(problem=problem, bands=bands)
    return _prepared(best)


def _of_join(problem: Problem) -> float:
    return costs.of_join(problem._replace(N=problem.images))


def estimate(problem: Problem) -> float:
    """Microseconds of the cheapest plan. Raises UnableError where there is none."""
    best = _cheapest(problem)
    if best is None:
        raise UnableError(problem)
    return best.microseconds


def explain(problem: Problem) -> str:
    """Which forms there are for a problem: what each is estimated at, or why it is not able, and which is taken.

    Raises ValueError for what is no problem of a convolution.
    """
    if problem.direction not in SAID or not problem.dtype.is_floating_point or problem.target not in launch.TARGETS:
        raise ValueError(
            f"explain: got {problem.direction!r} of {problem.dtype} on {problem.target!r}, expected one of "
            f"{', '.join(SAID)} of a floating-point dtype on one of {', '.join(launch.TARGETS)}"
        )
    if min(problem.N, problem.C, problem.M, problem.processors) < 1:
        raise ValueError(f"explain: N, C, M and processors must be at least 1, got {problem}")
    every = candidates(problem)
    if problem.concat_pair and (joined := _cheapest(problem._replace(concat_pair=False))) is not None:
        time = joined.microseconds + _of_join(problem)
        every.append((joined._replace(microseconds=time), f"joined, {_said_of_parts(joined)}"))
    best = min((made for made, _ in every if made is not None), key=_microseconds, default=None)
    lines = [str(problem)]
    for made, said in every:
        estimated = f"{said:<34}{made.microseconds:>12.1f} us" if made is not None else said
        lines.append(f"  {estimated}{'  taken' if made is best and made is not None else ''}")
    return "\n".join(lines)


def _microseconds(made: Plan) -> float:
    return made.microseconds


def candidates(problem: Problem) -> list[tuple[Plan | None, str]]:
    """Every form, and the problem in parts: a plan that has an estimate and nothing prepared, None where unable; and
    what to call it, or why not."""
    found: list[tuple[Plan | None, str]] = []
    counted = problem._replace(N=problem.images)
    for form in FORMS:
        said = _said(form)
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
            found.append((None, f"{said:<34} unable: {able}"))
            continue
        time = form.estimate(counted) + costs.of_sum(counted)
        found.append((Plan(problem, form.NAME, time, problem.shape, form), said))
    parts = _in_parts(problem)
    if parts is not None:
        found.append((parts, _said_of_parts(parts)))
    if not problem.pitches and not problem.concat_pair:
        found += [_of_other(problem, way) for way in _OTHERS if problem.form in (None, way.name)]
    return found


def _cheapest(problem: Problem) -> Plan | None:
    """With nothing prepared; None where no form is able."""
    return min((made for made, _ in candidates(problem) if made is not None), key=_microseconds, default=None)


def _adds(form: Any, problem: Problem) -> bool:
    """Whether a form takes a sum. Of other channels it would be read value by value, and the addresses fill the
    registers: 3.4 KB of these spill of 64->41 1x1 in tiles of 128x128."""
    return hasattr(form, "ADDED") and problem.M % form.ADDED == 0


def _reads(form: Any, problem: Problem) -> bool | Unsupported:
    """Whether a form that is able to reads x as it lies."""
    reads = not problem.concat_pair or (hasattr(form, "reads_concat_pair") and form.reads_concat_pair(problem))
    return reads or Unsupported("halves of x, which it does not read")


class Remade(NamedTuple):
    """A way to do a problem by another one: what it makes of it, what that costs beside the other, in microseconds, and
    what it prepares. The cost is of both problems with the images that plans are made for, and the other's time."""

    name: str
    make: Callable[[Problem], Problem | Unsupported]
    cost: Callable[[Problem, Problem, float], float]
    prepare: Callable[[Problem, Problem], Any]


_OTHERS = (
    Remade(
        filled.NAME, lambda problem: filled.wider(problem) if problem.dtype.itemsize > 1 else Unsupported("float8"),
        lambda problem, made, _: filled.cost(problem, made), filled.prepare,
    ),
    Remade(tap_sums.NAME, tap_sums.apart, tap_sums.cost, tap_sums.prepare),
    Remade(columns.NAME, columns.joined, lambda *_: 0.0, lambda problem, _: columns.prepare(problem)),
    Remade(
        unshuffled.NAME, unshuffled.apart, lambda problem, made, _: unshuffled.cost(problem, made), unshuffled.prepare
    ),
    Remade(mirrored.NAME, mirrored.exchanged, mirrored.cost, mirrored.prepare),
)  # fmt: skip


def _of_other(problem: Problem, way: Remade) -> tuple[Plan | None, str]:
    """The candidate that does a problem by the one that is made of it."""
    made = way.make(problem)
    if not isinstance(made, Problem):
        return None, f"{way.name:<34} unable: {made}"
    best = _cheapest(made)
    if best is None:
        return None, f"{way.name:<34} unable: no form for what it makes"
    counted = (one._replace(N=problem.images) for one in (problem, made))
    time = best.microseconds + way.cost(*counted, best.microseconds)
    found = Plan(problem, way.name, time, problem.shape, parts=(best,), other=way.prepare(problem, made))
    return found, _said_of_parts(found)


def _in_parts(problem: Problem) -> Plan | None:
    """The walks back one by one, or a convolution and its pool or sum; None where that is not possible."""
    cost = 0.0
    if problem.direction == TRANSPOSED:
        parts = [_cheapest(problem._replace(direction=WALK, walks=walks)) for walks in walks_back(problem.geometry)]
        cost = WALK_AFTER * (len(parts) - 1) if problem.paced else 0.0
    elif problem.pool and min(problem.at.h.count, problem.at.v.count) > 1:
        parts = [_cheapest(problem._replace(pool=None))]
        cost = costs.of_pool(problem._replace(N=problem.images))
    elif problem.added:
        parts = [_cheapest(problem._replace(added=False, act=None))]
        cost = costs.of_sum(problem._replace(N=problem.images), apart=True)
    else:
        return None
    if None in parts:
        return None
    name = "+".join(dict.fromkeys(part.name for part in parts))
    apart = WALKS_APART if problem.paced and len(parts) > filled.MOST_WALKS else 1.0
    cost += apart * sum(part.microseconds for part in parts)
    return Plan(problem, name, cost, problem.shape, parts=tuple(parts))


def _prepared(chosen: Plan) -> Plan:
    """The same with all that its form needs to run, or its parts."""
    problem = chosen.problem
    if chosen.form is None:
        return chosen._replace(parts=tuple(_prepared(part) for part in chosen.parts))
    as_they_are = problem.in_place and getattr(chosen.form, "IN_PLACE", False)
    if as_they_are and chosen.form is pixel_tiled:
        as_they_are = not pixel_choice.turns(problem, chosen.microseconds)
    if problem.direction == WALK and not as_they_are:
        turn = turned.prepare(problem, problem.at.h, problem.at.v)
        return chosen._replace(turn=turn, prepared=chosen.form.prepare(problem._replace(strides=())))
    return chosen._replace(prepared=chosen.form.prepare(problem))


def _said(form: Any) -> str:
    module = form.__name__.rpartition(".")[2]
    return f"{form.NAME}: {module}"


def _said_of_parts(parts: Plan) -> str:
    if parts.form is not None:
        return _said_of(parts)
    if parts.other is not None:
        return f"{parts.name}, {_said_of_parts(parts.parts[0])}"
    if parts.problem.pool:
        return f"{_said_of(parts.parts[0])}, then a pool"
    if parts.problem.added:
        return f"{_said_of(parts.parts[0])}, then a sum"
    said = "+".join(dict.fromkeys(_said_of(part) for part in parts.parts))
    return said if len(parts.parts) == 1 else f"{len(parts.parts)} walks by {said}"


def _said_of(part: Plan) -> str:
    return _said_of_parts(part) if part.form is None else _said(part.form)
