"""Triton kernels with unusual casts, views, arguments and errors; run with `--device compiled`."""

import pytest
import torch
import triton
import triton.language as tl

from minidl import testing
from minidl.runtime import launch

pytestmark = pytest.mark.skipif(not launch.COMPILED_CPU, reason="kernels are not compiled for the CPU here")


@triton.jit
def _square_kernel(p_x, p_y):
    """x is a view of a view of an expression."""
    o = tl.arange(0, 16)
    b_x = tl.broadcast_to((tl.load(p_x + o) * 2)[:, None], (16, 16))
    tl.store(p_y + o[:, None] * 16 + o[None, :], tl.dot(b_x, b_x, input_precision="ieee"))


def test_a_product_of_views_of_an_expression():
    x, y = torch.arange(16.0), torch.empty(16, 16)
    testing.compiled(_square_kernel)[(1,)](x, y)
    both = (2 * x)[:, None].expand(16, 16)
    assert torch.equal(y, both @ both)


@triton.jit
def _cast_kernel(p_x, p_bytes, p_halves, p_values, ADDRESS: tl.constexpr):
    o = tl.arange(0, 32)
    tl.store(p_bytes + o, tl.load((p_x + o).to(tl.pointer_type(tl.int8), bitcast=True)))
    p_each = (p_x + o).to(tl.int64).to(tl.pointer_type(tl.int16)) if ADDRESS else p_x.to(tl.pointer_type(tl.int16)) + o
    tl.store(p_halves + o, tl.load(p_each))
    tl.store(p_values + o, tl.load((p_x.to(tl.pointer_type(tl.int8)) + 4 * o).to(tl.pointer_type(tl.float32))))


@pytest.mark.parametrize("address", [False, True])
def test_pointers_that_are_cast_keep_their_distances(address):
    x = torch.randn(32)
    first, halves, values = torch.empty(32, dtype=torch.int8), torch.empty(32, dtype=torch.int16), torch.empty(32)
    testing.compiled(_cast_kernel)[(1,)](x, first, halves, values, address)
    assert torch.equal(first, x.view(torch.int8)[::4])
    assert torch.equal(halves, x.view(torch.int16)[::2] if address else x.view(torch.int16)[:32])
    assert torch.equal(values, x)


@triton.jit
def _unsigned_kernel(p_x, p_y, p_z, p_large):
    o = tl.arange(0, 32)
    tl.store(p_y + o, tl.load(p_x + o).to(tl.uint32))
    at = (o - 1).to(tl.uint32).to(tl.int64)  # 2^32 - 1 for the first
    tl.store(p_z + o, tl.load(p_x + at, mask=at < 32, other=-1.0))
    tl.store(p_large + o, o * 0.0 + 1e39)


def test_unsigned_numbers():
    x, y, z = torch.arange(32.0) * 1.3e8, torch.empty(32, dtype=torch.uint32), torch.empty(32)
    large = torch.empty(32)
    testing.compiled(_unsigned_kernel)[(1,)](x, y, z, large)
    assert y.tolist() == [int(value) for value in x.tolist()]
    assert torch.equal(z, torch.cat([torch.tensor([-1.0]), x[:-1]]))
    assert large.isinf().all()


@triton.jit
def _arguments_kernel(p_y, first, SIZES: tl.constexpr, pair, NONE: tl.constexpr, last):
    tl.store(p_y, first + 10 * pair[0] + 100 * pair[1] + 1000 * SIZES[1])
    tl.store(p_y + 1, last)


@pytest.mark.parametrize("none", [(), (7, 8, 9), None])
def test_constants_that_are_tuples_take_no_place(none):
    y = torch.empty(2)
    testing.compiled(_arguments_kernel)[(1,)](y, 1.5, (5, 6), (2, 3), none, 4e30)
    assert y.tolist() == [6321.5, float(torch.tensor(4e30))]
    launch.run(_arguments_kernel, (1,), y, 2.5, (5, 6), (2, 3), none, -1.0)
    assert y.tolist() == [6322.5, -1.0]


def test_an_argument_that_is_missing_by_position_is_named():
    with pytest.raises(TypeError, match=r"_arguments_kernel .*2 arguments by position, expected all but constants"):
        launch.run(_arguments_kernel, (1,), torch.empty(2), 1.5, SIZES=(5, 6), pair=(2, 3), NONE=None, last=1.0)


@triton.jit
def _loop_kernel(p_x, n, EIGHTS: tl.constexpr):
    for i in range(n):
        for _ in range(i):
            if EIGHTS:
                tl.store((p_x + i).to(tl.pointer_type(tl.float8e5)) + tl.arange(0, 2), tl.zeros([2], tl.float8e5))
            else:
                tl.atomic_cas(p_x + i, 0, 1)


@pytest.mark.parametrize(("eights", "what"), [(False, "tt.atomic_cas"), (True, "the type f8E5M2")])
def test_what_is_not_supported_in_a_loop_is_named_once(eights, what):
    with pytest.raises(NotImplementedError) as error:
        testing.compiled(_loop_kernel)[(1,)](torch.zeros(4, dtype=torch.int32), 4, eights)
    text = str(error.value)
    assert text.startswith(__file__) or __file__.endswith(text.partition(":")[0])
    assert text.count("is not supported on the CPU") == 1
    assert what in text


@triton.jit
def _early_kernel(p_x, n):
    if tl.load(p_x) > n:
        return
    tl.store(p_x, n)


def test_an_early_return_is_named():
    with pytest.raises(NotImplementedError, match="an early return is not supported on the CPU"):
        testing.compiled(_early_kernel)[(1,)](torch.zeros(1, dtype=torch.int32), 3)
