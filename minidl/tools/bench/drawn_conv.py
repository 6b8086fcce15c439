"""Drawn convolutions: ours in every form, torch's in both memory orders, and whether ours are right.

Both kinds are seen as one: a pair of images, a large one and a small one, and the weights [small channels, large
channels of a group, R, S] of the convolution from the large to the small one ("down"). Its way back ("up") is the
transposed convolution, and each is the other's gradient of the input. A sample is compared, see drawn_reference.
"""

from __future__ import annotations

import copy
import math
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch

from minidl.kernels import conv
from minidl.kernels.conv import plan as plans
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem
from minidl.runtime import launch
from minidl.testing.specs import products
from minidl.testing.specs.bounds import holds
from minidl.testing.specs.conv import chain
from minidl.tools.bench import drawn_reference as reference
from minidl.tools.bench import sides
from minidl.tools.bench.measure import MakeClock, Work, floor_ms, in_turn, input_sets
from minidl.tools.bench.shapes import Conv
from minidl.tools.first_line import first_line

DIRECTIONS = "forward", "gradient of the input", "gradient of the weight"
FORMS = plans.names()
# A gradient of a weight stays below what float16 holds.
LARGEST = 1000.0
# From so many pixels on, the gradient of a weight adds them up in shares.
MANY = 2**16
# A form that takes so many times as long as the one taken is timed once only; with what a launch may take.
SLOW = 4.0
LAUNCH_MS = 0.5


class Layer:
    """The tensors of a drawn convolution, channels-last: as many sets as exceed the L2 cache.

    Without `values` there is one set, with any values: for a rehearsal, or to see how long something takes.
    """

    def __init__(self, shape: Conv, dtype: torch.dtype, device: str, seed: str, values: bool = True) -> None:
        self.shape, self.dtype, self.seed, self.device, self.values = shape, dtype, seed, device, values
        generator = torch.Generator(device).manual_seed(Random(seed).getrandbits(63))
        large, small = _pair(shape)
        self.geometry = self.of_axes(*_axes(shape))
        self.pixels = shape.images * math.prod(small[1:])
        sets = input_sets(float(dtype.itemsize) * sum(shape.elements)) if values else 1

        def made(images: int, size: tuple[int, ...], scale: float) -> torch.Tensor:
            channels, *sizes = size
            if not values:
                return torch.empty(images, *sizes, channels, device=device, dtype=dtype).movedim(-1, 1)
            drawn = torch.randn(images, *sizes, channels, device=device, dtype=dtype, generator=generator)
            return drawn.mul_(scale).movedim(-1, 1)

        # The gradient of the output is the large one of a transposed convolution.
        scale = min(1.0, LARGEST / math.sqrt(self.pixels))
        of_large, of_small = (scale, 1.0) if shape.transposed else (1.0, scale)
        self.large = [made(shape.images, large, of_large) for _ in range(sets)]
        self.small = [made(shape.images, small, of_small) for _ in range(sets)]
        weights = large[0] // shape.groups, *shape.kernel
        self.w = made(small[0], weights, math.prod(weights) ** -0.5)

    def of_axes(self, *axes: Axis) -> Any:
        """The geometry with these axes."""
        return Geometry(axes[0], axes[1], self.shape.groups)

    def of_images(self, count: int) -> Layer:
        """The same with fewer images and any values."""
        return type(self)(self.shape._replace(images=count), self.dtype, self.device, self.seed, values=False)

    def ours(self, direction: str, form: str | None = None) -> list[sides.Call]:
        """Our calls, in a form or in the one taken for the shape."""
        kind = kind_of(self.shape, direction)
        if _is_column(self.shape):
            return [partial(_back, call) for call in self._turned().ours(direction, form)]
        if kind == "weight":
            pairs = zip(self.large, self.small, strict=True)
            return [partial(conv.grad_weight, x, dy, self.geometry, form=form) for x, dy in pairs]
        function, images = (conv.forward, self.large) if kind == "down" else (conv.transposed, self.small)
        return [partial(_first, function, x, self.w, self.geometry, form=form) for x in images]

    def _turned(self) -> Layer:
        """The same with rows as columns."""
        turned = copy.copy(self)
        turned.shape = _turned(self.shape)
        turned.w = self.w.permute(0, 2, 3, 1).reshape(-1, *turned.shape.kernel, 1).permute(0, 3, 1, 2)
        turned.large, turned.small = ([t.transpose(2, 3) for t in images] for images in (self.large, self.small))
        turned.geometry = turned.of_axes(*_axes(turned.shape))
        return turned

    def forms(self, direction: str) -> tuple[str, ...]:
        """Those that may be asked for."""
        return FORMS

    def theirs(self, direction: str) -> dict[str, list[sides.Call]]:
        """torch's calls in both memory orders."""
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

    def problem(self, direction: str) -> Problem:
        """What our call looks up its plan by."""
        return problem(self.shape, direction, self.dtype, launch.target(), launch.processors())

    def taken(self, direction: str) -> dict[str, Any]:
        """The form taken for the shape, as `explain` names it, and the time that was estimated."""
        problem = self.problem(direction)
        line = next(line for line in plans.explain(problem).splitlines() if line.endswith("taken"))
        form = re.sub(r"\s+[0-9.]+ us\s+taken$", "", line).strip()
        return {"plan": form, "estimated_ms": round(plans.plan(problem).microseconds / 1e3, 5)}

    @property
    def flop(self) -> float:
        """Products and sums of those whose input is inside the image."""
        inside = math.prod(float(sum(axis.inside())) for axis in reference.axes_of(self.geometry))
        return 2.0 * self.shape.images * inside * self.w.shape[0] * self.w.shape[1]

    def floor(self) -> float:
        """The least time: for these products, and for all three tensors."""
        return floor_ms(self.dtype.itemsize * float(sum(self.shape.elements)), self.flop, rate(self.dtype))

    def right(self, direction: str, got: torch.Tensor) -> bool:
        """Whether a sample of a result is as exact as the operation's record promises."""
        kind, at, groups = kind_of(self.shape, direction), self.geometry, (self.shape.groups, -1)
        M, C = self.w.shape[0] // at.groups, self.w.shape[1]
        random = Random(f"{self.seed} sample")
        images, of_groups, Ms, Cs = reference.sample(kind, at, self.shape.images, M, C, random)
        large, small = self.large[0].unflatten(1, groups), self.small[0].unflatten(1, groups)
        if kind == "weight":
            got = reference.part(got.unflatten(0, groups), of_groups, Ms, Cs)
            exact, total = (torch.zeros_like(got, dtype=torch.float64) for _ in range(2))
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
                # As image_rows has it: the blocks of one of a hundred shares, the shares and folded bands.
                depth = min(depth, 192 + 2 * (terms // 1600 + 6000))
        else:
            w = reference.part(self.w.unflatten(0, groups), of_groups, Ms, Cs).double()
            from_, to = (Cs, Ms) if kind == "down" else (Ms, Cs)
            x = reference.part(large if kind == "down" else small, images, of_groups, from_).double()
            got = reference.part(got.unflatten(1, groups), images, of_groups, to)
            function = reference.down if kind == "down" else reference.up
            exact, total = function(x, w, at), function(x.abs(), w.abs(), at)
            taps = math.prod(self.shape.kernel)
            terms = len(from_) * taps
            depth = chain(terms, taps)
        # |a| + |b| + 1 of normal numbers.
        return holds(got, exact, products.sum_error(total, total + 9 * terms, depth, self.dtype))


def kind_of(shape: Conv, direction: str) -> str:
    """What is computed: "down", "up" or "weight"."""
    if direction == DIRECTIONS[2]:
        return "weight"
    return "up" if shape.transposed == (direction == DIRECTIONS[0]) else "down"


def problem(shape: Conv, direction: str, dtype: torch.dtype, target: str, processors: int) -> Problem:
    """What a call on the tensors of a `Layer` looks up its plan by, on such a device."""
    if _is_column(shape):
        shape = _turned(shape)
    (large, *_), (small, *_) = _pair(shape)
    M, C, (R, S) = small // shape.groups, large // shape.groups, shape.kernel
    h, w = _axes(shape)
    made = Problem(
        FORWARD, Geometry(h, w, shape.groups), shape.images, C, M, dtype, launch.precision(dtype),
        target=target, processors=processors,
    )  # fmt: skip
    kind = kind_of(shape, direction)
    if kind == "down":
        return made
    if kind == "weight":
        return made._replace(direction=GRAD_WEIGHT)
    return made._replace(direction=TRANSPOSED, C=M, M=C, strides=(R * S * C, 1, S * C, C))


def _pair(shape: Conv) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Channels, rows and columns of the large image and of the small one."""
    x, y = (shape.channels, *shape.size), (shape.outputs, *shape.out)
    return (y, x) if shape.transposed else (x, y)


def _axes(shape: Conv) -> tuple[Axis, ...]:
    large, small = _pair(shape)
    settings = zip(large[1:], shape.kernel, small[1:], shape.stride, shape.padding, shape.dilation, strict=True)
    return tuple(Axis(*each) for each in settings)


def _is_column(shape: Conv) -> bool:
    """Whether conv1d sees a sequence as a column: where each channel has a group of its own."""
    return shape.sequence and _pair(shape)[0][0] == shape.groups


def _turned(shape: Conv) -> Conv:
    """A row as a column."""
    names = "size", "kernel", "stride", "padding", "dilation", "ends"
    return shape._replace(**{name: getattr(shape, name)[::-1] for name in names}, sequence=False)


def work(layer: Layer, direction: str, name: str) -> Work:
    """A row of the benchmark."""
    return Work(
        name, str(layer.dtype).removeprefix("torch."), layer.ours(direction),
        layer.theirs(direction) if layer.values else {}, layer.floor(), partial(layer.right, direction),
    )  # fmt: skip


def regret(layer: Layer, direction: str, make_clock: MakeClock, rounds: int, agree: float = 0.0) -> dict[str, Any]:
    """The time of the form taken divided by that of the best form, and the time of each form that is able."""
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
        except Exception as error:  # noqa: BLE001 (a form that fails is named beside those that do not)
            failed[form] = first_line(error)
    times |= {form: statistics.median(values) for form, values in in_turn(clocks, rounds, agree).items()}
    taken = times.pop("")
    best = min(times, key=lambda form: times[form], default=None)
    # Forms of the same name are the same kernel, and the noise of two timings is no regret.
    return {
        "regret": 1.0 if best is None else round(max(1.0, taken / times[best]), 3), "best_form": best,
        "forms_ms": {form: round(ms, 5) for form, ms in times.items()}, **({"forms_failed": failed} if failed else {}),
    }  # fmt: skip


def rate(dtype: torch.dtype) -> str:
    """The rate of products that a floor is counted with."""
    return launch.float32_precision() if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def _first(function: Callable[..., tuple[torch.Tensor, Any]], *args: Any, **how: Any) -> torch.Tensor:
    return function(*args, **how)[0]


def _back(call: sides.Call) -> torch.Tensor:
    """A column as a row."""
    return call().transpose(2, 3)


def once(call: sides.Call) -> float:
    """Milliseconds of one call with its launch."""
    _wait()
    started = time.perf_counter()
    call()
    _wait()
    return (time.perf_counter() - started) * 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
