import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def histogram(x, out, n, bins, BLOCK: tl.constexpr, FORM: tl.constexpr = "atomic"):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    if FORM == "no other":
        b = tl.load(x + i, mask=m)
    else:
        b = tl.load(x + i, mask=m, other=0)
    if FORM == "no other":
        tl.atomic_add(out + b, m.to(tl.int32))
    elif FORM == "store":
        tl.store(out + b, tl.load(out + b, mask=m, other=0) + 1, mask=m)
    elif FORM == "clamped":
        tl.atomic_add(out + tl.minimum(tl.maximum(b, 0), bins - 1), 1, mask=m)
    elif FORM == "seen":
        tl.store(out + b, 1, mask=m)
    elif FORM == "hash":
        tl.atomic_add(out + b * 40503 % bins, 1, mask=m)
    else:
        tl.atomic_add(out + b, 1, mask=m)


@triton.jit
def histogram_rows(x, out, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    b = tl.load(x + row * n + i, mask=i < n, other=0)
    count = tl.histogram(b, BINS, mask=i < n)
    tl.store(out + row * BINS + tl.arange(0, BINS), count)


def launch(x, out, **flags):
    histogram[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), out.numel(), BLOCK=128, **flags)
    return out


def some(high=10):
    return torch.randint(0, high, (300,), dtype=torch.int32)


@cases.bug("race of lanes")
def lanes_of_one_bin_store_instead_of_adding():
    launch(some(), torch.zeros(10, dtype=torch.int32), FORM="store")


@cases.bug("bounds")
def value_that_has_no_bin():
    x = some()
    x[7] = 10
    launch(x, torch.zeros(10, dtype=torch.int32))


@cases.bug("undefined lanes")
def bin_of_lanes_nobody_loaded():
    launch(some(), torch.zeros(10, dtype=torch.int32), FORM="no other")


@cases.bug("overflow")
def hash_of_a_large_key_exceeds_31_bits():
    launch(some(100_000), torch.zeros(10, dtype=torch.int32), FORM="hash")


@cases.clean("atomics")
def all_lanes_add_to_few_bins():
    x = some()
    return launch(x, torch.zeros(10, dtype=torch.int32)), torch.bincount(x, minlength=10).int()


@cases.clean("clamped indices")
def values_without_bin_go_to_the_last():
    x = some(14) - 2
    return launch(x, torch.zeros(10, dtype=torch.int32), FORM="clamped"), torch.bincount(x.clamp(0, 9)).int()


@cases.clean("same value")
def lanes_and_programs_store_the_same_flag():
    x = some()
    return launch(x, torch.zeros(12, dtype=torch.int32), FORM="seen"), torch.bincount(x, minlength=12).gt(0).int()


@cases.clean("padding")
def padded_rows_counted_with_a_mask():
    x, out = some().view(3, 100), torch.empty(3, 16, dtype=torch.int32)
    histogram_rows[(3,)](x, out, 100, BINS=16, BLOCK=128)
    return out, torch.stack([torch.bincount(row, minlength=16) for row in x]).int()
