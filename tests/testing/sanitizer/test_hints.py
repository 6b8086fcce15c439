"""Hints to the compiler: those that are true are left alone, whatever number they name."""

import pytest
import torch
import triton
import triton.language as tl

from minidl.runtime import launch
from minidl.testing import SanitizerError, sanitize

pytestmark = [
    pytest.mark.skipif(not launch.INTERPRETED, reason="the sanitizer is for the interpreter"),
    pytest.mark.unsanitized,
]


@triton.jit
def contiguous_kernel(x, N: tl.constexpr, SAID: tl.constexpr, STEP: tl.constexpr):
    tl.store(x + tl.max_contiguous(tl.arange(0, N) * STEP, SAID), 1)


@triton.jit
def pointers_kernel(x, N: tl.constexpr, MULTIPLE: tl.constexpr):
    tl.store(tl.multiple_of(tl.max_contiguous(x + tl.arange(0, N), N), MULTIPLE), 1)


@pytest.mark.parametrize(
    ("length", "said", "step", "right"),
    [
        (8, 8, 1, True), (8, 16, 1, True), (8, 3, 1, True), (8, 1, 2, True), (1, 4, 1, True),
        (8, 4, 2, False), (8, 3, 2, False), (8, 0, 1, False),
    ],
)  # fmt: skip
def test_contiguity(length, said, step, right):
    def call():
        with sanitize():
            contiguous_kernel[(1,)](torch.zeros(64), N=length, SAID=said, STEP=step)

    if right:
        call()
    else:
        with pytest.raises(SanitizerError, match="max_contiguous"):
            call()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float64])
def test_pointers(dtype):
    with sanitize():
        pointers_kernel[(1,)](torch.zeros(64, dtype=dtype), N=16, MULTIPLE=16)
    with pytest.raises(SanitizerError, match="multiple_of"), sanitize():
        pointers_kernel[(1,)](torch.zeros(64, dtype=dtype)[1:], N=16, MULTIPLE=16)
