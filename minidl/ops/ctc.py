"""The loss of unaligned labels: connectionist temporal classification."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import check
from minidl.kernels import ctc as kernels
from minidl.kernels.loss_total import check_reduction
from minidl.ops.shape import reshape, unsqueeze
from minidl.tensors import Tensor

__all__ = ["ctc_loss"]

Lengths = Tensor | torch.Tensor | Sequence[int]


class CTCLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor, longest: int, blank: int,
        reduction: str, zero_infinity: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.options = blank, reduction, zero_infinity
        loss, paths = kernels.ctc_loss(x, targets, lengths, longest, blank, reduction, zero_infinity, ctx.needs[0])
        ctx.save(x, targets, lengths, paths)
        return loss

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return kernels.ctc_loss_grad(dy, *ctx.saved, *ctx.options), *(None for _ in ctx.needs[1:])


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Return minus the logarithm of the probability that a sequence shows its labels, in any alignment with blanks
    (Graves et al., Connectionist temporal classification, ICML 2006), as torch.nn.functional.ctc_loss.

    Shapes: log_probs [T, N, C] or [T, C]; targets int64, int32 or uint8, padded [N, S] or the labels of all sequences
    one after another; lengths [N]: integer tensors, which are copied from a GPU, or sequences. Nothing beyond the
    lengths is read. "mean" divides each loss by its number of labels and averages; "none" gives the loss of each
    sequence. One shorter than its labels, with a blank between equal ones, has an infinite loss and a gradient of NaN;
    with zero_infinity both are 0. As in torch, the gradient is e^log_probs minus the probability of the class in the
    step, which is exact behind `log_softmax`.
    Raises TypeError for dtypes, ValueError for shapes, lengths, devices or options that do not fit. A label that is
    blank or no class raises IndexError on the CPU; on a GPU, which the check would wait for, the loss is NaN.
    """
    check.floating("ctc_loss", log_probs=log_probs.data)
    check_reduction("ctc_loss", reduction)
    if log_probs.ndim not in (2, 3) or log_probs.numel() == 0:
        raise ValueError(f"ctc_loss: log_probs has shape {list(log_probs.shape)}, expected [T, N, C] or [T, C] above 0")
    x, labels = log_probs if log_probs.ndim == 3 else unsqueeze(log_probs, 1), targets.data
    T, N, C = x.shape
    if not 0 <= check.integer("ctc_loss", "blank", blank) < C:
        raise ValueError(f"ctc_loss: blank is {blank}, expected a class from 0 to {C - 1}")
    if labels.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise TypeError(f"ctc_loss: targets has dtype {labels.dtype}, expected int64, int32 or uint8 classes")
    if labels.device != x.device:
        raise ValueError(f"ctc_loss: log_probs is on {x.device} and targets on {labels.device}; move one with .to()")
    steps = _lengths("input_lengths", input_lengths, N, T)
    counts = _lengths("target_lengths", target_lengths, N, labels.shape[-1] if labels.ndim else 0)
    total, padded = sum(counts), labels.ndim == 2
    if tuple(labels.shape) != ((N, labels.shape[1]) if padded else (total,)):
        raise ValueError(f"ctc_loss: targets has shape {list(labels.shape)}, expected [{N}, S] or [{total}]")
    labels = labels.contiguous()
    first = [n * labels.shape[1] for n in range(N)] if padded else [0, *itertools.accumulate(counts[:-1])]
    if not labels.is_cuda:
        used = (c for at, count in zip(first, counts, strict=True) for c in labels.view(-1)[at : at + count].tolist())
        for label in used:
            if not 0 <= label < C or label == blank:
                raise IndexError(f"ctc_loss: targets holds {label}, expected classes from 0 to {C - 1} but {blank}")
    lengths = torch.tensor([steps, counts, first], device=x.device)
    loss: Tensor = CTCLoss.apply(x, labels, lengths, max(counts), blank, reduction, zero_infinity)
    return reshape(loss) if log_probs.ndim == 2 and reduction == "none" else loss


def _lengths(name: str, lengths: Lengths, N: int, most: int) -> tuple[int, ...]:
    """Return lengths as integers. Raises TypeError or ValueError unless there are N from 0 to `most`."""
    values = check.integers("ctc_loss", name, lengths.tolist() if hasattr(lengths, "tolist") else lengths)
    if len(values) != N or not all(0 <= value <= most for value in values):
        raise ValueError(f"ctc_loss: {name} is {list(values)}, expected {N} numbers from 0 to {most}")
    return values
