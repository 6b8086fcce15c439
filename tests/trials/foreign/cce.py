"""Cases of cut-cross-entropy: the loss of a linear layer without its logits."""

import torch
import torch.nn.functional as F
from cut_cross_entropy import linear_cross_entropy

from tests.trials.foreign.case import Cases, graded
from tests.trials.foreign.shim import pretend_gpu

pretend_gpu()
cases = Cases()


def compared(rows, words, size, softcap=None, shift=False, ignored=(), reduction="mean", dtype=torch.float16):
    labels = torch.randint(0, words, rows)
    labels.view(-1)[list(ignored)] = -100

    def reference(e, c):
        logits = e @ c.T
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        wanted = labels[..., 1:] if shift else labels
        logits = logits[..., :-1, :] if shift else logits
        loss = F.cross_entropy(logits.flatten(0, -2), wanted.flatten(), reduction=reduction)
        return loss if reduction == "mean" else loss.view(wanted.shape)

    e, c = (torch.randn(*shape).to(dtype) for shape in ((*rows, size), (words, size)))
    return graded(
        lambda e, c: linear_cross_entropy(
            e, c, labels, softcap=softcap, shift=shift, reduction=reduction, filter_eps=None, impl="cce"
        ),
        reference, 0.3 * e, 0.3 * c,
    )  # fmt: skip


@cases.add
def mean():
    return compared((37,), 300, 40, ignored=(0, 5))


@cases.add
def mean_with_a_softcap():
    return compared((37,), 131, 40, softcap=5.0)


@cases.add
def each_of_shifted():
    return compared((2, 19), 300, 40, shift=True, reduction="none", ignored=(3,))


@cases.add
def bfloat16():
    return compared((37,), 300, 40, dtype=torch.bfloat16)
