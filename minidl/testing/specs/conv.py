"""The records of convolutions along one, two and three axes, and of transposed ones.

An output adds up K = C R S products (C of its group; of a volume C Q R S), an element of the input's gradient at most
M R S, one of the weight's gradient N OH OW. Every form adds a block of products at a time and then the blocks, shares
of them first; what lies outside the image adds nothing. So the chain is no longer than K, nor than a block and the
blocks. A transposed one exchanges C with M and the image with the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels.activation import Activation
from minidl.runtime import launch
from minidl.testing.specs import products
from minidl.testing.specs.activation import apply
from minidl.testing.specs.base import Bad, Case, OpSpec, of, refuses, tensors
from minidl.testing.specs.make import Make

FAMILIES = (
    "conv", "conv_flat", "conv_grad_weight", "conv_band", "conv_banded", "conv_banded_grad_weight", "conv_held",
    "conv_two_rows", "conv_turn", "conv_depthwise", "conv_depthwise_grad_weight",
)  # fmt: skip
# The most products that a compiled kernel adds in one step, with the pixels whose bands are folded after it; and the
# fewest channels or pixels that a step covers.
BLOCK, LEAST = 192, 16


def chain(terms: int, rows: int) -> int:
    """The longest chain for sums of `terms` products that stand in `rows` stretches."""
    if launch.INTERPRETED:
        return terms + 2
    steps = rows * math.ceil(terms / max(rows, 1) / LEAST)
    return min(terms, BLOCK + 2 * steps) + 2


@dataclass(frozen=True)
class Convolution:
    """The reference and the bounds of a convolution and, with the roles of C and M exchanged, of a transposed one.

    `op` is minidl's function and `function` torch's. Both take x, weight, bias and settings, of which the fourth is the
    number of groups; minidl's takes the activation after them.
    """

    op: Callable[..., Any]
    function: Callable[..., torch.Tensor]
    transposed: bool = False

    def reference(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The operation on torch tensors."""
        x, weight, bias, *how, act = Case(args, kwargs).arguments(self.op)
        return apply(self.convolve(x, weight, bias, how), act)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: Any, how: Sequence[Any]) -> torch.Tensor:
        """torch's convolution, also of no images: torch 2.11 divides by 0 there with groups, and transposes none."""
        if x.shape[0] == 0:
            one = self.convolve(x.new_zeros(1, *x.shape[1:]), weight, bias, how)
            return one[:0] + 0 * (x.sum() + weight.sum())
        if len(how) > 1 and how[1] in ("same", "causal"):
            # torch warns of a "same" of uneven parts, and has no "causal".
            x, how = _padded(x, weight, *how)
        return self.function(x, weight, bias, *how)

    def terms(self, weight: torch.Tensor, groups: int) -> tuple[int, int]:
        """The most products in an output, and in an element of the input's gradient."""
        taps = math.prod(weight.shape[2:])
        of_C, of_M = weight.shape[1] * taps, weight.shape[0] // groups * taps
        return (of_M, of_C) if self.transposed else (of_C, of_M)

    def preactivation(self, case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """z = conv(x, w) + b and its error in the accumulate type."""
        x, weight, bias, *how, _ = case.arguments(self.op)
        z, a, w = self.convolve(x, weight, bias, how), x.abs(), weight.abs()
        total, near_zero = self.convolve(a, w, None, how), self.convolve(a + 1, w + 1, None, how)
        terms, _ = self.terms(weight, how[3])
        error = products.sum_error(total, near_zero, chain(terms, math.prod(weight.shape[2:])), dtype)
        return z, products.with_bias(z, error, bias, dtype)

    def grad_bound(self, case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Bounds of the gradients of x, weight and bias."""
        x, weight, _, *how, act = case.arguments(self.op)
        known, error = products.incoming(act, dy, *self.preactivation(case, dtype), dtype)
        with torch.enable_grad():
            a, w = (t.abs().requires_grad_() for t in (x, weight))
            y = self.convolve(a, w, None, how)
            dx_known, dw_known = torch.autograd.grad(y, (a, w), known, retain_graph=True)
            dx_error, dw_error = torch.autograd.grad(y, (a, w), error)
            dx_tiny, dw_tiny = torch.autograd.grad(self.convolve(a + 1, w + 1, None, how), (a, w), known + 1)
        _, terms = self.terms(weight, how[3])
        image = x if self.transposed else dy
        pixels = image.shape[0] * math.prod(image.shape[2:])
        dx = dx_error + products.sum_error(dx_known, dx_tiny, chain(terms, math.prod(weight.shape[2:])), dtype)
        dw = dw_error + products.sum_error(dw_known, dw_tiny, chain(pixels, 1), dtype)
        return products.gradient_bounds(
            grads, (dx, dw, products.bias_error(known, error, (0, *range(2, x.ndim)), dtype)), dtype
        )

    def record(self, **fields: Any) -> OpSpec:
        """The record with everything that both have."""
        return OpSpec(
            name=self.op.__name__,
            op=self.op,
            reference=self.reference,
            bound=products.output_bound(self.op, self.preactivation),
            grad_bound=self.grad_bound,
            differentiable=(0, 1, 2),
            exact=True,
            # A zero of the padding or between weights is multiplied in one form and not in another:
            # tests/kernels/test_conv.py has the rule.
            specials=False,
            **fields,
        )


def _padded(
    x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: str, dilation: Any, groups: int
) -> tuple[torch.Tensor, list[Any]]:
    """x with the zeros that a padding by name puts around it, and the settings without it."""
    axes = x.ndim - 2
    around: list[int] = []
    for i, kernel in enumerate(weight.shape[2:]):
        reach = (kernel - 1) * (dilation if isinstance(dilation, int) else dilation[i])
        low = reach if padding == "causal" else reach // 2
        around = [low, reach - low, *around]
    return F.pad(x, around), [stride, (0,) * axes, dilation, groups]


def _bias_and_act(make: Make, channels: int) -> tuple[torch.Tensor | None, Activation]:
    bias = make.tensor(channels) if make.integer(0, 1) else None
    return bias, make.choice([None, "relu", ("leaky_relu", 0.25)])


def _inputs(axes: int, make: Make) -> Case:
    """Of `conv1d`, `conv2d` and `conv3d`."""

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(make.integer(least, most) for _ in range(axes))

    groups = make.choice([1, 1, 1, 2, 3])
    N, C, M = make.choice([2, 1, 3, 0]), make.choice([1, 3, 2, 13, 16, 32]), make.choice([2, 1, 5, 12, 16, 20])
    kernel, stride, dilation = each(1, 5 if axes < 3 else 3), each(1, 3), each(1, 2)
    padding: Any = make.choice(["numbers", "numbers", "numbers", "same", "valid"] + ["causal"] * (axes == 1))
    low: tuple[int, ...] = (0,) * axes
    if padding == "numbers":
        low = padding = each(0, 3)
    elif padding == "same":
        stride, low = (1,) * axes, tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    least = [max(1, d * (k - 1) + 1 - 2 * p) for d, k, p in zip(dilation, kernel, low, strict=True)]
    size = [smallest + make.choice([0, 1, 2, 5, 9] if axes < 3 else [0, 1, 3]) for smallest in least]
    bias, act = _bias_and_act(make, groups * M)
    x, weight = make.tensor(N, groups * C, *size), make.tensor(groups * M, C, *kernel)
    return Case((x, weight, bias, stride, padding, dilation, groups, act))


def _transposed_inputs(axes: int, make: Make) -> Case:
    """Of `conv_transpose1d` and `conv_transpose2d`."""

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(make.integer(least, most) for _ in range(axes))

    groups = make.choice([1, 1, 1, 2, 3])
    N, C, M = make.choice([2, 1, 3, 0]), make.choice([1, 3, 2, 13, 16, 32]), make.choice([2, 1, 3, 5, 12, 16])
    kernel, stride, dilation = each(1, 5), each(1, 3), each(1, 2)
    ends = tuple(make.integer(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    size = (make.choice([1, 2, 5, 9]), make.choice([1, 3, 4, 10]))[:axes]
    padding = []
    for i in range(axes):
        whole = (size[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + ends[i]
        padding.append(min(make.integer(0, 3), whole // 2))
    bias, act = _bias_and_act(make, groups * M)
    x, weight = make.tensor(N, groups * C, *size), make.tensor(groups * C, M, *kernel)
    return Case((x, weight, bias, stride, tuple(padding), ends, groups, dilation, act))


def _settings(x: tuple[int, ...], weight: tuple[int, ...]) -> Callable[..., Bad]:
    """Calls that are right but for their settings from the bias on."""
    return lambda error, message, *settings: refuses(error, message, x, weight, extra=settings)


_conv = _settings((2, 3, 4, 4), (4, 3, 1, 1))
_transposed = _settings((2, 4, 4, 4), (4, 3, 3, 3))

CONV2D = Convolution(ops.conv2d, F.conv2d).record(
    inputs=partial(_inputs, 2),
    families=FAMILIES,
    examples={
        "few channels": tensors((2, 1, 9, 11), (6, 1, 3, 3), (6,)),
        "many channels": tensors((3, 32, 6, 5), (20, 32, 3, 3), (20,), extra=(1, 1, 1, 1, "relu")),
        "stride, padding and dilation": tensors((2, 5, 13, 12), (7, 5, 3, 4), (7,), extra=((2, 3), (2, 1), (2, 1))),
        "groups": tensors((2, 6, 7, 8), (9, 2, 3, 3), (9,), extra=(1, "same", 1, 3, "gelu")),
        "depthwise": tensors((2, 8, 7, 7), (8, 1, 5, 5), extra=(None, 1, 2, 1, 8, "tanh")),
        "one pixel": tensors((1, 17, 1, 1), (3, 17, 1, 1), (3,), extra=(1, 0, 1, 1, "silu")),
        "kernel larger than the image": tensors((2, 3, 2, 3), (4, 3, 5, 5), extra=(None, 1, 2)),
    },
    bad=(
        refuses(ValueError, r"input has shape \[3, 4\].* expected \[N, C, H, W\]", (3, 4), (4, 3, 1, 1)),
        refuses(ValueError, "input has 3 channels, weight", (2, 3, 4, 4), (4, 2, 1, 1)),
        refuses(ValueError, "a multiple of groups", (2, 4, 4, 4), (3, 2, 1, 1), extra=(None, 1, 0, 1, 2)),
        _conv(ValueError, "groups is 0", None, 1, 0, 1, 0),
        refuses(ValueError, "kernel's height 5 .* is larger than .* the padded input, 4", (2, 3, 4, 4), (4, 3, 5, 1)),
        refuses(ValueError, r"bias has shape \[3\], expected \[4\]", (2, 3, 4, 4), (4, 3, 1, 1), (3,)),
        _conv(ValueError, "stride is 0, expected a whole number", None, 0),
        _conv(ValueError, "stride is .* from 1 to 1073741824", None, 2**40),
        _conv(ValueError, "groups is 1.0", None, 1, 0, 1, 1.0),
        _conv(ValueError, "padding is -1", None, 1, -1),
        _conv(ValueError, 'expected "same", "valid"', None, 1, "full"),
        refuses(ValueError, 'padding "same" is for stride 1', (2, 3, 4, 4), (4, 3, 3, 3), extra=(None, 2, "same")),
        _conv(TypeError, "or a pair of them", None, 1, 0, (1, 2, 3)),
        _conv(TypeError, "stride is True, expected a whole number", None, True),
        refuses(ValueError, "neither may have a size of 0", (2, 3, 0, 4), (4, 3, 1, 1)),
        refuses(TypeError, "convert one of", (2, 3, 4, 4), of(torch.float16, 4, 3, 1, 1)),
    ),
)

CONV_TRANSPOSE2D = Convolution(ops.conv_transpose2d, F.conv_transpose2d, transposed=True).record(
    inputs=partial(_transposed_inputs, 2),
    families=("conv_turn", "conv_few"),
    examples={
        "few outputs": tensors((2, 16, 5, 6), (16, 3, 5, 5), (3,), extra=(2, 2, 1, 1, 1, "tanh")),
        "many channels": tensors((3, 32, 4, 5), (32, 20, 4, 4), (20,), extra=(2, 1, 0, 1, 1, "relu")),
        "stride, padding and dilation": tensors((2, 5, 6, 5), (5, 7, 3, 4), (7,), extra=((2, 3), (2, 1), 1, 1, (1, 2))),
        "groups": tensors((2, 6, 7, 4), (6, 5, 3, 3), (10,), extra=(1, 1, 0, 2, 1, "gelu")),
        "stride above the kernel": tensors((2, 3, 4, 3), (3, 4, 2, 1), (4,), extra=(3, 0, 2, 1, 1, "silu")),
        "one pixel to an image": tensors((1, 17, 1, 1), (17, 9, 4, 4), extra=(None,)),
    },
    bad=(
        refuses(ValueError, r"input has shape \[3, 4\].* expected \[N, C, H, W\]", (3, 4), (3, 4, 1, 1)),
        refuses(ValueError, "input has 3 channels, weight", (2, 3, 4, 4), (2, 3, 1, 1)),
        refuses(ValueError, "and a multiple of groups", (2, 3, 4, 4), (3, 2, 1, 1), extra=(None, 1, 0, 0, 2)),
        _transposed(ValueError, "groups is 0", None, 1, 0, 0, 0),
        _transposed(ValueError, "groups is 1.0", None, 1, 0, 0, 1.0),
        refuses(ValueError, r"bias has shape \[3\], expected \[4\]", (2, 3, 4, 4), (3, 4, 1, 1), (3,)),
        _transposed(ValueError, "conv_transpose2d: stride is 0, expected a whole number", None, 0),
        _transposed(ValueError, "padding is -1", None, 1, -1),
        _transposed(TypeError, "padding is 'same', expected a whole number", None, 1, "same"),
        _transposed(ValueError, "output_padding is 2, expected less than stride 2 or than dilation", None, 2, 0, 2),
        _transposed(TypeError, "dilation is .*, or a pair of them", None, 1, 0, 0, 1, (1, 2, 3)),
        _transposed(ValueError, "the result would have a height of 0; use less padding than 3", None, 1, 3),
        refuses(ValueError, "neither may have a size of 0", (2, 3, 0, 4), (3, 4, 1, 1)),
        refuses(TypeError, "convert one of", (2, 3, 4, 4), of(torch.float16, 3, 4, 1, 1)),
    ),
)

_sequences = _settings((2, 3, 7), (4, 3, 3))

CONV1D = Convolution(ops.conv1d, F.conv1d).record(
    inputs=partial(_inputs, 1),
    families=("conv_depthwise",),
    examples={
        "dilated": tensors((2, 16, 20), (20, 16, 3), (20,), extra=(1, 2, 2, 1, "relu")),
        "first layer": tensors((2, 1, 43), (12, 1, 10), (12,), extra=(5,)),
        "depthwise": tensors((2, 8, 17), (8, 1, 31), (8,), extra=(1, "same", 1, 8, "silu")),
    },
    bad=(
        refuses(ValueError, r"input has shape \[3\].* expected \[N, C, L\]", (3,), (4, 3, 1)),
        refuses(ValueError, "conv1d: input has 3 channels, weight", (2, 3, 4), (4, 2, 1)),
        refuses(ValueError, "kernel's length 5 .* is larger than .* the padded input, 4", (2, 3, 4), (4, 3, 5)),
        _sequences(ValueError, "conv1d: stride is 0, expected a whole number", None, 0),
        _sequences(TypeError, "or a sequence of one", None, 1, 0, (1, 2)),
        _sequences(ValueError, 'expected "same", "valid", "causal", a whole number', None, 1, "full"),
        _sequences(ValueError, 'padding "same" is for stride 1', None, 2, "same"),
    ),
)

CONV_TRANSPOSE1D = Convolution(ops.conv_transpose1d, F.conv_transpose1d, transposed=True).record(
    inputs=partial(_transposed_inputs, 1),
    families=("conv_turn",),
    examples={"upsampling": tensors((2, 16, 9), (16, 8, 4), (8,), extra=(2, 1, 0, 1, 1, "relu"))},
    bad=(
        refuses(ValueError, r"input has shape \[3\].* expected \[N, C, L\]", (3,), (3, 4, 1)),
        refuses(ValueError, "conv_transpose1d: input has 3 channels, weight", (2, 3, 4), (2, 3, 1)),
        refuses(ValueError, "output_padding is 2, expected less", (2, 3, 4), (3, 2, 3), extra=(None, 2, 0, 2)),
        refuses(ValueError, "the result would have a length of 0", (2, 4, 4), (4, 3, 3), extra=(None, 1, 3)),
    ),
)

_volumes = _settings((2, 3, 4, 4, 4), (4, 3, 3, 3, 3))

CONV3D = Convolution(ops.conv3d, F.conv3d).record(
    inputs=partial(_inputs, 3),
    families=("conv_fill",),
    examples={
        "3x3x3": tensors((2, 16, 4, 5, 6), (20, 16, 3, 3, 3), (20,), extra=(1, 1, 1, 1, "relu")),
        "stride": tensors((2, 5, 6, 7, 5), (7, 5, 3, 2, 3), (7,), extra=((2, 1, 2), (1, 0, 1), (1, 2, 1))),
        "slices": tensors((2, 6, 4, 5, 5), (8, 6, 1, 3, 3), (8,), extra=(1, (0, 1, 1), 1, 1, "gelu")),
        "depth": tensors((2, 6, 7, 3, 3), (8, 6, 3, 1, 1), (8,), extra=((2, 1, 1), (1, 0, 0))),
        "depthwise": tensors((1, 8, 4, 5, 5), (8, 1, 3, 3, 3), extra=(None, 1, 1, 1, 8)),
    },
    bad=(
        refuses(ValueError, r"input has shape .* expected \[N, C, D, H, W\]", (2, 3, 4, 4), (4, 3, 1, 1)),
        refuses(ValueError, "conv3d: input has 3 channels, weight", (2, 3, 4, 4, 4), (4, 2, 1, 1, 1)),
        refuses(
            ValueError, "kernel's depth 5 .* is larger than .* the padded input, 4", (2, 3, 4, 4, 4), (4, 3, 5, 1, 1)
        ),
        _volumes(TypeError, "or three of them", None, (1, 2)),
        _volumes(ValueError, 'expected "same", "valid", a whole number or three', None, 1, "causal"),
        refuses(TypeError, "convert one of", (2, 3, 4, 4, 4), of(torch.float16, 4, 3, 1, 1, 1)),
    ),
)

SPECS = [CONV1D, CONV2D, CONV3D, CONV_TRANSPOSE1D, CONV_TRANSPOSE2D]
