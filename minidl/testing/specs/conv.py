"""Specs of convolutions along one, two and three axes, and of transposed convolutions.

An output adds up K = C R S products (C of its group; of a volume C Q R S), an element of the input's gradient at most
M R S, one of the weight's gradient N OH OW. Every form adds a block of products at a time and then the blocks, shares
of them first; taps outside the image add nothing. So the chain is at most K, and at most a block and the number of
blocks. A transposed convolution exchanges C with M and the image with the result.
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
from minidl.runtime import launch
from minidl.testing.specs import products
from minidl.testing.specs.activation import apply
from minidl.testing.specs.base import Bad, Case, OpSpec, of, refuses, tensors
from minidl.testing.specs.conv_cases import draw_conv, draw_transposed

FAMILIES = (
    "conv", "conv_flat", "conv_grad_weight", "conv_band", "conv_banded", "conv_banded_grad_weight",
    "conv_reorder", "conv_depthwise", "conv_depthwise_grad_weight",
)  # fmt: skip
# The most products that a compiled kernel adds in one step, with the pixels of the bands added after it; and the
# fewest channels or pixels that a step covers.
BLOCK, LEAST = 192, 16


def chain(terms: int, rows: int) -> int:
    """Return the longest chain for sums of `terms` products that stand in `rows` stretches."""
    if launch.ON_CPU:
        return terms + 2
    steps = rows * math.ceil(terms / max(rows, 1) / LEAST)
    return min(terms, BLOCK + 2 * steps) + 2


@dataclass(frozen=True)
class Convolution:
    """The reference and the bounds of a convolution or, with C and M exchanged, of a transposed convolution.

    `op` is minidl's function and `function` torch's. Both take x, weight, bias and settings, the fourth of which is the
    number of groups; minidl's also takes an activation.
    """

    op: Callable[..., Any]
    function: Callable[..., torch.Tensor]
    transposed: bool = False

    def reference(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the operation on torch tensors."""
        x, weight, bias, *settings, act = Case(args, kwargs).arguments(self.op)
        return apply(self.convolve(x, weight, bias, settings), act)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: Any, settings: Sequence[Any]) -> torch.Tensor:
        """Call torch's convolution, also for 0 images, for which torch 2.11 fails with groups or transposed."""
        if x.shape[0] == 0:
            one = self.convolve(x.new_zeros(1, *x.shape[1:]), weight, bias, settings)
            return one[:0] + 0 * (x.sum() + weight.sum())
        if len(settings) > 1 and settings[1] in ("same", "causal"):
            # torch warns about an uneven "same", and has no "causal".
            x, settings = _padded(x, weight, *settings)
        return self.function(x, weight, bias, *settings)

    def terms(self, weight: torch.Tensor, groups: int) -> tuple[int, int]:
        """Return the most products in an output, and in an element of the input's gradient."""
        taps = math.prod(weight.shape[2:])
        of_C, of_M = weight.shape[1] * taps, weight.shape[0] // groups * taps
        return (of_M, of_C) if self.transposed else (of_C, of_M)

    def preactivation(self, case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return z = conv(x, w) + b and its error in the accumulate type."""
        x, weight, bias, *settings, _ = case.arguments(self.op)
        z, a, w = self.convolve(x, weight, bias, settings), x.abs(), weight.abs()
        total, near_zero = self.convolve(a, w, None, settings), self.convolve(a + 1, w + 1, None, settings)
        terms, _ = self.terms(weight, settings[3])
        error = products.sum_error(total, near_zero, chain(terms, math.prod(weight.shape[2:])), dtype)
        return z, products.with_bias(z, error, bias, dtype)

    def grad_bound(self, case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the bounds of the gradients of x, weight and bias."""
        x, weight, _, *settings, act = case.arguments(self.op)
        magnitude, error = products.incoming(act, dy, *self.preactivation(case, dtype), dtype)
        with torch.enable_grad():
            a, w = (t.abs().requires_grad_() for t in (x, weight))
            y = self.convolve(a, w, None, settings)
            dx_size, dw_size = torch.autograd.grad(y, (a, w), magnitude, retain_graph=True)
            dx_error, dw_error = torch.autograd.grad(y, (a, w), error)
            dx_tiny, dw_tiny = torch.autograd.grad(self.convolve(a + 1, w + 1, None, settings), (a, w), magnitude + 1)
        _, terms = self.terms(weight, settings[3])
        image = x if self.transposed else dy
        pixels = image.shape[0] * math.prod(image.shape[2:])
        dx = dx_error + products.sum_error(dx_size, dx_tiny, chain(terms, math.prod(weight.shape[2:])), dtype)
        dw = dw_error + products.sum_error(dw_size, dw_tiny, chain(pixels, 1), dtype)
        return products.gradient_bounds(
            grads, (dx, dw, products.bias_error(magnitude, error, (0, *range(2, x.ndim)), dtype)), dtype
        )

    def spec(self, **fields: Any) -> OpSpec:
        """Return the spec with the fields that all convolutions share."""
        return OpSpec(
            name=self.op.__name__,
            op=self.op,
            reference=self.reference,
            bound=products.output_bound(self.op, self.preactivation),
            grad_bound=self.grad_bound,
            differentiable=(0, 1, 2),
            exact=True,
            # Only some forms multiply zeros of the padding or between weights; tests/kernels/test_conv.py has the rule.
            specials=False,
            **fields,
        )


def _padded(
    x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: str, dilation: Any, groups: int
) -> tuple[torch.Tensor, list[Any]]:
    """Return x with the zeros of a padding by name, and the settings without that padding."""
    axes = x.ndim - 2
    around: list[int] = []
    for i, kernel in enumerate(weight.shape[2:]):
        reach = (kernel - 1) * (dilation if isinstance(dilation, int) else dilation[i])
        low = reach if padding == "causal" else reach // 2
        around = [low, reach - low, *around]
    return F.pad(x, around), [stride, (0,) * axes, dilation, groups]


def _settings(x: tuple[int, ...], weight: tuple[int, ...]) -> Callable[..., Bad]:
    """Return the function that makes a call with invalid settings (bias and later arguments)."""
    return lambda error, message, *settings: refuses(error, message, x, weight, extra=settings)


_conv = _settings((2, 3, 4, 4), (4, 3, 1, 1))
_transposed = _settings((2, 4, 4, 4), (4, 3, 3, 3))

CONV2D = Convolution(ops.conv2d, F.conv2d).spec(
    inputs=partial(draw_conv, 2),
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

CONV_TRANSPOSE2D = Convolution(ops.conv_transpose2d, F.conv_transpose2d, transposed=True).spec(
    inputs=partial(draw_transposed, 2),
    families=("conv_reorder", "conv_few"),
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

CONV1D = Convolution(ops.conv1d, F.conv1d).spec(
    inputs=partial(draw_conv, 1),
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

CONV_TRANSPOSE1D = Convolution(ops.conv_transpose1d, F.conv_transpose1d, transposed=True).spec(
    inputs=partial(draw_transposed, 1),
    families=("conv_reorder",),
    examples={"upsampling": tensors((2, 16, 9), (16, 8, 4), (8,), extra=(2, 1, 0, 1, 1, "relu"))},
    bad=(
        refuses(ValueError, r"input has shape \[3\].* expected \[N, C, L\]", (3,), (3, 4, 1)),
        refuses(ValueError, "conv_transpose1d: input has 3 channels, weight", (2, 3, 4), (2, 3, 1)),
        refuses(ValueError, "output_padding is 2, expected less", (2, 3, 4), (3, 2, 3), extra=(None, 2, 0, 2)),
        refuses(ValueError, "the result would have a length of 0", (2, 4, 4), (4, 3, 3), extra=(None, 1, 3)),
    ),
)

_volumes = _settings((2, 3, 4, 4, 4), (4, 3, 3, 3, 3))

CONV3D = Convolution(ops.conv3d, F.conv3d).spec(
    inputs=partial(draw_conv, 3),
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

CONV_TRANSPOSE3D = Convolution(ops.conv_transpose3d, F.conv_transpose3d, transposed=True).spec(
    inputs=partial(draw_transposed, 3),
    families=("conv_fill",),
    examples={
        "upsampling": tensors((2, 16, 3, 4, 2), (16, 8, 4, 4, 4), (8,), extra=(2, 1, 0, 1, 1, "relu")),
        "stride, padding and dilation": tensors(
            (2, 5, 3, 4, 2), (5, 7, 3, 2, 3), (7,), extra=((2, 1, 3), (2, 0, 1), (1, 0, 1), 1, (1, 2, 2), "silu")
        ),
        "groups": tensors((2, 6, 3, 2, 4), (6, 5, 3, 3, 3), (10,), extra=(1, 1, 0, 2, 1, "gelu")),
        "depthwise": tensors((1, 8, 3, 4, 3), (8, 1, 3, 3, 3), (8,), extra=(2, 1, 1, 8, 1, "gelu")),
        "slices": tensors((2, 6, 3, 4, 3), (6, 8, 1, 3, 3), (8,), extra=(1, (0, 1, 1), 0, 1, 1, "gelu")),
        "depth": tensors((2, 6, 4, 3, 3), (6, 8, 3, 1, 1), (8,), extra=((2, 1, 1), (1, 0, 0), 0, 1, 1, "silu")),
        "one voxel of several": tensors((2, 6, 3, 2, 3), (6, 8, 1, 1, 1), (8,), extra=((2, 1, 3), 0, (1, 0, 2))),
        "a margin at the end": tensors((2, 6, 3, 2, 3), (6, 8, 1, 1, 1), extra=(None, 2, 0, 4, 1, 5)),
    },
    bad=(
        refuses(ValueError, r"input has shape .* expected \[N, C, D, H, W\]", (2, 3, 4), (3, 4, 1, 1, 1)),
        refuses(ValueError, "conv_transpose3d: input has 3 channels, weight", (2, 3, 4, 4, 4), (2, 3, 1, 1, 1)),
        refuses(
            ValueError, "output_padding is 2, expected less", (2, 3, 4, 4, 4), (3, 2, 3, 3, 3), extra=(None, 2, 0, 2)
        ),
        refuses(ValueError, "the result would have a depth of 0", (2, 4, 4, 4, 4), (4, 3, 3, 3, 3), extra=(None, 1, 3)),
        refuses(ValueError, r"bias has shape \[3\], expected \[4\]", (2, 3, 4, 4, 4), (3, 4, 1, 1, 1), (3,)),
    ),
)

SPECS = [CONV1D, CONV2D, CONV3D, CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D]
