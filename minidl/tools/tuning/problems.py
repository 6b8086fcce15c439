"""Representative problems of every family: sizes from the conditions of its table, and the catalogue's cases.

A rule that holds up to N = 1024 is tuned at 1024, one without a condition at the usual size. `classes` asks the
launcher which rule a problem uses, so superfluous problems do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from minidl import optim
from minidl.kernels import float8, images, recurrent, sparse
from minidl.kernels import random as random_kernels
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor
from minidl.testing.cases import convolutions, matrices
from minidl.testing.specs import Case, Make
from minidl.testing.specs import base as inputs_of
from minidl.testing.specs.base import integers, tensors
from minidl.tools.tuning import norms, products
from minidl.tools.tuning.kind import Inputs, Kind, kinds, rules_of
from minidl.tools.tuning.problem import Call, Problem, kernel


def problems(family: str, target: str) -> list[Problem]:
    """Return the family's problems for the tile table `target`; empty if the target has no tiles of the family.

    Raises KeyError for a family that has none: every family needs an entry here.
    """
    maker, *arguments = _MAKERS[family]
    problems = (problem for kind in kinds(family, target) for problem in maker(kind, *arguments))
    return list({problem.name: problem for problem in problems}.values())


# Inputs of operations on rows [M, N], by spec.
ROWS: dict[str, Callable[[int, int], Inputs]] = {
    "add": lambda M, N: tensors((M, N), (N,)),
    "bias_act": lambda M, N: tensors((M, N), (N,), extra=("gelu",)),
    "cross_entropy": lambda M, N: tensors((M, N), integers(M, high=N - 1)),
    "softmax": lambda M, N: tensors((M, N)),
    "layer_norm": lambda M, N: tensors((M, N), lambda make: (N,), (N,), (N,)),
}


def _row_problem(kind: Kind, spec: str, wrt: tuple[int, ...], M: int, N: int) -> Problem:
    return kind.operation(f"{M}x{N}", spec, wrt, ROWS[spec](M, N))


def _rows(kind: Kind, spec: str, *wrt: int) -> Iterator[Problem]:
    odd = () if kind.small else ((4096, 100), (12288, 100), (65536, 100))
    for M, N in (*kind.extents(M=0, N=1000 if kind.small else 4096), *odd):
        yield _row_problem(kind, spec, wrt, min(M, kind.rest(N)) or kind.rest(N), N)


def _long_rows(kind: Kind, spec: str, short: str, *wrt: int) -> Iterator[Problem]:
    """Yield rows that the family `short` cannot hold in one block."""
    longest = max(rule["tile"]["BLOCK_N"] for rule in rules_of(launch.table(short), kind.target))
    for N in (2 * longest, 4 * longest, 2 * longest + 8):
        yield _row_problem(kind, spec, wrt, kind.rest(N), N)


def _elementwise_tile(kind: Kind) -> Iterator[Problem]:
    for M, N in kind.extents(M=0, N=0):
        N = N or (kind.rest(M) if M else min(4096, kind.rest(8)))
        yield _row_problem(kind, "add", (), M or kind.rest(N), N)


def _pairs(kind: Kind, spec: str) -> Iterator[Problem]:
    """Yield an operation on two vectors."""
    for (n,) in kind.extents(N=kind.rest()):
        yield kind.operation(str(n), spec, (), tensors((n,), (n,)))


def _vector(kind: Kind, launcher: Callable[..., Any], *extra: Any) -> Iterator[Problem]:
    """Yield a launcher on one vector and the arguments `extra`."""
    for (n,) in kind.extents(N=kind.rest()):
        yield kind.problem(str(n), kernel(launcher), tensors((n,), extra=extra))


def _float8(x: torch.Tensor) -> torch.Tensor:
    """Convert to float8 and back."""
    return float8.dequantize(*float8.quantize(x), x.dtype)


def _recurrence(kind: Kind) -> Iterator[Problem]:
    """Yield lstm over few steps, and its gradient."""
    T, B = (2, 16) if kind.small else (8, 64)
    fused = kind.family.endswith("_fused")
    off = (2.0**-6 if kind.dtype.itemsize == 2 else 2.0**-14) if fused else 0.0  # tiles order the sums of products
    for M, H in kind.extents(M=B, N=128 if fused else 512 if kind.small else 1024):
        yield kind.problem(f"{T}x{M}x{H}", _lstm, tensors((T * M, 4 * H), (1, M, H), (1, M, H), (1, 4 * H, H)), off=off)


def _lstm(case: Case, make: Make) -> Call:
    x, h, c, weight = case.args
    steps = (tuple((first, h.shape[1]) for first in range(0, len(x), h.shape[1])),)

    def call() -> tuple[torch.Tensor, ...]:
        y, *_, saved = recurrent.recurrence("LSTM", x, h, c, weight, None, steps)
        assert saved is not None
        return y, recurrent.recurrence_grad("LSTM", y, None, None, weight, saved, steps, h.shape[1])[0]

    return call


def _uniform(t: torch.Tensor) -> torch.Tensor:
    return random_kernels.uniform_(t, 0.0, 1.0, seed=1)


def _reduce(kind: Kind, axis: int) -> Iterator[Problem]:
    """Yield sums over the rows or columns of a matrix: K results of R numbers each."""
    for K, R in kind.extents(K=0, R=0):
        R = R or (kind.rest(K) if K else 0)
        K = K or (kind.rest(R) if R else min(1024, kind.rest(8)))
        R = R or kind.rest(K)
        inputs = tensors((K, R) if axis == 1 else (R, K), extra=(axis,))
        yield kind.operation(f"{K} sums of {R}", "sum", (), inputs)


def _row_norms(kind: Kind) -> Iterator[Problem]:
    yield from _rows(kind, "layer_norm")
    # Instance norms of channels-last images have rows that lie side by side.
    for size in () if kind.small else (16, 32, 64):
        inputs = tensors(inputs_of.images(128, 64, size), None, None, (64,), (64,))
        yield kind.operation(f"128x64x{size}x{size}", "instance_norm", (), inputs)


def _pool(kind: Kind, *wrt: int) -> Iterator[Problem]:
    for (C,) in kind.extents(C=64):
        N = kind.rest(256 * C)
        for spec in ("max_pool2d", "avg_pool2d"):
            label = f"{spec.split('_')[0]} {N}x{C}x16x16"
            yield kind.operation(label, spec, wrt, tensors(inputs_of.images(N, C, 16), kernel_size=2))


def _pictures(kind: Kind) -> Iterator[Problem]:
    count = 32 if kind.small else 4096
    for size, channels in ((8, 1), (28, 1), (64, 3)):
        shape = count, size, size, channels

        def inputs(make: Make, shape: tuple[int, ...] = shape) -> Case:
            x = make.integers(*shape, low=0, high=255).to(torch.uint8)
            moves = make.integers(count, 3, low=0, high=1).to(torch.int32)
            mean, std = make.tensor(shape[-1]).float(), make.tensor(shape[-1], low=0.5, high=2.0).float()
            return Case((x, make.integers(count, low=0, high=count - 1), moves, mean, std, kind.dtype))

        yield kind.problem(f"{count} pictures {size}x{size}x{channels}", kernel(images.pick), inputs)


def _documents(kind: Kind) -> Iterator[Problem]:
    rows, terms, columns = matrices.DOCUMENTS_INTERPRETED if kind.small else matrices.DOCUMENTS

    def inputs(make: Make) -> Case:
        # The columns of each row are sorted and distinct: even steps from a start that differs by row.
        first = make.integers(rows, 1, low=0, high=columns // terms - 1)
        col = first + torch.arange(terms, device=first.device) * (columns // terms)
        crow = torch.arange(rows + 1, dtype=torch.int32, device=first.device) * terms
        x = CSR.from_torch(crow, col.reshape(-1).to(torch.int32), make.tensor(rows * terms), (rows, columns))
        return Case((x.crow, x.col, x.val, x.order, make.tensor(columns, 128), make.tensor(128), "relu"))

    yield kind.problem(f"{rows} x {terms} of {columns}", kernel(sparse.csr_matmul), inputs, by_values=True)


def _updates(kind: Kind) -> Iterator[Problem]:
    tables, rows = ((2000,), 200) if kind.small else ((matrices.DOCUMENTS[2], 4096), 4096)
    for (C,) in kind.extents(C=128):

        def inputs(make: Make, C: int = C) -> Case:
            values, dense = ([make.tensor(count, C) for count in counts] for counts in (tables, tables[1:]))
            return Case((values, dense, make.tensor(rows, C)))

        yield kind.problem(f"rows of {C}", _adam, inputs, in_place=True)


def _adam(case: Case, make: Make) -> Call:
    """Return a step of Adam for one parameter with a row gradient, and others with dense gradients."""
    values, dense, rows = case.args
    params = [Tensor(value.clone(), requires_grad=True) for value in values]
    index = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    adam = optim.Adam(params, lr=1e-3, max_norm=1.0)

    def call() -> tuple[torch.Tensor, ...]:
        params[0]._grad = RowGrad(index, rows, (params[0].shape[0], params[0].shape[1]))
        for param, grad in zip(params[1:], dense, strict=True):
            param.grad = Tensor(grad)
        adam.step()
        return tuple(param.data for param in params)

    return call


# The maker of the problems of each family, and its arguments after the kind.
_MAKERS: dict[str, tuple[Any, ...]] = {
    family: maker
    for families, maker in {
        "gemm gemm_pointer": (products.products,),
        "gemm_parts gemm_cut": (products.parts,),
        "gemm_thin": (products.thin_products,),
        "gemm_vector": (products.vector_products,),
        "gemm_rows": (products.copied_products,),
        "gemm_sum": (products.shares,),
        "attention_64 attention_128 attention_256": (products.attention,),
        "attention_grad_64 attention_grad_128 attention_grad_256": (products.attention, 0, 1, 2),
        "bias_act": (_rows, "bias_act"),
        "bias_act_grad": (_rows, "bias_act", 0, 1),
        "softmax": (_rows, "softmax"),
        "softmax_grad": (_rows, "softmax", 0),
        "softmax_loop": (_long_rows, "softmax", "softmax"),
        "softmax_grad_loop": (_long_rows, "softmax", "softmax_grad", 0),
        "cross_entropy": (_rows, "cross_entropy"),
        "cross_entropy_loop": (_long_rows, "cross_entropy", "cross_entropy"),
        "row_norm": (_row_norms,),
        "row_norm_grad": (_rows, "layer_norm", 0, 2, 3),
        "loss": (_pairs, "mse_loss"),
        "elementwise": (_pairs, "add"),
        "elementwise_tile": (_elementwise_tile,),
        "random": (_vector, _uniform),
        "float8": (_vector, _float8),
        "dropout": (_vector, random_kernels.dropout, 0.5, 1),
        "recurrent recurrent_fused recurrent_grad recurrent_grad_fused": (_recurrence,),
        "reduce_rows": (_reduce, 1),
        "reduce_columns": (_reduce, 0),
        "norm_stats norm_join norm": (norms.batch_norm,),
        "norm_sums norm_grad": (norms.batch_norm, 0, 3, 4),
        "norm_planes": (norms.plane_norm,),
        "norm_alone": (norms.few_values,),
        "norm_handed": (norms.joined_statistics,),
        "norm_fold": (norms.fold,),
        "pool": (_pool,),
        "pool_grad": (_pool, 0),
        "images": (_pictures,),
        "sparse": (_documents,),
        "update update_measure update_prepare": (_updates,),
        "conv conv_flat": (products.convolution, "pixel"),
        "conv_grad_weight": (products.convolution, "pixel", "weight"),
        "conv_unfolded_grad_weight": (products.convolution, "unfolded", "weight"),
        "conv_fill": (products.layers, "fill", convolutions.FILL_INTERPRETED, convolutions.FILL_TUNED),
        "conv_taps": (products.layers, "taps", convolutions.TAPS_INTERPRETED, convolutions.TAPS_TUNED),
        "conv_unshuffle": (products.layers, "unshuffle", convolutions.FIRST_INTERPRETED, convolutions.FIRST_TUNED),
        "conv_batch conv_batch_narrow": (products.convolution, "batch"),
        "conv_batch_grad_weight": (products.convolution, "batch", "weight"),
        "conv_back": (products.transposed_convolution, "batch"),
        "conv_box": (products.convolution, "box"),
        "conv_box_grad_weight": (products.convolution, "box", "weight"),
        "conv_split conv_split_box": (products.convolution, "split"),
        "conv_split_across conv_split_grad_weight": (products.convolution, "split", "weight"),
        "conv_band conv_banded": (products.convolution, "banded"),
        "conv_banded_grad_weight": (products.convolution, "banded", "weight"),
        "conv_depthwise": (products.depthwise,),
        "conv_depthwise_grad_weight": (products.depthwise, "weight"),
        "conv_reorder": (products.transposed_convolution, "pixel"),
        "conv_few": (products.transposed_convolution, "few"),
        "conv_fft conv_fft_product": (products.convolution, "fft"),
    }.items()
    for family in families.split()
}
