import torch
import triton
import triton.language as tl
from torch.nn import functional

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def group_norm(x, w, out, groups, width, size, ALIGN: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    image = tl.program_id(0)
    group = tl.program_id(1)
    n = width * size
    start = (image * groups + group) * n
    if ALIGN > 1:
        start = tl.multiple_of(start, ALIGN)
    c = tl.arange(0, BLOCK)
    total = 0.0
    square = 0.0
    for at in range(0, n, BLOCK):
        b = tl.load(x + start + at + c, mask=at + c < n, other=0.0)
        total += tl.sum(b, axis=0)
        square += tl.sum(b * b, axis=0)
    mean = total / n
    r = 1 / tl.sqrt(square / n - mean * mean + 1e-5)
    for at in range(0, n, BLOCK):
        i = at + c
        if FORM == "channel over":
            channel = group * width + (i + 1) // size
        else:
            channel = group * width + i // size
        if FORM == "masked by channel":
            b_w = tl.load(w + channel, mask=channel < groups * width, other=0.0)
        else:
            b_w = tl.load(w + channel, mask=i < n, other=0.0)
        b = tl.load(x + start + i, mask=i < n, other=0.0)
        tl.store(out + start + i, (b - mean) * r * b_w, mask=i < n)


@triton.jit
def statistics(x, total, n, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(x + group * n + i, mask=i < n, other=0.0)
    tl.atomic_add(total + 2 * group, tl.sum(b, axis=0))
    tl.atomic_add(total + 2 * group + 1, tl.sum(b * b, axis=0))


@triton.jit
def apply(x, total, out, n, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mean = tl.load(total + 2 * group) / n
    r = 1 / tl.sqrt(tl.load(total + 2 * group + 1) / n - mean * mean + 1e-5)
    b = tl.load(x + group * n + i, mask=i < n, other=0.0)
    tl.store(out + group * n + i, (b - mean) * r, mask=i < n)


@triton.jit
def whole(x, total, out, n, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(x + group * n + i, mask=i < n, other=0.0)
    tl.atomic_add(total + 2 * group, tl.sum(b, axis=0))
    tl.atomic_add(total + 2 * group + 1, tl.sum(b * b, axis=0))
    mean = tl.load(total + 2 * group) / n
    r = 1 / tl.sqrt(tl.load(total + 2 * group + 1) / n - mean * mean + 1e-5)
    tl.store(out + group * n + i, (b - mean) * r, mask=i < n)


def launch(size=13, align=1, form="plain", in_place=False):
    x, w = torch.randn(2, 6, size), torch.randn(6)
    want = functional.group_norm(x, 3, w)
    out = x if in_place else torch.empty_like(x)
    group_norm[(2, 3)](x, w, out, 3, 2, size, ALIGN=align, BLOCK=16, FORM=form)
    return out, want


def launch_in_two(total):
    x, out = torch.randn(2, 6, 20), torch.empty(2, 6, 20)
    statistics[(6, 3)](x, total, 40, BLOCK=16)
    apply[(6, 3)](x, total, out, 40, BLOCK=16)
    return out, functional.group_norm(x, 3)


@cases.bug("alignment")
def groups_of_26_said_to_start_at_multiples_of_4():
    launch(align=4)


@cases.bug("off by one")
def scale_of_the_next_channel_for_the_last_element():
    launch(form="channel over")


@cases.bug("race of programs")
def statistics_used_before_all_programs_added_to_them():
    x = torch.randn(2, 6, 20)
    whole[(6, 3)](x, torch.zeros(12), torch.empty_like(x), 40, BLOCK=16)


@cases.bug("uninitialised")
def statistics_added_to_fresh_memory():
    launch_in_two(torch.empty(12))


@cases.clean("in place")
def group_normalised_in_place():
    return launch(in_place=True)


@cases.clean("alignment")
def groups_of_32_start_at_multiples_of_16():
    return launch(size=16, align=16)


@cases.clean("masked surplus")
def padded_lanes_are_masked_by_their_channel():
    return launch(form="masked by channel")


@cases.clean("atomics")
def statistics_of_a_first_launch():
    return launch_in_two(torch.zeros(12))
