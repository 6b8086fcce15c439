import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def transpose(x, out, M, N, x_m, x_n, out_n, out_m, TILE: tl.constexpr, SWAP: tl.constexpr = False):
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (m[:, None] < M) & (n[None, :] < N)
    b = tl.load(x + m[:, None] * x_m + n[None, :] * x_n, mask=inside, other=0.0)
    if SWAP:
        inside_out = (n[:, None] < M) & (m[None, :] < N)
    else:
        inside_out = (n[:, None] < N) & (m[None, :] < M)
    tl.store(out + n[:, None] * out_n + m[None, :] * out_m, tl.trans(b), mask=inside_out)


@triton.jit
def swap_tiles(x, N, TILE: tl.constexpr, HALF: tl.constexpr, BARRIER: tl.constexpr):
    i = tl.program_id(0)
    j = tl.program_id(1)
    if HALF and i > j:
        return
    r = i * TILE + tl.arange(0, TILE)
    c = j * TILE + tl.arange(0, TILE)
    upper = x + r[:, None] * N + c[None, :]
    lower = x + c[:, None] * N + r[None, :]
    a = tl.load(upper)
    b = tl.load(lower)
    if BARRIER:
        tl.debug_barrier()
    tl.store(lower, tl.trans(a))
    if i != j:
        tl.store(upper, tl.trans(b))


def launch(x, out, **flags):
    M, N = x.shape
    transpose[(triton.cdiv(M, 16), triton.cdiv(N, 16))](x, out, M, N, *x.stride(), *out.stride(), TILE=16, **flags)


@cases.bug("bounds")
def bounds_not_exchanged_at_the_store():
    launch(torch.randn(20, 50), torch.empty(50, 20), SWAP=True)


@cases.bug("strides")
def output_walked_with_the_strides_of_the_input():
    x, out = torch.randn(20, 50), torch.empty(50, 20)
    transpose[(2, 4)](x, out, 20, 50, *x.stride(), *x.stride(), TILE=16)


@cases.bug("race of programs")
def both_mirror_tiles_swap_in_place():
    swap_tiles[(2, 2)](torch.randn(32, 32), 32, TILE=16, HALF=False, BARRIER=True)


@cases.clean("in place")
def one_program_for_each_pair_of_tiles():
    x = torch.randn(32, 32)
    want = x.t().clone()
    swap_tiles[(2, 2)](x, 32, TILE=16, HALF=True, BARRIER=True)
    return x, want


@cases.clean("in place")
def every_lane_loads_and_stores_at_its_own_address():
    x = torch.randn(32, 32)
    want = x.t().clone()
    swap_tiles[(2, 2)](x, 32, TILE=16, HALF=True, BARRIER=False)
    return x, want


@cases.clean("padding")
def tile_larger_than_the_matrix():
    x, out = torch.randn(5, 3), torch.empty(3, 5)
    launch(x, out)
    return out, x.t()


@cases.clean("strides")
def input_is_a_transposed_view():
    x, out = torch.randn(50, 20).t(), torch.empty(50, 20)
    launch(x, out)
    return out, x.t()


@cases.clean("strides")
def output_is_a_transposed_view_of_part_of_a_table():
    x, out = torch.randn(20, 50), torch.zeros(24, 60)[2:22, 5:55].t()
    launch(x, out)
    return out, x.t()
