"""What Triton's interpreter lacks and kernels written for a GPU use."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as of_cuda

from minidl.runtime import launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="kernels are compiled here, nothing is interpreted")


@triton.jit
def scaled(x, y, factor, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0) * factor.to(tl.float32), mask=i < n)


def test_a_float_is_a_float32_scalar():
    x, y = torch.randn(50).half(), torch.empty(50)
    scaled[(1,)](x, y, 1 / 3, 50, BLOCK=64)
    assert y.equal(x.float() * torch.tensor(1 / 3))  # a float16 block times a float32 scalar is float32


@triton.jit
def counted(y, n, step: tl.constexpr):
    for i in range(n):
        place = i.to(tl.int64)
        for j in tl.range(0, step):
            tl.store(y + place * step + j.to(tl.int64), (i * step).to(tl.float32) + j)


def test_the_number_of_a_loop_is_a_scalar():
    y = torch.empty(12)
    counted[(1,)](y, 4, step=3)
    assert y.equal(torch.arange(12.0))


@triton.jit
def chosen(x, y, n, wanted, BLOCK: tl.constexpr, ALL: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0)
    mask = (value > 0 or value == wanted) and i < n
    if ALL and n > 0:
        mask = not (i >= n)
    tl.store(y + i, value, mask=mask and value != 3)


@pytest.mark.parametrize("everything", [False, True])
def test_words_between_blocks_are_those_of_each_lane(everything):
    x, y = torch.arange(-20, 30), torch.full((64,), 99)
    chosen[(1,)](x, y, 50, -7, BLOCK=64, ALL=everything)
    kept = (x != 3) & ((x > 0) | (x == -7) | everything)
    assert y[:50].equal(torch.where(kept, x, 99))
    assert (y[50:] == 99).all()


@triton.jit
def curved(x, y, z, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    b = tl.load(x + i)
    tl.store(y + i, libdevice.tanh(b) + of_cuda.erf(b) + libdevice.pow(b * b, 0.5))
    tl.store(z + i, libdevice.fast_expf(b))


def test_functions_of_libdevice():
    x, y, z = torch.randn(64), torch.empty(64), torch.empty(64)
    curved[(1,)](x, y, z, BLOCK=64)
    torch.testing.assert_close(y, x.tanh() + x.erf() + x.abs())
    torch.testing.assert_close(z, x.exp())


@triton.jit
def counted_bits(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, libdevice.popc(tl.load(x + i)))


def test_a_function_that_is_lacking_is_named():
    with pytest.raises(Exception, match="the interpreter has no __nv_popc"):
        counted_bits[(1,)](torch.ones(4, dtype=torch.int32), BLOCK=4)


@triton.jit
def in_bfloat16(x, y, z, product, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(x + i * N + j), tl.load(y + i * N + j)
    tl.store(z + i * N + j, tl.where(a < b, a * b + a, -b))
    tl.store(product + i * N + j, tl.dot(a, b))


def test_arithmetic_of_bfloat16():
    x, y = torch.randn(2, 16, 16).bfloat16()
    z, product = torch.empty_like(x), torch.empty(16, 16)
    in_bfloat16[(1,)](x, y, z, product, N=16)
    assert z.equal(torch.where(x < y, x * y + x, -y))
    torch.testing.assert_close(product, x.float() @ y.float())


@triton.jit
def from_integers(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


def test_integers_become_bfloat16():
    x, y = torch.arange(-32, 32), torch.empty(64, dtype=torch.bfloat16)
    from_integers[(1,)](x, y, BLOCK=64)
    assert y.equal(x.bfloat16())
