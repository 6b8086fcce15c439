"""Drawn convolutions: minidl's calls in every form, torch's in both memory formats, and the check of results.

Checks compare a sample of each result, see drawn_reference.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from functools import partial
from random import Random
from typing import Any

import torch

from benchmarks.bench import drawn_reference as reference
from minidl.kernels import conv
from minidl.kernels.conv import forms
from minidl.kernels.conv import plan as plans
from minidl.runtime import launch
from minidl.testing.specs import products
from minidl.testing.specs.bounds import holds
from minidl.testing.specs.conv import chain
from minidl.tools.bench import sides
from minidl.tools.bench.measure import MakeClock, Work, floor_ms, in_turn
from minidl.tools.first_line import first_line
from minidl.tools.tuning import drawn_conv
from minidl.tools.tuning.drawn_conv import DIRECTIONS, kind_of

FORMS = forms.names()
# From this number of pixels, the gradient of a weight adds them in shares.
MANY = 2**16
# A form that takes this many times as long as the chosen one, plus the time of a launch, is timed only once.
SLOW = 4.0
LAUNCH_MS = 2.0


class Layer(drawn_conv.Layer):
    """The tensors of a drawn convolution, with torch's calls and the check of minidl's results."""

    def forms(self, direction: str) -> tuple[str, ...]:
        """Return the names of the forms that can be requested."""
        return FORMS

    def theirs(self, direction: str) -> dict[str, list[sides.Call]]:
        """Return torch's calls in both memory formats."""
        shape = self.shape
        how = list(shape.stride), list(shape.padding), list(shape.dilation), shape.transposed, list(shape.ends)
        if direction == DIRECTIONS[0]:
            images = self.small if shape.transposed else self.large
            return sides.in_both_orders(
                lambda x, w: torch.ops.aten.convolution(x, w, None, *how, shape.groups), images, self.w
            )
        at = DIRECTIONS.index(direction) - 1

        def backward(x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor) -> Any:
            mask = [at == 0, at == 1, False]
            return torch.ops.aten.convolution_backward(dy, x, w, None, *how, shape.groups, mask)[at]

        xs, dys = (self.small, self.large) if shape.transposed else (self.large, self.small)
        pairs, plain = list(zip(xs, dys, strict=True)), self.w.contiguous()
        return {
            "cuDNN, channels last": [partial(backward, x, dy, self.w) for x, dy in pairs],
            "cuDNN, contiguous": [partial(backward, x.contiguous(), dy.contiguous(), plain) for x, dy in pairs],
        }

    def choice(self, direction: str) -> dict[str, Any]:
        """Return the form of the plan, as `explain` names it, and its estimate."""
        problem = self.problem(direction)
        line = next(line for line in plans.explain(problem).splitlines() if line.endswith("taken"))
        form = re.sub(r"\s+[0-9.]+ us\s+taken$", "", line).strip()
        return {"plan": form, "estimated_ms": round(plans.plan(problem).microseconds / 1e3, 5)}

    @property
    def flop(self) -> float:
        """Return the number of multiplications and additions whose input is inside the image."""
        inside = math.prod(float(sum(axis.inside())) for axis in reference.axes_of(self.geometry))
        return 2.0 * self.shape.images * inside * self.w.shape[0] * self.w.shape[1]

    def floor(self) -> float:
        """Return the floor, for these operations and all three tensors."""
        return floor_ms(self.dtype.itemsize * float(sum(self.shape.elements)), self.flop, rate(self.dtype))

    def right(self, direction: str, result: torch.Tensor) -> bool:
        """Return whether a sample of a result is within the error bound of the operation's spec."""
        kind, at, groups = kind_of(self.shape, direction), self.geometry, (self.shape.groups, -1)
        M, C = self.w.shape[0] // at.groups, self.w.shape[1]
        random = Random(f"{self.seed} sample")
        images, of_groups, Ms, Cs = reference.sample(kind, at, self.shape.images, M, C, random)
        large, small = self.large[0].unflatten(1, groups), self.small[0].unflatten(1, groups)
        if kind == "weight":
            result = reference.part(result.unflatten(0, groups), of_groups, Ms, Cs)
            exact, total = (torch.zeros_like(result, dtype=torch.float64) for _ in range(2))
            values = len(of_groups) * (len(Cs) + len(Ms)) * max(large.shape[3:].numel(), small.shape[3:].numel())
            step = max(1, reference.CHUNK // values)
            for first in range(0, len(images), step):
                x = reference.part(large[first : first + step], range(len(large)), of_groups, Cs).double()
                dy = reference.part(small[first : first + step], range(len(small)), of_groups, Ms).double()
                exact += reference.weight(x, dy, at)
                total += reference.weight(x.abs(), dy.abs(), at)
            terms = self.pixels
            depth = chain(terms, 1)
            if terms >= MANY and not launch.INTERPRETED:
                # As in image_rows: the blocks of one of a hundred shares, the shares and folded bands.
                depth = min(depth, 192 + 2 * (terms // 1600 + 6000))
        else:
            w = reference.part(self.w.unflatten(0, groups), of_groups, Ms, Cs).double()
            from_, to = (Cs, Ms) if kind == "down" else (Ms, Cs)
            x = reference.part(large if kind == "down" else small, images, of_groups, from_).double()
            result = reference.part(result.unflatten(1, groups), images, of_groups, to)
            function = reference.down if kind == "down" else reference.up
            exact, total = function(x, w, at), function(x.abs(), w.abs(), at)
            taps = math.prod(self.shape.kernel)
            terms = len(from_) * taps
            depth = chain(terms, taps)
        # |a| + |b| + 1 of normal numbers.
        return holds(result, exact, products.sum_error(total, total + 9 * terms, depth, self.dtype))


def work(layer: Layer, direction: str, name: str) -> Work:
    """Return the work of a row."""
    return Work(
        name, str(layer.dtype).removeprefix("torch."), layer.ours(direction),
        layer.theirs(direction) if layer.values else {}, layer.floor(), partial(layer.right, direction),
    )  # fmt: skip


def regret(layer: Layer, direction: str, make_clock: MakeClock, rounds: int, agree: float = 0.0) -> dict[str, Any]:
    """Return the regret of the chosen form, and the time of each form that supports the problem."""
    clocks = {"": make_clock(layer.ours(direction), False)}
    limit = SLOW * clocks[""].time()
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    for form in layer.forms(direction):
        calls = layer.ours(direction, form)
        try:
            ms = min(once(calls[0]) for _ in range(3))
            if ms > limit + LAUNCH_MS:
                times[form] = ms
            else:
                clocks[form] = make_clock(calls, False)
        except conv.UnableError:
            pass
        except Exception as error:  # noqa: BLE001 (the row names forms that fail)
            failed[form] = first_line(error)
    times |= {form: statistics.median(values) for form, values in in_turn(clocks, rounds, agree).items()}
    chosen = times.pop("")
    best = min(times, key=lambda form: times[form], default=None)
    # The noise of two timings of the same form is no regret.
    return {
        "regret": 1.0 if best is None else round(max(1.0, chosen / times[best]), 3), "best_form": best,
        "forms_ms": {form: round(ms, 5) for form, ms in times.items()}, **({"forms_failed": failed} if failed else {}),
    }  # fmt: skip


def rate(dtype: torch.dtype) -> str:
    """Return the name of the matrix rate for a floor."""
    return launch.float32_precision() if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def once(call: sides.Call) -> float:
    """Return milliseconds of one call with its launch."""
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return (time.perf_counter() - start) * 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
