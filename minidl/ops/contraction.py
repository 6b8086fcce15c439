"""`einsum`: sums of products of tensors whose dimensions have names."""

from __future__ import annotations

import math
from typing import Any

from minidl.ops import elementwise, linalg, reduce
from minidl.ops.shape import diagonal, permute, reshape, squeeze
from minidl.tensors import Tensor

__all__ = ["einsum"]


def einsum(equation: str, *operands: Any) -> Tensor:
    """Return products of the operands added up over every name that is not in the result: einsum("bij,bjk->bik", a, b).

    Operands are joined from left to right, two at a time, by `matmul`. A name twice in one operand is its diagonal,
    `...` stands for all other dimensions, and a size of 1 fits every size. Without `->` the result has those of `...`
    and the names that occur once, in the order of the alphabet. Raises ValueError for names that do not fit, TypeError
    for an equation that is not text (torch's other form, of operands and lists of numbers).
    """
    if not isinstance(equation, str):
        raise TypeError(f"einsum: equation is {type(equation).__name__}, expected text such as 'bij,bjk->bik'")
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else list(operands)
    left, arrow, result = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if len(names) != len(tensors) or not all(isinstance(t, Tensor) for t in tensors):
        raise ValueError(f"einsum: {equation!r} names {len(names)} operands, got {len(tensors)} Tensors")
    if not arrow:
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        result = "." * 3 * ("..." in left) + "".join(once)
    names, result = _expand_ellipsis(equation, names, result, tensors)
    named = [_take_diagonals(t, each) for t, each in zip(tensors, names, strict=True)]
    sizes = _sizes(equation, named, result)
    tensors, names = map(list, zip(*(_drop_ones(t, each, sizes) for t, each in named), strict=True))
    value, value_names = tensors[0], names[0]
    for i in range(1, len(tensors)):
        needed = set(result).union(*names[i + 1 :])
        value, value_names = _multiply(value, value_names, tensors[i], names[i], needed)
    value, value_names = _sum_unneeded(value, value_names, set(result))
    return permute(value, *(value_names.index(c) for c in result)) if result else value


def _expand_ellipsis(equation: str, names: list[str], result: str, tensors: list[Any]) -> tuple[list[str], str]:
    """Return the names with a private-use letter, counted from the end, for each dimension of `...`."""
    spelled = []
    most = 0
    for each, tensor in zip(names, tensors, strict=True):
        more = tensor.ndim - len(each.replace("...", ""))
        if more < 0 or (more and "..." not in each) or not (each.replace("...", "") or "a").isalpha():
            raise ValueError(f"einsum: {each!r} of {equation!r} does not name {tensor.ndim} dimensions by letters")
        most = max(most, more)
        spelled.append(each.replace("...", "".join(chr(0xE000 + more - 1 - i) for i in range(more))))
    return spelled, result.replace("...", "".join(chr(0xE000 + most - 1 - i) for i in range(most)))


def _take_diagonals(x: Tensor, names: str) -> tuple[Tensor, str]:
    """Return x with the diagonal of each two dimensions of one name, and the names left. Raises ValueError for two
    sizes."""
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first, second = names.index(name), names.rindex(name)
            if x.shape[first] != x.shape[second]:
                raise ValueError(f"einsum: {name!r} is {x.shape[first]} and {x.shape[second]}")
            x = diagonal(x, 0, first, second)
            names = "".join(c for i, c in enumerate(names) if i not in (first, second)) + name
    return x, names


def _sizes(equation: str, operands: list[tuple[Tensor, str]], result: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor, each in operands:
        for name, size in zip(each, tensor.shape, strict=True):
            current = sizes.get(name, 1)
            if current != size and 1 not in (current, size):
                shown = name if name.isalpha() else "..."
                raise ValueError(f"einsum: {shown!r} of {equation!r} is {current} and {size}")
            sizes[name] = size if current == 1 else current
    if set(result) - set(sizes) or len(set(result)) < len(result):
        raise ValueError(f"einsum: the result {result!r} of {equation!r} has a name that no operand has, or one twice")
    return sizes


def _drop_ones(x: Tensor, names: str, sizes: dict[str, int]) -> tuple[Tensor, str]:
    """Return x without dimensions of size 1 whose name has another size elsewhere."""
    drop = [i for i, name in enumerate(names) if x.shape[i] == 1 != sizes[name]]
    return (squeeze(x, drop) if drop else x), "".join(c for i, c in enumerate(names) if i not in drop)


def _sum_unneeded(x: Tensor, names: str, needed: set[str]) -> tuple[Tensor, str]:
    """Return x summed over the dimensions that no later product or result needs."""
    dims = tuple(i for i, name in enumerate(names) if name not in needed)
    return (reduce.sum(x, dims) if dims else x), "".join(name for name in names if name in needed)


def _multiply(a: Tensor, left: str, b: Tensor, right: str, needed: set[str]) -> tuple[Tensor, str]:
    """Return the product of a and b, and its names: shared names, a's, b's."""
    a, left = _sum_unneeded(a, left, needed | set(right))
    b, right = _sum_unneeded(b, right, needed | set(left))
    batch = [c for c in left if c in right and c in needed]
    inner = [c for c in left if c in right and c not in needed]
    rows, columns = [c for c in left if c not in right], [c for c in right if c not in left]
    size = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    result = [*batch, *rows, *columns]
    if not inner:
        a = permute(a, *(left.index(c) for c in (*batch, *rows)))
        b = permute(b, *(right.index(c) for c in (*batch, *columns)))
        a = reshape(a, *(size[c] for c in (*batch, *rows)), *(1 for _ in columns))
        b = reshape(b, *(size[c] for c in batch), *(1 for _ in rows), *(size[c] for c in columns))
        return elementwise.mul(a, b), "".join(result)
    B, M, K, N = (math.prod(size[c] for c in names) for names in (batch, rows, inner, columns))
    a = reshape(permute(a, *(left.index(c) for c in (*batch, *rows, *inner))), B, M, K)
    b = reshape(permute(b, *(right.index(c) for c in (*batch, *inner, *columns))), B, K, N)
    return reshape(linalg.matmul(a, b), *(size[c] for c in result)), "".join(result)
