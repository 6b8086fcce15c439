"""Shapes drawn from a seed, as networks may have them.

Sizes are drawn log-uniformly, so that small and large ones, odd ones and primes come up alike; about 40 % are layers of
published networks (published.py) with a drawn batch. Row i of a kind and seed does not depend on the number of rows.
Invalid shapes, and shapes whose tensors and gradients need more than LIMIT bytes, are drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from minidl.tools.tuning.published import CONV, CONV1D, CONV3D, CONV_TRANSPOSE, GEMM, IMAGES, SOFTMAX
from minidl.tools.tuning.shapes import Conv, Gemm, Images, Pair, Reduced, Rows, Shape, Sizes

LIMIT = 8e9
PUBLISHED = 0.4


def draw(kind: str, seed: int, index: int, itemsize: int = 2) -> Any:
    """Return shape `index` of a kind; with values of `itemsize` bytes, all shapes fit into LIMIT."""
    rng = Random(f"{seed}:{kind}:{index}")
    while True:
        shape = KINDS[kind](rng)
        if shape.valid and memory(shape, itemsize) <= LIMIT:
            return shape


def memory(shape: Shape, itemsize: int) -> int:
    """Return the bytes of the tensors of a shape and of their gradients."""
    return 2 * itemsize * sum(shape.elements)


def _conv(rng: Random) -> Conv:
    if rng.random() < PUBLISHED:
        source, channels, outputs, size, kernel, stride, padding, dilation, groups = rng.choice(CONV)
        return Conv(
            _batch(rng), channels, outputs, _pair(size), _pair(kernel), _pair(stride), _pair(padding), _pair(dilation),
            groups, source,
        )  # fmt: skip
    groups, channels, outputs = _channels(rng)
    if groups == channels and rng.random() < 0.05:
        return Conv(_batch(rng), channels, outputs, _size(rng, 512), (31, 31), padding=(15, 15), groups=groups)
    kernel = _kernel(rng)
    size = _size(rng, 512)
    stride = _pair(rng.choices((1, 2, 3, 4), (12, 5, 1, 1))[0])
    dilation = _pair(rng.choices((1, 2, 3, 4), (17, 2, 1, 1))[0]) if max(kernel) > 1 else (1, 1)
    padding = _padding(rng, kernel, dilation)
    return Conv(_batch(rng), channels, outputs, size, kernel, stride, padding, dilation, groups)


def _conv_transpose(rng: Random) -> Conv:
    if rng.random() < PUBLISHED:
        source, channels, outputs, size, kernel, stride, padding, ends, groups = rng.choice(CONV_TRANSPOSE)
        return Conv(
            _batch(rng), channels, outputs, _pair(size), _pair(kernel), _pair(stride), _pair(padding), (1, 1), groups,
            source, True, _pair(ends),
        )  # fmt: skip
    groups, channels, outputs = _channels(rng)
    size = (1, 1) if rng.random() < 0.1 else _size(rng, 256)
    kernel, stride = rng.choice(((2, 2), (4, 2), (3, 2), (5, 2), (4, 4), (3, 1), (8, 4), (0, 0), (0, 0), (0, 0)))
    if kernel:
        kernels, strides = _pair(kernel), _pair(stride)
    else:
        kernels, strides = _kernel(rng), _pair(rng.choices((1, 2, 3, 4), (4, 4, 1, 1))[0])
    dilation = (1, 1) if rng.random() < 0.95 else (2, 2)
    padding = _padding(rng, kernels, dilation)
    ends = _pair(rng.randint(0, strides[0] - 1) if rng.random() < 0.4 else 0)
    return Conv(_batch(rng), channels, outputs, size, kernels, strides, padding, dilation, groups, "", True, ends)


def _conv1d(rng: Random) -> Conv:
    """Draw a sequence, an image of one row."""
    if rng.random() < PUBLISHED:
        source, channels, outputs, length, kernel, stride, padding, dilation, groups, transposed = rng.choice(CONV1D)
        return Conv(
            _batch(rng), channels, outputs, (1, length), (1, kernel), (1, stride), (0, padding), (1, dilation),
            groups, source, transposed, sequence=True,
        )  # fmt: skip
    groups, channels, outputs = _channels(rng)
    kernel = rng.choices((1, 2, 3, 4, 5, 7, 9, 15, 31, 64), (3, 2, 8, 3, 4, 3, 2, 1, 2, 1))[0]
    transposed = rng.random() < 0.15
    stride = rng.choices((1, 2, 3, 4), (12, 5, 1, 1))[0]
    dilation = 1 if kernel == 1 or transposed else rng.choices((1, 2, 4, 16, 64, 512), (9, 2, 2, 1, 1, 1))[0]
    padding = rng.choices((0, dilation * (kernel - 1) // 2), (3, 6))[0]
    return Conv(
        _batch(rng), channels, outputs, (1, _log(rng, 1, 65536)), (1, kernel), (1, stride), (0, padding),
        (1, dilation), groups, "", transposed, sequence=True,
    )  # fmt: skip


def _conv3d(rng: Random) -> Conv:
    if rng.random() < PUBLISHED:
        source, channels, outputs, size, kernel, stride, padding, dilation, groups = rng.choice(CONV3D)
        return Conv(
            _log(rng, 1, 32), channels, outputs, size, _three(kernel), _three(stride), _three(padding),
            _three(dilation), groups, source, ends=(0, 0, 0),
        )  # fmt: skip
    groups, channels, outputs = _channels(rng)
    size = rng.choices((1, 2, 3, 4, 5, 7), (4, 2, 12, 1, 2, 1))[0]
    kernel = rng.choices(((size,) * 3, (1, size, size), (size, 1, 1)), (8, 1, 1))[0]
    stride = rng.choices(((1, 1, 1), (2, 2, 2), (1, 2, 2)), (12, 4, 2))[0]
    dilation = (1, 1, 1) if size == 1 or rng.random() < 0.85 else (2, 2, 2)
    same = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    side = _log(rng, 1, 128)
    sizes = _log(rng, 1, 64), side, side if rng.random() < 0.8 else _log(rng, 1, 128)
    padding = rng.choices(((0, 0, 0), same), (3, 6))[0]
    return Conv(
        _log(rng, 1, 32), channels, outputs, sizes, kernel, stride, padding, dilation, groups, ends=(0, 0, 0)
    )  # fmt: skip


def _gemm(rng: Random) -> Gemm:
    kind = rng.choices(("AB", "AB^T", "A^TB"), (2, 2, 1))[0]
    if rng.random() < PUBLISHED:
        source, columns, inner = rng.choice(GEMM)
        rows = _log(rng, 1, 16384)
        return Gemm(rows, columns, inner, kind, source)
    M, N, K = (_even(rng, _log(rng, 1, 16384)) for _ in range(3))
    return Gemm(M, N, K, kind)


def _softmax(rng: Random) -> Rows:
    if rng.random() < PUBLISHED:
        source, rows, columns = rng.choice(SOFTMAX)
        return Rows(rows * _log(rng, 1, 512), columns, source)
    return Rows(_log(rng, 1, 262144), _even(rng, _log(rng, 1, 131072)))


def _norm(rng: Random) -> Images:
    return _images(rng, "batch norm")


def _pool(rng: Random) -> Images:
    kernel, stride, padding = rng.choice(((2, 2, 0), (2, 2, 0), (3, 2, 1), (3, 2, 0)))
    return _images(rng, rng.choice(("max pool", "average pool")))._replace(
        kernel=kernel, stride=stride, padding=padding
    )


def _reduce(rng: Random) -> Reduced:
    what = rng.choice(("sum", "mean", "max"))
    form = rng.choice(("rows", "columns", "middle", "all"))
    along = _even(rng, _log(rng, 1, 2**26 if form == "all" else 131072))
    outer = 1 if form in ("columns", "all") else _log(rng, 1, 65536)
    inner = 1 if form in ("rows", "all") else _even(rng, _log(rng, 1, 16384))
    return Reduced(outer, along, inner, what)


KINDS: dict[str, Callable[[Random], Shape]] = {
    "conv": _conv, "conv_transpose": _conv_transpose, "conv1d": _conv1d, "conv3d": _conv3d, "gemm": _gemm,
    "softmax": _softmax, "norm": _norm, "pool": _pool, "reduce": _reduce,
}  # fmt: skip


def _images(rng: Random, what: str) -> Images:
    if rng.random() < PUBLISHED:
        source, channels, size = rng.choice(IMAGES)
        return Images(_batch(rng), channels, _pair(size), what, source=source)
    return Images(_batch(rng), _even(rng, _log(rng, 1, 2048)), _size(rng, 512), what)


def _channels(rng: Random) -> tuple[int, int, int]:
    """Return groups, channels and outputs."""
    kind = rng.choices(("one", "some", "all"), (14, 3, 3))[0]
    if kind == "one":
        return 1, _even(rng, _log(rng, 1, 2048)), _even(rng, _log(rng, 1, 2048))
    if kind == "some":
        groups = rng.choice((2, 4, 8, 32))
        return groups, groups * _log(rng, 1, 2048 // groups), groups * _log(rng, 1, 2048 // groups)
    channels = _even(rng, _log(rng, 2, 2048))
    return channels, channels, channels * rng.choices((1, 2), (4, 1))[0]


def _kernel(rng: Random) -> Pair:
    size = rng.choices(range(1, 12), (24, 6, 30, 6, 12, 2, 8, 1, 2, 1, 2))[0]
    return rng.choices(((size, size), (1, size), (size, 1)), (8, 1, 1))[0]


def _padding(rng: Random, kernel: Pair, dilation: Pair) -> Pair:
    same = dilation[0] * (kernel[0] - 1) // 2, dilation[1] * (kernel[1] - 1) // 2
    other = rng.randint(0, max(same)), rng.randint(0, max(same))
    return rng.choices(((0, 0), same, other), (3, 6, 1))[0]


def _batch(rng: Random) -> int:
    return _log(rng, 1, 512)


def _size(rng: Random, largest: int) -> Pair:
    rows = _log(rng, 1, largest)
    return rows, rows if rng.random() < 0.8 else _log(rng, 1, largest)


def _even(rng: Random, size: int) -> int:
    """Return the size, or half of the time a multiple of 8 near it."""
    return size // 8 * 8 if size >= 16 and rng.random() < 0.5 else size


def _log(rng: Random, low: int, high: int) -> int:
    """Return an integer from low to high, drawn log-uniformly."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _pair(size: int | Pair) -> Pair:
    return (size, size) if isinstance(size, int) else size


def _three(size: int | Sizes) -> Sizes:
    return (size,) * 3 if isinstance(size, int) else size
