"""What is special to views and copies: which memory the result lies in, and gradients in another dtype."""

import pytest
import torch

from minidl.autograd import no_grad
from minidl.ops import indexing, join
from minidl.ops.shape import (
    clone,
    contiguous,
    expand,
    flatten,
    permute,
    reshape,
    squeeze,
    to,
    transpose,
    transposed,
    unsqueeze,
)
from minidl.tensors import Tensor, default_device


def numbers(*shape, dtype=torch.float32, requires_grad=False):
    count = torch.Size(shape).numel()
    return Tensor(torch.arange(count, device=default_device()).to(dtype).view(shape), requires_grad)


def shares(a, b):
    return a.data.untyped_storage().data_ptr() == b.data.untyped_storage().data_ptr()


VIEWS = {
    "reshape": lambda x: reshape(x, 3, 2),
    "flatten": flatten,
    "permute": lambda x: permute(x, 1, 0),
    "transpose": lambda x: transpose(x, 0, 1),
    "transposed": transposed,
    "expand": lambda x: expand(x, 4, 2, 3),
    "squeeze": squeeze,
    "unsqueeze": lambda x: unsqueeze(x, 1),
    "getitem": lambda x: indexing.getitem(x, (slice(None), 1)),
    "contiguous": contiguous,
    "to": lambda x: to(x, x.dtype),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shares_memory(name):
    x = numbers(2, 3)
    y = VIEWS[name](x)
    assert shares(x, y)
    with no_grad():
        x.fill_(7.0)
    assert y.data.eq(7.0).all()


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: reshape(transposed(x), 6),
        lambda x: contiguous(transposed(x)),
        lambda x: to(x, torch.float64),
        lambda x: join.cat([x]),
        lambda x: join.stack([x]),
        clone,
    ],
    ids=["reshape", "contiguous", "to", "cat", "stack", "clone"],
)
def test_a_copy_does_not_share_memory(copy):
    x = numbers(2, 3)
    y = copy(x)
    before = y.tolist()
    assert not shares(x, y)
    x.zero_()
    assert y.tolist() == before


def test_a_change_of_a_view_is_seen_by_backward():
    """A view of a saved tensor counts as that tensor."""
    from tests.autograd.functions import Square

    x = numbers(4, requires_grad=True)
    y = Square.apply(x)
    with no_grad():
        indexing.getitem(x, slice(1, 2)).zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward(numbers(4))


@pytest.mark.parametrize("target", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_gradient_returns_in_the_dtype_of_its_input(target):
    x = numbers(3, requires_grad=True)
    y = to(x, target)
    assert y.dtype == target
    y.backward(Tensor(torch.full((3,), 1.5, dtype=target, device=default_device())))
    assert x.grad.dtype == torch.float32
    assert x.grad.tolist() == [1.5, 1.5, 1.5]


def test_to_takes_device_and_dtype_in_any_form():
    x = numbers(3)
    where = x.device
    for moved in (
        to(x, where, torch.float64),
        to(x, torch.float64, device=where),
        to(x, device=str(where), dtype=torch.float64),
    ):
        assert (moved.device, moved.dtype) == (where, torch.float64)
    assert to(x, torch.int64).tolist() == [0, 1, 2]


def test_a_tensor_with_a_gradient_does_not_become_an_integer():
    with pytest.raises(TypeError, match=r"cannot become torch.int64; use .detach\(\) first"):
        to(numbers(3, requires_grad=True), torch.int64)


def test_cat_gives_each_part_its_own_gradient():
    a, b = numbers(2, 1, requires_grad=True), numbers(2, 2, requires_grad=True)
    join.cat([a, b], -1).backward(numbers(2, 3))
    assert a.grad.tolist() == [[0], [3]]
    assert b.grad.tolist() == [[1, 2], [4, 5]]
    assert not shares(a.grad, b.grad)


def test_cat_of_two_dtypes_gives_each_gradient_in_its_own():
    a, b = to(numbers(2), torch.float16), numbers(2, requires_grad=True)
    a = Tensor(a.data, True)
    joined = join.cat([a, b, to(numbers(2), torch.int64)])
    joined.backward(numbers(6))
    assert (joined.dtype, joined.tolist()) == (torch.float32, [0, 1] * 3)
    assert (a.grad.dtype, a.grad.tolist()) == (torch.float16, [0, 1])
    assert (b.grad.dtype, b.grad.tolist()) == (torch.float32, [2, 3])


def test_cat_of_nothing():
    with pytest.raises(ValueError, match="cat: got no tensors"):
        join.cat([])


def test_cat_gives_no_gradient_to_parts_that_want_none():
    a, b = numbers(2), numbers(2, requires_grad=True)
    join.cat([a, b]).backward(numbers(4))
    assert a.grad is None
    assert b.grad.tolist() == [2, 3]


def test_getitem_twice_adds_up():
    x = numbers(4, requires_grad=True)
    first = indexing.getitem(x, slice(0, 3))
    join.cat([first, indexing.getitem(x, slice(2, 4))]).backward(Tensor(torch.ones(5, device=default_device())))
    assert x.grad.tolist() == [1, 1, 2, 1]


def test_integers_have_views_too():
    x = Tensor(torch.arange(6, device=default_device()))
    assert reshape(x, 2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert indexing.getitem(x, 2).item() == 2
    assert join.cat([x, x]).dtype == torch.int64


@pytest.mark.gpu
def test_a_gradient_returns_to_the_device_of_its_input():
    x = Tensor(torch.ones(3), requires_grad=True)
    to(x, "cuda").backward(Tensor(torch.full((3,), 2.0, device="cuda")))
    assert x.grad.device.type == "cpu"
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
