import torch
import triton
import triton.language as tl
from torch.nn import functional

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def cross_entropy(x, target, loss, rows, n, ignore, BLOCK: tl.constexpr, FORM: tl.constexpr = "guarded"):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < n
    if FORM == "no other":
        b = tl.load(x + row * n + c, mask=m)
    else:
        b = tl.load(x + row * n + c, mask=m, other=float("-inf"))
    top = tl.max(b, axis=0)
    t = tl.load(target + row)
    if FORM == "unguarded":
        picked = tl.load(x + row * n + t)
    elif FORM == "selected":
        picked = tl.sum(tl.where(c == t, b, 0.0), axis=0)
    else:
        picked = tl.load(x + row * n + t, mask=t != ignore, other=0.0)
    value = tl.log(tl.sum(tl.exp(b - top), axis=0)) + top - picked
    tl.store(loss + row, tl.where(t == ignore, 0.0, value))


@triton.jit
def gradient(x, target, dx, n, BLOCK: tl.constexpr, FORM: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < n
    b = tl.load(x + row * n + c, mask=m, other=float("-inf"))
    e = tl.exp(b - tl.max(b, axis=0))
    p = e / tl.sum(e, axis=0)
    t = tl.load(target + row)
    if FORM == "where":
        tl.store(dx + row * n + c, p - tl.where(c == t, 1.0, 0.0), mask=m)
    else:
        tl.store(dx + row * n + c, p, mask=m)
        if FORM == "barrier":
            tl.debug_barrier()
        picked = tl.load(dx + row * n + t)
        if FORM == "barrier":
            tl.debug_barrier()
        tl.store(dx + row * n + t, picked - 1.0)


@triton.jit
def mean(loss, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(loss + i, mask=i < n, other=0.0), axis=0) / n)


TARGET = torch.tensor([3, 49, 0, -100, 7])


def launch(target, form="guarded"):
    x, loss, out = torch.randn(5, 50), torch.empty(5), torch.empty(1)
    cross_entropy[(5,)](x, target, loss, 5, 50, -100, BLOCK=64, FORM=form)
    mean[(1,)](loss, out, 5, BLOCK=8)
    return out, functional.cross_entropy(x, target, reduction="sum").view(1) / 5


def launch_gradient(form, in_place=False):
    x, target = torch.randn(4, 50), torch.tensor([3, 49, 0, 7])
    want = x.softmax(1) - functional.one_hot(target, 50)
    dx = x if in_place else torch.empty_like(x)
    gradient[(4,)](x, target, dx, 50, BLOCK=64, FORM=form)
    return dx, want


@cases.bug("bounds")
def ignored_target_is_used_as_a_column():
    launch(TARGET[[3, 1, 2, 0, 4]], form="unguarded")


@cases.bug("undefined lanes")
def sum_of_exponents_of_lanes_nobody_loaded():
    launch(TARGET.clamp(min=0), form="no other")


@cases.bug("grid")
def mean_of_a_loss_that_no_program_wrote():
    x, target, loss, out = torch.randn(5, 50), TARGET, torch.empty(5), torch.empty(1)
    cross_entropy[(4,)](x, target, loss, 5, 50, -100, BLOCK=64)
    mean[(1,)](loss, out, 5, BLOCK=8)


@cases.bug("race of lanes")
def target_column_reread_without_a_barrier():
    launch_gradient("nothing")


@cases.clean("masked wild pointers")
def ignored_target_is_masked():
    return launch(TARGET)


@cases.clean("selection")
def target_column_is_selected_from_the_block():
    return launch(TARGET, form="selected")


@cases.clean("barrier")
def target_column_reread_after_a_barrier():
    return launch_gradient("barrier")


@cases.clean("in place")
def gradient_takes_the_place_of_the_scores():
    return launch_gradient("where", in_place=True)
