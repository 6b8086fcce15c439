import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def gather(table, ids, out, n_ids, rows, first, dim, table_row, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    i = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < dim
    if FORM == "guarded":
        row = tl.load(ids + i, mask=i < n_ids, other=-1)
        m = m & (row >= 0) & (row < rows)
    elif FORM == "narrow":
        row = tl.load(ids + i).to(tl.int8)
    elif FORM == "half":
        row = tl.load(ids + i).to(tl.float16).to(tl.int32)
    else:
        row = tl.load(ids + i)
    if FORM == "shard":
        start = row.to(tl.int64) * table_row - first * table_row
    elif FORM == "wide shard":
        start = (row - first).to(tl.int64) * table_row
    else:
        start = row.to(tl.int64) * table_row
    tl.store(out + i * dim + c, tl.load(table + start + c, mask=m, other=0.0), mask=c < dim)


@triton.jit
def gather_blocks(table, ids, out, dim, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    row = tl.load(ids + tl.program_id(0))
    b = tl.load(table + row * dim + c, mask=c < dim)
    tl.store(out + tl.program_id(0) * dim + c, b, mask=c < dim)


def launch(ids, rows=60, form="plain", first=0):
    table, out = torch.randn(rows, 24), torch.empty(len(ids), 24)
    gather[(len(ids),)](table, ids, out, len(ids), rows, first, 24, 24, BLOCK=32, FORM=form)
    return table, out


@cases.bug("bounds")
def padding_id_of_minus_one_is_looked_up():
    launch(torch.tensor([3, 59, -1, 7]))


@cases.bug("truncation")
def row_number_in_eight_bits():
    launch(torch.tensor([3, 190, 100, 7]), rows=200, form="narrow")


@cases.bug("overflow")
def start_of_the_shard_exceeds_31_bits():
    first = 100_000_000
    launch(torch.tensor([3, 59, 12, 7], dtype=torch.int32) + first, form="shard", first=first)


@cases.bug("truncation")
def row_number_passes_through_half_precision():
    launch(torch.tensor([3, 4095, 12, 2051]), rows=4096, form="half")


@cases.clean("masked wild pointers")
def ids_outside_the_table_are_masked():
    ids = torch.tensor([3, 1 << 30, -1, 7])
    table, out = launch(ids, form="guarded")
    want = table[ids.clamp(0, 59)]
    want[1:3] = 0
    return out, want


@cases.clean("same value")
def second_axis_of_the_grid_repeats_the_work():
    table, ids, out = torch.randn(60, 17), torch.tensor([3, 59, 3, 7]), torch.empty(4, 17)
    gather_blocks[(4, 2)](table, ids, out, 17, BLOCK=32)
    return out, table[ids]


@cases.clean("just below overflow")
def shard_subtracted_before_the_product():
    first = 100_000_000
    ids = torch.tensor([3, 59, 12, 7], dtype=torch.int32)
    table, out = launch(ids + first, form="wide shard", first=first)
    return out, table[ids]


@cases.clean("narrow index")
def row_number_in_eight_bits_that_suffice():
    ids = torch.tensor([3, 127, 100, 7])
    table, out = launch(ids, rows=128, form="narrow")
    return out, table[ids]
