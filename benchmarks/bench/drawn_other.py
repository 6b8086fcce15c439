"""Drawn products, softmax, norms, pools and reductions: minidl's and torch's calls, and checks of samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.bench.drawn_conv import rate
from benchmarks.bench.drawn_reference import part
from minidl import ops
from minidl.autograd import no_grad
from minidl.kernels import gemm, reduce, softmax
from minidl.tensors import Tensor
from minidl.testing.specs.bounds import acc_unit, gamma, holds
from minidl.testing.specs.linalg import product_error
from minidl.testing.specs.softmax import chain
from minidl.tools.bench import sides
from minidl.tools.bench.measure import Work, floor_ms, input_sets
from minidl.tools.tuning.drawn_conv import LARGEST
from minidl.tools.tuning.shapes import Gemm, Images, Reduced, Rows

FORWARD, BOTH = "forward", "forward+backward"
# The values of a sample in float64, and the products of a sample of a matrix product.
VALUES = 2**24
PRODUCTS = 2**36


class Inputs:
    """The tensors of a row, random or (without `values`) uninitialised, and the indices of its sample."""

    def __init__(self, dtype: torch.dtype, device: str, seed: str, values: bool = True) -> None:
        self.dtype, self.device, self.values, self.random = dtype, device, values, Random(seed)
        self.generator = torch.Generator(device).manual_seed(self.random.getrandbits(63))

    def tensor(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        if not self.values:
            return torch.empty(*shape, device=self.device, dtype=self.dtype)
        return torch.randn(*shape, device=self.device, dtype=self.dtype, generator=self.generator).mul_(scale)

    def images(self, N: int, C: int, size: tuple[int, int], scale: float = 1.0) -> torch.Tensor:
        """Return channels-last images."""
        return self.tensor(N, *size, C, scale=scale).permute(0, 3, 1, 2)

    def sample(self, of: int, values_each: float) -> list[int]:
        """Return some indices below `of`, each with `values_each` values."""
        count = max(1, min(of, int(VALUES / max(values_each, 1))))
        return sorted(self.random.sample(range(of), count))


def work(
    shape: Any, direction: str, name: str, dtype: torch.dtype, device: str, seed: str, values: bool = True
) -> Work:
    """Return the work of a row; `values` as in `Inputs`."""
    return _WORKS[type(shape)](shape, direction, name, Inputs(dtype, device, seed, values))


def _gemm(shape: Gemm, direction: str, name: str, make: Inputs) -> Work:
    M, N, K, kind, _ = shape
    size, dtype = float(make.dtype.itemsize) * sum(shape.elements), make.dtype
    pairs = []
    for _ in range(input_sets(size)):
        a = make.tensor(K, M).t() if kind == "A^TB" else make.tensor(M, K)
        pairs.append((a, make.tensor(N, K).t() if kind == "AB^T" else make.tensor(K, N)))
    rows = sorted(make.random.sample(range(M), max(1, min(M, PRODUCTS // (N * K)))))

    def judge(c: torch.Tensor) -> bool:
        a, b = (part(pairs[0][0], rows).double(), pairs[0][1].double())
        return holds(part(c, rows), a @ b, product_error(a, b, M, N, K, dtype))

    return Work(
        name, _name(dtype), [partial(gemm.gemm, a, b) for a, b in pairs],
        {"torch.matmul": [partial(torch.matmul, a, b) for a, b in pairs]},
        floor_ms(size, 2.0 * M * N * K, rate(dtype)), judge,
    )  # fmt: skip


def _softmax(shape: Rows, direction: str, name: str, make: Inputs) -> Work:
    M, N, _ = shape
    size = float(make.dtype.itemsize) * M * N
    sample = make.sample(M, N)
    if direction == BOTH:
        x, dy = make.tensor(M, N), make.tensor(M, N)
        return _both(
            name, make.dtype, [x], dy, lambda x: ops.softmax(x, -1), lambda x: torch.softmax(x, -1), 4 * size,
            lambda y, dx: sides.right("softmax", part(y, sample), part(x, sample), -1)
            and sides.right("softmax", part(dx, sample), part(x, sample), -1, wrt=(0,), dy=part(dy, sample)),
        )  # fmt: skip
    xs = [make.tensor(M, N) for _ in range(input_sets(2 * size))]

    def judge(y: torch.Tensor) -> bool:
        z = part(xs[0], sample).double()
        depth, blocks = chain("softmax", M, N, make.dtype)
        # The spec's terms, at the largest exponent: the sum, two exponentials, the blocks and the division.
        largest = float((z.amax(-1) - z.amin(-1)).max())
        units = depth + 2 * (3 * largest + 8) + 18 * blocks + 8
        exact = torch.softmax(z, -1)
        return holds(part(y, sample), exact, gamma(units, acc_unit(make.dtype)) * exact)

    return Work(
        name, _name(make.dtype), [partial(softmax.softmax, x) for x in xs],
        {"torch": [partial(torch.softmax, x, -1) for x in xs]}, floor_ms(2 * size), judge,
    )  # fmt: skip


def _norm(shape: Images, direction: str, name: str, make: Inputs) -> Work:
    N, C, size = shape.images, shape.channels, shape.size
    pixels = N * math.prod(size)
    x = make.images(N, C, size)
    weight, bias = make.tensor(C, scale=0.2) + 1, make.tensor(C)
    dy = make.images(N, C, size, min(1.0, LARGEST / math.sqrt(pixels)))
    sample = make.sample(C, pixels)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.batch_norm(x, None, None, weight, bias, training=True)

    def theirs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, weight, bias, training=True)

    def judge(y: torch.Tensor, *grads: torch.Tensor) -> bool:
        everything = range(N)
        few = part(x, everything, sample), None, None, part(weight, sample), part(bias, sample), True
        right = sides.right("batch_norm", part(y, everything, sample), *few)
        if not grads:
            return right
        dx, *affine = grads
        results = part(dx, everything, sample), *(part(grad, sample) for grad in affine)
        return right and sides.right("batch_norm", results, *few, wrt=(0, 3, 4), dy=part(dy, everything, sample))

    moved = float(make.dtype.itemsize) * x.numel()
    if direction == BOTH:
        return _both(name, make.dtype, [x, weight, bias], dy, ours, theirs, 5 * moved, judge)
    return _forward(name, make.dtype, [x, weight, bias], ours, theirs, 2 * moved, judge)


def _pool(shape: Images, direction: str, name: str, make: Inputs) -> Work:
    N, C = shape.images, shape.channels
    x, dy = make.images(N, C, shape.size), make.images(N, C, shape.out)
    op = {"max pool": "max_pool2d", "average pool": "avg_pool2d"}[shape.what]
    how = shape.kernel, shape.stride, shape.padding
    sample = make.sample(N, C * math.prod(shape.size))

    def ours(x: Tensor) -> Tensor:
        return getattr(ops, op)(x, *how)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return getattr(F, op)(x, *how)

    def judge(y: torch.Tensor, *grads: torch.Tensor) -> bool:
        # On a GPU torch's gradient of padded averages in channels-last memory is wrong (its issue 188344).
        few, result, dys = (part(t, sample).cpu() for t in (x, y, dy))
        right = sides.right(op, result, few, *how)
        return right and all(sides.right(op, part(dx, sample).cpu(), few, *how, wrt=(0,), dy=dys) for dx in grads)

    moved = float(make.dtype.itemsize) * (x.numel() + dy.numel())
    if direction == BOTH:
        return _both(name, make.dtype, [x], dy, ours, theirs, 2 * moved, judge)
    return _forward(name, make.dtype, [x], ours, theirs, moved, judge)


def _reduce(shape: Reduced, direction: str, name: str, make: Inputs) -> Work:
    outer, along, inner, what = shape
    moved = float(make.dtype.itemsize) * sum(shape.elements)
    xs = [make.tensor(outer, along, inner) for _ in range(input_sets(moved))]
    ours, theirs = _REDUCE[what]
    outers = make.sample(outer, along * inner)
    inners = make.sample(inner, along * len(outers))

    def judge(y: torch.Tensor) -> bool:
        result, x = part(y, outers, inners), part(xs[0], outers, range(along), inners).double()
        exact = theirs(x, 1)
        if what == "max":
            return torch.equal(result.double(), exact)
        u = acc_unit(make.dtype)
        error = gamma(reduce.depth(outer * inner, along, make.dtype), u) * x.abs().sum(1)
        # A compiled division is off by 2 units in the last place.
        return holds(result, exact, error if what == "sum" else error / along + 4 * u * exact.abs())

    return Work(
        name, _name(make.dtype), [partial(ours, x, 1) for x in xs],
        {"torch": [partial(theirs, x, 1) for x in xs]}, floor_ms(moved), judge,
    )  # fmt: skip


_REDUCE: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "sum": (reduce.sum, torch.sum), "mean": (reduce.mean, torch.mean), "max": (reduce.amax, torch.amax),
}  # fmt: skip


def _forward(
    name: str, dtype: torch.dtype, inputs: list[torch.Tensor], ours: Callable[..., Tensor],
    theirs: Callable[..., torch.Tensor], moved: float, judge: Callable[..., bool],
) -> Work:  # fmt: skip
    """Return the work of an operation without its gradient, torch's calls in both memory formats."""

    def mine() -> torch.Tensor:
        with no_grad():
            return ours(*map(Tensor, inputs)).data

    peers: dict[str, list[sides.Call]] = {
        order: [partial(theirs, *tensors)] for order, tensors in _orders(inputs).items()
    }
    return Work(name, _name(dtype), [mine], peers, floor_ms(moved), judge)


def _both(
    name: str, dtype: torch.dtype, inputs: list[torch.Tensor], dy: torch.Tensor, ours: Callable[..., Tensor],
    theirs: Callable[..., torch.Tensor], moved: float, judge: Callable[..., bool],
) -> Work:  # fmt: skip
    """Return the work of an operation with all its gradients, torch's calls in both memory formats."""
    leaves = [Tensor(t, requires_grad=True) for t in inputs]
    peers: dict[str, list[sides.Call]] = {}
    for (order, tensors), cotangents in zip(_orders(inputs).items(), _orders([dy]).values(), strict=True):
        torch_leaves = [t.detach().clone().requires_grad_() for t in tensors]
        peers[order] = [partial(sides.torch_gradients, theirs, torch_leaves, cotangents[0])]
    return Work(
        name, _name(dtype), [partial(sides.our_gradients, ours, leaves, dy)], peers, floor_ms(moved),
        lambda results: judge(*results),
    )  # fmt: skip


def _orders(tensors: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors by memory format: images in channels-last and in contiguous memory."""
    if tensors[0].dim() < 4:
        return {"torch": tensors}
    return {"torch, channels last": tensors, "torch, contiguous": [t.contiguous() for t in tensors]}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _images(shape: Images, direction: str, name: str, make: Inputs) -> Work:
    return (_norm if shape.what == "batch norm" else _pool)(shape, direction, name, make)


_WORKS: dict[type, Callable[..., Work]] = {Gemm: _gemm, Rows: _softmax, Reduced: _reduce, Images: _images}
