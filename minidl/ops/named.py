"""Products of tensors whose dimensions have names, `einsum`, and those of matrices in torch's other names."""

from __future__ import annotations

import math
from typing import Any

from minidl.ops import elementwise, reduce, view
from minidl.ops.linalg import matmul
from minidl.tensors import Tensor

__all__ = ["bmm", "einsum", "mm"]


def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """`matmul` of two matrices. Raises ValueError for others."""
    return matmul(*_of_rank("mm", 2, input, mat2))


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """`matmul` of as many matrices each: [B, M, K] and [B, K, N] -> [B, M, N]. Raises ValueError for others."""
    a, b = _of_rank("bmm", 3, input, mat2)
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: got {a.shape[0]} and {b.shape[0]} matrices, expected as many of each")
    return matmul(a, b)


def _of_rank(name: str, rank: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.ndim != rank or b.ndim != rank:
        raise ValueError(f"{name}: got shapes {list(a.shape)} and {list(b.shape)}, expected {rank} dimensions each")
    return a, b


def einsum(equation: str, *operands: Any) -> Tensor:
    """Products of the operands added up over every name that is not in the result: einsum("bij,bjk->bik", a, b).

    Operands are joined from left to right, two at a time, by `matmul`. Without `->` the result has the names that occur
    once, in the order of the alphabet. Raises ValueError for names that do not fit, and for a name twice in one operand
    (a diagonal) or `...`, which are not built.
    """
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else list(operands)
    text = equation.replace(" ", "")
    left, arrow, result = text.partition("->")
    names = left.split(",")
    if "." in text:
        raise ValueError(f"einsum: {equation!r} has ..., which is not built; name the dimensions")
    if not arrow:
        result = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    _check(equation, names, result, tensors)
    value, held = tensors[0], names[0]
    for i in range(1, len(tensors)):
        wanted = set(result).union(*names[i + 1 :])
        value, held = _joined(value, held, tensors[i], names[i], wanted)
    value, held = _summed(value, held, set(result))
    return view.permute(value, *(held.index(c) for c in result)) if result else value


def _check(equation: str, names: list[str], result: str, tensors: list[Any]) -> None:
    if len(names) != len(tensors) or not all(isinstance(t, Tensor) for t in tensors):
        raise ValueError(f"einsum: {equation!r} names {len(names)} operands, got {len(tensors)} Tensors")
    sizes: dict[str, int] = {}
    for each, tensor in zip(names, tensors, strict=True):
        if len(each) != tensor.ndim or len(set(each)) < len(each) or not (each.isalpha() or not each):
            raise ValueError(
                f"einsum: {each!r} of {equation!r} does not name each of {tensor.ndim} dimensions by its own letter"
            )
        for name, size in zip(each, tensor.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise ValueError(f"einsum: {name!r} of {equation!r} is {sizes[name]} and {size}")
    if set(result) - set(sizes) or len(set(result)) < len(result):
        raise ValueError(f"einsum: the result {result!r} of {equation!r} names what no operand has, or one twice")


def _summed(x: Tensor, names: str, wanted: set[str]) -> tuple[Tensor, str]:
    """x without the dimensions that nothing wants, which are added up."""
    dims = tuple(i for i, name in enumerate(names) if name not in wanted)
    return (reduce.sum(x, dims) if dims else x), "".join(name for name in names if name in wanted)


def _joined(a: Tensor, left: str, b: Tensor, right: str, wanted: set[str]) -> tuple[Tensor, str]:
    """One product, and its names: of both, of a, of b."""
    a, left = _summed(a, left, wanted | set(right))
    b, right = _summed(b, right, wanted | set(left))
    batch = [c for c in left if c in right and c in wanted]
    inner = [c for c in left if c in right and c not in wanted]
    rows, columns = [c for c in left if c not in right], [c for c in right if c not in left]
    size = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    result = [*batch, *rows, *columns]
    if not inner:
        a = view.permute(a, *(left.index(c) for c in (*batch, *rows)))
        b = view.permute(b, *(right.index(c) for c in (*batch, *columns)))
        a = view.reshape(a, *(size[c] for c in (*batch, *rows)), *(1 for _ in columns))
        b = view.reshape(b, *(size[c] for c in batch), *(1 for _ in rows), *(size[c] for c in columns))
        return elementwise.mul(a, b), "".join(result)
    B, M, K, N = (math.prod(size[c] for c in names) for names in (batch, rows, inner, columns))
    a = view.reshape(view.permute(a, *(left.index(c) for c in (*batch, *rows, *inner))), B, M, K)
    b = view.reshape(view.permute(b, *(right.index(c) for c in (*batch, *inner, *columns))), B, K, N)
    return view.reshape(matmul(a, b), *(size[c] for c in result)), "".join(result)
