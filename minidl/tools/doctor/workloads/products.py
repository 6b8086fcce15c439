"""Calls of matrix products, and of float8 values and their products."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minidl.kernels import activation, float8, gemm
from minidl.kernels.conv import float8 as float8_conv
from minidl.runtime import launch
from minidl.testing.cases import convolutions, matrices
from minidl.testing.specs.base import matrix
from minidl.testing.specs.make import EmptyMake
from minidl.tools.doctor.workloads.convolution import Calls, in_form


def gemms(dtype: torch.dtype) -> Calls:
    """Yield all four transpositions with aligned and unaligned rows; shares of K; every epilogue."""
    make = EmptyMake(0, dtype)
    for a_transposed, b_transposed, gap in itertools.product((False, True), (False, True), (0, 1)):
        M, N, K = (512, 1024, 768) if gap == 0 else (517, 1030, 777)
        a, b = matrix(M, K, gap, a_transposed)(make), matrix(K, N, gap, b_transposed)(make)
        bias = make.tensor(N)
        name = f"{'A^T' if a_transposed else 'A'} {'B^T' if b_transposed else 'B'}{', unaligned' * gap}"
        yield name, partial(gemm.gemm, a, b, bias, "gelu_tanh", preactivation=True, split=1)
        yield f"{name}, shares of K", partial(gemm.gemm, a, b, split=2)
        if dtype.itemsize == 2 and a_transposed and not b_transposed:  # the gradient of a weight, over chunks of rows
            total = torch.zeros(a.shape[0], b.shape[1])
            yield f"{name}, wide", partial(gemm.gemm, a, b, wide=True, split=1)
            yield f"{name}, added in place", partial(gemm.gemm, a, b, onto=total, split=1)
        if gap == 0:
            tail = partial(gemm.gemm, a, b, bias, "gelu_tanh", preactivation=True, form="tail", split=2)
            yield f"{name}, shares of the last tiles", partial(_with_boxes, dtype.itemsize == 2, tail)
    a, b, bias = make.tensor(512, 768), make.tensor(768, 1024), make.tensor(1024)
    for act, split in itertools.product((None, *activation.NAMES), (1, 2)):
        yield f"{act}, {split} shares", partial(gemm.gemm, a, b, bias, act, split=split)
    yield "batches", partial(gemm.gemm, a.expand(3, *a.shape), b.expand(3, *b.shape))
    by_parts = dtype == torch.float32 and launch.precision(dtype) == "tf32x3"
    for split in (1, 2):
        parts = partial(gemm.gemm, a, b.t().contiguous().t(), bias, form="parts", split=split)
        yield f"parts, {split} shares", partial(_with_boxes, by_parts, parts)
    for M, N, K in matrices.THIN_COMPILED:
        a, b = matrix(M, K, 0, min(N, K) > M)(make), matrix(K, N, 0, min(M, K) > N)(make)
        bias, name = make.tensor(N), f"thin, {M}x{N}x{K}"
        for act in activation.NAMES if N == 4 else ():
            yield f"{name}, {act}", partial(gemm.gemm, a, b, bias, act, form="thin", split=1)
        yield f"{name}, z", partial(gemm.gemm, a, b, bias, "gelu_tanh", form="thin", split=1, preactivation=True)
        for split in (1, 2):
            yield f"{name}, {split} shares", partial(gemm.gemm, a, b, form="thin", split=split)
    yield from _vectors(make)


def _vectors(make: EmptyMake) -> Calls:
    """Yield products of a matrix and a column, of a row and a matrix, and of copies."""
    for (M, N, K), transposed, gap in itertools.product(matrices.VECTORS_COMPILED, (False, True), (0, 1)):
        a, b, bias = matrix(M, K, gap, transposed)(make), matrix(K, N, gap, transposed)(make), make.tensor(N)
        name = f"vector, {M}x{N}x{K}{', transposed' * transposed}{', unaligned' * gap}"
        yield f"{name}, z", partial(gemm.gemm, a, b, bias, "gelu_tanh", form="vector", split=1, preactivation=True)
        yield f"{name}, shares of K", partial(gemm.gemm, a, b, form="vector", split=2)
    for columns in (77, 518, 1036):
        a, b = make.tensor(517, columns), matrix(columns, 36, 0, True)(make)
        copied = partial(gemm.gemm, a, b, form="copied")
        yield f"copies of {columns} columns", partial(_with_boxes, make.dtype != torch.float64, copied)


def _with_boxes(enabled: bool, call: Callable[[], Any]) -> None:
    if enabled and launch.boxes():
        call()


def float8_conversions(dtype: torch.dtype) -> Calls:
    """Yield conversions to float8 and back, and the factors of a product."""
    x, scale = torch.zeros(70, 1000, dtype=dtype), torch.ones(())
    for kind in float8.DTYPES:
        yield f"to {kind}", partial(float8.quantize, x, kind)
        yield f"to {kind}, with a scale", partial(float8.quantize, x, kind, scale)
        for factor in (None, scale):
            yield f"from {kind}, scale {factor}", partial(float8.dequantize, x.to(kind), factor, dtype)
    yield "factors", partial(float8.epilogue, scale, scale, 100, x[0, :100], x[1, :100])
    yield "factors, result", partial(float8.epilogue, scale, scale, 100, None, x[1, :100], scale)


def float8_products(dtype: torch.dtype) -> Calls:
    """Yield every form, with and without its epilogue, with sums in float32 and with fast sums."""
    make, one = EmptyMake(0, dtype), torch.ones(())
    forms = "box", "batch", "product", None
    for case in convolutions.FLOAT8_COMPILED:
        (x, w, *_), bias = case.tensors(make), torch.zeros(case.M)
        for form, fast, out in itertools.product(forms, (False, True), (torch.bfloat16, torch.float32)):
            call = partial(float8_conv.forward, x, w, one, one, case.geometry, fast=fast)
            result = partial(call, bias, "relu", out_dtype=dtype, scale_result=torch.ones(()))
            name = f"{form}, {case}, {out}{', fast' * fast}"
            yield name, in_form(form, partial(call, bias, "relu", scale=bias, out_dtype=out))
            yield f"{name}, bare", in_form(form, partial(call, out_dtype=out))
            yield f"{name}, in float8", in_form(form, result)
