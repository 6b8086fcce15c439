"""Hooks on gradients, and gradients that are retained."""

import pytest

from minidl.kernels import elementwise
from minidl.tensors import Tensor, ones
from tests.autograd.functions import Add, Mul, Square, grad_of, leaf


def test_a_hook_sees_and_replaces_a_gradient():
    x = leaf(3.0)
    y = Square.apply(x)
    seen = []
    y.register_hook(lambda g: seen.append(g.tolist()))
    y.register_hook(lambda g: Tensor(elementwise.add(g.data, g.data)))
    Square.apply(y).backward()
    assert seen == [[18.0]]
    assert grad_of(x) == [2 * 108.0]


def test_a_leaf_hook_runs_once_on_the_whole_gradient():
    x = leaf(3.0)
    seen = []
    x.register_hook(lambda g: seen.append(g.tolist()))
    Add.apply(Mul.apply(x, x), x).backward()
    assert seen == [[7.0]]


def test_a_removed_hook_is_not_called():
    x = leaf(3.0)
    calls = []
    remove = x.register_hook(lambda g: calls.append(1))
    keep = x.register_hook(lambda g: calls.append(2))
    remove()
    remove()
    Square.apply(x).backward()
    assert calls == [2]
    keep()


def test_a_hook_on_a_leaf_that_is_the_root():
    x = leaf(3.0)
    x.register_hook(lambda g: Tensor(elementwise.add(g.data, g.data)))
    x.backward()
    assert grad_of(x) == [2.0]


def test_a_hook_must_keep_the_shape():
    x = leaf(3.0)
    Square.apply(x)
    x.register_hook(lambda g: ones(2))
    with pytest.raises(RuntimeError, match=r"a hook returned shape \[2\] .* expected \[1\]"):
        Square.apply(x).backward()


def test_a_hook_needs_a_gradient():
    with pytest.raises(RuntimeError, match=r"register_hook.*set requires_grad=True"):
        leaf(1.0, requires_grad=False).register_hook(lambda g: g)


def test_retain_grad():
    x = leaf(3.0)
    y = Square.apply(x)
    y.retain_grad()
    z = Square.apply(y)
    Add.apply(z, y).backward()
    assert grad_of(y) == [19.0]
    assert z.grad is None
    x.grad.zero_()
    assert grad_of(y) == [19.0]


def test_retained_gradients_accumulate():
    y = Square.apply(leaf(3.0))
    y.retain_grad()
    z = Square.apply(y)
    z.backward(retain_graph=True)
    z.backward()
    assert grad_of(y) == [36.0]


def test_retain_grad_sees_what_hooks_return():
    x = leaf(3.0)
    y = Square.apply(x)
    y.retain_grad()
    y.register_hook(lambda g: Tensor(elementwise.add(g.data, g.data)))
    y.backward()
    assert grad_of(y) == [2.0]
    assert grad_of(x) == [12.0]
