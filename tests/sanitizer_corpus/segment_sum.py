from itertools import pairwise

import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def segment_sum(x, starts, out, n, dim, ROWS: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    segment = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    r = tl.arange(0, ROWS)
    first = tl.load(starts + segment)
    if FORM == "ends guessed":
        last = tl.load(starts + segment + 1, mask=segment + 1 < tl.num_programs(0), other=n)
    else:
        last = tl.load(starts + segment + 1)
    last = tl.minimum(last, n)
    acc = tl.zeros((BLOCK,), tl.float32)
    for at in range(first, last, ROWS):
        if FORM == "whole blocks":
            m = c[None, :] < dim
        elif FORM == "length of the first":
            m = (r[:, None] < last - first) & (c[None, :] < dim)
        else:
            m = (at + r[:, None] < last) & (c[None, :] < dim)
        acc += tl.sum(tl.load(x + (at + r[:, None]) * dim + c[None, :], mask=m, other=0.0), axis=0)
    if FORM == "skips empty":
        if last > first:
            tl.store(out + segment * dim + c, acc, mask=c < dim)
    else:
        tl.store(out + segment * dim + c, acc, mask=c < dim)


@triton.jit
def segment_sum_by_id(x, ids, out, n, dim, BLOCK: tl.constexpr, SCOPE: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    b = tl.load(x + row * dim + c, mask=c < dim, other=0.0)
    p_out = out + tl.load(ids + row) * dim + c
    if SCOPE != "none":
        tl.atomic_add(p_out, b, mask=c < dim, scope=SCOPE)
    else:
        tl.store(p_out, b + tl.load(p_out, mask=c < dim, other=0.0), mask=c < dim)


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))


STARTS = [0, 5, 5, 12, 30]


def launch(form="plain", starts=STARTS, fresh=torch.empty):
    x, out = torch.randn(30, 12), fresh(4, 12)
    segment_sum[(4,)](x, torch.tensor(starts, dtype=torch.int32), out, 30, 12, ROWS=8, BLOCK=16, FORM=form)
    return out, torch.stack([x[a:b].sum(0) for a, b in pairwise(STARTS)])


def launch_by_id(ids, scope):
    x, out = torch.randn(len(ids), 12), torch.zeros(6, 12)
    segment_sum_by_id[(len(ids),)](x, ids, out, len(ids), 12, BLOCK=16, SCOPE=scope)
    return out, torch.zeros(6, 12).index_add(0, ids, x)


@cases.bug("off by one")
def last_segment_has_no_end():
    launch(starts=STARTS[:4])


@cases.bug("loop")
def last_rows_of_a_segment_not_masked():
    launch("whole blocks")


@cases.bug("uninitialised")
def empty_segment_is_skipped_and_then_summed():
    out, everything = launch("skips empty")[0], torch.empty(1)
    total[(1,)](out, everything, 48, BLOCK=64)


@cases.bug("atomics")
def rows_of_one_segment_add_with_the_scope_of_one_block():
    launch_by_id(torch.tensor([0, 0, 1, 3, 3, 3]), "cta")


@cases.clean("masked surplus")
def one_segment_is_empty():
    return launch()


@cases.clean("masked wild pointers")
def end_of_the_last_segment_is_not_loaded():
    return launch("ends guessed", starts=STARTS[:4])


@cases.clean("fresh memory")
def empty_segment_is_skipped_and_holds_zeros():
    return launch("skips empty", fresh=torch.zeros)


@cases.clean("distinct targets")
def every_segment_has_one_row():
    return launch_by_id(torch.tensor([5, 0, 1, 3, 2, 4]), "none")
