"""How gradients arrive: sums, roots, outputs that were not used, memory that is never shared."""

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.autograd import Function
from minidl.kernels import elementwise
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor, default_device, full
from tests.autograd.functions import Add, Mul, Pair, Square, View, grad_of, leaf


def test_one_operation():
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    Mul.apply(x, y).backward(leaf(1.0, 10.0, requires_grad=False))
    assert grad_of(x) == [3.0, 40.0]
    assert grad_of(y) == [1.0, 20.0]


def test_a_tensor_used_twice_by_one_operation():
    x = leaf(3.0)
    Mul.apply(x, x).backward()
    assert grad_of(x) == [6.0]


def test_diamond():
    x = leaf(3.0)
    a = Square.apply(x)
    Add.apply(Mul.apply(a, x), Mul.apply(a, a)).backward()
    assert grad_of(x) == [3 * 9 + 4 * 27]


def test_a_node_waits_for_every_gradient():
    """The inner node is older than both users and must run after the younger of them, once."""
    x = leaf(2.0)
    calls = []

    class Counted(Square):
        @staticmethod
        def backward(ctx, dy):
            calls.append(dy.tolist())
            return Square.backward(ctx, dy)

    a = Counted.apply(x)
    b = Square.apply(a)
    c = Square.apply(b)
    Add.apply(Add.apply(a, c), b).backward()
    assert calls == [[1 + 4 * 4**3 + 2 * 4]]


class Adding(Mul):
    """A product that adds to its gradients what has arrived before."""

    seen: ClassVar[list] = []

    @staticmethod
    def backward(ctx, dy):
        arrived = [ctx.pending_gradient(index) for index in range(2)]
        Adding.seen.append([None if t is None else t.tolist() for t in arrived])
        grads = Mul.backward(ctx, dy)
        return tuple(g if t is None else elementwise.add(g, t) for g, t in zip(grads, arrived, strict=True))


@pytest.mark.parametrize("again", [False, True])
def test_an_operation_may_add_what_has_arrived(again):
    """The sum is the same, at a leaf and inside, for one tensor given twice, and in a second walk."""
    Adding.seen.clear()
    x, y = leaf(3.0), leaf(5.0)
    a = Square.apply(x)
    product, twice = Adding.apply(a, y), Adding.apply(a, a)
    total = Add.apply(Add.apply(product, twice), Add.apply(View.apply(y, 1), View.apply(a, 1)))
    for _ in range(1 + again):
        x.grad = y.grad = None
        total.backward(retain_graph=True)
        assert grad_of(y) == [9.0 + 1.0]
        assert grad_of(x) == [(5.0 + 2 * 9.0 + 1.0) * 2 * 3.0]
    assert Adding.seen == [[[1.0], None], [[19.0], [1.0]]] * (1 + again)


def test_gradients_accumulate_over_calls():
    x = leaf(3.0)
    Square.apply(x).backward()
    Square.apply(x).backward()
    assert grad_of(x) == [12.0]
    x.grad = None
    Square.apply(x).backward()
    assert grad_of(x) == [6.0]


def test_retain_graph():
    x = leaf(3.0)
    y = Square.apply(x)
    y.backward(retain_graph=True)
    y.backward()
    assert grad_of(x) == [12.0]


def test_only_inputs_that_require_a_gradient_get_one():
    x, y = leaf(3.0), leaf(4.0, requires_grad=False)
    needs = []

    class Look(Mul):
        @staticmethod
        def forward(ctx, a, b):
            needs.append(ctx.needs)
            return Mul.forward(ctx, a, b)

    z = Look.apply(x, y)
    z.backward()
    assert needs == [(True, False)]
    assert (grad_of(x), y.grad) == ([4.0], None)


def test_a_leaf_is_its_own_gradient():
    x = leaf(3.0)
    seed = leaf(5.0, requires_grad=False)
    x.backward(seed)
    assert grad_of(x) == [5.0]
    assert x.grad.data.data_ptr() != seed.data.data_ptr()


class TakesNone(Square):
    """A root whose gradient of 1 may be left out, and the gradients that it was given."""

    seed_is_optional = True
    given: ClassVar[list[object]] = []

    @staticmethod
    def backward(ctx, dy):
        TakesNone.given.append(None if dy is None else dy.tolist())
        return Square.backward(ctx, torch.ones_like(ctx.saved[0]) if dy is None else dy)


@pytest.mark.parametrize(
    ("walk", "given"),
    [
        (lambda y: y.backward(), [None]),
        (lambda y: y.backward(leaf(1.0, requires_grad=False)), [[1.0]]),
        (lambda y: Add.apply(y, leaf(5.0)).backward(), [[1.0]]),
        (lambda y: Square.apply(y).backward(), [[18.0]]),
        (lambda y: (y.backward(retain_graph=True), y.backward()), [None, None]),
        (lambda y: (y.register_hook(lambda g: None), y.backward()), [[1.0]]),
        (lambda y: (y.register_hook(lambda g: None)(), y.backward()), [None]),
        (lambda y: (y.retain_grad(), y.backward()), [[1.0]]),
    ],
    ids=["root", "explicit", "sum", "inside", "twice", "hook", "removed hook", "retained"],
)
def test_the_one_of_a_root_may_arrive_as_none(walk, given):
    x = leaf(3.0)
    TakesNone.given.clear()
    walk(TakesNone.apply(x))
    assert TakesNone.given == given
    assert grad_of(x) == [6.0 * sum(1.0 if dy is None else dy[0] for dy in given)]


def test_a_root_that_takes_none_may_give_none():
    class Constant(TakesNone):
        @staticmethod
        def backward(ctx, dy):
            return None

    x = leaf(2.0)
    Constant.apply(Square.apply(x)).backward()
    assert x.grad is None


def test_the_gradient_of_a_root_is_one():
    for function in (Square, TakesNone):
        y = function.apply(leaf(3.0))
        seen = []
        y.retain_grad()
        y.register_hook(lambda g, seen=seen: seen.append(g.tolist()))
        y.backward()
        assert (grad_of(y), seen) == ([1.0], [[1.0]])


def test_outputs_that_were_not_used_arrive_as_none():
    for used, expected in (((0,), 2.0), ((1,), 3.0), ((0, 1), 5.0)):
        x = leaf(7.0)
        outputs = Pair.apply(x)
        total = outputs[used[0]] if len(used) == 1 else Add.apply(*outputs)
        total.backward()
        assert Pair.seen == (0 in used, 1 in used)
        assert grad_of(x) == [expected]


def test_each_output_can_be_a_root():
    x = leaf(7.0)
    first, second = Pair.apply(x)
    first.backward(retain_graph=True)
    second.backward()
    assert grad_of(x) == [5.0]


def test_integer_outputs_have_no_gradient():
    class WithIndex(Function):
        @staticmethod
        def forward(ctx, x):
            return elementwise.add(x, x), torch.zeros(x.shape, dtype=torch.int64, device=x.device)

        @staticmethod
        def backward(ctx, dy, dindex):
            assert dindex is None
            return elementwise.add(dy, dy)

    x = leaf(1.0)
    value, index = WithIndex.apply(x)
    assert (value.requires_grad, index.requires_grad) == (True, False)
    value.backward()
    assert grad_of(x) == [2.0]


def test_a_function_may_give_no_gradient():
    class Constant(Square):
        @staticmethod
        def backward(ctx, dy):
            return None

    x = leaf(2.0)
    Add.apply(Constant.apply(Square.apply(x)), x).backward()
    assert grad_of(x) == [1.0]


def test_a_row_gradient_arrives_as_rows_and_reads_as_dense():
    class Rows(Function):
        @staticmethod
        def forward(ctx, w):
            return w[1:2].clone()

        @staticmethod
        def backward(ctx, dy):
            return RowGrad(torch.tensor([1], dtype=torch.int32, device=dy.device), dy.clone(), (3, 2))

    w = Tensor(torch.ones(3, 2, device=default_device()), True)
    one = Tensor(torch.full((1, 2), 4.0, device=default_device()))
    Rows.apply(w).backward(one)
    assert isinstance(w.raw_grad, RowGrad)
    assert grad_of(w) == [[0, 0], [4, 4], [0, 0]]
    Rows.apply(w).backward(one)
    assert grad_of(w) == [[0, 0], [8, 8], [0, 0]]


def test_leaf_gradients_never_share_memory():
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    seed = leaf(1.0, 1.0, requires_grad=False)
    s = View.apply(x, 2, 1)
    t = View.apply(s, 2)
    Add.apply(t, y).backward(seed)
    memory = {id(g): g.data.data_ptr() for g in (x.grad, y.grad, seed)}
    assert len(set(memory.values())) == 3
    x.grad.zero_()
    assert grad_of(y) == [1.0, 1.0]


def test_one_new_gradient_for_two_leaves_is_not_shared():
    class Both(Add):
        @staticmethod
        def backward(ctx, dy):
            doubled = elementwise.add(dy, dy)
            return doubled, doubled

    x, y = leaf(1.0), leaf(1.0)
    Both.apply(x, y).backward()
    x.grad.zero_()
    assert grad_of(y) == [2.0]


def test_saved_memory_does_not_become_a_gradient():
    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save(x)
            return elementwise.add(x, x)

        @staticmethod
        def backward(ctx, dy):
            return ctx.saved[0]

    x = leaf(5.0)
    Saves.apply(x).backward()
    x.grad.zero_()
    assert x.tolist() == [5.0]


def test_requires_grad_propagates():
    x, constant = leaf(1.0), leaf(1.0, requires_grad=False)
    assert Add.apply(x, constant).requires_grad
    assert not Add.apply(constant, constant).requires_grad
    assert not Add.apply(x.detach(), constant).requires_grad
    assert full((1,), 2.0).requires_grad is False


@given(st.data())
@settings(max_examples=max(20, settings.default.max_examples))
def test_random_dags_as_torch(data):
    """Whole-number values, so that both give the same gradient exactly, in whatever order they add."""
    leaves = data.draw(st.integers(1, 3))
    wanted = data.draw(st.lists(st.booleans(), min_size=leaves, max_size=leaves))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    values = [torch.randint(-2, 3, (2, 2), generator=generator).double() for _ in range(leaves)]
    ours = [Tensor(v.to(default_device()), w) for v, w in zip(values, wanted, strict=True)]
    theirs = [v.clone().requires_grad_(w) for v, w in zip(values, wanted, strict=True)]
    mine, reference = list(ours), list(theirs)
    for _ in range(data.draw(st.integers(1, 12))):
        a = data.draw(st.integers(0, len(mine) - 1))
        b = data.draw(st.integers(0, leaves - 1))
        c = data.draw(st.integers(0, len(mine) - 1))
        kind = data.draw(st.sampled_from(["add", "mul", "pair", "turn", "detach"]))
        if kind == "add":
            mine.append(Add.apply(mine[a], mine[c]))
            reference.append(reference[a] + reference[c])
        elif kind == "mul":
            mine.append(Mul.apply(mine[a], mine[b]))
            reference.append(reference[a] * reference[b])
        elif kind == "pair":
            mine.extend(Pair.apply(mine[a]))
            reference.extend([2 * reference[a], 3 * reference[a]])
        elif kind == "turn":
            mine.append(View.apply(View.apply(mine[a], 4), 2, 2))
            reference.append(reference[a].reshape(4).reshape(2, 2))
        else:
            mine.append(mine[a].detach())
            reference.append(reference[a].detach())
        assert mine[-1].requires_grad == reference[-1].requires_grad
        assert torch.equal(mine[-1].data.cpu(), reference[-1].detach())
    roots = data.draw(st.lists(st.integers(0, len(mine) - 1), min_size=1, max_size=3))
    # Summed here: torch's own backward() into two leaves can leave both with one piece of memory.
    expected = [None] * leaves
    for root in roots:
        if reference[root].requires_grad:
            seed = torch.randint(-2, 3, (2, 2), generator=generator).double()
            mine[root].backward(Tensor(seed.to(default_device())), retain_graph=True)
            tracked = [i for i in range(leaves) if wanted[i]]
            grads = torch.autograd.grad(
                reference[root], [theirs[i] for i in tracked], seed, retain_graph=True, allow_unused=True
            )
            for i, grad in zip(tracked, grads, strict=True):
                if grad is not None:
                    expected[i] = grad if expected[i] is None else expected[i] + grad
    for x, y in zip(ours, expected, strict=True):
        assert (x.grad is None) == (y is None)
        assert x.grad is None or torch.equal(x.grad.data.cpu(), y)
