import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr, MASK_LOAD: tl.constexpr = True, MASK_STORE: tl.constexpr = True):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    m_load = m if MASK_LOAD else i >= 0
    m_store = m if MASK_STORE else i >= 0
    s = tl.load(x + i, mask=m_load, other=0.0) + tl.load(y + i, mask=m_load, other=0.0)
    tl.store(out + i, s, mask=m_store)


@triton.jit
def add_closed(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i <= n
    tl.store(out + i, tl.load(x + i, mask=m, other=0.0) + tl.load(y + i, mask=m, other=0.0), mask=m)


@triton.jit
def add_far(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    far = tl.where(m, i.to(tl.int64), i.to(tl.int64) + (1 << 40))
    tl.store(out + far, tl.load(x + far, mask=m, other=0.0) + tl.load(y + far, mask=m, other=0.0), mask=m)


def launch(kernel, x, y, out, **flags):
    kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256, **flags)


@cases.bug("bounds")
def load_without_mask():
    x, y, out = torch.randn(1000), torch.randn(1000), torch.empty(1000)
    launch(add, x, y, out, MASK_LOAD=False)


@cases.bug("bounds")
def store_without_mask():
    x, y, out = torch.randn(1000), torch.randn(1000), torch.empty(1000)
    launch(add, x, y, out, MASK_STORE=False)


@cases.bug("off by one")
def mask_includes_the_length():
    x, y, out = torch.randn(1000), torch.randn(1000), torch.empty(1000)
    launch(add_closed, x, y, out)


@cases.bug("alias")
def output_is_the_input_shifted_by_one():
    both, y = torch.randn(1001), torch.randn(1000)
    launch(add, both[:-1], y, both[1:])


@cases.clean("masked wild pointers")
def masked_lanes_point_a_terabyte_away():
    x, y, out = torch.randn(1000), torch.randn(1000), torch.empty(1000)
    launch(add_far, x, y, out)
    return out, x + y


@cases.clean("in place")
def output_is_the_first_input():
    x, y = torch.randn(1000), torch.randn(1000)
    want = x + y
    launch(add, x, y, x)
    return x, want


@cases.clean("overlapping reads")
def inputs_are_shifted_views_of_one_tensor():
    both, out = torch.randn(1001), torch.empty(1000)
    launch(add, both[:-1], both[1:], out)
    return out, both[:-1] + both[1:]


@cases.clean("empty grid")
def nothing_to_add():
    x, y, out = torch.randn(0), torch.randn(0), torch.empty(0)
    launch(add, x, y, out)
    return out, x + y
