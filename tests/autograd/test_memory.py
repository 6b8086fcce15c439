"""What is freed when, and that a graph of any depth needs no recursion."""

import gc
import weakref

from minidl.autograd import no_grad
from tests.autograd.functions import Add, Mul, Pair, Square, View, grad_of, leaf


def test_a_deep_chain_needs_no_recursion():
    """Forward, backward, and the end of the graph, each 20,000 operations deep."""
    x = leaf(1.0)
    y = x
    for _ in range(20_000):
        y = View.apply(y, 1)
    y.backward()
    assert grad_of(x) == [1.0]
    del y
    z = x
    for _ in range(20_000):
        z = View.apply(z, 1)
    del z


def test_saved_tensors_die_as_they_are_used():
    """When the first operation's backward runs, the saved tensors of the later ones are gone."""
    alive = []

    class Last(Square):
        @staticmethod
        def backward(ctx, dy):
            alive.extend(reference() is not None for reference in references)
            return Square.backward(ctx, dy)

    references = []
    x = leaf(1.0)
    y = Last.apply(x)
    for _ in range(3):
        y = Square.apply(y)
        references.append(weakref.ref(y._node.context._saved[0]))
    y.backward()
    assert alive == [False, False, False]


def test_gradients_between_operations_die_as_they_are_used():
    references, alive = [], []

    class Look(Square):
        @staticmethod
        def backward(ctx, dy):
            alive.append(sum(reference() is not None for reference in references))
            references.append(weakref.ref(dy))
            return Square.backward(ctx, dy)

    x = leaf(1.0)
    y = x
    for _ in range(5):
        y = Look.apply(y)
    y.backward()
    assert max(alive) <= 1


def test_a_graph_has_no_reference_cycles():
    gc.collect()
    gc.disable()
    try:
        x = leaf(2.0)
        y = Square.apply(x)
        y.retain_grad()
        y.register_hook(lambda g: None)
        z = Add.apply(*Pair.apply(Mul.apply(y, x)))
        watched = [weakref.ref(o) for o in (y, z, y._node, z._node, y.data, z.data)]
        z.backward(retain_graph=True)
        del y, z
        assert [reference() for reference in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_a_graph_that_was_not_used_goes_away():
    gc.collect()
    gc.disable()
    try:
        x = leaf(2.0)
        node = weakref.ref(Square.apply(Square.apply(x))._node)
        assert node() is None
    finally:
        gc.enable()


def test_no_grad_keeps_nothing():
    x = leaf(2.0)
    with no_grad():
        y = Square.apply(x)
    assert y._node is None
