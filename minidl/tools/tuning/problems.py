"""Representative problems of every family: sizes from the conditions of its table, and the benchmark's shapes.

A rule that holds up to N = 1024 is tuned at 1024, one without a condition at the usual size. `classes` asks the
launcher which rule a problem really uses, so superfluous problems do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from minidl import optim
from minidl.kernels import conv, float8, gemm, images, norm, sparse
from minidl.kernels import random as random_kernels
from minidl.kernels.conv import float8 as float8_products
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.gemm import thin
from minidl.kernels.norm import alone
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor
from minidl.testing.specs import Case, Make
from minidl.testing.specs.base import between, integers, of, tensors
from minidl.tools.bench import generator_rows, image_rows
from minidl.tools.tuning.problem import Call, Problem, Start, kernel, operation
from minidl.tools.tuning.space import PRODUCTS

Inputs = Callable[[Make], Case]
Sizes = Callable[[Make], torch.Tensor] | tuple[int, ...]
# Elements of a problem of rows: more than a GPU's L2 cache holds, few for the interpreter.
ELEMENTS, ELEMENTS_INTERPRETED = 2**25, 2**18
# (N, C, M, size, kernel, stride): the benchmark's layers with fewer images, and small batches.
LAYERS = (
    *((min(N, 2000), C, M, size, side, 1) for N, C, M, size, side, *_ in image_rows.LAYERS.values()),
    (32, 64, 64, 56, 3, 1), (32, 256, 256, 14, 3, 1), (8, 128, 128, 28, 3, 1), (128, 64, 128, 56, 3, 2),
    (512, 64, 32, 14, 3, 1), (16, 512, 512, 7, 3, 1), (8, 64, 64, 56, 3, 1), (2000, 1, 8, 28, 5, 1),
    (2000, 3, 8, 28, 3, 1), (64, 64, 12, 28, 3, 1), (64, 8, 64, 28, 3, 1), (64, 96, 256, 14, 1, 1),
    (64, 96, 48, 14, 1, 1), (64, 48, 48, 14, 1, 1),
)  # fmt: skip
LAYERS_INTERPRETED = (
    (16, 1, 8, 12, 3, 1), (16, 3, 8, 12, 3, 1), (16, 16, 32, 8, 3, 1), (16, 32, 32, 8, 3, 1), (4, 32, 320, 4, 3, 1),
)  # fmt: skip
# (N, channels, size, side, stride): MobileNetV2, ConvNeXt and EfficientNet.
DEPTHWISE = (
    (128, 32, 112, 3, 1), (128, 96, 112, 3, 2), (128, 144, 56, 3, 1), (128, 384, 14, 3, 1), (64, 96, 56, 7, 1),
    (128, 240, 28, 5, 1), (128, 672, 14, 5, 2), (256, 56, 13, 1, 1), (256, 8, 28, 3, 1), (102, 168, 128, 5, 1),
    (256, 96, 28, 5, 2), (128, 96, 28, 7, 2), (64, 32, 56, 9, 1),
)  # fmt: skip
SEQUENCE = 1, 1536, 2048, 4  # N, C, length and kernel, which lie down a column (Mamba)
DEPTHWISE_INTERPRETED = ((4, 16, 8, 3, 1), (4, 16, 9, 5, 2))
# (N, C, M, size): transposed, 5x5 with stride 2.
BACK = (*((1000, *layer) for layer in generator_rows.LAYERS), (64, 256, 128, 8), (64, 128, 64, 16))
BACK_INTERPRETED = ((8, 32, 16, 4), (8, 16, 3, 4))
GEMMS = (
    (8192, 8192, 8192), (2048, 2048, 2048), (1024, 1024, 1024), (1024, 128, 32768), (32768, 128, 1024),
    (128, 32768, 1024),
)  # fmt: skip


def problems(family: str, target: str) -> list[Problem]:
    """The family's problems for the tile table `target`; empty where the family is not used there.

    Raises KeyError for a family that has none: every family needs an entry here.
    """
    make, *given = _MAKERS[family]
    found = [problem for kind in _kinds(family, target) for problem in make(kind, *given)]
    return list({problem.name: problem for problem in found}.values())


class Kind(NamedTuple):
    """What problems are made for: a family's table for a target, a dtype, and the precision of float32 products."""

    family: str
    target: str
    dtype: torch.dtype
    precision: str = "ieee"

    @property
    def small(self) -> bool:
        """Whether problems run in the interpreter."""
        return self.target == "interpreted"

    def rest(self, of: int = 1) -> int:
        """By how many a size is multiplied to give the elements of a problem of rows."""
        return max(1, (ELEMENTS_INTERPRETED if self.small else ELEMENTS) // of)

    def extents(self, **usual: int) -> list[tuple[int, ...]]:
        """The sizes in each rule's conditions (those not named there from `usual`), `usual` itself, and twice the
        largest size that a rule holds up to, in the order of `usual`."""
        whens = [rule.get("when", {}) for rule in launch.table(self.family)[self.target]]
        sizes = [{name[:-4]: when[name] for name in when if name[-4:] in ("_max", "_min")} for when in whens]
        largest = {name: 2 * max(size.get(name, 0) for size in sizes) for name in usual}
        named = (*sizes, {}, *({name: size} for name, size in largest.items() if size))
        return list(dict.fromkeys(tuple(size.get(name, usual[name]) for name in usual) for size in named))

    def problem(self, what: str, start: Start, inputs: Inputs, **options: Any) -> Problem:
        """The problem of calls that `start` makes from `inputs`."""
        name = f"{what} {str(self.dtype).removeprefix('torch.')}"
        name += f" {self.precision}" if self.precision != "ieee" else ""
        return Problem(name, self.dtype, inputs, start, self.precision, **options)

    def of_float8(self, what: str, form: str, x: Sizes, w: Sizes, geometry: Geometry) -> Problem:
        """The problem of a product of float8 values, made of numbers in float16."""

        def start(case: Case, make: Make) -> Call:
            one = torch.ones((), device=case.args[0].device)
            values, weights = (t.to(self.dtype) for t in case.args)
            return lambda: float8_products.forward(
                values, weights, one, one, geometry, out_dtype=torch.float16, form=form
            )

        return Problem(f"{what} float8", torch.float16, tensors(x, w), start)

    def recorded(self, what: str, record: str, wrt: tuple[int, ...], inputs: Inputs) -> Problem:
        """The problem of a record's operation, or of its gradients by the arguments at `wrt`."""
        return self.problem(what, operation(record, wrt), inputs, record=record, wrt=wrt)


def _kinds(family: str, target: str) -> list[Kind]:
    """Dtypes with the precisions of float32 products: float16 (bfloat16 runs as it), float32, and those in rules."""
    rules = launch.table(family)[target]
    if not rules:
        return []
    if target == "interpreted":
        return [Kind(family, target, torch.float32)]
    named = {name for rule in rules for name in rule.get("when", {}).get("dtype", ())}
    products = family in PRODUCTS or family.startswith("conv_fft")
    precisions = launch.PRECISIONS if products else ("ieee",)
    return [
        Kind(family, target, torch.float16),
        *(Kind(family, target, torch.float32, precision) for precision in precisions),
        *([Kind(family, target, torch.float64)] if "float64" in named else []),
        *([Kind(family, target, torch.float8_e4m3fn)] if "float8_e4m3fn" in named else []),
    ]


def _gemm(kind: Kind) -> Iterator[Problem]:
    usual = {"M": 128, "N": 128, "K": 1024} if kind.small else {"M": 4096, "N": 4096, "K": 4096}
    shapes = kind.extents(**usual)
    if kind.dtype == torch.float64:
        shapes = [(1024, 1024, 1024)]
    elif not kind.small:
        shapes += [shape for shape in GEMMS if shape not in shapes]
    # Where there are boxes, the pointer form is used for rows that no box can read.
    pointer = kind.family == "gemm_pointer"
    gap = int(pointer and kind.target != "sm_80" and kind.dtype != torch.float64)

    for M, N, K in shapes:
        if kind.dtype.itemsize == 1:
            one = Geometry.of((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))
            yield kind.of_float8(f"{M}x{N}x{K}", "product", (M, K, 1, 1), (N, K, 1, 1), one)
            continue
        inputs = tensors(_rows_of(M, K, gap), _rows_of(N, K, gap, turned=True), form="pointer" if pointer else None)
        yield kind.problem(f"{M}x{N}x{K}", kernel(gemm.gemm), inputs)


def _rows_of(rows: int, columns: int, gap: int = 0, turned: bool = False) -> Callable[[Make], torch.Tensor]:
    """A matrix of rows that are `gap` elements apart, or its transpose."""

    def made(make: Make) -> torch.Tensor:
        matrix = make.tensor(rows, columns + gap)[:, :columns]
        return matrix.t() if turned else matrix

    return made


def _parts(kind: Kind) -> Iterator[Problem]:
    if kind.small or kind.precision == "tf32x3":
        for n in (128,) if kind.small else (1024, 4096):
            inputs = tensors((n, n), (n, n), form="parts", precision="tf32x3")
            yield kind.problem(f"{n}x{n}x{n}", kernel(gemm.gemm), inputs)


def _thin(kind: Kind) -> Iterator[Problem]:
    """Operands of a layer with few outputs and of its gradients: M, N or K is small."""
    usual = {"M": 64, "N": 4, "K": 32} if kind.small else {"M": 1024, "N": 128, "K": 1024}
    for M, N, K in kind.extents(**usual) + ([] if kind.small else [(1024, 16, 128), (16, 1024, 128)]):
        least = min(M, N, K)
        if least <= thin.THIN:
            a = _rows_of(K, M, turned=True) if least == M else (M, K)
            b = _rows_of(N, K, turned=True) if least == N else (K, N)
            yield kind.problem(f"{M}x{N}x{K}", kernel(gemm.gemm), tensors(a, b, form="thin"))


def _vectors(kind: Kind) -> Iterator[Problem]:
    """A matrix times a column: as it is stored, and turned."""
    usual = {"M": 64, "K": 32, "STEP": 1} if kind.small else {"M": 4096, "K": 4096, "STEP": 1}
    for M, K, step in kind.extents(**usual):
        for turned in {False, step > 1}:
            inputs = tensors(_rows_of(M, K, turned=turned), (K, 1), form="vector")
            yield kind.problem(f"{M}x1x{K}{', turned' * turned}", kernel(gemm.gemm), inputs)


def _copied(kind: Kind) -> Iterator[Problem]:
    """Operands in rows that no box can be read of."""
    for M, K in kind.extents(**({"M": 64, "K": 40} if kind.small else {"M": 4096, "K": 4096})):
        inputs = tensors(_rows_of(M, K, gap=1), _rows_of(64, K, turned=True), form="copied")
        yield kind.problem(f"{M}x64x{K}", kernel(gemm.gemm), inputs)


def _gemm_sum(kind: Kind) -> Iterator[Problem]:
    for shares, total in kind.extents(S=8, total=kind.rest(8)):
        inputs = tensors(of(launch.acc_torch(kind.dtype), shares, total), extra=(kind.dtype,))
        yield kind.problem(f"{shares} shares of {total}", kernel(gemm.sum_shares), inputs)


# Operations on rows [M, N], by their records: the inputs.
ROWS: dict[str, Callable[[int, int], Inputs]] = {
    "add": lambda M, N: tensors((M, N), (N,)),
    "bias_act": lambda M, N: tensors((M, N), (N,), extra=("gelu",)),
    "cross_entropy": lambda M, N: tensors((M, N), integers(M, high=N - 1)),
    "softmax": lambda M, N: tensors((M, N)),
    "layer_norm": lambda M, N: tensors((M, N), lambda make: (N,), (N,), (N,)),
}


def _of_rows(kind: Kind, record: str, wrt: tuple[int, ...], M: int, N: int) -> Problem:
    return kind.recorded(f"{M}x{N}", record, wrt, ROWS[record](M, N))


def _rows(kind: Kind, record: str, *wrt: int) -> Iterator[Problem]:
    odd = () if kind.small else ((4096, 100), (12288, 100), (65536, 100))
    for M, N in (*kind.extents(M=0, N=1000 if kind.small else 4096), *odd):
        yield _of_rows(kind, record, wrt, min(M, kind.rest(N)) or kind.rest(N), N)


def _long_rows(kind: Kind, record: str, short: str, *wrt: int) -> Iterator[Problem]:
    """Rows that the family `short` cannot hold in one block."""
    longest = max(rule["tile"]["BLOCK_N"] for rule in launch.table(short)[kind.target])
    for N in (2 * longest, 4 * longest, 2 * longest + 8):
        yield _of_rows(kind, record, wrt, kind.rest(N), N)


def _elementwise_tile(kind: Kind) -> Iterator[Problem]:
    for M, N in kind.extents(M=0, N=0):
        N = N or (kind.rest(M) if M else min(4096, kind.rest(8)))
        yield _of_rows(kind, "add", (), M or kind.rest(N), N)


def _pairs(kind: Kind, record: str) -> Iterator[Problem]:
    """An operation on two vectors."""
    for (n,) in kind.extents(N=kind.rest()):
        yield kind.recorded(str(n), record, (), tensors((n,), (n,)))


def _vector(kind: Kind, launcher: Callable[..., Any], *extra: Any) -> Iterator[Problem]:
    """A launcher on one vector and the arguments `extra`."""
    for (n,) in kind.extents(N=kind.rest()):
        yield kind.problem(str(n), kernel(launcher), tensors((n,), extra=extra))


def _float8(x: torch.Tensor) -> torch.Tensor:
    """To float8 and back."""
    return float8.dequantize(*float8.quantize(x), x.dtype)


def _joined(case: Case, make: Make) -> Call:
    """A row for each band stands for x."""
    (x,) = case.args
    fused_statistics = torch.stack((x, x * x), 1).to(launch.acc_torch(x.dtype))
    return lambda: norm.batch_statistics(x, 1e-5, None, None, fused_statistics)


def _uniform(t: torch.Tensor) -> torch.Tensor:
    return random_kernels.uniform_(t, 0.0, 1.0, seed=1)


def _reduce(kind: Kind, axis: int) -> Iterator[Problem]:
    """Sums over the rows or columns of [., .]: K results of R numbers each."""
    for K, R in kind.extents(K=0, R=0):
        R = R or (kind.rest(K) if K else 0)
        K = K or (kind.rest(R) if R else min(1024, kind.rest(8)))
        R = R or kind.rest(K)
        inputs = tensors((K, R) if axis == 1 else (R, K), extra=(axis,))
        yield kind.recorded(f"{K} sums of {R}", "sum", (), inputs)


def _batch_norm(kind: Kind, *wrt: int) -> Iterator[Problem]:
    # Rules of the join go by the number of bands, of which few channels have many.
    more = ((8,), (256,), (1024,), (2048,)) if kind.family == "norm_join" and not kind.small else ()
    for (C,) in (*kind.extents(C=64), *more):
        N = max(alone.MOST // 64 + 1, kind.rest(64 * C))
        vectors = (C,), between(0.5, 2.0, C), (C,), (C,)
        inputs = tensors(_images(N, C, 8), *vectors, extra=(True, 0.1, 1e-5, "relu"))
        yield kind.recorded(f"{N}x{C}x8x8", "batch_norm", wrt, inputs)


def _few_values(kind: Kind) -> Iterator[Problem]:
    """Batch norm of so few values per channel that one launch does it."""
    for M, C in kind.extents(M=alone.MOST, C=256):
        vectors = (C,), between(0.5, 2.0, C), (C,), (C,)
        inputs = tensors((M, C), *vectors, extra=(True, 0.1, 1e-5, "relu"))
        yield kind.recorded(f"{M}x{C}", "batch_norm", (), inputs)


def _handed(kind: Kind) -> Iterator[Problem]:
    """Statistics of tiles, of which few channels have many."""
    for bands, C in ((70, 16),) if kind.small else ((3136, 256), (196, 1024)):
        yield kind.problem(f"{bands} bands {C} channels", _joined, tensors((bands, C)))


def _fold(kind: Kind) -> Iterator[Problem]:
    vectors = (512,), (512,), between(0.5, 2.0, 512), (512,), (512,)
    inputs = tensors((512, 64, 3, 3), *vectors, extra=(1e-5,))
    yield kind.recorded("512 channels", "fold_batch_norm", (), inputs)


def _pool(kind: Kind, *wrt: int) -> Iterator[Problem]:
    for (C,) in kind.extents(C=64):
        N = kind.rest(256 * C)
        for record in ("max_pool2d", "avg_pool2d"):
            what = f"{record.split('_')[0]} {N}x{C}x16x16"
            yield kind.recorded(what, record, wrt, tensors(_images(N, C, 16), kernel_size=2))


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
    rows, each, columns = (64, 20, 1000) if kind.small else (1024, 65, 32754)

    def inputs(make: Make) -> Case:
        # Every row takes its columns at even steps from a place of its own: sorted, and none twice.
        first = make.integers(rows, 1, low=0, high=columns // each - 1)
        col = first + torch.arange(each, device=first.device) * (columns // each)
        crow = torch.arange(rows + 1, dtype=torch.int32, device=first.device) * each
        x = CSR.from_torch(crow, col.reshape(-1).to(torch.int32), make.tensor(rows * each), (rows, columns))
        return Case((x.crow, x.col, x.val, x.order, make.tensor(columns, 128), make.tensor(128), "relu"))

    yield kind.problem(f"{rows} x {each} of {columns}", kernel(sparse.csr_matmul), inputs, by_values=True)


def _updates(kind: Kind) -> Iterator[Problem]:
    tables, rows = ((2000,), 200) if kind.small else ((32754, 4096), 4096)
    for (C,) in kind.extents(C=128):

        def inputs(make: Make, C: int = C) -> Case:
            values, dense = ([make.tensor(count, C) for count in some] for some in (tables, tables[1:]))
            return Case((values, dense, make.tensor(rows, C)))

        yield kind.problem(f"rows of {C}", _adam, inputs, in_place=True)


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


def _images(N: int, C: int, size: int, width: int | None = None) -> Callable[[Make], torch.Tensor]:
    """In channels-last memory."""
    return lambda make: make.tensor(N, size, size if width is None else width, C).permute(0, 3, 1, 2)


def _convolution(kind: Kind, form: str, gradient: str = "") -> Iterator[Problem]:
    fft = form == "fft"
    off = 0.0
    if fft:
        off = {torch.float16: 2.0**-9}.get(kind.dtype, 2.0**-8 if kind.precision == "tf32" else 2.0**-18)

    launcher = conv.grad_weight if gradient == "weight" else _forward
    layers = LAYERS_INTERPRETED if kind.small else (*LAYERS[:6], LAYERS[13]) if fft else LAYERS
    for N, C, M, size, side, stride in layers:
        N = max(1, N // 8) if kind.dtype == torch.float64 or fft else N
        pad = side // 2 if side == 3 else 0
        geometry = Geometry.of((size, size), (side, side), (stride,) * 2, ((pad, pad),) * 2, (1, 1))
        other = _images(N, M, geometry.h.output) if gradient == "weight" else _images(M, C, side)
        inputs = tensors(_images(N, C, size), other, extra=(geometry,), form=form)
        what = f"{C}->{M} {side}x{side} at {size}, {N} images" + (f", stride {stride}" if stride > 1 else "")
        if kind.dtype.itemsize == 1:
            if C % 32 == 0 and stride <= (form == "batch") + 1:
                yield kind.of_float8(what, form, _images(N, C, size), other, geometry)
            continue
        yield kind.problem(what, kernel(launcher), inputs, off=off)


def _odd_channels(kind: Kind) -> Iterator[Problem]:
    """Images and weights that are filled, and groups that are made one."""
    if kind.dtype == torch.float64:
        return
    N, size = (4, 8) if kind.small else (64, 28)
    for C, M, groups in ((201, 64, 1), (8, 8, 32)):
        geometry = Geometry.of((size, size), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), groups)
        inputs = tensors(_images(N, groups * C, size), _images(groups * M, C, 3), extra=(geometry,), form="fill")
        yield kind.problem(f"{groups} x {C}->{M} 3x3 at {size}, {N} images", kernel(_forward), inputs)


def _first_layers(kind: Kind) -> Iterator[Problem]:
    """Images of few channels, with strides."""
    if kind.dtype == torch.float64:
        return
    N, size = (2, 16) if kind.small else (64, 224)
    for side, stride in ((7, 2), (3, 2)):
        geometry = Geometry.of((size, size), (side,) * 2, (stride,) * 2, ((side // 2,) * 2,) * 2, (1, 1))
        inputs = tensors(_images(N, 3, size), _images(64, 3, side), extra=(geometry,), form="unshuffle")
        yield kind.problem(f"3->64 {side}x{side} at {size}, {N} images, stride {stride}", kernel(_forward), inputs)


def _taps(kind: Kind) -> Iterator[Problem]:
    """Few outputs of many channels."""
    for N, C, M, size in ((2, 40, 3, 8),) if kind.small else ((16, 512, 4, 16), (16, 256, 8, 64)):
        geometry = Geometry.of((size, size), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
        inputs = tensors(_images(N, C, size), _images(M, C, 3), extra=(geometry,), form="taps")
        yield kind.problem(f"{C}->{M} 3x3 at {size}, {N} images", kernel(_forward), inputs)


def _depthwise(kind: Kind, gradient: str = "") -> Iterator[Problem]:
    launcher = conv.grad_weight if gradient == "weight" else _forward
    for N, C, size, side, stride in DEPTHWISE_INTERPRETED if kind.small else DEPTHWISE:
        N = max(1, N // 8) if kind.dtype == torch.float64 else N
        geometry = Geometry.of((size, size), (side, side), (stride,) * 2, ((side // 2,) * 2,) * 2, (1, 1), C)
        other = _images(N, C, geometry.h.output) if gradient == "weight" else _images(C, 1, side)
        inputs = tensors(_images(N, C, size), other, extra=(geometry,), form="depthwise")
        what = f"depthwise {side}x{side}, {C} channels at {size}, {N} images" + f", stride {stride}" * (stride > 1)
        yield kind.problem(what, kernel(launcher), inputs)
    if gradient == "weight" and not kind.small:
        N, C, size, side = SEQUENCE
        geometry = Geometry.of((size, 1), (side, 1), (1, 1), ((side - 1, side - 1), (0, 0)), (1, 1), C)
        images = _images(N, C, size, 1), _images(N, C, geometry.h.output, 1)
        inputs = tensors(*images, extra=(geometry,), form="depthwise")
        yield kind.problem(f"depthwise {side}x1, {C} channels of {size}", kernel(launcher), inputs)


def _pair_pool(kind: Kind) -> Iterator[Problem]:
    if kind.dtype == torch.float64:
        return
    N, C, M, size, side = (8, 16, 16, 8, 3) if kind.small else (4096, 32, 64, 12, 5)
    geometry = Geometry.of((size, size), (side, side), (1, 1), ((0, 0), (0, 0)), (1, 1))
    inputs = tensors(_images(N, C, size), _images(M, C, side), extra=(geometry,), form="pair", pool="max")
    yield kind.problem(f"{C}->{M} {side}x{side} at {size}, pooled, {N} images", kernel(_forward), inputs)


def _forward(x: torch.Tensor, w: torch.Tensor, geometry: Geometry, form: str, pool: str | None = None) -> torch.Tensor:
    return conv.forward(x, w, geometry, form=form, pool=pool)[0]


def _transposed(kind: Kind, form: str) -> Iterator[Problem]:
    for N, C, M, size in BACK_INTERPRETED if kind.small else BACK:
        N = max(1, N // 8) if kind.dtype == torch.float64 else N
        what = f"transposed {C}->{M} 5x5 stride 2 at {size}, {N} images"
        axis = Axis(2 * size, 5, size, 2, 2, 1)
        # Weights as torch lays them, which a walk has to turn.
        inputs = tensors(_images(N, C, size), (C, M, 5, 5), extra=(Geometry(axis, axis),), form=form)
        yield kind.problem(what, kernel(conv.grad_input), inputs)


# Who makes the problems of families, and its arguments after the kind.
_MAKERS: dict[str, tuple[Any, ...]] = {
    family: maker
    for families, maker in {
        "gemm gemm_pointer": (_gemm,),
        "gemm_parts gemm_cut": (_parts,),
        "gemm_thin": (_thin,),
        "gemm_vector": (_vectors,),
        "gemm_rows": (_copied,),
        "gemm_sum": (_gemm_sum,),
        "bias_act": (_rows, "bias_act"),
        "bias_act_grad": (_rows, "bias_act", 0, 1),
        "softmax": (_rows, "softmax"),
        "softmax_grad": (_rows, "softmax", 0),
        "softmax_loop": (_long_rows, "softmax", "softmax"),
        "softmax_grad_loop": (_long_rows, "softmax", "softmax_grad", 0),
        "cross_entropy": (_rows, "cross_entropy"),
        "cross_entropy_loop": (_long_rows, "cross_entropy", "cross_entropy"),
        "row_norm": (_rows, "layer_norm"),
        "row_norm_grad": (_rows, "layer_norm", 0, 2, 3),
        "loss": (_pairs, "mse_loss"),
        "elementwise": (_pairs, "add"),
        "elementwise_tile": (_elementwise_tile,),
        "random": (_vector, _uniform),
        "float8": (_vector, _float8),
        "dropout": (_vector, random_kernels.dropout, 0.5, 1),
        "reduce_rows": (_reduce, 1),
        "reduce_columns": (_reduce, 0),
        "norm_stats norm_join norm": (_batch_norm,),
        "norm_sums norm_grad": (_batch_norm, 0, 3, 4),
        "norm_alone": (_few_values,),
        "norm_handed": (_handed,),
        "norm_fold": (_fold,),
        "pool": (_pool,),
        "pool_grad": (_pool, 0),
        "images": (_pictures,),
        "sparse": (_documents,),
        "update update_measure update_prepare": (_updates,),
        "conv conv_flat": (_convolution, "pixel"),
        "conv_grad_weight": (_convolution, "pixel", "weight"),
        "conv_unfolded_grad_weight": (_convolution, "unfolded", "weight"),
        "conv_fill": (_odd_channels,),
        "conv_taps": (_taps,),
        "conv_unshuffle": (_first_layers,),
        "conv_batch conv_batch_narrow": (_convolution, "batch"),
        "conv_batch_grad_weight": (_convolution, "batch", "weight"),
        "conv_back": (_transposed, "batch"),
        "conv_box": (_convolution, "box"),
        "conv_box_grad_weight": (_convolution, "box", "weight"),
        "conv_band conv_banded conv_held conv_two_rows": (_convolution, "banded"),
        "conv_pair_pool": (_pair_pool,),
        "conv_banded_grad_weight": (_convolution, "banded", "weight"),
        "conv_depthwise": (_depthwise,),
        "conv_depthwise_grad_weight": (_depthwise, "weight"),
        "conv_turn": (_transposed, "pixel"),
        "conv_few": (_transposed, "few"),
        "conv_fft conv_fft_product": (_convolution, "fft"),
    }.items()
    for family in families.split()
}
