"""Specs of pooling of images.

A maximum is a value of x, and its gradient a sum of values of dy in the order of the windows. A mean is a sum
of at most K values times one over its divisor: K - 1 additions, a division (2 units in the last place where compiled,
4 u) and a product make (K + 4) u of the same mean of absolute values. Its gradient is a sum of such shares.
Sums of absolute values come from the reference itself, which is linear: its gradient for |dy| where it is a maximum,
its value for |x| and its gradient for |dy| where it is a mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels import pool, reduce
from minidl.runtime import launch
from minidl.testing.specs import bounds
from minidl.testing.specs.base import (
    WANTS_FLOATING,
    Case,
    OpSpec,
    distinct,
    in_both_orders,
    in_either_order,
    integers,
    refuses,
    spec_factory,
    tensors,
)
from minidl.testing.specs.elementwise import no_error, where_finite
from minidl.testing.specs.make import Make

Reference = Callable[..., torch.Tensor]
Steps = tuple[pool.Windows, ...]  # the windows of an image; of a volume those of slices, and along the depth


def _image(make: Make, height: int, width: int) -> torch.Tensor:
    return in_either_order(make, make.tensor(make.size(0, 5), make.size(1, 17), height, width))


def axis_of(make: Make, dilations: tuple[int, ...] = (1,)) -> tuple[int, int, int, int]:
    """Return (size, kernel, padding, dilation) of an axis that is large enough for a window."""
    kernel, dilation = make.integer(1, 4), make.choice(dilations)
    padding = make.integer(0, kernel // 2)
    # Where padding could hold two taps of a dilated kernel, a window might miss the image; torch has no answer then.
    least = max(1, (kernel - 1) * dilation + 1 - (0 if dilation > 1 else 2 * padding))
    return make.integer(least, least + 9), kernel, padding, dilation


def _max_pool2d(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """Call torch's function on a contiguous image: its float64 kernel for channels-last images with one channel (2.11)
    writes doubles at unaligned addresses."""
    return F.max_pool2d(x.contiguous(), *args, **named)


def _max_inputs(make: Make) -> Case:
    (H, R, pad_h, dil_h), (W, S, pad_w, dil_w) = axis_of(make, (1, 1, 2)), axis_of(make, (1, 1, 3))
    stride = make.choice([None, 1, 2, 3, (1, 2), (3, 1)])
    x = distinct(_image(make, H, W))
    return Case((x, (R, S), stride, (pad_h, pad_w), (dil_h, dil_w), bool(make.integer(0, 1))))


def _avg_inputs(make: Make) -> Case:
    (H, R, pad_h, _), (W, S, pad_w, _) = axis_of(make), axis_of(make)
    stride = make.choice([None, 1, 2, 3, (1, 2), (3, 1)])
    ceil, include = bool(make.integer(0, 1)), bool(make.integer(0, 1))
    divisor = make.choice([None, None, 3, -7])
    return Case((_image(make, H, W), (R, S), stride, (pad_h, pad_w), ceil, include, divisor))


def _adaptive_inputs(make: Make) -> Case:
    x = _image(make, make.integer(1, 12), make.integer(1, 12))
    return Case((x, make.choice([1, 2, 5, (1, 1), (3, None), (13, 4), (7, 1)])))


_spec = spec_factory(differentiable=(0,), families=("pool", "pool_grad"))


def _linear(result: torch.Tensor, total: torch.Tensor, units: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the bound of a sum with an error of `units` of `total`, its absolute terms; infinite on overflow."""
    error = bounds.gamma(units, bounds.acc_unit(dtype)) * total + units * bounds.TINY[launch.acc_torch(dtype)]
    return where_finite(result, bounds.rounded(result, bounds.or_infinite(error, total, dtype), dtype))


def _of_sizes(case: Case, dy: torch.Tensor, reference: Reference) -> torch.Tensor:
    """Return the reference's gradient for |dy|."""
    x = case.args[0].detach().clone().requires_grad_()
    with torch.enable_grad():
        y = reference(x, *case.args[1:], **case.kwargs)
    return torch.autograd.grad(y, x, dy.abs())[0]


def _near(windows: Steps) -> int:
    """Return the most windows around a pixel, of all steps."""
    return sum(at.near[0] * at.near[1] for at in windows)


def maximum(name: str, reference: Reference, windows: Callable[..., tuple[pool.Windows, ...]], **fields: Any) -> OpSpec:
    """Return the spec of a maximum, whose windows follow from its arguments as those of `mean`."""

    def grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        x, *rest = case.arguments(getattr(ops, name))
        at = windows(x.shape[2:], *rest[:-1])
        return (_linear(grads[0], _of_sizes(case, dy, reference), _near(at) - len(at), dtype),)

    fields["examples"] = in_both_orders(fields["examples"])
    return _spec(name, reference=reference, bound=no_error, grad_bound=grad_bound, exact=True, **fields)


def mean(name: str, windows: Callable[..., Steps], **fields: Any) -> OpSpec:
    """Return the spec of a mean, whose windows follow from its arguments after the size of the image."""
    op, reference = getattr(ops, name), getattr(F, name)

    def bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x, *rest = case.arguments(op)
        at = windows(x.shape[2:], *rest)
        total = reference(x.abs(), *case.args[1:], **case.kwargs).abs()
        taps, chain = 1, 0
        for each in at:
            taps, chain = taps * each.kernel[0] * each.kernel[1], chain + each.kernel[0] * each.kernel[1]
        if all(each.output == (1, 1) for each in at) and (len(at) == 1 or at[0].adaptive):
            chain = reduce.depth(max(x.shape[0] * x.shape[1], 1), taps, dtype)
        bound = _linear(result, total, max(chain, 1) + 4 * len(at), dtype)
        # The sum itself, so much more than the mean of absolute values, must not overflow.
        return where_finite(result, bounds.or_infinite(bound, total * taps, dtype))

    def grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        x, *rest = case.arguments(op)
        at = windows(x.shape[2:], *rest)
        return (_linear(grads[0], _of_sizes(case, dy, reference).abs(), _near(at) + 5 * len(at), dtype),)

    fields["examples"] = in_both_orders(fields["examples"])
    return _spec(name, reference=reference, bound=bound, grad_bound=grad_bound, **fields)


_INTEGERS = refuses(TypeError, WANTS_FLOATING.message, integers(1, 2, 4, 4), extra=(2,))
_ONE = (1, 1, 4, 4)
_WINDOWS = (
    _INTEGERS,
    refuses(ValueError, r"input has shape \[4, 4\], expected \[N, C, H, W\]", (4, 4), kernel_size=2),
    refuses(ValueError, "padding 2 is above half of the kernel's height 3; use", _ONE, kernel_size=3, padding=2),
    refuses(ValueError, "a kernel of width 5 does not fit into an image of width 4", (1, 1, 9, 4), kernel_size=5),
    refuses(ValueError, "kernel_size is 0, expected a whole number from 1", _ONE, kernel_size=0),
    refuses(ValueError, "stride is 0, expected a whole number from 1", _ONE, kernel_size=2, stride=0),
    refuses(TypeError, r"kernel_size is \(1, 2, 3\), expected .* or a pair of them", _ONE, kernel_size=(1, 2, 3)),
    refuses(TypeError, "kernel_size is True, expected a whole number", _ONE, kernel_size=True),
    refuses(ValueError, "stride is .*, expected a whole number from 1 to", _ONE, kernel_size=2, stride=2**40),
)


def _one(windows: Callable[..., pool.Windows], *fixed: Any) -> Callable[..., Steps]:
    return lambda *args: (windows(*fixed, *args),)


def avg_windows(windows: Any, name: str) -> Callable[..., Any]:
    """Return the function of the size of an image and the arguments of a mean that returns its windows."""

    def of(size: Any, kernel: Any, stride: Any, padding: Any, ceil: bool, padded: bool, divisor: Any) -> Any:
        return windows(name, size, kernel, stride, padding, 1, ceil, divisor, padded)

    return of


def with_distinct(inputs: Callable[[Make], Case]) -> Callable[[Make], Case]:
    def draw(make: Make) -> Case:
        x, output = inputs(make).args
        return Case((distinct(x), output))

    return draw


SPECS = [
    maximum(
        "max_pool2d",
        _max_pool2d,
        _one(pool.windows, "max_pool2d"),
        inputs=_max_inputs,
        examples={
            "2x2": tensors((3, 33, 8, 10), kernel_size=2),
            "overlapping": tensors((2, 5, 15, 13), kernel_size=3, stride=2, padding=1),
            "ceil, dilated": tensors(
                (2, 3, 14, 12), kernel_size=(2, 3), stride=3, padding=1, dilation=(1, 2), ceil_mode=True
            ),
            "large": tensors((1, 70, 14, 15), kernel_size=12, stride=2),
        },
        bad=(
            *_WINDOWS,
            refuses(ValueError, "dilation is 0, expected a whole number from 1", _ONE, kernel_size=2, dilation=0),
        ),
    ),
    mean(
        "avg_pool2d",
        _one(avg_windows(pool.windows, "avg_pool2d")),
        inputs=_avg_inputs,
        examples={
            "2x2": tensors((3, 33, 8, 10), kernel_size=2),
            "overlapping": tensors((2, 5, 15, 13), kernel_size=3, stride=2, padding=1, count_include_pad=False),
            "ceil": tensors((2, 3, 14, 12), kernel_size=(2, 3), stride=3, padding=1, ceil_mode=True),
            "divisor": tensors((2, 70, 9, 9), kernel_size=4, stride=1, divisor_override=5),
        },
        bad=(
            *_WINDOWS,
            refuses(ValueError, "divisor_override is 0", _ONE, kernel_size=2, divisor_override=0),
            refuses(TypeError, "divisor_override is 1.5", _ONE, kernel_size=2, divisor_override=1.5),
        ),
    ),
    mean(
        "adaptive_avg_pool2d",
        _one(pool.adaptive_windows, "adaptive_avg_pool2d"),
        inputs=_adaptive_inputs,
        examples={
            "shrinking": tensors((3, 33, 10, 7), output_size=(3, 4)),
            "growing": tensors((2, 5, 3, 4), output_size=7),
            "global": tensors((5, 70, 7, 7), output_size=1),
            "mixed": tensors((2, 3, 5, 9), output_size=(None, 4)),
        },
        bad=(
            _INTEGERS,
            refuses(ValueError, r"input has shape \[4, 4\], expected \[N, C, H, W\]", (4, 4), output_size=1),
            refuses(
                ValueError, "the image is 0 x 4, expected a height and width of 1 or more", (1, 2, 0, 4), output_size=1
            ),
            refuses(ValueError, "output_size is -1, expected a whole number from 0", (1, 2, 4, 4), output_size=-1),
            refuses(TypeError, r"output_size is \(1, 2, 3\), expected", (1, 2, 4, 4), output_size=(1, 2, 3)),
        ),
    ),
    maximum(
        "adaptive_max_pool2d",
        F.adaptive_max_pool2d,
        _one(pool.adaptive_windows, "adaptive_max_pool2d"),
        inputs=with_distinct(_adaptive_inputs),
        examples={
            "quarters": tensors((2, 5, 8, 12), output_size=4),
            "global": tensors((5, 70, 7, 7), output_size=1),
            "shrinking": tensors((3, 33, 10, 7), output_size=(3, 4)),
            "growing": tensors((2, 5, 3, 4), output_size=7),
        },
        bad=(
            _INTEGERS,
            refuses(ValueError, "output_size is -1, expected a whole number from 0", _ONE, output_size=-1),
        ),
    ),
]
