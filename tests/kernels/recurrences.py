"""The spec of recurrences: the kernels' formulas on values with their errors, step by step, forward and backward.

Errors grow with the steps: a state's error passes through the product with the weight and through the gates, whose
slopes are at most 1/4 (sigmoid) and 1 (tanh, relu). A state is rounded to the dtype in each step, c of lstm is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from minidl.kernels.activation import Activation
from minidl.kernels.recurrent import GATES
from minidl.ops.recurrent import recurrence
from minidl.runtime import launch
from minidl.testing.specs import bounds, products
from minidl.testing.specs.activation import output_error
from minidl.testing.specs.base import Bad, Case, OpSpec, of, refuses, tensors
from minidl.testing.specs.linalg import chain
from minidl.testing.specs.make import Make

_PLAIN: dict[str, Activation] = {"RNN_TANH": "tanh", "RNN_RELU": "relu"}


def _op(
    x: Any, h: Any, weight: Any, bias: Any = None, c: Any = None, weight_reverse: Any = None, bias_reverse: Any = None,
    mode: str = "LSTM", sizes: Any = (),
) -> Any:  # fmt: skip
    parameters = ((weight, weight_reverse)[: len(h)], (bias, bias_reverse)[: len(h)])
    return recurrence(x, (h,) if c is None else (h, c), *parameters, mode, sizes)


class _Direction(NamedTuple):
    """The arguments of a direction, and its steps in order."""

    x: torch.Tensor
    h: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    c: torch.Tensor | None
    mode: str
    steps: list[tuple[int, int]]


def _directions(case: Case) -> list[_Direction]:
    x, h, weight, bias, c, weight_reverse, bias_reverse, mode, sizes = case.arguments(_op)
    steps = list(zip(accumulate(sizes, initial=0), sizes, strict=False))
    parameters = ((weight, bias, steps), (weight_reverse, bias_reverse, steps[::-1]))
    return [
        _Direction(part, h[d], w, b, None if c is None else c[d], mode, order)
        for d, (part, (w, b, order)) in enumerate(zip(x.chunk(len(h), 1), parameters, strict=False))
    ]


def _reference(*args: Any, **options: Any) -> Any:
    y, *states = zip(*map(_one_reference, _directions(Case(args, options))), strict=True)
    return (torch.cat(y, 1), *map(torch.stack, states))


def _one_reference(direction: _Direction) -> tuple[torch.Tensor, ...]:
    x, h, weight, bias, c, mode, steps = direction
    rows_of = {}
    for first, rows in steps:
        at, before = x[first : first + rows], h[:rows]
        q = before @ weight.t() + (0.0 if bias is None else bias)
        if c is not None:
            i, f, g, o = (at + q).chunk(4, 1)
            cell = f.sigmoid() * c[:rows] + i.sigmoid() * g.tanh()
            after, c = o.sigmoid() * cell.tanh(), torch.cat((cell, c[rows:]))
        elif mode == "GRU":
            (r, z, n), (q_r, q_z, q_n) = at.chunk(3, 1), q.chunk(3, 1)
            z, n = (z + q_z).sigmoid(), (n + (r + q_r).sigmoid() * q_n).tanh()
            after = n + z * (before - n)
        else:
            after = (at + q).tanh() if mode == "RNN_TANH" else (at + q).relu()
        h, rows_of[first] = torch.cat((after, h[rows:])), after
    y = torch.cat([rows_of[first] for first in sorted(rows_of)])
    return (y, h) if c is None else (y, h, c)


class _Near(NamedTuple):
    """A value in float64, and the largest error of what the kernels compute for it."""

    value: torch.Tensor
    error: torch.Tensor

    def rows(self, first: int, end: int | None = None) -> _Near:
        return _Near(self.value[first:end], self.error[first:end])

    def gates(self, count: int) -> list[_Near]:
        return list(map(_Near, self.value.chunk(count, 1), self.error.chunk(count, 1)))

    def onto(self, total: _Near, first: int) -> None:
        """Write the rows to `total` from row `first` on."""
        for source, target in zip(self, total, strict=True):
            target[first : first + len(source)] = source


def _joined(parts: Any, join: Callable[[list[torch.Tensor]], torch.Tensor] = torch.stack) -> _Near:
    return _Near(*(join(list(each)) for each in zip(*parts, strict=True)))


def _side_by_side(parts: Any) -> _Near:
    return _joined(parts, partial(torch.cat, dim=1))


def _exact(value: torch.Tensor) -> _Near:
    return _Near(value.clone(), torch.zeros_like(value))


class _Arithmetic(NamedTuple):
    """Operations of the kernels, in the accumulation type of `dtype`."""

    dtype: torch.dtype

    def sum(self, *terms: _Near) -> _Near:
        error = sum((t.error for t in terms), start=torch.zeros(()))
        size = sum((t.value.abs() for t in terms), start=error)
        error = error + bounds.gamma(len(terms) - 1, bounds.acc_unit(self.dtype)) * size
        return _Near(sum((t.value for t in terms), start=torch.zeros(())), bounds.or_infinite(error, size, self.dtype))

    def times(self, a: _Near, b: _Near) -> _Near:
        value, error = a.value * b.value, a.value.abs() * b.error + a.error * b.value.abs() + a.error * b.error
        size, tiny = value.abs() + error, bounds.TINY[launch.acc_torch(self.dtype)]
        error = error + bounds.acc_unit(self.dtype) * size + tiny
        return _Near(value, bounds.or_infinite(error, size, self.dtype))

    def product(self, a: _Near, b: _Near) -> _Near:
        rows, (K, N) = len(a.value), b.value.shape
        a_size, b_size = a.value.abs() + a.error, b.value.abs() + b.error
        error = a.error @ b.value.abs() + a_size @ b.error
        depth = chain(rows, K, N, self.dtype) if rows else 1
        sums = products.sum_error(a_size @ b_size, (a_size + 1) @ (b_size + 1), depth, self.dtype)
        return _Near(a.value @ b.value, error + sums)

    def act(self, name: Activation, z: _Near) -> _Near:
        value = z.value.relu() if name == "relu" else getattr(torch, str(name))(z.value)
        error = output_error(z.value, z.error, name, self.dtype)
        most = {"sigmoid": 1.0, "tanh": 2.0}.get(str(name), math.inf)
        return _Near(value, torch.where(error.isfinite(), error.clamp(max=most), error))

    def rest(self, a: _Near) -> _Near:
        """Return 1 - a."""
        return self.sum(_exact(torch.ones_like(a.value)), _Near(-a.value, a.error))

    def stored(self, a: _Near) -> _Near:
        error = bounds.rounded(a.value, a.error, self.dtype)
        return _Near(a.value, torch.where(a.value.abs() + error > torch.finfo(self.dtype).max, math.inf, error))


class _Step(NamedTuple):
    """What a step keeps for the gradient; for a plain recurrence, gates is the slope."""

    first: int
    rows: int
    before: _Near
    gates: list[_Near]
    c_before: _Near | None


def _forward(direction: _Direction, dtype: torch.dtype) -> tuple[list[_Near], list[_Step]]:
    """Return y, h and c, and the steps."""
    x, h, weight, bias, c, mode, order = direction
    a, steps = _Arithmetic(dtype), []
    y, state, cell = _exact(x[:, : h.shape[1]]), _exact(h), None if c is None else _exact(c)
    for first, rows in order:
        before, c_before = state.rows(0, rows), None
        before = _Near(before.value.clone(), before.error.clone())
        hidden = a.product(before, _exact(weight.t()))
        if bias is not None:
            hidden = a.sum(hidden, _exact(bias.expand_as(hidden.value)))
        inputs, q = _exact(x[first : first + rows]).gates(GATES[mode]), hidden.gates(GATES[mode])
        z = list(map(a.sum, inputs, q))
        if cell is not None:
            i, f, o, g = (*(a.act("sigmoid", z[k]) for k in (0, 1, 3)), a.act("tanh", z[2]))
            c_before = _Near(cell.value[:rows].clone(), cell.error[:rows].clone())
            after = a.sum(a.times(f, c_before), a.times(i, g))
            after.onto(cell, 0)
            after, gates = a.times(o, a.act("tanh", after)), [i, f, g, o]
        elif mode == "GRU":
            r, z_gate = (a.act("sigmoid", z[k]) for k in (0, 1))
            n = a.act("tanh", a.sum(inputs[2], a.times(r, q[2])))
            after = a.sum(n, a.times(z_gate, a.sum(before, _Near(-n.value, n.error))))
            gates = [r, z_gate, n, q[2]]
        else:
            after = a.act(_PLAIN[mode], z[0])
            gates = [_Near(*products.slope_error(_PLAIN[mode], *z[0], dtype))]
        after = a.stored(after)
        after.onto(state, 0)
        after.onto(y, first)
        gates = gates if mode in _PLAIN else list(map(a.stored, gates))
        steps.append(_Step(first, rows, before, gates, c_before))
    return [y, state, *([] if cell is None else [a.stored(cell)])], steps


def _results(forward: list[Any]) -> list[_Near]:
    """Return y, h and c of all directions."""
    y, *states = zip(*(results for results, _ in forward), strict=True)
    return [_side_by_side(y), *map(_joined, states)]


def _bound(case: Case, result: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    results = _results([_forward(direction, dtype) for direction in _directions(case)])
    return tuple(near.error.nan_to_num(nan=math.inf) for near in results)


def _grad_bound(case: Case, dy: Any, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the bounds of the sums of the gradients by each result, in a pass of its own, rounded each time."""
    directions = _directions(case)
    forward = [_forward(direction, dtype) for direction in directions]
    results = _results(forward)
    cotangents = dy if isinstance(dy, tuple) else (dy,)
    totals: list[_Near] | None = None
    for k, cotangent in enumerate(cotangents):
        only = [torch.zeros_like(result.value) for result in results]
        only[k] = cotangent
        cotangents_of = zip(only[0].chunk(len(directions), 1), *only[1:], strict=True)
        operands = zip(directions, forward, cotangents_of, strict=True)
        each = [_gradients(direction, steps, dtype, *dys) for direction, (_, steps), dys in operands]
        parts = [_Arithmetic(dtype).stored(part) for part in _all_gradients(each)]
        sums = [_Near(t.value + p.value, t.error + p.error) for t, p in zip(totals or parts, parts, strict=True)]
        totals = parts if totals is None else list(map(_Arithmetic(dtype).stored, sums))
    return tuple(
        None if grad is None else total.error.nan_to_num(nan=math.inf)
        for grad, total in zip(grads, totals or (), strict=True)
    )


def _all_gradients(each: list[list[_Near]]) -> list[_Near]:
    """Return the gradients of the operation's arguments from those of each direction's."""
    dx, dh, dw, db, dc = zip(*each, strict=True)
    return [_side_by_side(dx), _joined(dh), dw[0], db[0], _joined(dc), dw[-1], db[-1]]


def _gradients(
    direction: _Direction, steps: list[_Step], dtype: torch.dtype, dy: torch.Tensor, dh: torch.Tensor,
    dc: torch.Tensor | None = None,
) -> list[_Near]:  # fmt: skip
    """Return the gradients of x, h, weight, bias and c before they are rounded."""
    x, h, weight, *_, mode, _ = direction
    a, dc = _Arithmetic(dtype), torch.zeros_like(h) if dc is None else dc
    dx, dhidden, before = _exact(x), _exact(x), _exact(x[:, : h.shape[1]])
    carried, cell, product = _exact(dh), _exact(dc), _exact(torch.zeros_like(h))
    for first, rows, h_before, gates, c_before in reversed(steps):
        total = a.sum(carried.rows(0, rows), _exact(dy[first : first + rows]), product.rows(0, rows))
        passed, dq = _exact(torch.zeros_like(total.value)), None
        if c_before is not None:
            i, f, g, o = gates
            t = a.act("tanh", a.sum(a.times(f, c_before), a.times(i, g)))
            d = a.sum(cell.rows(0, rows), a.times(a.times(total, o), a.rest(a.times(t, t))))
            a.times(d, f).onto(cell, 0)
            parts = [
                a.times(a.times(d, g), a.times(i, a.rest(i))),
                a.times(a.times(d, c_before), a.times(f, a.rest(f))),
                a.times(a.times(d, i), a.rest(a.times(g, g))), a.times(a.times(total, t), a.times(o, a.rest(o))),
            ]  # fmt: skip
        elif mode == "GRU":
            r, z, n, q = gates
            dn = a.times(a.times(total, a.rest(z)), a.rest(a.times(n, n)))
            dr = a.times(a.times(dn, q), a.times(r, a.rest(r)))
            dz = a.times(a.times(total, a.sum(h_before, _Near(-n.value, n.error))), a.times(z, a.rest(z)))
            passed, parts, dq = a.times(total, z), [dr, dz, dn], a.times(dn, r)
        else:
            parts = [a.times(total, gates[0])]
        for target, last in ((dx, parts[-1]), (dhidden, dq or parts[-1])):
            columns = zip(*(*parts[:-1], last), strict=True)
            a.stored(_Near(*(torch.cat(each, 1) for each in columns))).onto(target, first)
        h_before.onto(before, first)
        passed.onto(carried, 0)
        a.product(dhidden.rows(first, first + rows), _exact(weight)).onto(product, 0)
    dw = a.product(_Near(dhidden.value.t(), dhidden.error.t()), before)
    db = products.bias_error(dhidden.value.abs() + dhidden.error, dhidden.error, (0,), dtype)
    return [dx, a.sum(carried, product), dw, _Near(dhidden.value.sum(0), db), cell]


def _arguments(make: Make, mode: str, H: int, sizes: tuple[int, ...], bias: bool = True, both: bool = False) -> Case:
    D, width, near = 1 + both, GATES[mode] * H, 1 / math.sqrt(max(H, 1))
    x, h = make.tensor(sum(sizes), D * width), make.tensor(D, sizes[0], H)
    parameters: list[Any] = [None] * 4
    for d in range(D):
        weight = make.tensor(width, H, low=-near, high=near)
        parameters[2 * d : 2 * d + 2] = weight, make.tensor(width) if bias else None
    c = make.tensor(D, sizes[0], H) if mode == "LSTM" else None
    return Case((x, h, *parameters[:2], c, *parameters[2:]), {"mode": mode, "sizes": sizes})


def _inputs(make: Make) -> Case:
    sizes = sorted((make.integer(1, 7) for _ in range(make.integer(1, 4))), reverse=True)
    mode, H = make.choice(list(GATES)), make.size(1, 40)
    return _arguments(make, mode, H, tuple(sizes), bool(make.integer(0, 1)), bool(make.integer(0, 1)))


SPEC = OpSpec(
    "recurrence",
    op=_op,
    reference=_reference,
    inputs=_inputs,
    bound=_bound,
    grad_bound=_grad_bound,
    differentiable=tuple(range(7)),
    families=("recurrent", "recurrent_fused", "recurrent_grad", "recurrent_grad_fused"),
    examples={
        **{
            f"{mode}, {H}{', both directions' * both}": partial(_arguments, mode=mode, H=H, sizes=(12, 5, 5), both=both)
            for mode in GATES
            for H, both in ((33, False), (33, True), (304, True))
        },
        "lstm without a bias": partial(_arguments, mode="LSTM", H=20, sizes=(3, 3, 2), bias=False),
        "one sequence": partial(_arguments, mode="GRU", H=17, sizes=(1, 1, 1, 1)),
    },
    bad=(
        refuses(TypeError, "convert one of them", (3, 8), of(torch.float64, 1, 3, 2), (8, 2), sizes=(3,)),
        Bad(
            tensors((3, 8), lambda make: make.integers(1, 3, 2, low=0, high=4), (8, 2), sizes=(3,)),
            TypeError,
            "expected a floating type",
        ),
    ),
)
