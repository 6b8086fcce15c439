"""The spec of attention.

A score has the error of its product, of the scale and of the sum with the mask; d is the largest of a row, with the
rounding of the difference to the row's maximum. So a weight is off by a factor of exp(2 d), and by the roundings of
powers, of sums and of one rescaling for each block; it is rounded to the dtype before the product with the values. In
the gradients, p (dp - delta) has the errors of its factors, delta that of the stored result.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from minidl import ops
from minidl.kernels.attention import HEAD_FAMILIES
from minidl.testing.specs import bounds, products
from minidl.testing.specs.base import Bad, Case, bools, integers, of, refuses, spec_factory, tensors
from minidl.testing.specs.make import Make

LEAST_BLOCK = 16  # keys of a block, at least


def _op(
    query: Any, key: Any, value: Any, bias: Any = None, is_causal: bool = False, scale: Any = None,
    window: Any = None, lengths: Any = None, seen: Any = None,
) -> Any:  # fmt: skip
    mask = bias if seen is None else seen
    return ops.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True, window=window, lengths=lengths
    )


class _Weights(NamedTuple):
    """q, k and v with as many heads as q; the factor of scores, the weights p, and the relative error of weights."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    factor: float
    p: torch.Tensor
    error: torch.Tensor
    blocks: int


def _seen(L: int, S: int, is_causal: bool, window: Any, lengths: Any) -> torch.Tensor:
    """Return which keys each query sees, [L, S] or [batch, 1, L, S]."""
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    i, j = torch.arange(L).view(-1, 1), torch.arange(S)
    seen = torch.ones(L, S, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen if lengths is None else seen & (j < lengths.cpu().reshape(*lengths.shape, 1, 1, 1))


def _weights(case: Case, dtype: torch.dtype = torch.float64) -> _Weights:
    q, k, v, bias, is_causal, scale, window, lengths, bools_seen = case.arguments(_op)
    heads = q.shape[-3] if q.dim() > 2 else 1
    if k.dim() > 2:
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) if x.shape[-3] else x for x in (k, v))
    L, S, E = q.shape[-2], k.shape[-2], q.shape[-1]
    factor = (1 / math.sqrt(E) if E else 0.0) if scale is None else scale
    scores = q @ k.mT * factor
    near = (q.abs() + 1) @ (k.abs() + 1).mT
    size = q.abs() @ k.abs().mT * abs(factor)
    u = bounds.acc_unit(dtype)
    off = products.sum_error(size, near * (1 + abs(factor)), E + 2, dtype)
    hidden = ~_seen(L, S, is_causal, window, lengths).to(q.device)
    if bools_seen is not None:
        hidden = hidden | ~bools_seen
    if bias is not None:
        scores, size = scores + bias, size + bias.abs()
    scores = scores.masked_fill(hidden, -math.inf)
    size, off = ((x + torch.zeros_like(scores)).masked_fill(scores == -math.inf, 0.0) for x in (size, off))
    p = scores.softmax(-1)
    p = torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, p)
    if not S:
        return _Weights(q, k, v, factor, p, p, 0)
    blocks = math.ceil(S / LEAST_BLOCK)
    most = size.amax(-1, keepdim=True)
    d = (off + 6 * u * size).amax(-1, keepdim=True) + 8 * u * most
    error = torch.expm1(2 * d) + bounds.gamma(S + 10 * blocks + 12, u)
    return _Weights(q, k, v, factor, p, error, blocks)


def _reference(q: Any, k: Any, v: Any, *more: Any, **options: Any) -> torch.Tensor:
    weights = _weights(Case((q, k, v, *more), options))
    return weights.p @ weights.v


def _bound(case: Case, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _output_error(_weights(case, dtype), result, dtype)


def _output_error(w: _Weights, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not w.blocks:
        return torch.zeros_like(result)
    size, u = w.v.abs(), bounds.acc_unit(dtype)
    total = w.p @ size
    error = (w.error + bounds.UNIT[dtype]) * total + bounds.TINY[dtype] * (1 + w.error) * size.sum(-2, keepdim=True)
    near = (w.p + 1) @ (size + 1)
    error = error + (1 + w.error) * products.sum_error(total, near, w.p.shape[-1] + 2 * w.blocks, dtype)
    return bounds.rounded(result, error + 3 * u * total, dtype).nan_to_num(nan=math.inf, posinf=math.inf)


def _grad_bound(case: Case, dy: torch.Tensor, grads: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    w = _weights(case, dtype)
    if not w.blocks or not dy.numel():
        return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)
    u, unit, tiny = bounds.acc_unit(dtype), bounds.UNIT[dtype], bounds.TINY[dtype]
    y = w.p @ w.v
    L, S, V = *w.p.shape[-2:], w.v.shape[-1]
    size = dy.abs()
    # lse is stored: its rounding is relative to its size, which the largest score bounds.
    relative = 2 * w.error + 8 * u * (math.log2(S) + 4)
    dp, dp_size = dy @ w.v.mT, size @ w.v.abs().mT
    delta_size = (size * y.abs()).sum(-1, keepdim=True)
    dp_off = products.sum_error(dp_size, (size + 1) @ (w.v.abs() + 1).mT, V + 2, dtype)
    y_off = _output_error(w, y, dtype)
    delta_off = (size * y_off).sum(-1, keepdim=True) + bounds.gamma(V + 3, u) * delta_size
    delta_off = bounds.or_infinite(delta_off, delta_size + dp_size.amax(-1, keepdim=True), dtype)
    difference = (dp - (dy * y).sum(-1, keepdim=True)).abs()
    ds = w.p * difference
    off = w.p * (1 + relative) * (dp_off + delta_off + 3 * u * (dp_size + delta_size)) + relative * ds
    # A weight below the smallest number is 0.
    off = off + bounds.TINY[torch.float32 if dtype != torch.float64 else dtype] * (dp_size + delta_size)
    off = bounds.rounded(ds, off, dtype)
    most = torch.finfo(dtype).max
    off = torch.where(ds + off > most, math.inf, off).nan_to_num(nan=math.inf, posinf=math.inf)
    magnitude = ds + off
    groups = w.q.shape[-3] // case.args[1].shape[-3] if case.args[1].dim() > 2 else 1
    depth = groups * (L + 2 * math.ceil(L / LEAST_BLOCK)) + 2
    factor = abs(w.factor)

    def product(a: torch.Tensor, b: torch.Tensor, a_off: torch.Tensor, length: int) -> torch.Tensor:
        return a_off @ b + products.sum_error(a @ b, (a + 1) @ (b + 1), length, dtype)

    dq = factor * (product(magnitude, w.k.abs(), off, S + 2 * w.blocks) + 2 * u * (magnitude @ w.k.abs()))
    dk = factor * (product(magnitude.mT, w.q.abs(), off.mT, depth) + 2 * u * (magnitude.mT @ w.q.abs()))
    dv = product(w.p.mT, size, ((relative + unit) * w.p + tiny).mT, depth) * (1 + relative.amax())
    errors = [dq, *(_of_groups(x, grad) for x, grad in zip((dk, dv), grads[1:3], strict=True))]
    bias = case.args[3]
    if bias is not None:
        shape = bias.shape
        errors.append(off.sum_to_size(shape) + bounds.gamma(off.numel() + 1, u) * magnitude.sum_to_size(shape))
    else:
        errors.append(torch.zeros(()))
    return products.gradient_bounds(grads, errors, dtype)


def _of_groups(x: torch.Tensor, grad: Any) -> torch.Tensor:
    """Return the sums over heads of queries that share a head of keys, with the shape of their gradient."""
    if grad is None or x.dim() == 2:
        return x
    return x.unflatten(-3, (grad.shape[-3], -1)).sum(-3)


def _inputs(make: Make) -> Case:
    groups, each = make.size(1, 3), make.choice([1, 1, 2])
    batch = [make.size(0, 3)] if make.integer(0, 1) else []
    L, S, E, V = make.size(0, 40), make.size(0, 40), make.size(1, 40), make.size(1, 40)
    lead = [*batch, groups * each]
    options: dict[str, Any] = {}
    kind = make.choice(["none", "causal", "window", "lengths", "bool", "numbers"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "window":
        options["window"] = (make.integer(-1, 9), make.integer(-1, 9))
    elif kind == "lengths":
        options["lengths"] = make.integers(*batch, low=0, high=S)
    elif kind == "bool":
        options["seen"] = make.integers(L, S, low=0, high=1).bool()
    if make.integer(0, 3) == 0:
        options["scale"] = 0.25
    bias = make.tensor(L, S) if kind == "numbers" else None
    q, k, v = make.tensor(*lead, L, E), make.tensor(*batch, groups, S, E), make.tensor(*batch, groups, S, V)
    return Case((q, k, v, bias), options)


_SMALL = (2, 3, 4), (2, 5, 4), (2, 5, 6)

SPECS = [
    spec_factory()(
        "scaled_dot_product_attention",
        op=_op,
        reference=_reference,
        inputs=_inputs,
        bound=_bound,
        grad_bound=_grad_bound,
        differentiable=(0, 1, 2, 3),
        families=tuple(f"{family}_{size}" for family in ("attention", "attention_grad") for size in HEAD_FAMILIES),
        examples={
            "heads of 64": tensors((2, 2, 130, 64), (2, 2, 150, 64), (2, 2, 150, 64), None),
            "causal": tensors((1, 2, 200, 32), (1, 2, 200, 32), (1, 2, 200, 32), None, is_causal=True),
            "window": tensors((3, 150, 16), (3, 150, 16), (3, 150, 16), None, window=lambda make: (40, 9)),
            "lengths, shared heads": tensors(
                (2, 4, 40, 48), (2, 2, 70, 48), (2, 2, 70, 40), None, lengths=integers(2, low=20, high=70)
            ),
            "a mask of numbers": tensors((2, 3, 33, 24), (2, 3, 65, 24), (2, 3, 65, 24), (3, 33, 65)),
            "a mask of bools": tensors((2, 137, 128), (2, 130, 128), (2, 130, 128), None, seen=bools(137, 130)),
            "heads of 256": tensors((1, 140, 256), (1, 140, 256), (1, 140, 256), None),
            "one query": tensors((2, 2, 1, 8), (2, 2, 100, 8), (2, 2, 100, 8), None),
            "matrices": tensors((20, 24), (30, 24), (30, 8), None),
        },
        bad=(
            refuses(ValueError, "expected at least two dimensions each", (4,), (5, 4), (5, 4)),
            refuses(ValueError, r"expected \[..., L, E\], \[..., S, E\]", (2, 3, 4), (2, 5, 3), (2, 5, 4)),
            refuses(ValueError, "query has 3 heads, key 2 and value 2", (3, 3, 4), (2, 5, 4), (2, 5, 4)),
            refuses(ValueError, "heads have at most 256 values", (2, 257), (3, 257), (3, 4)),
            refuses(ValueError, "both attn_mask and is_causal", *_SMALL, None, seen=bools(3, 5), is_causal=True),
            refuses(ValueError, "window is", *_SMALL, None, window=lambda make: (-2, 0)),
            refuses(ValueError, "window is 3, expected two numbers", *_SMALL, None, window=lambda make: 3),
            refuses(TypeError, "attn_mask has dtype torch.int64", *_SMALL, integers(3, 5)),
            refuses(TypeError, "lengths has dtype torch.float", *_SMALL, None, lengths=lambda make: make.tensor()),
            refuses(TypeError, "convert one of them", (3, 4), of(torch.float64, 5, 4), (5, 6)),
            Bad(lambda make: Case((make.integers(2, 2, low=0, high=4),) * 3), TypeError, "expected a floating type"),
        ),
        specials=False,
    ),
]
