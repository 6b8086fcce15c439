"""Gradients of outputs used twice, handed in two parts to operations that add them as they read."""

from typing import ClassVar

import pytest

from minidl.autograd import PendingSum
from minidl.kernels import elementwise
from tests.autograd.functions import Add, Mul, Square, grad_of, leaf


class Taking(Square):
    """x x, and what its backward was given."""

    seen: ClassVar[list] = []

    @staticmethod
    def accepts_pending_sums():
        return True

    @staticmethod
    def backward(ctx, dy):
        Taking.seen.append(tuple(part.tolist() for part in dy) if isinstance(dy, PendingSum) else dy.tolist())
        return Square.backward(ctx, dy.dense() if isinstance(dy, PendingSum) else dy)


@pytest.fixture(autouse=True)
def nothing_seen():
    Taking.seen = []


def test_the_last_two_parts_arrive_in_the_order_of_their_operations():
    """From the youngest: what three uses give is (a + b) + c."""
    x = leaf(2.0)
    y = Taking.apply(x)
    a, b = Mul.apply(y, y), Square.apply(y)
    Add.apply(a, b).backward()
    # The square's 2 y came first, then y twice from the product.
    assert Taking.seen == [([12.0], [4.0])]
    assert grad_of(x) == [16.0 * 4.0]


def test_one_use_is_no_sum():
    x = leaf(2.0)
    Square.apply(Taking.apply(x)).backward()
    assert Taking.seen == [[8.0]]


@pytest.mark.parametrize("watch", ["hook", "hook of another", "retain", "removed"])
def test_a_gradient_that_someone_watches_is_added_at_once(watch):
    x = leaf(2.0)
    y = Taking.apply(x)
    calls = []
    if watch == "retain":
        y.retain_grad()
    else:
        remove = (x if watch == "hook of another" else y).register_hook(lambda g: calls.append(g.tolist()))
        if watch == "removed":
            remove()
    Add.apply(Square.apply(y), y).backward()
    assert Taking.seen == ([([1.0], [8.0])] if watch == "removed" else [[9.0]])
    assert calls == {"hook": [[9.0]], "hook of another": [[36.0]]}.get(watch, [])
    assert watch != "retain" or y.grad.tolist() == [9.0]
    assert grad_of(x) == [36.0]


def test_a_part_that_becomes_a_gradient_is_not_shared():
    class First(Taking):
        @staticmethod
        def backward(ctx, dy):
            First.parts = dy
            return dy.first

    x = leaf(2.0)
    y = First.apply(x)
    Add.apply(Square.apply(y), y).backward()
    assert grad_of(x) == First.parts.first.tolist() == [1.0]
    assert x.grad.data.data_ptr() != First.parts.first.data_ptr()


def test_a_graph_that_is_kept_gives_the_same_again():
    x = leaf(2.0)
    y = Taking.apply(x)
    z = Add.apply(Square.apply(y), y)
    z.backward(retain_graph=True)
    z.backward()
    assert Taking.seen == [([1.0], [8.0])] * 2
    assert grad_of(x) == elementwise.add(leaf(36.0).data, 36.0).tolist()
