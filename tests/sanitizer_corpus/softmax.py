import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def softmax(x, out, n_cols, x_row, out_row, BLOCK: tl.constexpr, FORM: tl.constexpr = "other"):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < n_cols
    if FORM == "unmasked":
        b = tl.load(x + row * x_row + c)
    elif FORM == "other":
        b = tl.load(x + row * x_row + c, mask=m, other=float("-inf"))
    else:
        b = tl.load(x + row * x_row + c, mask=m)
        if FORM == "where":
            b = tl.where(m, b, float("-inf"))
    e = tl.exp(b - tl.max(b, axis=0))
    tl.store(out + row * out_row + c, e / tl.sum(e, axis=0), mask=m)


@triton.jit
def softmax_blocks(x, out, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row * n_cols
    out += row * n_cols
    c = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        b = tl.load(x + start + c, mask=start + c < n_cols, other=float("-inf"))
        higher = tl.maximum(top, tl.max(b, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(b - higher), axis=0)
        top = higher
    mine = tl.program_id(1) * BLOCK + c
    b = tl.load(x + mine, mask=mine < n_cols, other=0.0)
    tl.store(out + mine, tl.exp(b - top) / total, mask=mine < n_cols)


def launch(x, out, **flags):
    rows, cols = x.shape
    softmax[(rows,)](x, out, cols, x.stride(0), out.stride(0), BLOCK=triton.next_power_of_2(cols), **flags)


@cases.bug("undefined lanes")
def maximum_over_lanes_nobody_loaded():
    x = torch.randn(6, 50)
    launch(x, torch.empty_like(x), FORM="nothing")


@cases.bug("neighbour's row")
def block_runs_on_into_the_next_row():
    x = torch.randn(6, 50)
    launch(x, torch.empty_like(x), FORM="unmasked")


@cases.bug("alias")
def in_place_while_other_blocks_still_read_the_row():
    x = torch.randn(4, 100)
    softmax_blocks[(4, 2)](x, x, 100, BLOCK=64)


@cases.bug("strides")
def dense_output_walked_with_the_padded_input_rows():
    x, out = torch.randn(6, 64)[:, :50], torch.empty(6, 50)
    softmax[(6,)](x, out, 50, x.stride(0), x.stride(0), BLOCK=64)


@cases.clean("undefined lanes unused")
def undefined_lanes_are_replaced_before_use():
    x, out = torch.randn(6, 50), torch.empty(6, 50)
    launch(x, out, FORM="where")
    return out, x.softmax(1)


@cases.clean("in place")
def in_place_with_one_program_a_row():
    x = torch.randn(6, 50)
    want = x.softmax(1)
    launch(x, x)
    return x, want


@cases.clean("overlapping reads")
def several_programs_read_the_whole_row():
    x, out = torch.randn(4, 100), torch.empty(4, 100)
    softmax_blocks[(4, 2)](x, out, 100, BLOCK=64)
    return out, x.softmax(1)


@cases.clean("padding")
def rows_padded_in_input_and_output():
    x, out = torch.randn(6, 64)[:, :50], torch.zeros(6, 56)[:, :50]
    launch(x, out)
    return out, x.softmax(1)
