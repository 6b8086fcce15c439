"""Cross-entropy of logits x w^T + bias, computed for chunks of rows so that the logits never all exist in memory.

The logits of a chunk are a matrix product. One launch computes their losses and overwrites them with their gradient,
and two more products compute the gradients of x and w. So memory for logits is bounded, and the backward pass only
scales (Hsu et al., Liger Kernel, arXiv 2410.10989). The gradient of w is accumulated over chunks in the accumulation
dtype.

    x [R, K]     w [N, K]     bias [N]     targets and weights as in `cross_entropy`, of logits [R, N]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minidl.kernels import check, elementwise, reduce
from minidl.kernels import cross_entropy as entropy
from minidl.kernels.cross_entropy.targets import check_arguments, divisor_parts
from minidl.kernels.gemm import gemm
from minidl.kernels.loss_total import write_total
from minidl.runtime import launch

# Most logits of a chunk: 512 MB in 16 bits. Smaller chunks would be slower: each one reads and writes the sum of dw, 8
# bytes for each of N K values, which takes as long as the chunk's products at some 250 rows (H200, 16 bits).
MOST = 2**28
LEAST = 1024  # least rows of a chunk, for any number of classes


class LossAndGrads(NamedTuple):
    """The loss, and the wanted gradients of x, w and bias, which `scaled` completes.

    divisor  the gradients must still be divided by it, see `cross_entropy.CrossEntropy`
    """

    loss: torch.Tensor
    grads: list[torch.Tensor]
    divisor: torch.Tensor | None


def linear_cross_entropy(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    smoothing: float,
    *,
    needs_grad: Sequence[bool],
    dy: torch.Tensor | None = None,
    wide: bool = False,
) -> LossAndGrads:
    """Return the loss, in x's dtype or with `wide` in the accumulation dtype, and the gradients of x, w and bias that
    `needs_grad` selects.

    dy [R] is the gradient of each row's loss, which gradients with the reduction "none" need.
    Raises as `cross_entropy_parts` for logits [R, N], and ValueError for shapes that do not fit.
    """
    _check(x, w, bias)
    R, N = len(x), len(w)
    check_arguments(
        x.new_empty(()).expand(R, N), target, weight, ignore_index, reduction, smoothing, op="linear_cross_entropy"
    )
    acc, with_grad = launch.acc_torch(x.dtype), any(needs_grad)
    each, mean = reduction == "none", reduction == "mean"
    defer = mean and with_grad and x.dtype == torch.float16
    target, weight = target.contiguous(), None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    sums, count = divisor_parts("linear_cross_entropy", target, weight, R, N, ignore_index, x.dtype, mean)
    out = acc if wide else x.dtype
    step = rows_at_once(R, N)
    losses, dxs = [], []
    totals: list[torch.Tensor | None] = [None, None]
    for first in range(0, max(R, 1), step):
        rows, end = x[first : first + step], first + step
        z = gemm(rows, w.t(), bias)
        divisors = (sums, count) if mean and with_grad and not defer else (None, 1)
        options = weight, ignore_index, smoothing, divisors, out if each else None, with_grad
        losses.append(entropy.in_place(z, target[first:end], *options))
        if dy is not None:
            entropy.cross_entropy_grad_(z, dy[first:end])
        if needs_grad[0]:
            dxs.append(gemm(z, w))
        if needs_grad[1]:
            totals[0] = _product(totals[0], z.t(), rows, defer or step < R)
        if needs_grad[2]:
            totals[1] = _accumulate(totals[1], reduce.sum_rows(z, acc))
    parts = torch.cat(losses) if len(losses) > 1 else losses[0]
    loss, divisor = parts, None
    if not each:
        loss = torch.empty((), dtype=out, device=x.device)
        divisor = write_total(parts, loss, sums, count)
    grads = [torch.cat(dxs) if len(dxs) > 1 else dxs[0]] if dxs else []
    grads += [total if defer else total.to(x.dtype) for total in totals if total is not None]
    return LossAndGrads(loss, grads, divisor if defer else None)


def rows_at_once(R: int, N: int) -> int:
    """Return the rows of a chunk, for R rows of N classes."""
    return max(1, min(R, max(LEAST, MOST // N)))


def scaled(
    grad: torch.Tensor, dy: torch.Tensor | None, divisor: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply a gradient of `LossAndGrads` by dy (one number on the device, None means 1) in place, and return it."""
    if dy is not None or divisor is not None:
        entropy.cross_entropy_grad_(grad, dy, divisor)
    return grad.to(dtype)


def _product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, wide: bool) -> torch.Tensor:
    """Return total + a @ b in total's memory; a float32 form computes some tiles twice and cannot add in place."""
    if total is None or a.dtype.itemsize > 2:
        return _accumulate(total, gemm(a, b, wide=wide))
    return gemm(a, b, onto=total)


def _accumulate(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else elementwise.add(total, term, out=total)


def _check(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    op = "linear_cross_entropy"
    check.floating(op, input=x)
    check.same(op, input=x, linear_weight=w, linear_bias=bias)
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{op}: input is {list(x.shape)} and linear_weight {list(w.shape)}, expected [in_features] or "
            "[N, in_features], and [classes, in_features]; flatten other inputs and targets"
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"{op}: linear_bias has shape {list(bias.shape)}, expected [{len(w)}]")
