"""A kernel under triton.autotune, which without a GPU cannot choose: its first configuration is checked."""

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


def copies(first):
    """A kernel that copies n elements, in blocks of this size or of 32; one of 16 copies one too many."""

    @triton.autotune([triton.Config({"BLOCK": first}), triton.Config({"BLOCK": 32})], key=["n"])
    @triton.jit
    def copy(x, y, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n + (BLOCK == 16)
        tl.store(y + i, tl.load(x + i, mask=mask, other=0), mask=mask)

    return copy


def test_the_first_configuration_is_checked():
    x, y = torch.randn(50), torch.empty(50)
    right, wrong = copies(64), copies(16)
    with sanitize():
        right[lambda meta: (triton.cdiv(50, meta["BLOCK"]),)](x, y, 50)
    assert x.equal(y)
    assert len(right.configs) == 2
    with pytest.raises(SanitizerError, match="1 past the end"), sanitize():
        wrong[lambda meta: (triton.cdiv(50, meta["BLOCK"]),)](x, y, 50)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 32, 64)], key=["n"])
@triton.jit
def fussy(x, y, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 16, "too small")
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n + (BLOCK == 64)
    tl.store(y + i, tl.load(x + i, mask=mask, other=0), mask=mask)


def test_a_configuration_that_a_static_assertion_refuses_is_passed_over():
    x, y = torch.randn(50), torch.empty(50)
    with sanitize():
        fussy[lambda meta: (triton.cdiv(50, meta["BLOCK"]),)](x, y, 50)
    assert x.equal(y)


def large(configurations, arguments, **_):
    return [each for each in configurations if arguments["n"] % each.kwargs["BLOCK"] == 0]


@triton.autotune(
    [triton.Config({"BLOCK": block}) for block in (64, 32)], key=["n"], prune_configs_by={"early_config_prune": large}
)
@triton.jit
def unmasked(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))


def test_a_configuration_that_the_kernel_prunes_is_passed_over():
    x, y = torch.randn(96), torch.empty(96)
    with sanitize():
        unmasked[lambda meta: (triton.cdiv(96, meta["BLOCK"]),)](x, y, 96)
    assert x.equal(y)
    assert len(unmasked.configs) == 2
