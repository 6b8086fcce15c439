"""The engine: what is recorded, how gradients arrive, what is freed when, and the errors."""

import gc
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl import autograd
from minidl.autograd import Function, enable_grad, is_grad_enabled, no_grad
from minidl.kernels import elementwise
from minidl.rows import RowGrad
from minidl.tensor import Tensor, default_device, full, ones


class Add(Function):
    @staticmethod
    def forward(ctx, a, b):
        return elementwise.add(a, b)

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


class Mul(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save(a, b)
        return elementwise.mul(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved
        return elementwise.mul(dy, b), elementwise.mul(dy, a)


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save(x)
        return elementwise.mul(x, x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved
        return elementwise.mul(dy, elementwise.add(x, x))


class Pair(Function):
    """(2 x, 3 x), and which of the two were used."""

    seen: tuple[bool, bool] | None = None

    @staticmethod
    def forward(ctx, x):
        ctx.save(x)
        return elementwise.add(x, x), elementwise.add(elementwise.add(x, x), x)

    @staticmethod
    def backward(ctx, dy, dz):
        Pair.seen = dy is not None, dz is not None
        total = None
        for weight, grad in ((2, dy), (3, dz)):
            for _ in range(weight if grad is not None else 0):
                total = grad if total is None else elementwise.add(total, grad)
        return total


class View(Function):
    @staticmethod
    def forward(ctx, x, *shape):
        ctx.shape = x.shape
        return x.view(shape)

    @staticmethod
    def backward(ctx, dy):
        return dy.reshape(ctx.shape), *[None] * (dy.dim())


def leaf(*values, requires_grad=True):
    return Tensor(torch.tensor(values, dtype=torch.float32, device=default_device()), requires_grad)


def grad_of(tensor):
    return None if tensor.grad is None else tensor.grad.tolist()


class TestGradients:
    def test_one_operation(self):
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        Mul.apply(x, y).backward(leaf(1.0, 10.0, requires_grad=False))
        assert grad_of(x) == [3.0, 40.0]
        assert grad_of(y) == [1.0, 20.0]

    def test_a_tensor_used_twice_by_one_operation(self):
        x = leaf(3.0)
        Mul.apply(x, x).backward()
        assert grad_of(x) == [6.0]

    def test_diamond(self):
        x = leaf(3.0)
        a = Square.apply(x)
        Add.apply(Mul.apply(a, x), Mul.apply(a, a)).backward()
        assert grad_of(x) == [3 * 9 + 4 * 27]

    def test_a_node_waits_for_every_gradient(self):
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

    def test_gradients_accumulate_over_calls(self):
        x = leaf(3.0)
        Square.apply(x).backward()
        Square.apply(x).backward()
        assert grad_of(x) == [12.0]
        x.grad = None
        Square.apply(x).backward()
        assert grad_of(x) == [6.0]

    def test_retain_graph(self):
        x = leaf(3.0)
        y = Square.apply(x)
        y.backward(retain_graph=True)
        y.backward()
        assert grad_of(x) == [12.0]

    def test_only_inputs_that_require_a_gradient_get_one(self):
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

    def test_a_leaf_is_its_own_gradient(self):
        x = leaf(3.0)
        seed = leaf(5.0, requires_grad=False)
        x.backward(seed)
        assert grad_of(x) == [5.0]
        assert x.grad.data.data_ptr() != seed.data.data_ptr()

    def test_outputs_that_were_not_used_arrive_as_none(self):
        for used, expected in (((0,), 2.0), ((1,), 3.0), ((0, 1), 5.0)):
            x = leaf(7.0)
            outputs = Pair.apply(x)
            total = outputs[used[0]] if len(used) == 1 else Add.apply(*outputs)
            total.backward()
            assert Pair.seen == (0 in used, 1 in used)
            assert grad_of(x) == [expected]

    def test_each_output_can_be_a_root(self):
        x = leaf(7.0)
        first, second = Pair.apply(x)
        first.backward(retain_graph=True)
        second.backward()
        assert grad_of(x) == [5.0]

    def test_integer_outputs_have_no_gradient(self):
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

    def test_a_function_may_give_no_gradient(self):
        class Constant(Square):
            @staticmethod
            def backward(ctx, dy):
                return None

        x = leaf(2.0)
        Add.apply(Constant.apply(Square.apply(x)), x).backward()
        assert grad_of(x) == [1.0]

    def test_a_row_gradient_arrives_as_rows_and_reads_as_dense(self):
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

    def test_leaf_gradients_never_share_memory(self):
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        seed = leaf(1.0, 1.0, requires_grad=False)
        s = View.apply(x, 2, 1)
        t = View.apply(s, 2)
        Add.apply(t, y).backward(seed)
        memory = {id(g): g.data.data_ptr() for g in (x.grad, y.grad, seed)}
        assert len(set(memory.values())) == 3
        x.grad.zero_()
        assert grad_of(y) == [1.0, 1.0]

    def test_one_new_gradient_for_two_leaves_is_not_shared(self):
        class Both(Add):
            @staticmethod
            def backward(ctx, dy):
                doubled = elementwise.add(dy, dy)
                return doubled, doubled

        x, y = leaf(1.0), leaf(1.0)
        Both.apply(x, y).backward()
        x.grad.zero_()
        assert grad_of(y) == [2.0]

    def test_saved_memory_does_not_become_a_gradient(self):
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


class TestDagsLikeTorch:
    """Whole-number values, so that both give the same gradient exactly, in whatever order they add."""

    @given(st.data())
    @settings(max_examples=max(20, settings.default.max_examples))
    def test_random_dag(self, data):
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


class TestModes:
    def test_no_grad_as_context_and_decorator(self):
        x = leaf(1.0)
        with no_grad():
            assert not is_grad_enabled()
            assert not Square.apply(x).requires_grad
        assert is_grad_enabled()

        @no_grad()
        def quiet(value):
            return Square.apply(value)

        assert not quiet(x).requires_grad
        assert Square.apply(x).requires_grad

    def test_modes_nest(self):
        with no_grad():
            with enable_grad():
                assert is_grad_enabled()
                with no_grad():
                    assert not is_grad_enabled()
                assert is_grad_enabled()
            assert not is_grad_enabled()
        assert is_grad_enabled()

    def test_one_context_entered_twice(self):
        mode = no_grad()
        with mode:
            with mode:
                pass
            assert not is_grad_enabled()
        assert is_grad_enabled()

    def test_a_mode_ends_with_an_exception(self):
        with pytest.raises(KeyError), no_grad():
            raise KeyError
        assert is_grad_enabled()

    def test_recursion_in_a_decorated_function(self):
        @no_grad()
        def down(depth):
            if depth:
                down(depth - 1)
            return is_grad_enabled()

        assert down(5) is False
        assert is_grad_enabled()

    def test_threads_have_their_own_mode(self):
        seen = []
        with no_grad():
            thread = threading.Thread(target=lambda: seen.append(is_grad_enabled()))
            thread.start()
            thread.join()
        assert seen == [True]

    def test_one_decorated_function_in_two_threads(self):
        """The second call enters while recording is off and leaves after the first one has left."""
        first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
        after = {}

        @no_grad()
        def wait(entered, leave):
            entered.set()
            assert leave.wait(20)

        def first():
            wait(first_is_in, second_is_in)
            after["first"] = is_grad_enabled()
            first_is_out.set()

        def second():
            with no_grad():
                assert first_is_in.wait(20)
                wait(second_is_in, first_is_out)
                after["second"] = is_grad_enabled()

        threads = [threading.Thread(target=first), threading.Thread(target=second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert after == {"first": True, "second": False}

    def test_backward_in_threads(self):
        grads = [None] * 4

        def work(i):
            x = leaf(float(i))
            y = x
            for _ in range(50):
                y = Add.apply(y, x)
            y.backward()
            grads[i] = grad_of(x)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert grads == [[51.0]] * 4

    def test_nothing_is_recorded_during_backward(self):
        recorded = []

        class Look(Square):
            @staticmethod
            def backward(ctx, dy):
                recorded.append(is_grad_enabled())
                return Square.backward(ctx, dy)

        x = leaf(1.0)
        Look.apply(x).backward()
        assert recorded == [False]
        assert not x.grad.requires_grad


class TestHooks:
    def test_a_hook_sees_and_replaces_a_gradient(self):
        x = leaf(3.0)
        y = Square.apply(x)
        seen = []
        y.register_hook(lambda g: seen.append(g.tolist()))
        y.register_hook(lambda g: Tensor(elementwise.add(g.data, g.data)))
        Square.apply(y).backward()
        assert seen == [[18.0]]
        assert grad_of(x) == [2 * 108.0]

    def test_a_leaf_hook_runs_once_on_the_whole_gradient(self):
        x = leaf(3.0)
        seen = []
        x.register_hook(lambda g: seen.append(g.tolist()))
        Add.apply(Mul.apply(x, x), x).backward()
        assert seen == [[7.0]]

    def test_a_removed_hook_is_not_called(self):
        x = leaf(3.0)
        calls = []
        remove = x.register_hook(lambda g: calls.append(1))
        keep = x.register_hook(lambda g: calls.append(2))
        remove()
        remove()
        Square.apply(x).backward()
        assert calls == [2]
        keep()

    def test_a_hook_on_a_leaf_that_is_the_root(self):
        x = leaf(3.0)
        x.register_hook(lambda g: Tensor(elementwise.add(g.data, g.data)))
        x.backward()
        assert grad_of(x) == [2.0]

    def test_a_hook_must_keep_the_shape(self):
        x = leaf(3.0)
        Square.apply(x)
        x.register_hook(lambda g: ones(2))
        with pytest.raises(RuntimeError, match=r"a hook returned shape \[2\] .* expected \[1\]"):
            Square.apply(x).backward()

    def test_a_hook_needs_a_gradient(self):
        with pytest.raises(RuntimeError, match=r"register_hook.*set requires_grad=True"):
            leaf(1.0, requires_grad=False).register_hook(lambda g: g)

    def test_retain_grad(self):
        x = leaf(3.0)
        y = Square.apply(x)
        y.retain_grad()
        z = Square.apply(y)
        Add.apply(z, y).backward()
        assert grad_of(y) == [19.0]
        assert z.grad is None
        x.grad.zero_()
        assert grad_of(y) == [19.0]

    def test_retained_gradients_accumulate(self):
        y = Square.apply(leaf(3.0))
        y.retain_grad()
        z = Square.apply(y)
        z.backward(retain_graph=True)
        z.backward()
        assert grad_of(y) == [36.0]

    def test_retain_grad_sees_what_hooks_return(self):
        x = leaf(3.0)
        y = Square.apply(x)
        y.retain_grad()
        y.register_hook(lambda g: Tensor(elementwise.add(g.data, g.data)))
        y.backward()
        assert grad_of(y) == [2.0]
        assert grad_of(x) == [12.0]


class TestErrors:
    def test_a_second_backward_names_operation_and_line(self):
        x = leaf(3.0)
        y = Square.apply(x)  # the line in the message
        line = line_of("# the line in the message")
        y.backward()
        with pytest.raises(RuntimeError, match=rf"Square \({re.escape(__file__)}:{line}\).*retain_graph=True"):
            y.backward()
        assert grad_of(x) == [6.0], "no gradient may change"

    def test_a_second_backward_through_a_shared_part_changes_nothing(self):
        x, w = leaf(3.0), leaf(1.0)
        shared = Square.apply(x)
        Add.apply(shared, w).backward()
        other = Mul.apply(shared, w)
        with pytest.raises(RuntimeError, match=r"Square .*second time"):
            other.backward()
        assert (grad_of(x), grad_of(w)) == ([6.0], [1.0])

    def test_an_in_place_change_of_a_saved_tensor(self):
        x = leaf(3.0)
        y = Square.apply(x)
        line = line_of("y = Square.apply(x)", after="def test_an_in_place_change")
        with no_grad():
            x.fill_(4.0)
        with pytest.raises(
            RuntimeError, match=rf"Square \(.*:{line}\).*saved tensor 0 of shape \[1\].*changed in place"
        ):
            y.backward()

    def test_an_in_place_change_through_a_view(self):
        x = Tensor(torch.ones(4, device=default_device()), True)
        y = Square.apply(x)
        with no_grad():
            Tensor(x.data[1:2]).zero_()
        with pytest.raises(RuntimeError, match="changed in place"):
            y.backward(ones(4))

    def test_a_tensor_that_was_not_saved_may_change(self):
        x, y = leaf(1.0), leaf(2.0)
        z = Add.apply(x, y)
        with no_grad():
            x.fill_(5.0)
        z.backward()
        assert grad_of(x) == [1.0]

    def test_a_wrong_number_of_gradients(self):
        class One(Mul):
            @staticmethod
            def backward(ctx, dy):
                return dy

        z = One.apply(leaf(1.0), leaf(2.0))
        with pytest.raises(RuntimeError, match=r"One \(.*\): backward returned 1 gradients for 2 inputs"):
            z.backward()

    @pytest.mark.parametrize("change", [lambda g: g.view(1, -1), lambda g: g.double()])
    def test_a_gradient_of_the_wrong_form(self, change):
        class Wrong(Square):
            @staticmethod
            def backward(ctx, dy):
                return change(dy)

        z = Wrong.apply(leaf(1.0))
        with pytest.raises(
            RuntimeError, match=r"Wrong \(.*\): backward returned a gradient of shape .* for an input of"
        ):
            z.backward()

    def test_backward_without_a_graph(self):
        with pytest.raises(RuntimeError, match="nothing was recorded"):
            leaf(1.0, requires_grad=False).backward()
        with no_grad():
            y = Square.apply(leaf(1.0))
        with pytest.raises(RuntimeError, match="nothing was recorded"):
            y.backward()

    def test_backward_of_several_elements_needs_a_gradient(self):
        y = Square.apply(leaf(1.0, 2.0))
        with pytest.raises(RuntimeError, match=r"shape \[2\] needs `gradient`"):
            y.backward()

    @pytest.mark.parametrize(
        "gradient", [ones(3), ones(2, dtype=torch.float64), ones(2, 1)], ids=["length", "dtype", "rank"]
    )
    def test_a_seed_of_the_wrong_form(self, gradient):
        y = Square.apply(leaf(1.0, 2.0))
        with pytest.raises(RuntimeError, match=r"gradient has shape .* expected \[2\], torch.float32"):
            y.backward(gradient)

    def test_the_caller_is_named_also_beside_the_package(self):
        """A folder whose name begins like the package's is not the package."""
        code = compile("result = Square.apply(x)", autograd._PACKAGE.rstrip("/") + "_project/train.py", "exec")
        space = {"Square": Square, "x": leaf(1.0)}
        exec(code, space)
        assert "_project/train.py:1" in str(space["result"]._node)


def line_of(text, after=""):
    """Line number of the first line of this file with `text`, after a line with `after`."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if after in line), 0)
    return next(i for i, line in enumerate(lines, 1) if text in line and i > start)


class TestMemory:
    def test_a_deep_chain_needs_no_recursion(self):
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

    def test_saved_tensors_die_as_they_are_used(self):
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

    def test_gradients_between_operations_die_as_they_are_used(self):
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

    def test_a_graph_has_no_reference_cycles(self):
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

    def test_a_graph_that_was_not_used_goes_away(self):
        gc.collect()
        gc.disable()
        try:
            x = leaf(2.0)
            node = weakref.ref(Square.apply(Square.apply(x))._node)
            assert node() is None
        finally:
            gc.enable()

    def test_no_grad_keeps_nothing(self):
        x = leaf(2.0)
        with no_grad():
            y = Square.apply(x)
        assert y._node is None


def test_requires_grad_propagates():
    x, constant = leaf(1.0), leaf(1.0, requires_grad=False)
    assert Add.apply(x, constant).requires_grad
    assert not Add.apply(constant, constant).requires_grad
    assert not Add.apply(x.detach(), constant).requires_grad
    assert full((1,), 2.0).requires_grad is False
