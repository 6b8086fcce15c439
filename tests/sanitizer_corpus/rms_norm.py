import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def rms_norm(x, res, w, out, rows, n, BLOCK: tl.constexpr, FORM: tl.constexpr = "right"):
    row = tl.program_id(0)
    if FORM == "guarded":
        if row >= rows:
            return
    c = tl.arange(0, BLOCK)
    m = c < n
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        if FORM != "mask kept":
            m = start + c < n
        s = tl.load(x + row * n + start + c, mask=m, other=0.0) + tl.load(res + row * n + start + c, mask=m, other=0.0)
        tl.store(res + row * n + start + c, s, mask=m)
        square += s * s
    r = 1 / tl.sqrt(tl.sum(square, axis=0) / n + 1e-6)
    for start in range(0, n, BLOCK):
        col = start + c
        m = col < n
        if FORM == "narrow":
            b_w = tl.load(w + col.to(tl.int8), mask=m, other=0.0)
        else:
            b_w = tl.load(w + col, mask=m, other=0.0)
        s = tl.load(res + row * n + col, mask=m, other=0.0)
        tl.store(out + row * n + col, s * r * b_w, mask=m)


@triton.jit
def row_rms(x, r, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    b = tl.load(x + row * n + c, mask=c < n, other=0.0)
    tl.store(r + row, 1 / tl.sqrt(tl.sum(b * b, axis=0) / n + 1e-6))


@triton.jit
def scale_rows(x, r, out, rows, n, FIRST: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    c = tl.arange(0, BLOCK)
    m = (row[:, None] < rows) & (c[None, :] < n)
    b_r = tl.load(r + row + FIRST, mask=row < rows, other=0.0)
    b = tl.load(x + row[:, None] * n + c[None, :], mask=m, other=0.0)
    tl.store(out + row[:, None] * n + c[None, :], b * b_r[:, None], mask=m)


def reference(x, w):
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * w


def launch(n, extra_programs=0, **flags):
    x, res, w, out = torch.randn(6, n), torch.randn(6, n), torch.randn(n), torch.empty(6, n)
    want = reference(x + res, w)
    rms_norm[(6 + extra_programs,)](x, res, w, out, 6, n, BLOCK=64, **flags)
    return out, want


def launch_in_two(first=0):
    x, r, out = torch.randn(6, 50), torch.empty(6), torch.empty(6, 50)
    row_rms[(6,)](x, r, 50, BLOCK=64)
    scale_rows[(2,)](x, r, out, 6, 50, FIRST=first, TALL=4, BLOCK=64)
    return out, reference(x, 1)


@cases.bug("loop")
def mask_of_the_first_block_serves_all_blocks():
    launch(200, FORM="mask kept")


@cases.bug("truncation")
def column_index_in_eight_bits():
    launch(200, FORM="narrow")


@cases.bug("grid")
def one_program_too_many():
    launch(200, extra_programs=1)


@cases.bug("off by one")
def scales_of_the_next_row():
    launch_in_two(first=1)


@cases.clean("reread of own stores")
def second_pass_reads_what_the_same_lanes_stored():
    return launch(200)


@cases.clean("surplus programs")
def surplus_programs_return_at_once():
    return launch(200, extra_programs=3, FORM="guarded")


@cases.clean("fresh memory")
def scales_of_a_first_kernel_in_fresh_memory():
    return launch_in_two()


@cases.clean("narrow index")
def column_index_in_eight_bits_that_suffice():
    return launch(100, FORM="narrow")
