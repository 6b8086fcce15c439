"""Masked lanes without `other` are told of past libdevice and arithmetic of bfloat16."""

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from minidl.runtime import launch
from minidl.testing import SanitizerError, sanitize

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="the sanitizer is for the interpreter"),
    pytest.mark.unsanitized,
]


@triton.jit
def curved(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, libdevice.tanh(tl.load(x + i, mask=i < n)))


@triton.jit
def added(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    b = tl.load(x + i, mask=i < n)
    tl.store(y + i, b * b + b)


@triton.jit
def in_bits(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    b = tl.load(x + i, mask=i < n)
    tl.store(y.to(tl.pointer_type(tl.int32)) + i, b.to(tl.int32, bitcast=True))


@triton.jit
def counted(x, y, n, BLOCK: tl.constexpr, MASKED: tl.constexpr = False):
    i = tl.arange(0, BLOCK)
    b = tl.load(x + i, mask=i < n)
    tl.store(y + tl.arange(0, 8), tl.histogram(b, 8, mask=i < n) if MASKED else tl.histogram(b, 8))


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(curved, torch.float32), (added, torch.bfloat16), (in_bits, torch.float32), (counted, torch.int32)],
)
def test_masked_lanes_are_told_of(kernel, dtype):
    x, y = torch.randn(50).to(dtype), torch.empty(64, dtype=dtype)
    with pytest.raises(SanitizerError, match="masks off without `other`"), sanitize():
        kernel[(1,)](x, y, 50, BLOCK=64)


def test_a_histogram_that_leaves_masked_lanes_out_is_right():
    y = torch.empty(8, dtype=torch.int32)
    with sanitize():
        counted[(1,)](torch.full((50,), 3, dtype=torch.int32), y, 50, BLOCK=64, MASKED=True)
    assert y.tolist() == [0, 0, 0, 50, 0, 0, 0, 0]
