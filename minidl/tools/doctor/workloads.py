"""The calls of the offline compile: examples of every record, and launchers that no record reaches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from minidl import optim
from minidl.kernels import (
    activation,
    average,
    bias_act,
    conv,
    crops,
    elementwise,
    float8,
    gemm,
    images,
    mixing,
    norm,
    scaled_sum,
    tree,
)
from minidl.kernels import random as random_kernels
from minidl.kernels.conv import depthwise_rows, few_outputs, forms, volume
from minidl.kernels.conv import float8 as float8_products
from minidl.kernels.conv.geometry import Axis, Geometry, Volume
from minidl.kernels.norm import alone
from minidl.runtime import launch
from minidl.runtime.descriptors import ConcatPair
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor
from minidl.testing.compare import as_tuple, wrap
from minidl.testing.specs import Case, Make, OpSpec, all_specs
from minidl.testing.specs.base import FLOATS
from minidl.testing.specs.make import SeededMake

Calls = Iterator[tuple[str, Callable[[], Any]]]
# Families that only transposed convolutions and input gradients use.
TRANSPOSED = ("conv_back", "conv_few")
NORM = "norm", "norm_alone", "norm_grad", "norm_stats", "norm_sums"
# Those whose every tile is compiled for matrix products.
PRODUCTS = (
    "gemm", "gemm_parts", "gemm_cut", "gemm_pointer", "gemm_rows", "gemm_thin", "gemm_vector", "gemm_sum",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Calls whose launches are compiled.

    families  tile families whose every tile is forced in turn
    calls     for a dtype, the calls by name; nothing is computed, so results are meaningless
    """

    name: str
    families: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    calls: Callable[[torch.dtype], Calls]


def workloads(name: str = "") -> list[Workload]:
    """Everything to compile, or the part with `name` in its name."""
    found = [Workload(spec.name, spec.families, spec.dtypes, partial(_examples, spec)) for spec in all_specs().values()]
    found += [
        Workload("gemm", PRODUCTS, FLOATS, _gemm),
        Workload(
            "convolution", tuple(f for f in conv.FAMILIES if f not in TRANSPOSED + PRODUCTS), FLOATS, _convolution
        ),
        Workload("convolution as a product", (), FLOATS, _products),
        Workload("convolution and a sum", ("conv_box", "conv_batch"), FLOATS, _sums),
        Workload("convolution of halves", ("conv_box", "conv_box_grad_weight"), FLOATS, _concat_pair),
        Workload("convolution of volumes", ("conv_box", "conv_box_grad_weight"), FLOATS, _volumes),
        Workload("transposed convolution", TRANSPOSED, FLOATS, _transposed),
        Workload("float8", ("float8",), float8.SOURCES, _float8),
        Workload("products of float8", ("conv_box", "conv_batch", "gemm"), float8.DTYPES, _float8_products),
        Workload("optimizers", ("update", "update_measure", "update_prepare"), FLOATS, _optimizers),
        Workload("moving averages", ("elementwise",), FLOATS, _averages),
        Workload("sums over shards", ("elementwise",), FLOATS, _trees),
        Workload("statistics over shards", ("norm_join", "norm_grad"), FLOATS, _statistics),
        Workload("rows apart", ("bias_act_grad", *NORM), FLOATS, _apart),
        Workload("scaled sums", ("bias_act", "bias_act_grad"), FLOATS, _scaled_sums),
        Workload("fused", ("norm", "norm_sums", "norm_handed", "elementwise", "dropout"), FLOATS, _fused),
        Workload("pictures", ("images",), FLOATS, _pictures),
        Workload("random numbers", ("random",), FLOATS, _random),
    ]
    return [load for load in found if name in load.name]


def _examples(spec: OpSpec, dtype: torch.dtype) -> Calls:
    def forward_and_backward(example: Callable[[Make], Case]) -> None:
        case = example(SeededMake(0, dtype))
        args = [wrap(value, position in spec.differentiable) for position, value in enumerate(case.args)]
        outputs = spec.op(*args, **{name: wrap(value) for name, value in case.kwargs.items()})
        for output in as_tuple(outputs):
            if output.requires_grad:
                output.backward(Tensor(torch.zeros_like(output.data)), retain_graph=True)

    for name, example in spec.examples.items():
        yield name, partial(forward_and_backward, example)


def _gemm(dtype: torch.dtype) -> Calls:
    """All four transpositions, in rows that are aligned and rows that are not; shares of K; every epilogue."""
    for a_turned, b_turned, gap in itertools.product((False, True), (False, True), (0, 1)):
        M, N, K = (512, 1024, 768) if gap == 0 else (517, 1030, 777)
        a, b = _matrix(M, K, a_turned, gap, dtype), _matrix(K, N, b_turned, gap, dtype)
        bias = torch.zeros(N, dtype=dtype)
        name = f"{'A^T' if a_turned else 'A'} {'B^T' if b_turned else 'B'}{', unaligned' if gap else ''}"
        yield name, partial(gemm.gemm, a, b, bias, "gelu_tanh", preactivation=True, split=1)
        yield f"{name}, shares of K", partial(gemm.gemm, a, b, split=2)
        if dtype.itemsize == 2 and a_turned and not b_turned:  # the gradient of a weight, over chunks of rows
            total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
            yield f"{name}, wide", partial(gemm.gemm, a, b, wide=True, split=1)
            yield f"{name}, added in place", partial(gemm.gemm, a, b, onto=total, split=1)
        if gap == 0:
            yield f"{name}, shares of the last tiles", partial(_in_tail, a, b, bias)
    a, b, bias = (torch.zeros(size, dtype=dtype) for size in ((512, 768), (768, 1024), (1024,)))
    for act in (None, *activation.NAMES):
        for split in (1, 2):
            yield f"{act}, {split} shares", partial(gemm.gemm, a, b, bias, act, split=split)
    yield "batches", partial(gemm.gemm, a.expand(3, *a.shape), b.expand(3, *b.shape))
    for split in (1, 2):
        yield f"parts, {split} shares", partial(_in_parts, a, b.t().contiguous().t(), bias, split)
    # A layer of few outputs and its gradients, and the same with rows that are not aligned.
    for (M, N, K), a_turned, b_turned in (
        ((1024, 4, 128), False, True), ((1024, 128, 4), False, False), ((4, 128, 1024), True, False),
        ((517, 9, 77), False, True), ((517, 77, 9), False, False), ((9, 77, 517), True, False),
        ((1, 1, 1), False, False),
    ):  # fmt: skip
        a, b = _matrix(M, K, a_turned, 0, dtype), _matrix(K, N, b_turned, 0, dtype)
        bias, name = torch.zeros(N, dtype=dtype), f"thin, {M}x{N}x{K}"
        for act in activation.NAMES if N == 4 else ():
            yield f"{name}, {act}", partial(gemm.gemm, a, b, bias, act, form="thin", split=1)
        yield f"{name}, z", partial(gemm.gemm, a, b, bias, "gelu_tanh", form="thin", split=1, preactivation=True)
        for split in (1, 2):
            yield f"{name}, {split} shares", partial(gemm.gemm, a, b, form="thin", split=split)
    yield from _vectors(dtype)


def _vectors(dtype: torch.dtype) -> Calls:
    """A matrix times a column and a row times a matrix, and products of copies."""
    for M, N, K, turned, gap in itertools.chain(
        itertools.product((1000,), (1,), (776, 77), (False, True), (0, 1)),
        itertools.product((1,), (1000,), (776, 77), (False, True), (0, 1)),
    ):
        a, b = _matrix(M, K, turned, gap, dtype), _matrix(K, N, turned, gap, dtype)
        bias, name = torch.zeros(N, dtype=dtype), f"vector, {M}x{N}x{K}{', turned' * turned}{', unaligned' * gap}"
        yield f"{name}, z", partial(gemm.gemm, a, b, bias, "gelu_tanh", form="vector", split=1, preactivation=True)
        yield f"{name}, shares of K", partial(gemm.gemm, a, b, form="vector", split=2)
    for columns in (77, 518, 1036):
        a, b = _matrix(517, columns, False, 0, dtype), _matrix(columns, 36, True, 0, dtype)
        yield f"copies of {columns} columns", partial(_of_copies, a, b)


def _of_copies(a: torch.Tensor, b: torch.Tensor) -> None:
    if launch.boxes() and a.dtype != torch.float64:
        gemm.gemm(a, b, form="copied")


def _in_tail(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> None:
    if launch.boxes() and a.dtype.itemsize == 2:
        gemm.gemm(a, b, bias, "gelu_tanh", preactivation=True, form="tail", split=2)


def _in_parts(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, split: int) -> None:
    if launch.boxes() and (a.dtype, launch.precision(a.dtype)) == (torch.float32, "tf32x3"):
        gemm.gemm(a, b, bias, form="parts", split=split)


@cache
def _matrix(rows: int, columns: int, turned: bool, gap: int, dtype: torch.dtype) -> torch.Tensor:
    if turned:
        return _matrix(columns, rows, False, gap, dtype).t()
    return torch.zeros(rows, columns + gap, dtype=dtype)[:, :columns]


def _convolution(dtype: torch.dtype) -> Calls:
    """Every form on shapes that suit it, with every epilogue; strides, for input gradients."""
    for C, M, size, kernel, stride, N in (
        (1, 12, 72, 7, 1, 256), (12, 24, 33, 7, 1, 256), (1, 32, 28, 5, 1, 256), (3, 16, 32, 3, 1, 2),
        (64, 64, 56, 3, 1, 128), (128, 128, 28, 3, 1, 128), (256, 256, 14, 3, 1, 128), (512, 512, 7, 3, 1, 128),
        (256, 256, 56, 3, 1, 128), (64, 128, 28, 3, 2, 128), (24, 40, 9, 3, 1, 2), (32, 64, 12, 5, 1, 128),
    ):  # fmt: skip
        padding = 0 if kernel == 5 else 1
        geometry = Geometry.of((size, size), (kernel,) * 2, (stride,) * 2, ((padding,) * 2,) * 2, (1, 1))
        x, w, bias = _images(N, C, size, dtype), _images(M, C, kernel, dtype), torch.zeros(M, dtype=dtype)
        dy = _images(N, M, geometry.h.output, dtype)
        for form in conv.FORMS:
            calls: dict[str, Callable[..., Any]] = {
                "forward": partial(conv.forward, x, w, geometry, bias, "gelu_tanh", preactivation=True, scale=bias),
                "sum": partial(conv.forward, x, w, geometry, bias, "relu", scale=bias, added=dy),
                "pooled": partial(conv.forward, x, w, geometry, bias, "gelu_tanh", pool="max"),
                "gradient of the input": partial(conv.grad_input, dy, w, geometry),
                "gradient of the weight": partial(conv.grad_weight, x, dy, geometry),
            }
            for name, call in calls.items():
                yield f"{name}, {form}, {C} to {M} at {size}", partial(_if_able, call, form)
        yield f"gradient of the weight in equal parts, {C} to {M} at {size}", partial(_in_equal_parts, x, dy, geometry)
    geometry = Geometry.of((28, 28), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 32)
    x, w = _images(8, 256, 28, dtype), _images(256, 8, 3, dtype)
    yield "32 groups of 8", partial(_if_able, partial(conv.forward, x, w, geometry), "fill")
    for kernel, stride, size in ((7, 2, 224), (3, 2, 224), (11, 4, 224)):
        first = Geometry.of((size, size), (kernel,) * 2, (stride,) * 2, ((kernel // 2,) * 2,) * 2, (1, 1))
        call = partial(conv.forward, _images(8, 3, size, dtype), _images(64, 3, kernel, dtype), first)
        yield f"first layer {kernel}x{kernel}", partial(_if_able, call, "unshuffle")
    yield "32 groups of 8, gradient of the input", partial(_if_able, partial(conv.grad_input, x, w, geometry), "fill")
    yield "32 groups of 8, gradient of the weight", partial(_if_able, partial(conv.grad_weight, x, x, geometry), "fill")
    for groups, M, size, kernel, stride in (
        (32, 1, 112, 3, 1), (144, 1, 56, 3, 2), (96, 1, 56, 7, 1), (240, 2, 28, 5, 1), (24, 1, 9, 11, 1),
    ):  # fmt: skip
        geometry = Geometry.of((size, size), (kernel,) * 2, (stride,) * 2, ((kernel // 2,) * 2,) * 2, (1, 1), groups)
        out = groups * M
        x, w, bias = _images(64, groups, size, dtype), _images(out, 1, kernel, dtype), torch.zeros(out, dtype=dtype)
        dy = _images(64, out, geometry.h.output, dtype)
        name = f"depthwise {kernel}x{kernel}, {groups} to {out} at {size}"
        for act, preactivation in (("gelu_tanh", True), ("relu", False)):
            call = partial(conv.forward, x, w, geometry, bias, act, scale=bias, form="depthwise")
            yield f"{name}, {act}", partial(call, preactivation=preactivation)
            yield f"{name}, {act}, down the rows", partial(_among, depthwise_rows, partial(call, preactivation=False))
        yield f"{name}, gradient of the input", partial(conv.grad_input, dy, w, geometry, form="depthwise")
        yield f"{name}, gradient of the weight", partial(conv.grad_weight, x, dy, geometry, form="depthwise")
    for padding, act in itertools.product((0, 3), ("relu", "gelu")):
        geometry = Geometry.of((72, 72), (7, 7), (1, 1), ((padding,) * 2,) * 2, (1, 1))
        x, w, bias = _images(256, 1, 72, dtype), _images(12, 1, 7, dtype), torch.zeros(12, dtype=dtype)
        call = partial(conv.forward, x, w, geometry, bias, act)
        yield f"two rows, padding {padding}, {act}", partial(_if_able, call, "banded")


def _products(dtype: torch.dtype) -> Calls:
    """Convolutions that are matrix products, with the tiles of these: boxes and pointers, one share and more."""
    for C, M, size, kernel, N in ((64, 256, 28, 1, 128), (1024, 256, 7, 1, 1), (30, 41, 9, 1, 32), (64, 128, 4, 4, 64)):
        geometry = Geometry.of((size, size), (kernel,) * 2, (1, 1), ((0, 0), (0, 0)), (1, 1))
        x, w, bias = _images(N, C, size, dtype), _images(M, C, kernel, dtype), torch.zeros(M, dtype=dtype)
        dy = _images(N, M, geometry.h.output, dtype)
        for name, call in (
            ("statistics", partial(conv.forward, x, w, geometry, statistics=True)),
            ("forward", partial(conv.forward, x, w, geometry, bias, "gelu_tanh", preactivation=True)),
            ("sum", partial(conv.forward, x, w, geometry, bias, "relu", scale=bias, added=dy)),
            ("gradient of the input", partial(conv.grad_input, dy, w, geometry)),
            ("gradient of the weight", partial(conv.grad_weight, x, dy, geometry)),
        ):
            yield f"{name}, {C} to {M} at {size}", partial(_if_able, call, "product")


def _sums(dtype: torch.dtype) -> Calls:
    """A residual before the activation, of more tiles than programs, with one step for each tile and with more."""
    for C, kernel, form in itertools.product((64, 96, 256), (1, 3), ("box", "batch")):
        geometry = Geometry.of((28, 28), (kernel,) * 2, (1, 1), ((kernel // 2,) * 2,) * 2, (1, 1))
        x, w, added = _images(128, C, 28, dtype), _images(256, C, kernel, dtype), _images(128, 256, 28, dtype)
        bias = torch.zeros(256, dtype=torch.promote_types(dtype, torch.float32))
        call = partial(conv.forward, x, w, geometry, bias, "relu", scale=bias, added=added)
        yield f"{form}, {C} to 256, {kernel}x{kernel}", partial(_if_able, call, form)


def _concat_pair(dtype: torch.dtype) -> Calls:
    """Two tensors read where they lie, in tiles of channels of one and of both."""
    for C, M, form in ((128, 64, "pair"), (256, 128, "box")):
        geometry = Geometry.of((64, 64), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
        x = ConcatPair(*torch.empty(2, 16, 64, 64, C // 2, dtype=dtype).permute(0, 1, 4, 2, 3))
        w = _images(M, C, 3, dtype)
        bias = torch.zeros(M, dtype=torch.promote_types(dtype, torch.float32))
        dy = _images(16, M, 64, dtype)
        for name, call in (
            ("relu", partial(conv.forward, x, w, geometry, bias, "relu", scale=bias)),
            ("bare", partial(conv.forward, x, w, geometry)),
            ("gradient of the weight", partial(conv.grad_weight, x, dy, geometry)),
        ):
            yield f"{name}, {C} to {M}", partial(_if_read, call, "box" if name.startswith("gradient") else form)


def _float8(dtype: torch.dtype) -> Calls:
    x, scale = torch.zeros(70, 1000, dtype=dtype), torch.ones(())
    for kind in float8.DTYPES:
        yield f"to {kind}", partial(float8.quantize, x, kind)
        yield f"to {kind}, scale given", partial(float8.quantize, x, kind, scale)
        for given in (None, scale):
            yield f"from {kind}, scale {given}", partial(float8.dequantize, x.to(kind), given, dtype)
    yield "factors", partial(float8.epilogue, scale, scale, 100, x[0, :100], x[1, :100])
    yield "factors, result", partial(float8.epilogue, scale, scale, 100, None, x[1, :100], scale)


def _float8_products(dtype: torch.dtype) -> Calls:
    """Every form, with and without its epilogue, with sums that go on to float32 and with sums that do not."""
    for C, M, size, kernel, stride, N in (
        (512, 512, 7, 3, 1, 256), (32, 64, 14, 3, 2, 128), (1024, 2048, 7, 1, 1, 256), (256, 64, 1, 1, 1, 20),
    ):  # fmt: skip
        geometry = Geometry.of((size, size), (kernel,) * 2, (stride,) * 2, ((kernel // 2,) * 2,) * 2, (1, 1))
        x, w, bias = _images(N, C, size, dtype), _images(M, C, kernel, dtype), torch.zeros(M)
        for form, fast, out in itertools.product(
            ("box", "batch", "product", None), (False, True), (torch.bfloat16, torch.float32)
        ):
            call = partial(float8_products.forward, x, w, torch.ones(()), torch.ones(()), geometry, fast=fast)
            what = f"{form}, {C} to {M} at {size}, {out}{', fast' * fast}"
            yield what, partial(_if_able, partial(call, bias, "relu", scale=bias, out_dtype=out), form)
            yield f"{what}, bare", partial(_if_able, partial(call, out_dtype=out), form)
            result = partial(call, bias, "relu", out_dtype=dtype, scale_result=torch.ones(()))
            yield f"{what}, in float8", partial(_if_able, result, form)


def _volumes(dtype: torch.dtype) -> Calls:
    """In boxes of voxels and as slices side by side, with strides and groups."""
    for C, M, size, kernel, stride, groups, N in (
        (64, 64, 16, 3, 1, 1, 4), (32, 16, 64, 3, 1, 1, 1), (128, 96, 14, 3, 2, 1, 8), (128, 128, 8, 3, 1, 4, 2),
        (3, 64, 32, 3, 1, 1, 2), (24, 24, 16, 3, 1, 24, 2),
    ):  # fmt: skip
        axis = Axis.of("conv3d", "depth", size, kernel, stride, (1, 1), 1)
        at = Volume(axis, Geometry(axis, axis, groups))
        x, bias = torch.zeros(N, size, size, size, C, dtype=dtype).movedim(-1, 1), torch.zeros(M, dtype=dtype)
        w = torch.zeros(M, kernel, kernel, kernel, C // groups, dtype=dtype).movedim(-1, 1)
        dy = torch.zeros(N, *(axis.output,) * 3, M, dtype=dtype).movedim(-1, 1)
        for form in ("cube", "stack", None):
            name = f"{form or 'chosen'}, {C} to {M} at {size}, stride {stride}, {groups} groups"
            call = partial(volume.forward, x, w, at, bias, "gelu_tanh", preactivation=True, scale=bias, form=form)
            yield name, call
            yield f"{name}, gradient of the input", partial(volume.grad_input, dy, w, at, form=form)
            yield f"{name}, gradient of the weight", partial(volume.grad_weight, x, dy, at, form=form)


def _among(form: Any, call: Callable[[], object]) -> None:
    """A call in one form, where it is able, whatever the estimates say."""
    with contextlib.suppress(conv.UnableError), forms.among(form):
        call()


def _in_equal_parts(x: torch.Tensor, dy: torch.Tensor, geometry: Geometry) -> None:
    """The weight gradient with EVEN set in the tile, whatever the table has; nothing where the form is not able."""
    N, _, H, W = dy.shape
    with contextlib.suppress(conv.UnableError):
        conv.grad_weight(x, dy, geometry, form="batch")  # the table has rules for able problems alone
        tile = launch.tile(
            "conv_batch_grad_weight", x.dtype, floor=16, M=dy.shape[1], N=x.shape[1], K=N, pixels=H * W
        )  # fmt: skip
        # Tiles of two warps are never split this way.
        if tile["TAPS"] == 1 and tile.num_warps > 2:
            even = replace(tile, sizes={**tile.sizes, "EVEN": 1})
            with launch.force(conv_batch_grad_weight=even):
                conv.grad_weight(x, dy, geometry, form="batch")


def _transposed(dtype: torch.dtype) -> Calls:
    """The layers of generators, with weights in both memory formats, for inference and training."""
    for C, M, size, kernel, act in (
        (512, 256, 4, 5, "relu"), (128, 64, 16, 5, "relu"), (96, 40, 7, 4, "gelu_tanh"),
        (64, 3, 32, 5, "tanh"), (64, 1, 14, 4, "tanh"), (32, 4, 7, 3, "gelu_tanh"),
    ):  # fmt: skip
        axis = Axis(2 * size, kernel, size, 2, (kernel - 1) // 2, 1)
        x, bias = _images(256, C, size, dtype), torch.zeros(M, dtype=dtype)
        plain = torch.zeros(C, M, kernel, kernel, dtype=dtype)
        for memory in (torch.contiguous_format, torch.channels_last):
            w = plain.contiguous(memory_format=memory)
            call = partial(conv.transposed, x, w, Geometry(axis, axis), bias, act)
            name = f"{C} to {M} at {size}, {memory}"
            for form in ("few",) if M <= few_outputs.MOST else ("batch", "merge"):
                what = f"{name}, merged" if form == "merge" else name
                yield what, partial(_if_able, partial(call, scale=bias), form)
                yield f"{what}, before the activation", partial(_if_able, partial(call, preactivation=True), form)
    for C, M, size, kernel, act in ((256, 128, 64, 2, "gelu_tanh"), (768, 3, 14, 16, "tanh"), (64, 24, 4, 3, "relu")):
        axis = Axis(kernel * size, kernel, size, kernel, 0, 1)
        x, bias = _images(6, C, size, dtype), torch.zeros(M, dtype=dtype)
        w = torch.zeros(C, M, kernel, kernel, dtype=dtype).contiguous(memory_format=torch.channels_last)
        call = partial(conv.transposed, x, w, Geometry(axis, axis), bias, act, scale=bias)
        for keep in (False, True):
            name = f"patches of {kernel}x{kernel}, {C} to {M} at {size}{', before the activation' if keep else ''}"
            yield name, partial(_if_able, partial(call, preactivation=keep), "product")


def _if_read(call: Callable[..., Any], form: str) -> None:
    """A call of halves, where a tile can read them."""
    with contextlib.suppress(ValueError):
        call(form=form)


def _if_able(call: Callable[..., Any], form: str | None) -> None:
    with contextlib.suppress(conv.UnableError):
        call(form=form)


@cache
def _images(N: int, C: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(N, size, size, C, dtype=dtype).permute(0, 3, 1, 2)  # memory that is never touched


def _optimizers(dtype: torch.dtype) -> Calls:
    made: dict[str, Callable[[list[Tensor], bool], optim.Optimizer]] = {
        "sgd": lambda params, lazy: optim.SGD(params, lr=0.1, max_norm=1.0),
        "sgd, nesterov": lambda params, lazy: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "sgd, dampening": lambda params, lazy: optim.SGD(params, momentum=0.9, dampening=0.1, maximize=True),
        "rmsprop": lambda params, lazy: optim.RMSprop(params, momentum=0.9, centered=True, weight_decay=0.1),
        "adagrad": lambda params, lazy: optim.Adagrad(params, weight_decay=0.1, lazy=lazy),
        "adam": lambda params, lazy: optim.Adam(params, lazy=lazy),
        "adam, amsgrad": lambda params, lazy: optim.Adam(params, amsgrad=True, skip_nonfinite=False),
        "adamw": lambda params, lazy: optim.AdamW(params, max_norm=1.0, lazy=lazy),
        "adamw, scaled loss": lambda params, lazy: optim.AdamW(params, max_norm=1.0, lazy=lazy, loss_scale=65536.0),
        "muon": lambda params, lazy: optim.Muon([param for param in params if param.ndim == 2]),
    }
    for rows, lazy in ((False, False), (True, False), (True, True)):
        variant = f"{', rows' if rows else ''}{', lazy' if lazy else ''}"
        for name, make in made.items():
            yield name + variant, partial(_step, make, dtype, rows, lazy)
        yield f"adam, two dtypes{variant}", partial(_step, made["adam"], dtype, rows, lazy, second_dtype=True)


def _step(
    make: Callable[[list[Tensor], bool], optim.Optimizer], dtype: torch.dtype, rows: bool, lazy: bool,
    second_dtype: bool = False,
) -> None:  # fmt: skip
    shapes = ((1000, 128), (128,), (33, 7))
    params = [Tensor(torch.zeros(shape, dtype=dtype), requires_grad=True) for shape in shapes]
    if second_dtype:
        other = torch.float64 if dtype == torch.float32 else torch.float32
        params.append(Tensor(torch.zeros(128, dtype=other), requires_grad=True))
    optimizer = make(params, lazy)
    for param in params:
        param.grad = Tensor(torch.zeros(param.shape, dtype=param.dtype))
    if rows:
        params[0]._grad = RowGrad(torch.arange(50, dtype=torch.int32), torch.zeros(50, 128, dtype=dtype), (1000, 128))
    optimizer.step()


def _pictures(dtype: torch.dtype) -> Calls:
    index, moves = torch.zeros(128, dtype=torch.int64), torch.zeros(128, 3, dtype=torch.int32)
    for shape in ((8, 8, 1), (28, 28, 1), (64, 48, 3)):
        x = torch.zeros(1000, *shape, dtype=torch.uint8)
        how, what = (torch.zeros(shape[-1]), torch.ones(shape[-1]), dtype), " x ".join(map(str, shape))
        yield what, partial(images.pick, x, index, None, *how)
        yield f"{what}, moved", partial(images.pick, x, index, moves, *how)
        yield f"{what}, moved, edges repeated", partial(images.pick, x, index, moves, *how, replicate=True)
        parts = torch.zeros(128, 5, dtype=torch.int32)
        for size in ((shape[0] // 2, shape[1] // 2), (3 * shape[0], 3 * shape[1])):
            to = " x ".join(map(str, size))
            yield f"parts of {what} as {to}", partial(crops.crop, x, index, parts, size, *how)
        yield f"parts of {what}, edges repeated", partial(crops.crop, x, index, parts, shape[:2], *how, replicate=True)
        batch = torch.zeros(128, shape[2], *shape[:2], dtype=dtype).to(memory_format=torch.channels_last)
        box, share = torch.zeros(128, 4, dtype=torch.int32), torch.zeros(128)
        yield f"{what}, mixed", partial(mixing.mix, batch, index, share, box)
        yield f"targets of {what}, mixed", partial(mixing.mix_targets, index, index, share, 10 * shape[2])


def _fused(dtype: torch.dtype) -> Calls:
    """What no single operation launches: a batch norm with a sum, a sum with an activation; dropout of images."""
    x, y = (torch.zeros(4, 64, 8, 8, dtype=dtype).to(memory_format=torch.channels_last) for _ in "xy")
    wide = launch.acc_torch(dtype)
    found = norm.Statistics(torch.zeros(64, dtype=wide), torch.ones(64, dtype=wide))
    for act in (None, "relu", "relu6"):
        yield f"batch norm, sum, {act}", partial(norm.normalise, x, found, None, None, act, y)
        for more in (None, y):
            back = partial(norm.normalise_grad, x, x, found, None, None, act, True, y=y, more=more)
            yield f"gradient of it, {act}{'' if more is None else ', in two parts'}", back
    fused_statistics = torch.zeros(16, 2, 64, dtype=wide)
    yield "statistics handed on", partial(norm.batch_statistics, x, 1e-5, None, None, fused_statistics)
    yield "gradient in two parts", partial(norm.normalise_grad, x, x, found, None, None, "gelu", True, more=y)
    yield "sum and activation", partial(elementwise.add_act, x, y, "relu")
    yield "scaled sum in place", partial(elementwise.add_scaled, x, y, 0.5, x)
    yield "dropout of images", partial(random_kernels.dropout, x, 0.5, 1)


def _apart(dtype: torch.dtype) -> Calls:
    """Channels of a wider tensor: a batch norm reads them where they lie, a gradient is copied as it is summed."""
    wide = launch.acc_torch(dtype)
    for C, of in ((64, 192), (20, 40)):
        few, x = (torch.zeros(4, n, n, of, dtype=dtype)[..., :C].movedim(-1, 1) for n in (8, 64))
        w = torch.ones(C, dtype=wide)
        found, affine, what = norm.Statistics(torch.zeros(C, dtype=wide), w), (w, w), f"{C} of {of} channels"
        yield f"{what}, few values", partial(alone.normalised, few, *affine, None, 0.1, 1e-5, "relu")
        yield f"{what}, few values, gradient", partial(alone.normalised_grad, few, few, found, *affine, "relu", few)
        yield f"{what}, statistics", partial(norm.batch_statistics, x, 1e-5, 0.1, None)
        yield f"{what}, values", partial(norm.normalise, x, found, *affine, "relu")
        yield f"{what}, gradient", partial(norm.normalise_grad, x, x, found, *affine, "relu", True, so_far=x)
        rows = x.movedim(1, -1)
        yield f"{what}, copied and summed", partial(bias_act.bias_act_grad, rows, rows, None, None)


def _scaled_sums(dtype: torch.dtype) -> Calls:
    """What is scaled in its own dtype, what it is added to in that and in float32, as under autocast."""
    for N, other in itertools.product((96, 77), {dtype, torch.promote_types(dtype, torch.float32)}):
        x, added, scale = torch.zeros(8, 49, N, dtype=dtype), torch.zeros(8, 49, N, dtype=other), torch.ones(N)
        for factor in (None, torch.ones(8)):
            what = f"{N} channels, {other}{'' if factor is None else ', examples dropped'}"
            yield what, partial(scaled_sum.scaled_sum, x, scale.to(other), factor, added)
            back = partial(scaled_sum.scaled_sum_grad, added, x, scale.to(other), factor)
            yield f"{what}, gradient", back
            yield f"{what}, gradient of the scale", partial(back, want_x=False)
            yield f"{what}, gradient of x", partial(back, want_scale=False)


def _averages(dtype: torch.dtype) -> Calls:
    share = torch.zeros((), dtype=torch.float64)
    y, wide = torch.zeros(777, dtype=dtype), torch.zeros(777, dtype=launch.acc_torch(dtype))
    yield "moving averages", lambda: average.Averages([y], [y])(share)
    yield "moving averages in a wider type", lambda: average.Averages([wide], [y])(share)


def _trees(dtype: torch.dtype) -> Calls:
    rows, weight = torch.zeros(8, 1000, dtype=dtype), torch.ones(8, dtype=torch.float64)
    parts = torch.zeros(2, 2, 512, dtype=launch.acc_torch(dtype))
    yield "sum over eight shards", partial(tree.sum_rows, rows, range(8), 8, weight)
    yield "a node in segments", partial(tree.sum_rows, rows[:2], (0, 1), 2, weight, parts[:, 0])
    yield "nodes of three processes", partial(tree.sum_rows, rows[:5], (0, 2, 3, 4, 6), 8, y=rows[6])


def _statistics(dtype: torch.dtype) -> Calls:
    x, sums = torch.zeros(4, 40, 16, 16, dtype=dtype), torch.zeros(2, 40, dtype=launch.acc_torch(dtype))
    rows, shares = torch.zeros(64, 80, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    mean, var = torch.zeros(2, 40, dtype=launch.acc_torch(dtype))
    buffers = norm.Buffers(mean, var, torch.zeros((), dtype=torch.int64))
    yield "of a shard", partial(norm.batch_statistics, x, None, 0.1, buffers)
    for count, momentum in ((8, 0.1), (64, None)):
        of = partial(norm.join_shards, rows[:count], shares[:count], 1000, dtype, 1e-5)
        yield f"{count} shards", partial(of, momentum, buffers)
    given = x, x, norm.Statistics(mean, var), mean, None, None, True
    yield "gradient of given sums", partial(norm.normalise_grad, *given, sums=sums, want_affine=False)


def _random(dtype: torch.dtype) -> Calls:
    t = torch.zeros(300, 1000, dtype=dtype)
    yield "uniform", partial(random_kernels.uniform_, t, 0.0, 1.0, seed=1)
    yield "normal", partial(random_kernels.normal_, t, 0.0, 1.0, seed=1)
    yield "integers", partial(random_kernels.randint, (300, 1000), 0, 10, seed=1)
    recorded = random_kernels.DeviceStream(torch.zeros(2, dtype=torch.int64), 1)
    yield "normal, recorded", partial(random_kernels.normal_, t, 0.0, 1.0, seed=1, stream=recorded)
    yield "normal, rows", partial(random_kernels.normal_rows, range(300), 100)
    yield "a part's normal", partial(random_kernels.normal_, t, 0.0, 1.0, seed=1, first=2001)
    yield "a part's dropout", partial(random_kernels.dropout, t, 0.5, seed=1, stream=recorded, first=2002)
    yield "dropout, recorded", partial(random_kernels.dropout, t, 0.5, seed=1, stream=recorded)


def precisions(dtype: torch.dtype) -> tuple[str, ...]:
    """The precisions of products of this dtype."""
    return launch.PRECISIONS if dtype == torch.float32 else ("ieee",)
