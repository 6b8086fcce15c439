"""A case of a trial of foreign kernels: a function of a package on inputs like those of its own tests, beside a
reference in float64."""

import torch


class Cases(dict):
    """The cases of a package by name; `error` is how far a result may be off where not 1e-3."""

    def add(self, run):
        self[run.__name__] = run
        return run


def leaf(value, dtype=None):
    """A float tensor that collects a gradient, with the strides it has; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().to(dtype or value.dtype).requires_grad_()


def several(value):
    return [value] if isinstance(value, torch.Tensor) else [part for part in value if part is not None]


def pairs(function, reference, *inputs):
    """(got, want) of the results alone, for what has no backward."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    want = several(reference(*wide))
    return list(zip(several(function(*inputs)), want, strict=True))


def graded(function, reference, *inputs):
    """(got, want) of the results, and of the gradient of each input for a drawn gradient of each result."""
    mine, wide = [leaf(x) for x in inputs], [leaf(x, torch.float64) for x in inputs]
    want = several(reference(*wide))
    got = several(function(*mine))
    told = [(g.detach().clone(), w.detach()) for g, w in zip(got, want, strict=True)]
    # Some packages write a gradient into the memory of the one that they are given.
    drawn = [torch.randn(w.shape) for w in want]
    torch.autograd.backward(want, [d.double() for d in drawn])
    torch.autograd.backward(got, [d.to(g.dtype) for d, g in zip(drawn, got, strict=True)])
    leaves = [(m.grad, w.grad) for m, w in zip(mine, wide, strict=True) if isinstance(w, torch.Tensor) and w.is_leaf]
    return told + [(m, w) for m, w in leaves if w is not None]


def error(got, want):
    """The largest difference, in the largest value that should be, at least 1; of 16 bits an eighth of it."""
    if got is None or got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    difference = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1)
    short = got.dtype in (torch.float16, torch.bfloat16)
    return float(difference.nan_to_num(nan=float("inf"))) / (8 if short else 1)
