"""What torch's code asks of autograd: functions of one's own, `grad`, modes, handles of hooks, anomalies."""

import pytest
import torch

import minidl
from minidl import autograd, ops
from minidl.autograd import Function, detect_anomaly, grad, is_grad_enabled, no_grad, set_grad_enabled
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, as_tensor, default_device, ones


def leaf(*values):
    return as_tensor(list(values), requires_grad=True)


class TestTorchsModes:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)])
    def test_nothing_is_recorded_where_torch_records_nothing(self, mode):
        x = leaf(1.0)
        with mode():
            assert not is_grad_enabled()
            assert not (x * 2).requires_grad
            x -= 0.5
            with minidl.enable_grad():
                assert (x * 2).requires_grad
            assert not is_grad_enabled()
        assert (x * 2).requires_grad
        assert x.item() == 0.5
        decorated = torch.no_grad()(lambda: (x * 2).requires_grad)
        assert not decorated()

    def test_what_was_set_last_counts(self):
        x = leaf(1.0)
        with no_grad(), torch.no_grad():
            assert not is_grad_enabled()
        with torch.no_grad(), no_grad():
            assert not is_grad_enabled()
            with torch.enable_grad():
                assert (x * 2).requires_grad
            assert not is_grad_enabled()
        with torch.no_grad(), minidl.enable_grad(), torch.no_grad():
            assert not (x * 2).requires_grad
        with no_grad(), torch.no_grad(), torch.enable_grad():
            assert (x * 2).requires_grad
        assert is_grad_enabled()

    def test_a_setting_that_is_made_within_a_block_ends_with_it(self):
        x = leaf(1.0)
        with torch.no_grad():
            set_grad_enabled(True)
            assert (x * 2).requires_grad
        with torch.no_grad():
            assert not (x * 2).requires_grad

    def test_torch_records_nothing_where_minidl_does_not(self):
        t = torch.ones(1, requires_grad=True)
        with no_grad():
            assert not (t * 2).requires_grad
        assert (t * 2).requires_grad


class Cube(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        assert ctx.needs_input_grad == (True, False)
        return ops.mul(ops.mul(ops.mul(x, x), x), factor)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return ops.mul(grad_output, ops.mul(ops.square(x), 3 * ctx.factor)), None


class Twice(Function):
    @staticmethod
    def forward(x):
        return ops.mul(x, 2), ops.exp(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        (ctx.x,) = inputs
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, doubled, raised):
        (y,) = ctx.saved_tensors
        return ops.add(ops.mul(doubled, 2), ops.mul(raised, y))


class TestFunction:
    def test_in_torchs_names(self):
        x = leaf(1.0, 2.0)
        y = Cube.apply(x, 0.5)
        assert isinstance(y, Tensor)
        y.sum().backward()
        assert (y.tolist(), x.grad.tolist()) == ([0.5, 4.0], [1.5, 6.0])

    def test_with_its_context_set_up_apart(self):
        x = leaf(0.0, 0.0)
        a, b = Twice.apply(x)
        (a + b).sum().backward()
        assert x.grad.tolist() == [3, 3]


class TestGrad:
    def test_of_leaves_and_of_what_is_between(self):
        x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
        y = x * w
        z = (y * y + y).sum()
        dx, dy = grad(z, (x, y))
        assert dy.tolist() == [7, 17]
        assert dx.tolist() == [21, 68]
        assert (x.grad, w.grad) == (None, None)

    def test_is_torchs_of_several_outputs(self):
        values = torch.tensor([0.5, -1.0, 2.0])
        found = []
        for make, exp, wrap, of in (
            (lambda t: Tensor(t.to(default_device()), True), ops.exp, lambda t: Tensor(t.to(default_device())), grad),
            (lambda t: t.clone().requires_grad_(), torch.exp, lambda t: t, torch.autograd.grad),
        ):
            x = make(values)
            y = x * x
            parts = of([exp(y).sum(), y], [x, y], grad_outputs=[None, wrap(values)], retain_graph=True)
            parts += of(y, x, wrap(values))
            found.append([part.cpu() if isinstance(part, torch.Tensor) else part.data.cpu() for part in parts])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_of_itself_and_of_what_is_not_used(self):
        x, other = leaf(2.0), leaf(1.0, 1.0)
        assert grad(x, x)[0].tolist() == [1]
        with pytest.raises(
            RuntimeError, match="input 1 was not used in the graph of the outputs; pass allow_unused=True"
        ):
            grad((x * 2).sum(), [x, other])
        assert grad((x * 2).sum(), [x, other], allow_unused=True)[1] is None
        assert grad((x * 2).sum(), [x, other], materialize_grads=True)[1].tolist() == [0, 0]

    def test_of_rows_is_dense(self):
        x = CSR.from_torch(torch.tensor([0, 1]), torch.tensor([1]), torch.ones(1), (1, 3)).to(default_device())
        w = ones(3, 2, requires_grad=True)
        (found,) = grad(ops.sparse_linear(x, w).sum(), w)
        assert found.tolist() == [[0, 0], [1, 1], [0, 0]]

    def test_hooks_of_an_input_act_once(self):
        x = leaf(1.0)
        x.register_hook(lambda g: g * 10)
        assert grad((x * 2).sum(), x)[0].tolist() == [20]

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda x: grad(x.detach(), x), "an output does not require grad"),
            (lambda x: grad(x * 2, x.detach()), "an input does not require grad"),
            (lambda x: grad(x * 2, x), r"an output of shape \[2\] needs a gradient in grad_outputs"),
            (lambda x: grad(x * 2, x, ones(3)), r"grad_outputs\[0\] has shape \[3\]"),
            (lambda x: grad([x * 2, x], x, [ones(2)]), "got 1 gradients of 2 results"),
        ],
    )
    def test_refuses(self, call, message):
        with pytest.raises(RuntimeError, match=message):
            call(leaf(1.0, 2.0))


class TestModes:
    def test_set_grad_enabled(self):
        with set_grad_enabled(False):
            assert not is_grad_enabled()
            with set_grad_enabled(True):
                assert is_grad_enabled()
        assert is_grad_enabled()
        minidl.set_grad_enabled(False)
        try:
            assert not is_grad_enabled()
        finally:
            minidl.set_grad_enabled(True)

        @set_grad_enabled(False)
        def recorded():
            return is_grad_enabled()

        assert is_grad_enabled()
        assert not recorded()

    def test_a_bare_decorator(self):
        @no_grad
        def bare():
            """Kept."""
            return is_grad_enabled()

        assert not bare()
        assert is_grad_enabled()
        assert bare.__doc__ == "Kept."

    def test_a_generator(self):
        @no_grad()
        def generator():
            received = yield is_grad_enabled()
            yield received, is_grad_enabled()
            return "end"

        running = generator()
        assert next(running) is False
        assert is_grad_enabled()
        assert running.send(5) == (5, False)
        with pytest.raises(StopIteration, match="end"):
            next(running)
        assert is_grad_enabled()


def test_a_hook_is_removed_by_its_handle():
    x, seen = leaf(1.0), []
    handle = x.register_hook(lambda g: seen.append(1))
    with x.register_hook(lambda g: seen.append(2)):
        (x * 2).backward()
    handle.remove()
    handle.remove()
    (x * 2).backward()
    assert seen == [1, 2]


def test_an_anomaly_names_the_operation():
    x = leaf(-1.0, 1.0)
    with (
        detect_anomaly(),
        pytest.raises(RuntimeError, match=r"Sqrt \(.*test_torch_names.py:\d+\): its gradient .* NaN"),
    ):
        ops.sqrt(x).sum().backward()
    assert not autograd.is_anomaly_enabled()
    ops.sqrt(x).sum().backward()


def test_what_torchs_module_has_beside():
    x, y = leaf(1.0, 2.0), leaf(3.0)
    autograd.backward([x * x, y * 2], [ones(2), None])
    assert (x.grad.tolist(), y.grad.tolist()) == ([2, 4], [2])
    old = autograd.Variable(x * 2, requires_grad=True)
    assert (old.is_leaf, old.requires_grad, autograd.Variable(x).requires_grad) == (True, True, False)
    with pytest.raises(RuntimeError, match="backward: got 1 gradients of 2 results"):
        autograd.backward([x * x, y], [ones(2)])
    with pytest.raises(AttributeError, match="autograd has no functional; write grad with create_graph"):
        _ = autograd.functional
