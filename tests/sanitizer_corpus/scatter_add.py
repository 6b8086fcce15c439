import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def scatter_rows(x, index, out, n, dim, out_rows, BLOCK: tl.constexpr, FORM: tl.constexpr = "atomic"):
    i = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < dim
    row = tl.load(index + i)
    b = tl.load(x + i * dim + c, mask=m, other=0.0)
    if FORM == "atomic":
        tl.atomic_add(out + row * dim + c, b, mask=m)
    elif FORM == "relaxed":
        tl.atomic_add(out + row * dim + c, b, mask=m, sem="relaxed")
    elif FORM == "unmasked":
        tl.atomic_add(out + row * dim + c, b)
    elif FORM == "skipping":
        tl.atomic_add(out + row * dim + c, b, mask=m & (row >= 0) & (row < out_rows))
    else:
        tl.store(out + row * dim + c, tl.load(out + row * dim + c, mask=m, other=0.0) + b, mask=m)


@triton.jit
def scatter_lanes(x, index, out, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    to = tl.load(index + i, mask=m, other=0)
    if ATOMIC:
        tl.atomic_add(out + to, tl.load(x + i, mask=m, other=0.0), mask=m)
    else:
        tl.store(out + to, tl.load(x + i, mask=m, other=0.0), mask=m)


def launch(index, form="atomic"):
    x, out = torch.randn(len(index), 24), torch.zeros(20, 24)
    scatter_rows[(len(index),)](x, index, out, len(index), 24, 20, BLOCK=32, FORM=form)
    keep = (index >= 0) & (index < 20)
    return out, torch.zeros(20, 24).index_add(0, index[keep], x[keep])


def launch_lanes(index, atomic):
    x, out = torch.randn(len(index)), torch.zeros(100)
    scatter_lanes[(1,)](x, index, out, len(index), BLOCK=128, ATOMIC=atomic)
    return out, torch.zeros(100).index_add(0, index, x)


@cases.bug("race of programs")
def rows_with_one_target_load_add_and_store():
    launch(torch.tensor([3, 19, 3, 7]), "store")


@cases.bug("bounds")
def atomic_add_without_mask_reaches_past_the_table():
    launch(torch.tensor([3, 19, 4, 7]), "unmasked")


@cases.bug("race of lanes")
def lanes_with_one_target_store_different_values():
    launch_lanes(torch.arange(100) % 60, atomic=False)


@cases.bug("bounds")
def target_past_the_last_row():
    launch(torch.tensor([3, 20, 4, 7]))


@cases.clean("atomics")
def rows_with_one_target_add_atomically():
    return launch(torch.tensor([3, 19, 3, 7]), "relaxed")


@cases.clean("distinct targets")
def permuted_rows_load_add_and_store():
    return launch(torch.tensor([3, 19, 4, 7]), "store")


@cases.clean("distinct targets")
def lanes_store_to_a_permutation():
    return launch_lanes(torch.randperm(100), atomic=False)


@cases.clean("masked wild pointers")
def targets_outside_the_table_are_skipped():
    return launch(torch.tensor([3, 1 << 40, -1, 7]), "skipping")
