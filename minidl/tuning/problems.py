"""Representative problems of every family: sizes from the conditions of its table, and the benchmark's shapes.

A rule that holds up to N = 1024 is tuned at 1024, one without a condition at the usual size. Which rule a problem
really meets is asked of the launcher (`classes`), so that one too many does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from minidl import optim
from minidl.csr import CSR
from minidl.kernels import conv, gemm, images, launch, sparse
from minidl.kernels import random as random_kernels
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.gemm import thin
from minidl.rows import RowGrad
from minidl.specs import Case, Make
from minidl.tensor import Tensor
from minidl.tuning.problem import Call, Problem, Start, backward, forward, kernel
from minidl.tuning.space import PRODUCTS

Extents = dict[str, int]
# What a problem of rows has in all: more than an L2 cache holds on a GPU, little for the interpreter.
ELEMENTS, ELEMENTS_INTERPRETED = 2**25, 2**18
# (N, C, M, size, kernel, stride): layers as the benchmark has them, with fewer images where these were 10,000, and
# small batches.
LAYERS = (
    (2000, 1, 12, 72, 7, 1), (2000, 12, 24, 33, 7, 1), (2000, 1, 32, 28, 5, 1), (2000, 32, 64, 12, 5, 1),
    (128, 64, 64, 56, 3, 1), (128, 128, 128, 28, 3, 1), (128, 256, 256, 14, 3, 1), (128, 512, 512, 7, 3, 1),
    (64, 256, 256, 56, 3, 1), (32, 64, 64, 56, 3, 1), (32, 256, 256, 14, 3, 1), (8, 128, 128, 28, 3, 1),
    (128, 64, 128, 56, 3, 2), (512, 64, 32, 14, 3, 1), (16, 512, 512, 7, 3, 1), (8, 64, 64, 56, 3, 1),
    (2000, 1, 8, 28, 5, 1), (2000, 3, 8, 28, 3, 1),
)  # fmt: skip
LAYERS_INTERPRETED = (
    (16, 1, 8, 12, 3, 1), (16, 3, 8, 12, 3, 1), (16, 16, 32, 8, 3, 1), (16, 32, 32, 8, 3, 1), (4, 32, 320, 4, 3, 1),
)  # fmt: skip
# (N, C, M, size): transposed, 5x5 with stride 2.
BACK = (
    (1000, 512, 256, 4),
    (1000, 256, 128, 8),
    (1000, 128, 64, 16),
    (1000, 64, 3, 32),
    (64, 256, 128, 8),
    (64, 128, 64, 16),
)
BACK_INTERPRETED = ((8, 32, 16, 4), (8, 16, 3, 4))
GEMMS = (
    (8192, 8192, 8192), (2048, 2048, 2048), (1024, 1024, 1024), (1024, 128, 32768), (32768, 128, 1024),
    (128, 32768, 1024),
)  # fmt: skip


def problems(family: str, target: str) -> list[Problem]:
    """The family's problems for the tile table `target`; empty where the family is not used there.

    Raises KeyError for a family that has none: every family needs an entry here.
    """
    rules = launch.table(family)[target]
    made = _MAKERS[family]
    if not rules:
        return []
    found = [problem for kind in _types(family, target) for problem in made(family, target, *kind)]
    return list({problem.name: problem for problem in found}.values())


def _types(family: str, target: str) -> list[tuple[torch.dtype, str]]:
    """Dtypes with the precisions of float32 products: float16 (bfloat16 runs as it), float32, and those in rules."""
    if target == "interpreted":
        return [(torch.float32, "ieee")]
    rules = launch.table(family)[target]
    named = {name for rule in rules for name in rule.get("when", {}).get("dtype", ())}
    found = [(torch.float16, "ieee")]
    products = family in PRODUCTS or family.startswith("conv_fft")
    found += [(torch.float32, precision) for precision in (launch.PRECISIONS if products else ("ieee",))]
    return found + [(torch.float64, "ieee")] * ("float64" in named)


def _extents(family: str, target: str, **usual: int) -> list[Extents]:
    """For each rule the sizes in its conditions, with those of `usual` that it does not name; then `usual` itself, and
    twice the largest size that a rule holds up to."""
    whens = [rule.get("when", {}) for rule in launch.table(family)[target]]
    sizes = [{name[:-4]: when[name] for name in when if name[-4:] in ("_max", "_min")} for when in whens]
    largest = {name: 2 * max(size.get(name, 0) for size in sizes) for name in usual}
    found: list[Extents] = []
    for named in (*sizes, {}, *({name: size} for name, size in largest.items() if size)):
        extents = {**usual, **{name: size for name, size in named.items() if name in usual}}
        if extents not in found:
            found.append(extents)
    return found


def _elements(target: str) -> int:
    return ELEMENTS_INTERPRETED if target == "interpreted" else ELEMENTS


def _rest(target: str, of: int) -> int:
    return max(1, _elements(target) // of)


def _problem(dtype: torch.dtype, precision: str, what: str, start: Start, inputs: Any, **options: Any) -> Problem:
    shown = str(dtype).removeprefix("torch.") + (f" {precision}" if precision != "ieee" else "")
    return Problem(f"{what} {shown}", dtype, inputs, start, precision, **options)


Maker = Callable[[str, str, torch.dtype, str], Iterator[Problem]]


def _gemm(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    small = target == "interpreted"
    usual = {"M": 128, "N": 128, "K": 1024} if small else {"M": 4096, "N": 4096, "K": 4096}
    shapes = [tuple(found.values()) for found in _extents(family, target, **usual)]
    shapes += [] if small or dtype == torch.float64 else [shape for shape in GEMMS if shape not in shapes]
    # Rows that no box can read are the pointer form's where there are boxes.
    gap = int(family == "gemm_pointer" and target != "sm_80" and dtype != torch.float64)
    form = "pointer" if family == "gemm_pointer" else None
    if dtype == torch.float64:
        shapes = [(1024, 1024, 1024)]
    for M, N, K in shapes:

        def inputs(make: Make, M: int = M, N: int = N, K: int = K) -> Case:
            return Case((make.tensor(M, K + gap)[:, :K], make.tensor(N, K + gap)[:, :K].t()), {"form": form})

        yield _problem(dtype, precision, f"{M}x{N}x{K}", kernel(gemm.gemm), inputs)


def _parts(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    if dtype != torch.float32 or (precision != "tf32x3" and target != "interpreted"):
        return
    for size in (128,) if target == "interpreted" else (1024, 4096):

        def inputs(make: Make, n: int = size) -> Case:
            return Case((make.tensor(n, n), make.tensor(n, n)), {"form": "parts", "precision": "tf32x3"})

        yield _problem(dtype, precision, f"{size}x{size}x{size}", kernel(gemm.gemm), inputs)


def _thin(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    """Operands as a layer of few outputs and its gradients have them, by which of the sizes is the small one."""
    small = target == "interpreted"
    usual = {"M": 64, "N": 4, "K": 32} if small else {"M": 1024, "N": 128, "K": 1024}
    shapes = [tuple(found.values()) for found in _extents(family, target, **usual)]
    shapes += [] if small else [(1024, 16, 128), (16, 1024, 128)]
    for M, N, K in shapes:
        least = min(M, N, K)
        if least > thin.THIN:
            continue

        def inputs(make: Make, M: int = M, N: int = N, K: int = K, least: int = least) -> Case:
            a = make.tensor(K, M).t() if least == M else make.tensor(M, K)
            b = make.tensor(N, K).t() if least == N else make.tensor(K, N)
            return Case((a, b), {"form": "thin"})

        yield _problem(dtype, precision, f"{M}x{N}x{K}", kernel(gemm.gemm), inputs)


def _gemm_sum(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    acc = launch.acc_torch(dtype)
    for extents in _extents(family, target, total=_rest(target, 8)):
        total = extents["total"]

        def inputs(make: Make, n: int = total) -> Case:
            return Case((make.tensor(8, n).to(acc), dtype))

        yield _problem(dtype, precision, f"8 shares of {total}", kernel(gemm.sum_shares), inputs)


def _rows(record: str, tail: Callable[[Make, int, int], tuple[Any, ...]], *wrt: int, usual: int = 4096) -> Maker:
    """Operations on rows [M, N]; `tail` makes the arguments after them."""

    def make_all(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
        most = usual if target != "interpreted" else min(usual, 1000)
        for extents in _extents(family, target, N=most):
            yield _of_rows(record, tail, wrt, _rest(target, extents["N"]), extents["N"], dtype)

    return make_all


def _of_rows(record: str, tail: Any, wrt: tuple[int, ...], M: int, N: int, dtype: torch.dtype) -> Problem:
    start = backward(record, wrt) if wrt else forward(record)

    def inputs(make: Make) -> Case:
        return Case((make.tensor(M, N), *tail(make, M, N)))

    return _problem(dtype, "ieee", f"{M}x{N}", start, inputs, record=record, wrt=wrt)


def _long_rows(record: str, tail: Callable[[Make, int, int], tuple[Any, ...]], short: str, *wrt: int) -> Maker:
    """Rows that the family `short` cannot hold in one block."""

    def make_all(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
        longest = max(rule["tile"]["BLOCK_N"] for rule in launch.table(short)[target])
        for N in (2 * longest, 4 * longest, 2 * longest + 8):
            yield _of_rows(record, tail, wrt, max(1, _rest(target, N)), N, dtype)

    return make_all


def _none(make: Make, M: int, N: int) -> tuple[Any, ...]:
    return ()


def _labels(make: Make, M: int, N: int) -> tuple[Any, ...]:
    return (make.integers(M, low=0, high=N - 1),)


def _bias_gelu(make: Make, M: int, N: int) -> tuple[Any, ...]:
    return make.tensor(N), "gelu"


def _row(make: Make, M: int, N: int) -> tuple[Any, ...]:
    return (make.tensor(N),)


def _elementwise_tile(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    for extents in _extents(family, target, M=0, N=0):
        N = extents["N"] or (_rest(target, extents["M"]) if extents["M"] else min(4096, _elements(target) // 8))
        M = extents["M"] or _rest(target, N)
        yield _of_rows("add", _row, (), M, N, dtype)


def _vector(start: Start, options: Mapping[str, Any], tail: Callable[[Make, int], tuple[Any, ...]]) -> Maker:
    """Operations on N numbers in a row."""

    def make_all(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
        for extents in _extents(family, target, N=_elements(target)):
            n = extents["N"]

            def inputs(make: Make, n: int = n) -> Case:
                return Case((make.tensor(n), *tail(make, n)))

            yield _problem(dtype, precision, str(n), start, inputs, **options)

    return make_all


def _uniform(t: torch.Tensor) -> torch.Tensor:
    return random_kernels.uniform_(t, 0.0, 1.0, seed=1)


def _reduce(axis: int) -> Maker:
    """Sums over the rows or columns of [., .]: K results of R numbers each."""

    def make_all(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
        for extents in _extents(family, target, K=0, R=0):
            R = extents["R"] or (_rest(target, extents["K"]) if extents["K"] else 0)
            K = extents["K"] or (_rest(target, R) if R else min(1024, _elements(target) // 8))
            R = R or _rest(target, K)
            shape = (K, R) if axis == 1 else (R, K)

            def inputs(make: Make, shape: tuple[int, int] = shape) -> Case:
                return Case((make.tensor(*shape), axis))

            what = f"{K} sums of {R}"
            yield _problem(dtype, precision, what, forward("sum"), inputs, record="sum")

    return make_all


def _batch_norm(*wrt: int) -> Maker:
    def make_all(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
        for extents in _extents(family, target, C=64):
            C = extents["C"]
            N = max(2, _rest(target, 64 * C))
            start = backward("batch_norm", wrt) if wrt else forward("batch_norm")

            def inputs(make: Make, N: int = N, C: int = C) -> Case:
                running = make.tensor(C), make.tensor(C, low=0.5, high=2.0)
                affine = make.tensor(C), make.tensor(C)
                return Case((_images(make, N, C, 8), *running, *affine, True, 0.1, 1e-5, "relu"))

            what = f"{N}x{C}x8x8"
            yield _problem(dtype, precision, what, start, inputs, record="batch_norm", wrt=wrt)

    return make_all


def _fold(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    def inputs(make: Make) -> Case:
        vectors = make.tensor(512), make.tensor(512), make.tensor(512, low=0.5, high=2.0), make.tensor(512)
        return Case((make.tensor(512, 64, 3, 3), *vectors, make.tensor(512), 1e-5))

    yield _problem(dtype, precision, "512 channels", forward("fold_batch_norm"), inputs, record="fold_batch_norm")


def _pool(*wrt: int) -> Maker:
    def make_all(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
        for extents in _extents(family, target, C=64):
            C = extents["C"]
            N = max(1, _rest(target, 256 * C))
            for record in ("max_pool2d", "avg_pool2d"):
                start = backward(record, wrt) if wrt else forward(record)

                def inputs(make: Make, N: int = N, C: int = C) -> Case:
                    return Case((_images(make, N, C, 16),), {"kernel_size": 2})

                what = f"{record.split('_')[0]} {N}x{C}x16x16"
                yield _problem(dtype, precision, what, start, inputs, record=record, wrt=wrt)

    return make_all


def _pictures(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    count = 32 if target == "interpreted" else 4096
    for size, channels in ((8, 1), (28, 1), (64, 3)):

        def inputs(make: Make, size: int = size, channels: int = channels) -> Case:
            x = make.integers(count, size, size, channels, low=0, high=255).to(torch.uint8)
            moves = make.integers(count, 3, low=0, high=1).to(torch.int32)
            mean, std = make.tensor(channels).float(), make.tensor(channels, low=0.5, high=2.0).float()
            return Case((x, make.integers(count, low=0, high=count - 1), moves, mean, std, dtype))

        yield _problem(dtype, precision, f"{count} pictures {size}x{size}x{channels}", kernel(images.pick), inputs)


def _documents(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    rows, each, columns = (64, 20, 1000) if target == "interpreted" else (1024, 65, 32754)

    def inputs(make: Make) -> Case:
        # Every row takes its columns at even steps from a place of its own: sorted, and none twice.
        first = make.integers(rows, 1, low=0, high=columns // each - 1)
        col = first + torch.arange(each, device=first.device) * (columns // each)
        crow = torch.arange(rows + 1, dtype=torch.int32, device=first.device) * each
        x = CSR.from_torch(crow, col.reshape(-1).to(torch.int32), make.tensor(rows * each), (rows, columns))
        return Case((x.crow, x.col, x.val, x.order, make.tensor(columns, 128), make.tensor(128), "relu"))

    yield _problem(dtype, precision, f"{rows} x {each} of {columns}", kernel(sparse.csr_matmul), inputs)


def _updates(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    tables, rows = ((2000,), 200) if target == "interpreted" else ((32754, 4096), 4096)
    for extents in _extents(family, target, C=128):
        C = extents["C"]

        def inputs(make: Make, C: int = C) -> Case:
            values = [make.tensor(count, C) for count in tables]
            return Case((values, [make.tensor(count, C) for count in tables[1:]], make.tensor(rows, C)))

        yield _problem(dtype, precision, f"rows of {C}", _adam, inputs, in_place=True)


def _adam(case: Case, make: Make) -> Call:
    """One parameter with a gradient of few rows, and others with dense ones."""
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


def _images(make: Make, N: int, C: int, size: int) -> torch.Tensor:
    """In channels-last memory."""
    return make.tensor(N, size, size, C).permute(0, 3, 1, 2)


def _convolution(form: str, gradient: str = "") -> Maker:
    def make_all(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
        fft = form == "fft"
        off = {torch.float16: 2.0**-9}.get(dtype, 2.0**-8 if precision == "tf32" else 2.0**-18) if fft else 0.0
        layers = LAYERS_INTERPRETED if target == "interpreted" else (*LAYERS[:6], LAYERS[13]) if fft else LAYERS
        for N, C, M, size, side, stride in layers:
            N = max(1, N // 8) if dtype == torch.float64 or fft else N
            pad = side // 2 if side == 3 else 0
            geometry = Geometry.of((size, size), (side, side), (stride,) * 2, ((pad, pad),) * 2, (1, 1))
            out = geometry.h.output

            def inputs(
                make: Make, N: int = N, C: int = C, M: int = M, size: int = size, side: int = side, out: int = out,
                geometry: Geometry = geometry,
            ) -> Case:  # fmt: skip
                x = _images(make, N, C, size)
                if gradient == "weight":
                    return Case((x, _images(make, N, M, out), geometry), {"form": form})
                return Case((x, _images(make, M, C, side), geometry), {"form": form})

            launcher = conv.grad_weight if gradient == "weight" else _forward
            what = f"{C}->{M} {side}x{side} at {size}, {N} images" + (f", stride {stride}" if stride > 1 else "")
            yield _problem(dtype, precision, what, kernel(launcher), inputs, off=off)

    return make_all


def _pair_pool(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
    if dtype == torch.float64:
        return
    N, C, M, size, side = (8, 16, 16, 8, 3) if target == "interpreted" else (4096, 32, 64, 12, 5)
    geometry = Geometry.of((size, size), (side, side), (1, 1), ((0, 0), (0, 0)), (1, 1))

    def inputs(make: Make) -> Case:
        return Case((_images(make, N, C, size), _images(make, M, C, side), geometry), {"form": "pair", "pool": "max"})

    yield _problem(dtype, precision, f"{C}->{M} {side}x{side} at {size}, pooled, {N} images", kernel(_forward), inputs)


def _forward(x: torch.Tensor, w: torch.Tensor, geometry: Geometry, form: str, pool: str | None = None) -> torch.Tensor:
    return conv.forward(x, w, geometry, form=form, pool=pool)[0]


def _transposed(form: str | None) -> Maker:
    def make_all(family: str, target: str, dtype: torch.dtype, precision: str) -> Iterator[Problem]:
        layers = BACK_INTERPRETED if target == "interpreted" else BACK
        for N, C, M, size in layers:
            axis = Axis(2 * size, 5, size, 2, 2, 1)
            N = max(1, N // 8) if dtype == torch.float64 else N

            def inputs(make: Make, N: int = N, C: int = C, M: int = M, size: int = size, axis: Axis = axis) -> Case:
                # Weights as torch lays them, which a walk has to turn.
                return Case((_images(make, N, C, size), make.tensor(C, M, 5, 5), Geometry(axis, axis)), {"form": form})

            what = f"transposed {C}->{M} 5x5 stride 2 at {size}, {N} images"
            yield _problem(dtype, precision, what, kernel(conv.grad_input), inputs)

    return make_all


_MAKERS: dict[str, Maker] = {
    "gemm": _gemm,
    "gemm_pointer": _gemm,
    "gemm_parts": _parts,
    "gemm_thin": _thin,
    "gemm_cut": _parts,
    "gemm_sum": _gemm_sum,
    "bias_act": _rows("bias_act", _bias_gelu),
    "bias_act_grad": _rows("bias_act", _bias_gelu, 0, 1),
    "softmax": _rows("softmax", _none),
    "softmax_grad": _rows("softmax", _none, 0),
    "softmax_loop": _long_rows("softmax", _none, "softmax"),
    "softmax_grad_loop": _long_rows("softmax", _none, "softmax_grad", 0),
    "cross_entropy": _rows("cross_entropy", _labels),
    "cross_entropy_loop": _long_rows("cross_entropy", _labels, "cross_entropy"),
    "loss": _vector(forward("mse_loss"), {"record": "mse_loss"}, lambda make, n: (make.tensor(n),)),
    "elementwise": _vector(forward("add"), {"record": "add"}, lambda make, n: (make.tensor(n),)),
    "elementwise_tile": _elementwise_tile,
    "random": _vector(kernel(_uniform), {}, lambda make, n: ()),
    "dropout": _vector(kernel(random_kernels.dropout), {}, lambda make, n: (0.5, 1)),
    "reduce_rows": _reduce(1),
    "reduce_columns": _reduce(0),
    "norm_stats": _batch_norm(),
    "norm_join": _batch_norm(),
    "norm": _batch_norm(),
    "norm_sums": _batch_norm(0, 3, 4),
    "norm_grad": _batch_norm(0, 3, 4),
    "norm_fold": _fold,
    "pool": _pool(),
    "pool_grad": _pool(0),
    "images": _pictures,
    "sparse": _documents,
    "update": _updates,
    "update_measure": _updates,
    "update_prepare": _updates,
    "conv": _convolution("pixel"),
    "conv_flat": _convolution("pixel"),
    "conv_grad_weight": _convolution("pixel", "weight"),
    "conv_batch": _convolution("batch"),
    "conv_batch_narrow": _convolution("batch"),
    "conv_batch_grad_weight": _convolution("batch", "weight"),
    "conv_back": _transposed("batch"),
    "conv_box": _convolution("box"),
    "conv_band": _convolution("banded"),
    "conv_banded": _convolution("banded"),
    "conv_held": _convolution("banded"),
    "conv_two_rows": _convolution("banded"),
    "conv_pair_pool": _pair_pool,
    "conv_banded_grad_weight": _convolution("banded", "weight"),
    "conv_turn": _transposed("pixel"),
    "conv_few": _transposed("few"),
    "conv_fft": _convolution("fft"),
    "conv_fft_product": _convolution("fft"),
}  # fmt: skip
