"""Recurrences of the layers in `nn.recurrent`: one function for a layer and direction."""

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
        ctx: Any, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, weight: torch.Tensor,
        bias: torch.Tensor | None, mode: str, steps: kernels.Steps,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        y, last_h, last_c, saved = kernels.recurrence(mode, x, h, c, weight, bias, steps, any(ctx.needs))
        if saved is not None:
            ctx.save(weight, *saved)
        ctx.mode, ctx.steps, ctx.batch = mode, steps, len(h)
        return (y, last_h) if last_c is None else (y, last_h, last_c)

    @staticmethod
    def backward(ctx: Any, dy: Any, dh: Any, dc: Any = None) -> Any:
        weight, *rest = ctx.saved
        saved = kernels.Saved(*rest)
        dx, dhidden, dh, dc = kernels.recurrence_grad(ctx.mode, dy, dh, dc, weight, saved, ctx.steps, ctx.batch)
        dw = gemm.gemm(dhidden.t(), saved.before) if ctx.needs[3] else None
        db = reduce.sum_rows(dhidden) if ctx.needs[4] else None
        return dx, dh, dc, dw, db, None, None


def recurrence(
    x: Tensor, state: Sequence[Tensor], weight: Tensor, bias: Tensor | None, mode: str, sizes: Sequence[int],
    reverse: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y [N, H] and the last states [B, H]: h, and c of "LSTM", for products of inputs x [N, GATES H].

    sizes: the number of sequences in each step, never rising, of which the rows in x follow one another; `reverse`
    computes the last step first. state: h, and c, before. mode: "LSTM", "GRU", "RNN_TANH" or "RNN_RELU". Raises
    TypeError for dtypes that differ or integers.
    """
    h, c = (*state, None)[:2]
    if torch._C._is_any_autocast_enabled():  # inputs are products
        x, h, c = (None if t is None else t.to(weight.dtype) for t in (x, h, c))  # type: ignore[assignment]
    operands = {"input": x, "hx": h, "cx": c, "weight_hh": weight, "bias_hh": bias}
    raw = {name: None if t is None else t.data for name, t in operands.items()}
    check.floating(mode.partition("_")[0], **raw)
    check.same(mode.partition("_")[0], **raw)
    steps = tuple(zip(accumulate(sizes, initial=0), sizes, strict=False))
    y: tuple[Tensor, ...] = Recurrence.apply(x, h, c, weight, bias, mode, steps[::-1] if reverse else steps)
    return y
