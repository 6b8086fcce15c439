"""Calls of convolutions in every form that suits a shape, with every epilogue, and of their gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from minidl.kernels import conv
from minidl.kernels.conv import few_outputs, volume
from minidl.kernels.conv.geometry import Axis, Geometry, Volume
from minidl.runtime.descriptors import ConcatPair
from minidl.testing.cases import convolutions as cases
from minidl.testing.cases import transposed
from minidl.testing.cases.convolutions import Conv
from minidl.testing.specs.make import EmptyMake

Calls = Iterator[tuple[str, Callable[[], Any]]]


def in_form(form: str | None, call: Callable[..., Any]) -> Callable[[], None]:
    """Return the call in a form, without the error of a form that cannot compute the problem."""

    def call_in_form() -> None:
        with contextlib.suppress(conv.UnableError):
            call(form=form)

    return call_in_form


def convolutions(dtype: torch.dtype) -> Calls:
    """Yield every form of the layers of networks; strides are for input gradients."""
    make = EmptyMake(0, dtype)
    for case in cases.COMPILED:
        x, w, dy, bias = case.tensors(make)
        calls = _calls(x, w, dy, bias, case.geometry)
        calls["pooled"] = partial(conv.forward, x, w, case.geometry, bias, "gelu_tanh", pool="max")
        for form, (name, call) in itertools.product(conv.FORMS, calls.items()):
            yield f"{name}, {form}, {case}", in_form(form, call)
    case = cases.FILL_COMPILED
    x, w, dy, _ = case.tensors(make)
    yield f"{case}", in_form("fill", partial(conv.forward, x, w, case.geometry))
    yield f"{case}, gradient of the input", in_form("fill", partial(conv.grad_input, dy, w, case.geometry))
    yield f"{case}, gradient of the weight", in_form("fill", partial(conv.grad_weight, x, dy, case.geometry))
    for case in cases.FIRST_COMPILED:
        x, w, *_ = case.tensors(make)
        yield f"first layer {case}", in_form("unshuffle", partial(conv.forward, x, w, case.geometry))
    for case in cases.DEPTHWISE_COMPILED:
        yield from _depthwise(case, make)


def _calls(
    x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor, at: Geometry
) -> dict[str, Callable[..., Any]]:
    return {
        "forward": partial(conv.forward, x, w, at, bias, "gelu_tanh", preactivation=True, scale=bias),
        "sum": partial(conv.forward, x, w, at, bias, "relu", scale=bias, added=dy),
        "gradient of the input": partial(conv.grad_input, dy, w, at),
        "gradient of the weight": partial(conv.grad_weight, x, dy, at),
    }


def _depthwise(case: Conv, make: EmptyMake) -> Calls:
    x, w, dy, bias = case.tensors(make)
    for act, preactivation in (("gelu_tanh", True), ("relu", False)):
        call = partial(conv.forward, x, w, case.geometry, bias, act, scale=bias, form="depthwise")
        yield f"{case}, {act}", partial(call, preactivation=preactivation)
    yield f"{case}, gradient of the input", partial(conv.grad_input, dy, w, case.geometry, form="depthwise")
    yield f"{case}, gradient of the weight", partial(conv.grad_weight, x, dy, case.geometry, form="depthwise")


def products(dtype: torch.dtype) -> Calls:
    """Yield convolutions that are matrix products, with their tiles: boxes and pointers, one share and more."""
    make = EmptyMake(0, dtype)
    for case in cases.PRODUCTS_COMPILED:
        x, w, dy, bias = case.tensors(make)
        calls = _calls(x, w, dy, bias, case.geometry) | {
            "statistics": partial(conv.forward, x, w, case.geometry, statistics=True),
            "forward": partial(conv.forward, x, w, case.geometry, bias, "gelu_tanh", preactivation=True),
        }
        for name, call in calls.items():
            yield f"{name}, {case}", in_form("product", call)
        yield f"split gradient of the weight, {case}", in_form("split", calls["gradient of the weight"])


def sums(dtype: torch.dtype) -> Calls:
    """Yield a residual before the activation, of more tiles than programs, with one step per tile and with more."""
    make = EmptyMake(0, dtype)
    for C, kernel, form in itertools.product((64, 96, 256), (1, 3), ("box", "batch")):
        case = Conv(128, C, 256, 28, kernel, kernel // 2)
        bias = torch.zeros(256, dtype=torch.promote_types(dtype, torch.float32))
        x, w, dy, _ = case.tensors(make)
        call = partial(conv.forward, x, w, case.geometry, bias, "relu", scale=bias, added=dy)
        yield f"{form}, {case}", in_form(form, call)


def concat_pairs(dtype: torch.dtype) -> Calls:
    """Yield concat pairs, in tiles with channels of one tensor and of both."""
    make = EmptyMake(0, dtype)
    for case, form in ((Conv(16, 128, 64, 64, 3, 1), "pair"), (Conv(16, 256, 128, 64, 3, 1), "box")):
        w, at = case.tensors(make)[1], case.geometry
        x = ConcatPair(*make.tensor(2, 16, 64, 64, case.C // 2).permute(0, 1, 4, 2, 3))
        bias = torch.zeros(case.M, dtype=torch.promote_types(dtype, torch.float32))
        for name, call in (
            ("relu", partial(conv.forward, x, w, at, bias, "relu", scale=bias, form=form)),
            ("bare", partial(conv.forward, x, w, at, form=form)),
        ):
            yield f"{name}, {case}", partial(_if_readable, call)


def _if_readable(call: Callable[[], Any]) -> None:
    """Make a call of a concat pair if a tile can read it."""
    with contextlib.suppress(ValueError):
        call()


def volumes(dtype: torch.dtype) -> Calls:
    """Yield volumes in boxes of voxels and as adjacent slices, with strides and groups."""
    for C, M, size, kernel, stride, groups, N in (
        (64, 64, 16, 3, 1, 1, 4), (32, 16, 64, 3, 1, 1, 1), (128, 96, 14, 3, 2, 1, 8), (128, 128, 8, 3, 1, 4, 2),
        (3, 64, 32, 3, 1, 1, 2), (24, 24, 16, 3, 1, 24, 2),
    ):  # fmt: skip
        axis = Axis.of("conv3d", "depth", size, kernel, stride, (1, 1), 1)
        at = Volume(axis, Geometry(axis, axis, groups))
        x, bias = torch.zeros(N, size, size, size, C, dtype=dtype).movedim(-1, 1), torch.zeros(M, dtype=dtype)
        w = torch.zeros(M, kernel, kernel, kernel, C // groups, dtype=dtype).movedim(-1, 1)
        dy = torch.zeros(N, *(axis.output,) * 3, M, dtype=dtype).movedim(-1, 1)
        for form in ("cube", "unfold", "stack", None):
            name = f"{form or 'chosen'}, {C} to {M} at {size}, stride {stride}, {groups} groups"
            call = partial(volume.forward, x, w, at, bias, "gelu_tanh", preactivation=True, scale=bias, form=form)
            yield name, call
            yield f"{name}, gradient of the input", partial(volume.grad_input, dy, w, at, form=form)
            yield f"{name}, gradient of the weight", partial(volume.grad_weight, x, dy, at, form=form)


def transposed_convolutions(dtype: torch.dtype) -> Calls:
    """Yield the layers of generators, with weights in both memory formats, for inference and training."""
    make = EmptyMake(0, dtype)
    for case, act in transposed.COMPILED.items():
        x, bias, weights = case.x(make), make.tensor(case.M), make.tensor(*case.weights_shape)
        for memory in (torch.contiguous_format, torch.channels_last):
            w = weights.contiguous(memory_format=memory)
            call = partial(conv.transposed, x, w, case.geometry, bias, act)
            for form in ("few",) if case.M <= few_outputs.MOST else ("batch",):
                name = f"{case}, {memory}, {form}"
                yield name, in_form(form, partial(call, scale=bias))
                yield f"{name}, before the activation", in_form(form, partial(call, preactivation=True))
    for case, act in transposed.PATCHES_COMPILED.items():
        x, bias = case.x(make), make.tensor(case.M)
        w = make.tensor(*case.weights_shape).contiguous(memory_format=torch.channels_last)
        call = partial(conv.transposed, x, w, case.geometry, bias, act, scale=bias)
        for keep in (False, True):
            name = f"{case}{', before the activation' if keep else ''}"
            yield name, in_form("product", partial(call, preactivation=keep))
