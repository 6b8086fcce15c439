import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def copy_rows(x, out, n_cols, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < n_cols
    b = tl.load(x + row * x_row + c * x_col, mask=m, other=0.0)
    tl.store(out + row * out_row + c * out_col, b, mask=m)


@triton.jit
def copy_aligned_rows(x, out, n_cols, x_row, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = tl.multiple_of(row * x_row, ALIGN)
    c = tl.max_contiguous(tl.arange(0, BLOCK), BLOCK)
    m = c < n_cols
    tl.store(out + row * n_cols + c, tl.load(x + start + c, mask=m, other=0.0), mask=m)


@triton.jit
def resample(x, out, n, step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    source = (i * step) >> 16
    tl.store(out + i, tl.load(x + source, mask=m, other=0.0), mask=m)


@triton.jit
def reverse(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + (n - 1) - i, mask=i < n, other=0.0), mask=i < n)


def launch(x, out):
    copy_rows[(x.shape[0],)](x, out, x.shape[1], *x.stride(), *out.stride(), BLOCK=64)


@cases.bug("strides")
def rows_of_a_padded_output_taken_as_dense():
    x, out = torch.randn(8, 33), torch.zeros(8, 40)[:, :33]
    copy_rows[(8,)](x, out, 33, 33, 1, 33, 1, BLOCK=64)


@cases.bug("bounds")
def length_of_another_tensor_with_every_second_element():
    x, out = torch.randn(32)[::2], torch.empty(1, 24)
    copy_rows[(1,)](x, out, out.shape[1], 0, x.stride(0), 24, 1, BLOCK=32)


@cases.bug("alignment")
def rows_of_33_said_to_start_at_multiples_of_16():
    x, out = torch.randn(8, 33), torch.empty(8, 33)
    copy_aligned_rows[(8,)](x, out, 33, x.stride(0), ALIGN=16, BLOCK=64)


@cases.bug("overflow")
def fixed_point_position_exceeds_31_bits():
    x, out = torch.randn(5 * 8192), torch.empty(8192)
    resample[(8,)](x, out, 8192, 5 << 16, BLOCK=1024)


@cases.clean("padding")
def columns_of_a_wider_table():
    x, out = torch.randn(8, 40)[:, 3:36], torch.zeros(8, 48)[:, :33]
    launch(x, out)
    return out, x


@cases.clean("overlapping reads")
def sliding_windows_of_one_line():
    x, out = torch.randn(40).as_strided((8, 33), (1, 1)), torch.empty(8, 33)
    launch(x, out)
    return out, x


@cases.clean("negative stride")
def read_from_the_last_element_backwards():
    x, out = torch.randn(33), torch.empty(33)
    reverse[(1,)](x, out, 33, BLOCK=64)
    return out, x.flip(0)


@cases.clean("just below overflow")
def fixed_point_position_just_fits_31_bits():
    x, out = torch.randn(5 * 6553), torch.empty(6553)
    resample[(7,)](x, out, 6553, 5 << 16, BLOCK=1024)
    return out, x[::5]
