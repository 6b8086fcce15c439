"""Problems of products: matrices and convolutions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minidl.kernels import conv, gemm
from minidl.kernels.conv import float8 as float8_products
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.gemm import thin
from minidl.runtime import launch
from minidl.testing.cases import convolutions, matrices, transposed
from minidl.testing.cases.convolutions import Conv
from minidl.testing.specs import Case, Make
from minidl.testing.specs.base import images, matrix, of, tensors
from minidl.tools.tuning.kind import Kind
from minidl.tools.tuning.problem import Call, Problem, kernel


def products(kind: Kind) -> Iterator[Problem]:
    """Yield matrix products of boxes or, in the family of pointers, of rows that no box can read."""
    usual = {"M": 128, "N": 128, "K": 1024} if kind.small else {"M": 4096, "N": 4096, "K": 4096}
    shapes = kind.extents(**usual)
    if kind.dtype == torch.float64:
        shapes = [(1024, 1024, 1024)]
    elif not kind.small:
        shapes += [shape for shape in matrices.BENCHMARK if shape not in shapes]
    pointer = kind.family == "gemm_pointer"
    gap = int(pointer and kind.target != "sm_80" and kind.dtype != torch.float64)
    for M, N, K in shapes:
        if kind.dtype.itemsize == 1:
            yield _float8_product(f"{M}x{N}x{K}", Conv(M, K, N, 1, 1), "product", kind.dtype)
            continue
        operands = matrix(M, K, gap), matrix(K, N, gap, transposed=True)
        inputs = tensors(*operands, form="pointer" if pointer else None)
        yield kind.problem(f"{M}x{N}x{K}", kernel(gemm.gemm), inputs)


def _float8_product(label: str, case: Conv, form: str, dtype: torch.dtype) -> Problem:
    """Return the problem of a product of float8 values, converted from float16."""

    def start(arguments: Case, make: Make) -> Call:
        one = torch.ones((), device=arguments.args[0].device)
        values, weights = (t.to(dtype) for t in arguments.args)
        return lambda: float8_products.forward(
            values, weights, one, one, case.geometry, out_dtype=torch.float16, form=form
        )

    return Problem(f"{label} float8", torch.float16, tensors(*case.inputs[:2]), start)


def parts(kind: Kind) -> Iterator[Problem]:
    """Yield float32 products by parts of tf32."""
    if kind.small or kind.precision == "tf32x3":
        for n in (128,) if kind.small else (1024, 4096):
            inputs = tensors((n, n), (n, n), form="parts", precision="tf32x3")
            yield kind.problem(f"{n}x{n}x{n}", kernel(gemm.gemm), inputs)


def thin_products(kind: Kind) -> Iterator[Problem]:
    """Yield the operands of a layer with few outputs and of its gradients: M, N or K is small."""
    usual = {"M": 64, "N": 4, "K": 32} if kind.small else {"M": 1024, "N": 128, "K": 1024}
    for M, N, K in (*kind.extents(**usual), *(() if kind.small else matrices.THIN_TUNED)):
        least = min(M, N, K)
        if least <= thin.THIN:
            operands = matrix(M, K, transposed=least == M), matrix(K, N, transposed=least == N)
            yield kind.problem(f"{M}x{N}x{K}", kernel(gemm.gemm), tensors(*operands, form="thin"))


def vector_products(kind: Kind) -> Iterator[Problem]:
    """Yield products of a matrix and a column, with the matrix as stored and transposed."""
    usual = {"M": 64, "K": 32, "STEP": 1} if kind.small else {"M": 4096, "K": 4096, "STEP": 1}
    for M, K, step in kind.extents(**usual):
        for is_transposed in {False, step > 1}:
            inputs = tensors(matrix(M, K, transposed=is_transposed), (K, 1), form="vector")
            yield kind.problem(f"{M}x1x{K}{', turned' * is_transposed}", kernel(gemm.gemm), inputs)


def copied_products(kind: Kind) -> Iterator[Problem]:
    """Yield products of a matrix whose rows no box can read."""
    for M, K in kind.extents(**({"M": 64, "K": 40} if kind.small else {"M": 4096, "K": 4096})):
        inputs = tensors(matrix(M, K, gap=1), matrix(K, 64, transposed=True), form="copied")
        yield kind.problem(f"{M}x64x{K}", kernel(gemm.gemm), inputs)


def shares(kind: Kind) -> Iterator[Problem]:
    """Yield sums of the shares of a product."""
    for count, total in kind.extents(S=8, total=kind.rest(8)):
        inputs = tensors(of(launch.acc_torch(kind.dtype), count, total), extra=(kind.dtype,))
        yield kind.problem(f"{count} shares of {total}", kernel(gemm.sum_shares), inputs)


def _forward(x: torch.Tensor, w: torch.Tensor, geometry: Geometry, form: str, pool: str | None = None) -> torch.Tensor:
    return conv.forward(x, w, geometry, form=form, pool=pool)[0]


def _convolution(kind: Kind, case: Conv, form: str, gradient: str = "", label: str = "", off: float = 0.0) -> Problem:
    """Return the problem of a convolution, or of its gradient of the weight."""
    x, w, dy = case.inputs
    launcher, other = (conv.grad_weight, dy) if gradient == "weight" else (_forward, w)
    inputs = tensors(x, other, extra=(case.geometry,), form=form)
    return kind.problem(label or str(case), kernel(launcher), inputs, off=off)


def convolution(kind: Kind, form: str, gradient: str = "") -> Iterator[Problem]:
    """Yield the layers of networks in one form."""
    fft = form == "fft"
    off = 0.0
    if fft:
        off = {torch.float16: 2.0**-9}.get(kind.dtype, 2.0**-8 if kind.precision == "tf32" else 2.0**-18)
    tuned = convolutions.FFT_TUNED if fft else convolutions.TUNED
    for case in convolutions.INTERPRETED if kind.small else tuned:
        if kind.dtype == torch.float64 or fft:
            case = case._replace(N=max(1, case.N // 8))
        if kind.dtype.itemsize > 1:
            yield _convolution(kind, case, form, gradient, off=off)
        elif case.C % 32 == 0 and case.stride <= (form == "batch") + 1:
            yield _float8_product(str(case), case, form, kind.dtype)


def layers(kind: Kind, form: str, interpreted: tuple[Conv, ...], tuned: tuple[Conv, ...]) -> Iterator[Problem]:
    """Yield some layers in the form that is made for them, which float64 lacks."""
    if kind.dtype != torch.float64 or form == "taps":
        for case in interpreted if kind.small else tuned:
            label = f"1 x {case}" if form == "fill" and case.groups == 1 else ""
            yield _convolution(kind, case, form, label=label)


def depthwise(kind: Kind, gradient: str = "") -> Iterator[Problem]:
    """Yield depthwise layers and, for the gradient of the weight, a sequence."""
    for case in convolutions.DEPTHWISE_INTERPRETED if kind.small else convolutions.DEPTHWISE_TUNED:
        if kind.dtype == torch.float64:
            case = case._replace(N=max(1, case.N // 8))
        yield _convolution(kind, case, "depthwise", gradient)
    if gradient == "weight" and not kind.small:
        N, C, size, side = convolutions.SEQUENCE
        geometry = Geometry.of((size, 1), (side, 1), (1, 1), ((side - 1, side - 1), (0, 0)), (1, 1), C)
        operands = images(N, C, size, 1), images(N, C, geometry.h.output, 1)
        inputs = tensors(*operands, extra=(geometry,), form="depthwise")
        yield kind.problem(f"depthwise {side}x1, {C} channels of {size}", kernel(conv.grad_weight), inputs)


def transposed_convolution(kind: Kind, form: str) -> Iterator[Problem]:
    """Yield the layers of generators, with weights in torch's layout, which the kernel has to transpose."""
    for case in transposed.INTERPRETED if kind.small else transposed.TUNED:
        if kind.dtype == torch.float64:
            case = case._replace(N=max(1, case.N // 8))
        inputs = tensors(case.x, case.weights_shape, extra=(case.geometry,), form=form)
        yield kind.problem(str(case), kernel(conv.grad_input), inputs)


def attention(kind: Kind, *wrt: int) -> Iterator[Problem]:
    """Yield full, causal and masked attention of heads of the family's largest size."""
    E = int(kind.family.rpartition("_")[2])
    B, H, L = (1, 2, 200) if kind.small else (4, 16, 2048)
    for variant in ("", " causal", " masked"):
        mask = (L, L) if variant == " masked" else None
        inputs = tensors(*((B, H, L, E),) * 3, mask, is_causal=variant == " causal")
        label = f"{B}x{H}x{L}x{E}{variant}"
        yield kind.operation(label, "scaled_dot_product_attention", wrt, inputs)
