import torch
import triton
import triton.language as tl
from torch.nn import functional

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def conv1d(x, w, out, n, n_out, pad, dilation, TAPS: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = i < n_out
    acc = tl.zeros((BLOCK,), tl.float32)
    inside = m
    for t in tl.static_range(TAPS):
        at = i - pad + t * dilation
        if FORM == "left open":
            inside = m & (at < n)
        elif FORM == "right open":
            inside = m & (at >= 0)
        elif FORM == "once":
            if t == 0:
                inside = m & (at >= 0) & (at < n)
        else:
            inside = m & (at >= 0) & (at < n)
        acc += tl.load(x + row * n + at, mask=inside, other=0.0) * tl.load(w + t)
    tl.store(out + row * n_out + i, acc, mask=m)


@triton.jit
def causal_in_place(x, w, n, BLOCK: tl.constexpr, TAPS: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    for start in range(((n - 1) // BLOCK) * BLOCK, -1, -BLOCK):
        acc = tl.zeros((BLOCK,), tl.float32)
        for t in tl.static_range(TAPS):
            at = start + i - (TAPS - 1) + t
            acc += tl.load(x + row * n + at, mask=(at >= 0) & (at < n), other=0.0) * tl.load(w + t)
        tl.debug_barrier()
        tl.store(x + row * n + start + i, acc, mask=start + i < n)


def launch(form="plain", pad=2, dilation=1, out=None, x=None):
    x, w = torch.randn(3, 50) if x is None else x, torch.randn(5)
    want = functional.conv1d(x[:, None], w[None, None], padding=pad, dilation=dilation)[:, 0]
    out = torch.empty(want.shape) if out is None else out
    n_out = out.shape[1]
    conv1d[(3, triton.cdiv(n_out, 32))](x, w, out, 50, n_out, pad, dilation, TAPS=5, BLOCK=32, FORM=form)
    return out, want


@cases.bug("neighbour's row")
def left_padding_reads_the_row_before():
    launch("left open")


@cases.bug("neighbour's row")
def right_padding_reads_the_row_after():
    launch("right open")


@cases.bug("loop")
def mask_of_the_first_tap_serves_all_taps():
    launch("once")


@cases.bug("alias")
def in_place_while_neighbours_still_read():
    x = torch.randn(3, 50)
    launch(x=x, out=x)


@cases.clean("masked wild pointers")
def padding_is_masked_on_both_sides():
    return launch()


@cases.clean("masked wild pointers")
def wide_taps_point_far_outside():
    return launch(pad=60, dilation=30)


@cases.clean("overlapping reads")
def no_padding_but_the_last_block_is_short():
    return launch(pad=0)


@cases.clean("in place")
def one_program_walks_its_row_backwards():
    x, w = torch.randn(3, 50), torch.randn(5)
    want = functional.conv1d(functional.pad(x, (4, 0))[:, None], w[None, None])[:, 0]
    causal_in_place[(3,)](x, w, 50, BLOCK=32, TAPS=5)
    return x, want
