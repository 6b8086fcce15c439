import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def scan_blocks(x, out, totals, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, tl.cumsum(b, axis=0), mask=i < n)
    tl.store(totals + tl.program_id(0), tl.sum(b, axis=0))


@triton.jit
def add_carries(out, totals, n, BLOCK: tl.constexpr, MANY: tl.constexpr, OTHER: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.arange(0, MANY)
    m = before < tl.program_id(0)
    if OTHER:
        b = tl.load(totals + before, mask=m, other=0.0)
    else:
        b = tl.load(totals + before, mask=m)
    tl.store(out + i, tl.load(out + i, mask=i < n, other=0.0) + tl.sum(b, axis=0), mask=i < n)


@triton.jit
def scan_doubling(x, scratch, n, BLOCK: tl.constexpr, STEPS: tl.constexpr, BARRIER: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(scratch + i, tl.load(x + i, mask=i < n, other=0.0))
    for s in tl.static_range(STEPS):
        if BARRIER:
            tl.debug_barrier()
        left = tl.load(scratch + i - (1 << s), mask=i >= (1 << s), other=0.0)
        here = tl.load(scratch + i)
        if BARRIER:
            tl.debug_barrier()
        tl.store(scratch + i, here + left)


@triton.jit
def scan_chained(x, out, totals, flags, n, BLOCK: tl.constexpr, WAIT: tl.constexpr):
    p = tl.program_id(0)
    i = p * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(x + i, mask=i < n, other=0.0)
    carry = 0.0
    if p > 0:
        if WAIT:
            while tl.atomic_add(flags + p - 1, 0, sem="acquire") == 0:
                pass
        carry = tl.load(totals + p - 1)
    tl.store(totals + p, carry + tl.sum(b, axis=0))
    if WAIT:
        tl.debug_barrier()
        tl.atomic_xchg(flags + p, 1, sem="release")
    tl.store(out + i, carry + tl.cumsum(b, axis=0), mask=i < n)


def launch(blocks=5, other=True):
    x, out, totals = torch.randn(300), torch.empty(300), torch.empty(5)
    scan_blocks[(blocks,)](x, out, totals, 300, BLOCK=64)
    add_carries[(5,)](out, totals, 300, BLOCK=64, MANY=8, OTHER=other)
    return out, x.cumsum(0)


def launch_doubling(barrier):
    x, scratch = torch.randn(50), torch.empty(64)
    scan_doubling[(1,)](x, scratch, 50, BLOCK=64, STEPS=6, BARRIER=barrier)
    return scratch[:50], x.cumsum(0)


def launch_chained(wait):
    x, out, totals, flags = torch.randn(300), torch.empty(300), torch.empty(5), torch.zeros(5, dtype=torch.int32)
    scan_chained[(5,)](x, out, totals, flags, 300, BLOCK=64, WAIT=wait)
    return out, x.cumsum(0)


@cases.bug("undefined lanes")
def totals_nobody_loaded_are_added():
    launch(other=False)


@cases.bug("grid")
def last_block_is_never_scanned():
    launch(blocks=4)


@cases.bug("race of lanes")
def lanes_read_what_others_store_without_a_barrier():
    launch_doubling(barrier=False)


@cases.bug("race of programs")
def carry_taken_before_the_other_program_is_known_to_be_done():
    launch_chained(wait=False)


@cases.clean("fresh memory")
def totals_pass_from_one_launch_to_the_next():
    return launch()


@cases.clean("barrier")
def lanes_read_what_others_stored_before_a_barrier():
    return launch_doubling(barrier=True)


@cases.clean("lock")
def carry_taken_after_its_flag():
    return launch_chained(wait=True)


@cases.clean("in place")
def scan_in_place():
    x, totals = torch.randn(60), torch.empty(1)
    want = x.cumsum(0)
    scan_blocks[(1,)](x, x, totals, 60, BLOCK=64)
    return x, want
