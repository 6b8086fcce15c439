"""The largest element of a row, and the k largest."""

import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def argmax(x, value, index, n, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    if OTHER:
        b = tl.load(x + row * n + c, mask=c < n, other=float("-inf"))
    else:
        b = tl.load(x + row * n + c, mask=c < n)
    top, where = tl.max(b, axis=0, return_indices=True)
    tl.store(value + row, top)
    tl.store(index + row, where)


@triton.jit
def argmax_parts(x, values, indices, n, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    i = part * BLOCK + tl.arange(0, BLOCK)
    top, where = tl.max(tl.load(x + i, mask=i < n, other=float("-inf")), axis=0, return_indices=True)
    tl.store(values + part, top)
    tl.store(indices + part, part * BLOCK + where)


@triton.jit
def argmax_of_parts(values, indices, out, parts, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    _, where = tl.max(tl.load(values + i, mask=i < parts, other=float("-inf")), axis=0, return_indices=True)
    tl.store(out, tl.load(indices + where))


@triton.jit
def record_maximum(x, best, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = tl.max(tl.load(x + i, mask=i < n, other=float("-inf")), axis=0)
    if ATOMIC:
        tl.atomic_max(best, top)
    else:
        if top > tl.load(best):
            tl.store(best, top)


@triton.jit
def top_k(x, values, indices, n, k, out_row, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    b = tl.load(x + row * n + c, mask=c < n, other=float("-inf"))
    for slot in range(SLOTS):
        top, where = tl.max(b, axis=0, return_indices=True)
        tl.store(values + row * out_row + slot, top, mask=slot < k)
        tl.store(indices + row * out_row + slot, where, mask=slot < k)
        b = tl.where(c == where, float("-inf"), b)


def launch(other):
    x, value, index = torch.randn(6, 50) - 5, torch.empty(6), torch.empty(6, dtype=torch.int32)
    argmax[(6,)](x, value, index, 50, BLOCK=64, OTHER=other)
    return index, x.argmax(1).int()


def launch_parts(parts_written):
    x, out = torch.randn(300), torch.empty(1, dtype=torch.int32)
    values, indices = torch.empty(5), torch.empty(5, dtype=torch.int32)
    argmax_parts[(parts_written,)](x, values, indices, 300, BLOCK=64)
    argmax_of_parts[(1,)](values, indices, out, 5, BLOCK=8)
    return out, x.argmax().int().view(1)


def launch_record(atomic):
    x, best = torch.randn(300).abs(), torch.zeros(1)
    record_maximum[(5,)](x, best, 300, BLOCK=64, ATOMIC=atomic)
    return best, x.max().view(1)


def launch_top(k, width):
    x, values, indices = torch.randn(6, 50), torch.zeros(6, width), torch.zeros(6, width, dtype=torch.int32)
    top_k[(6,)](x, values, indices, 50, k, width, BLOCK=64, SLOTS=4)
    return values[:, :k], x.topk(k).values


@cases.bug("undefined lanes")
def maximum_and_place_of_lanes_nobody_loaded():
    launch(other=False)


@cases.bug("grid")
def last_part_is_never_reduced():
    launch_parts(4)


@cases.bug("race of programs")
def programs_compare_and_store_the_record():
    launch_record(atomic=False)


@cases.bug("off by one")
def one_slot_more_than_the_output_has():
    launch_top(k=4, width=3)


@cases.clean("padding")
def padded_lanes_are_minus_infinity():
    return launch(other=True)


@cases.clean("fresh memory")
def parts_of_a_first_launch():
    return launch_parts(5)


@cases.clean("atomics")
def programs_raise_the_record_atomically():
    return launch_record(atomic=True)


@cases.clean("masked surplus")
def last_slot_is_masked():
    return launch_top(k=3, width=3)
