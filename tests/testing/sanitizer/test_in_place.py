"""Kernels that write over what they read, each element after the load that it depends on."""

import pytest
import torch
import triton
import triton.language as tl

from minidl.runtime import launch
from minidl.testing import sanitize

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="the sanitizer is for the interpreter"),
    pytest.mark.unsanitized,
]


@triton.jit
def transposed(x, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(x + i + j * N, tl.trans(tl.load(x + i * N + j)) * 2)


@triton.jit
def reshaped(x, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(x + i * N + j, tl.reshape(tl.load(x + tl.arange(0, N * N)), (N, N)) * 2)


@triton.jit
def gathered(x, N: tl.constexpr):
    back = N * N - 1 - tl.arange(0, N * N)
    tl.store(x + tl.arange(0, N * N), tl.gather(tl.load(x + back), back, 0) * 2)


@triton.jit
def joined(x, N: tl.constexpr):
    i = 2 * tl.arange(0, N * N // 2)
    first, second = tl.load(x + i), tl.load(x + i + 1)
    tl.store(x + i[:, None] + tl.arange(0, 2)[None, :], tl.join(first * 2, second * 2))


@triton.jit
def split(x, N: tl.constexpr):
    i = 2 * tl.arange(0, N * N // 2)
    first, second = tl.split(tl.load(x + i[:, None] + tl.arange(0, 2)[None, :]))
    tl.store(x + i, first * 2)
    tl.store(x + i + 1, second * 2)


@pytest.mark.parametrize("kernel", [transposed, reshaped, gathered, joined, split], ids=lambda kernel: kernel.__name__)
def test_no_barrier_is_needed(kernel):
    x = torch.randn(64)
    expected = x * 2
    with sanitize():
        kernel[(1,)](x, N=8)
    assert x.equal(expected)
