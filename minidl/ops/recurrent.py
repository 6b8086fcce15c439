"""Recurrences of the layers in `nn.recurrent`: one function for a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import check, gemm, reduce
from minidl.kernels import recurrent as kernels
from minidl.tensors import Tensor

__all__: list[str] = []  # torch has layers only


class Recurrence(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, mode: str, steps: kernels.Steps,
        *parameters: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        stack: Any = torch.stack if len(h) > 1 else lambda parts: parts[0][None]  # a copy, or a view
        weight, bias = stack(parameters[: len(h)]), parameters[len(h)]
        bias = bias if bias is None else stack(parameters[len(h) :])
        y, last_h, last_c, saved = kernels.recurrence(mode, x, h, c, weight, bias, steps, any(ctx.needs))
        if saved is not None:
            ctx.save(weight, *saved)
        ctx.mode, ctx.steps, ctx.batch = mode, steps, h.shape[1]
        return (y, last_h) if last_c is None else (y, last_h, last_c)

    @staticmethod
    def backward(ctx: Any, dy: Any, dh: Any, dc: Any = None) -> Any:
        weight, *rest = ctx.saved
        saved, D = kernels.Saved(*rest), len(ctx.steps)
        dx, dhidden, dh, dc = kernels.recurrence_grad(ctx.mode, dy, dh, dc, weight, saved, ctx.steps, ctx.batch)
        parts = dhidden.chunk(D, 1)
        factors = zip(parts, saved.before.chunk(D, 1), ctx.needs[5 : 5 + D], strict=True)
        dw = [gemm.gemm(part.t(), before) if need else None for part, before, need in factors]
        db = [reduce.sum_rows(part) if need else None for part, need in zip(parts, ctx.needs[5 + D :], strict=True)]
        return dx, dh, dc, None, None, *dw, *db


def recurrence(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], mode: str,
    sizes: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y [N, D H] and the last states [D, B, H]: h, and c of "LSTM", for products of inputs x [N, D GATES H].

    weights, biases: of the product with h, for each of D directions; the second computes the last step first. sizes:
    the number of sequences in each step, never rising, of which the rows in x follow one another. state: h, and c,
    before. mode: "LSTM", "GRU", "RNN_TANH" or "RNN_RELU". Raises TypeError for dtypes that differ or integers.
    """
    h, c = (*state, None)[:2]
    if torch._C._is_any_autocast_enabled():  # inputs are products
        x, h, c = (None if t is None else t.to(weights[0].dtype) for t in (x, h, c))  # type: ignore[assignment]
    operands: dict[str, Tensor | None] = {"input": x, "hx": h, "cx": c}
    for weight, bias, suffix in zip(weights, biases, ("", "_reverse"), strict=False):
        operands |= {f"weight_hh{suffix}": weight, f"bias_hh{suffix}": bias}
    raw = {name: None if t is None else t.data for name, t in operands.items()}
    check.floating(mode.partition("_")[0], **raw)
    check.same(mode.partition("_")[0], **raw)
    steps = tuple(zip(accumulate(sizes, initial=0), sizes, strict=False))
    y: tuple[Tensor, ...] = Recurrence.apply(x, h, c, mode, (steps, steps[::-1])[: len(weights)], *weights, *biases)
    return y
