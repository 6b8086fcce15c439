import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def matmul_pointers(
    a, b, c, M, N, K, rows_a, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    CHECK_A: tl.constexpr, CHECK_C: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    p_a = tl.make_block_ptr(a, (rows_a, K), (K, 1), (m, 0), (BM, BK), (1, 0))
    p_b = tl.make_block_ptr(b, (K, N), (N, 1), (0, n), (BK, BN), (1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        b_a = tl.load(p_a, boundary_check=CHECK_A, padding_option="zero")
        b_b = tl.load(p_b, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(b_a, b_b, acc, input_precision="ieee")
        p_a = tl.advance(p_a, (0, BK))
        p_b = tl.advance(p_b, (BK, 0))
    p_c = tl.make_block_ptr(c, (M, N), (N, 1), (m, n), (BM, BN), (1, 0))
    tl.store(p_c, acc, boundary_check=CHECK_C)


@triton.jit
def matmul_descriptors(a, b, c, M, N, K, rows_c, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    d_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    d_b = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    d_c = tl.make_tensor_descriptor(c, [rows_c, N], [N, 1], [BM, BN])
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(d_a.load([m, k]), d_b.load([k, n]), acc, input_precision="ieee")
    d_c.store([m, n], acc)


@triton.jit
def scale(d_x, d_out, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    d_out.store([m, n], d_x.load([m, n]) * 2)


def launch_pointers(check_a=(0, 1), check_c=(0, 1), rows_a=50):
    a, b, c = torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70)
    grid = 2, 3
    matmul_pointers[grid](a, b, c, 50, 70, 40, rows_a, BM=32, BN=32, BK=16, CHECK_A=check_a, CHECK_C=check_c)
    return c, a @ b


def launch_descriptors(rows_c):
    a, b, c = torch.randn(50, 40), torch.randn(40, 68), torch.empty(50, 68)
    matmul_descriptors[(2, 3)](a, b, c, 50, 68, 40, rows_c, BM=32, BN=32, BK=16)
    return c, a @ b


@cases.bug("block pointers")
def rows_not_checked_at_the_load():
    launch_pointers(check_a=(1,))


@cases.bug("block pointers")
def columns_not_checked_at_the_store():
    launch_pointers(check_c=(0,))


@cases.bug("block pointers")
def shape_says_more_rows_than_there_are():
    launch_pointers(rows_a=64)


@cases.bug("block pointers")
def descriptor_of_the_output_says_more_rows_than_there_are():
    launch_descriptors(rows_c=64)


@cases.clean("block pointers")
def all_edges_checked():
    return launch_pointers()


@cases.clean("block pointers")
def tiles_hang_over_the_ends_of_descriptors():
    return launch_descriptors(rows_c=50)


@cases.clean("block pointers")
def unchecked_axis_fits_whole_tiles():
    a, b, c = torch.randn(64, 40), torch.randn(40, 70), torch.empty(64, 70)
    matmul_pointers[(2, 3)](a, b, c, 64, 70, 40, 64, BM=32, BN=32, BK=16, CHECK_A=(1,), CHECK_C=(1,))
    return c, a @ b


@cases.clean("surplus programs")
def programs_wholly_outside_the_descriptors():
    x, out = torch.randn(20, 24), torch.empty(20, 24)
    d_x, d_out = (TensorDescriptor(t, [20, 24], [24, 1], [16, 16]) for t in (x, out))
    scale[(3, 3)](d_x, d_out, BM=16, BN=16)
    return out, x * 2
