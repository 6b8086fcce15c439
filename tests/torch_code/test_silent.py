"""What looks right in torch's code is right, or refused with what to do: never silently something else."""

import operator
import re
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch

import minidl
from minidl import nn, ops
from minidl.tensors import Tensor, as_tensor, default_device, from_torch, ones, zeros
from minidl.testing import assert_within, error_bound


def numbers(*shape, seed=0, requires_grad=False):
    data = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device())
    return Tensor(data, requires_grad)


def torch_leaf(*shape):
    return torch.ones(shape, device=default_device(), requires_grad=True)


class TestSequential:
    def test_takes_an_ordered_dict(self):
        model = nn.Sequential(OrderedDict(first=nn.Linear(3, 2), act=nn.Tanh()))
        assert list(model.state_dict()) == ["first.weight", "first.bias"]
        x = numbers(4, 3)
        assert torch.equal(model(x).data, ops.tanh(model.first(x)).data)

    @pytest.mark.parametrize(
        ("part", "message"),
        [
            (ops.tanh, r"Sequential: '1' is the function tanh, .* use a layer that calls it"),
            (lambda x: x, r"'1' is the function <lambda>"),
            (nn.ReLU, r"'1' is the class ReLU, expected a Module: write ReLU\(...\)"),
            (torch.nn.ReLU(), r"'1' is torch's ReLU, .* use minidl.nn.ReLU"),
            ([nn.ReLU()], r"'1' is a list, .* pass its modules one by one"),
            (None, "'1' is of type NoneType"),
        ],
        ids=["function", "lambda", "class", "torch", "list", "none"],
    )
    def test_refuses_what_is_no_module_by_its_place(self, part, message):
        with pytest.raises(TypeError, match=message):
            nn.Sequential(nn.Linear(3, 3), part)

    @pytest.mark.parametrize("name", ["", "a.b", "forward", "training"])
    def test_refuses_names_that_hide_something(self, name):
        with pytest.raises(KeyError, match="nothing can be named"):
            nn.Sequential(OrderedDict({name: nn.ReLU()}))

    def test_keeps_its_names_when_a_norm_is_folded(self):
        model = nn.Sequential(OrderedDict(conv=nn.Conv2d(1, 2, 1), norm=nn.BatchNorm2d(2), act=nn.ReLU())).eval()
        nn.fold_batch_norms(model)
        assert [name for name, _ in model.named_modules()][1:] == ["conv", "act"]


CHANGES = {
    "add": (operator.iadd, lambda x, y: x + y),
    "sub": (operator.isub, lambda x, y: x - y),
    "mul": (operator.imul, lambda x, y: x * y),
    "div": (operator.itruediv, lambda x, y: x / y),
    "add scaled": (lambda x, y: x.add_(y, alpha=-0.5), lambda x, y: x + -0.5 * y),
    "sub scaled": (lambda x, y: x.sub_(y, alpha=3), lambda x, y: x - 3 * y),
    "copy": (lambda x, y: x.copy_(y), lambda x, y: y.expand(x.shape)),
    "clamp": (lambda x, y: x.clamp_(-0.5, 0.5), lambda x, y: x.clamp(-0.5, 0.5)),
}


class TestInPlace:
    @pytest.mark.parametrize("name", CHANGES)
    @pytest.mark.parametrize("shape", [(3, 4), (4,), (1, 1)], ids=str)
    def test_a_parameter_is_changed_where_it_lies(self, name, shape):
        change, meant = CHANGES[name]
        p, y = nn.Parameter(numbers(3, 4)), numbers(*shape, seed=1)
        memory, version = p.data, p.data._version
        expected = meant(p.data.double(), y.data.double())
        bound = error_bound(change, (p.data.clone(), y.data), reference=meant, depth=2)
        with minidl.no_grad():
            assert change(p, y) is p
        assert p.data is memory
        assert memory._version == version + 1
        assert_within(p, expected, bound)

    @pytest.mark.parametrize("name", CHANGES)
    def test_a_part_of_a_tensor(self, name):
        """Columns that lie apart, by an operand that overlaps them."""
        change, meant = CHANGES[name]
        x = numbers(4, 6)
        expected = x.data.double()
        bound = torch.zeros_like(expected)
        parts = x.data[:, ::2].clone(), x.data[:, :3].clone()
        bound[:, ::2] = error_bound(change, parts, reference=meant, depth=2).to(bound.device)
        expected[:, ::2] = meant(expected[:, ::2], expected[:, :3].clone())
        change(x[:, ::2], x[:, :3])
        assert_within(x, expected, bound)

    @pytest.mark.parametrize("name", CHANGES)
    def test_is_refused_for_a_leaf_that_requires_grad(self, name):
        with pytest.raises(RuntimeError, match=r"cannot be changed in place; do it under minidl.no_grad\(\)"):
            CHANGES[name][0](nn.Parameter(numbers(3)), numbers(3))

    @pytest.mark.parametrize("name", CHANGES)
    def test_what_was_saved_is_refused_on_the_way_back(self, name):
        x = numbers(3, requires_grad=True)
        y = ops.exp(x)
        with minidl.no_grad():
            CHANGES[name][0](y, numbers(3))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum().backward()

    @pytest.mark.parametrize("name", CHANGES)
    def test_in_the_graph_it_is_torchs(self, name):
        """Whoever holds the tensor sees the change, and gradients go through it."""
        change, _ = CHANGES[name]
        given = numbers(3, 4).data, numbers(4, seed=1).data + 2
        x, y = (Tensor(t.clone(), True) for t in given)
        z = x * x
        same = z
        assert change(z, y) is z
        (same * x).sum().backward()

        def exactly(x, y, which):
            z = x * x
            change(z, y)
            grads = torch.autograd.grad((z * x).sum(), (x, y), create_graph=True, materialize_grads=True)
            return (z, *grads)[which]

        # The longest chain: a square, a change of two roundings, three products, the change on the way back, two
        # additions of three rows, and that of two gradients.
        for which, got in enumerate((same, x.grad, y.grad)):
            if got is not None:
                bound = error_bound(change, given, reference=partial(exactly, which=which), depth=11)
                wide = [t.double().requires_grad_() for t in given]
                assert_within(got, exactly(*wide, which).detach(), bound)

    def test_a_view_in_the_graph_is_refused(self):
        y = numbers(3, requires_grad=True) * 2
        view = y.reshape(3, 1)
        with pytest.raises(RuntimeError, match="shares memory with a view of it"):
            y += 1
        assert torch.equal(view.data[:, 0], y.data)

    def test_a_sum_that_waits_is_still_taken_in(self):
        class Block(nn.Module):
            def __init__(self, in_place):
                super().__init__()
                self.conv, self.bn, self.in_place = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), in_place

            def forward(self, x):
                out = self.bn(self.conv(x))
                if self.in_place:
                    out += x
                else:
                    out = out + x
                return ops.relu(out)

        x, results, weights = numbers(2, 8, 5, 5), [], Block(True).state_dict()
        for block in map(Block, (True, False)):
            block.load_state_dict(weights)
            y = block.eval()(x)
            results.append(y.data)
            assert minidl.draw(y).dot.count("sum, relu") == 1
        assert torch.equal(*results)

    @pytest.mark.parametrize("change", [lambda x: x.normal_(2, 0.1), lambda x: x.uniform_(1.5, 2.5)])
    def test_random_values(self, change):
        p = nn.Parameter(torch.zeros(1000, device=default_device()))
        with minidl.no_grad():
            assert change(p) is p
        assert abs(p.data.double().mean() - 2) < 0.1

    def test_of_integers(self):
        n = as_tensor([1, 2])
        n += 1
        n *= 3
        assert n.tolist() == [6, 9]
        x = zeros(2)
        x += n
        assert x.tolist() == [6, 9]
        for change in (operator.itruediv, lambda a, b: a.add_(0.5)):
            with pytest.raises(TypeError, match=r"torch\.int64"):
                change(n, 2)

    def test_does_not_grow(self):
        with pytest.raises(ValueError, match="does not fit in place"):
            zeros(3).add_(ones(2, 3))
        with pytest.raises(RuntimeError, match=r"share one memory address; clone\(\)"):
            Tensor(torch.zeros(1, device=default_device()).expand(3)).add_(1)


class TestTensor:
    def test_as_tensor_of_a_tensor_stays_in_the_graph(self):
        x = ones(3, requires_grad=True)
        y = x * 2
        assert as_tensor(y) is y
        as_tensor(y, dtype=torch.float64).sum().backward()
        assert x.grad.tolist() == [2, 2, 2]

    def test_numpy_makes_an_array_of_it(self):
        x = numbers(2, 3).cpu()
        assert np.asarray(x).dtype == np.float32
        assert np.array_equal(np.asarray(x), x.data)
        assert np.asarray(x, dtype=np.float64).dtype == np.float64
        assert np.shares_memory(np.asarray(x), x.numpy())
        assert not np.shares_memory(np.array(x), x.numpy())
        with pytest.raises(RuntimeError, match=r"requires grad; use .detach\(\).numpy\(\)"):
            np.asarray(ones(2, requires_grad=True))
        with pytest.raises(TypeError, match=r"can't convert a tensor on meta to numpy; .* .cpu\(\)"):
            np.asarray(Tensor(torch.empty(2, device="meta")))

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda x, t: torch.relu(x), r"torch.relu got a minidl Tensor; use minidl.ops.relu, .* x.to_torch\(\)"),
            (lambda x, t: torch.cat([t, x]), "use minidl.ops.cat"),
            (torch.nn.functional.cross_entropy, "use minidl.ops.cross_entropy"),
            (lambda x, t: torch.nn.Linear(2, 2, device=t.device)(x), "use minidl.ops.linear"),
        ],
        ids=["relu", "cat", "cross_entropy", "layer"],
    )
    def test_torchs_functions_name_minidls(self, call, message):
        with pytest.raises(TypeError, match=message):
            call(ones(2, 2), torch.ones(2, 2, device=default_device()))

    def test_operators_take_a_torch_tensor_on_either_side(self):
        x, t = numbers(2, 2), numbers(2, 2, seed=1).data
        for function in (operator.add, operator.sub, operator.mul, operator.matmul, operator.lt, operator.eq):
            for a, b in ((x, t), (t, x)):
                found = function(a, b)
                assert isinstance(found, Tensor)
                torch.testing.assert_close(found.data, function(*(v.data if v is x else v for v in (a, b))))
        with pytest.raises(RuntimeError, match=r"torch\.Tensor\.add_ got a minidl Tensor"):
            t += x

    def test_what_torch_trains_is_refused(self):
        x, t = ones(2, 2), torch_leaf(2, 2)
        for use in (lambda: x * t, lambda: t @ x, lambda: ops.linear(x, t), lambda: x[0].copy_(t[0])):
            with pytest.raises(TypeError, match=r"pass t.detach\(\)"):
                use()
        for make in (lambda: from_torch(t * 2), lambda: as_tensor(t), lambda: nn.Parameter(t)):
            with pytest.raises(TypeError, match=r"would end here; pass t.detach\(\)"):
                make()
        with minidl.no_grad():
            assert (x * t).tolist() == [[1, 1], [1, 1]]


TIES = torch.tensor([[2.0, 2.0, 1.0], [float("nan"), 3.0, float("nan")], [0.0, -1.0, -1.0]])


class TestReductions:
    """Both rows of a batch of two are no values and indices."""

    @pytest.mark.parametrize("name", ["max", "min"])
    @pytest.mark.parametrize("keepdim", [False, True])
    def test_along_a_dimension(self, name, keepdim):
        x, theirs = Tensor(TIES.to(default_device()), requires_grad=True), TIES.clone().requires_grad_()
        found, expected = getattr(x, name)(1, keepdim), getattr(theirs, name)(1, keepdim)
        values, indices = found
        assert values is found.values
        assert indices is found.indices
        assert torch.equal(indices.data.cpu(), expected.indices)
        torch.testing.assert_close(values.data.cpu(), expected.values, rtol=0, atol=0, equal_nan=True)
        values.sum().backward()
        expected.values.sum().backward()
        assert torch.equal(x.grad.data.cpu(), theirs.grad)  # all of it to one of equal elements

    @pytest.mark.parametrize("name", ["max", "min"])
    def test_of_everything_and_of_two(self, name):
        x, theirs = numbers(3, 4), numbers(3, 4).data
        x, theirs = Tensor(theirs.round(), True), theirs.round().requires_grad_()
        getattr(x, name)().backward()
        getattr(theirs, name)().backward()
        torch.testing.assert_close(x.grad.data, theirs.grad)  # shared out
        other = numbers(3, 4, seed=1)
        assert torch.equal(getattr(x, name)(other).data, getattr(torch, name)(theirs.detach(), other.data))
        with pytest.raises(TypeError, match=f"expected one dimension or None; a{name} takes several"):
            getattr(x, name)((0, 1))

    @pytest.mark.parametrize("largest", [True, False])
    def test_topk(self, largest):
        x = numbers(5, 40, requires_grad=True)
        theirs = x.data.clone().requires_grad_()
        found, expected = x.topk(3, largest=largest), theirs.topk(3, largest=largest)
        assert torch.equal(found.indices.data, expected.indices)
        (found.values * as_tensor([1.0, 2.0, 3.0])).sum().backward()
        (expected.values * torch.tensor([1.0, 2.0, 3.0], device=theirs.device)).sum().backward()
        assert torch.equal(x.grad.data, theirs.grad)

    @pytest.mark.parametrize("p", [2, 1, "fro", float("inf"), -float("inf"), 0], ids=str)
    @pytest.mark.parametrize("dim", [None, 1, (0, 2)], ids=str)
    def test_norm(self, p, dim):
        x = numbers(3, 4, 2, requires_grad=True)
        found = x.norm(p, dim, keepdim=True)
        found.sum().backward()

        def value(t):
            return t.norm(p, dim, keepdim=True)

        def gradient(t):
            return torch.autograd.grad(value(t).sum(), t, create_graph=True, materialize_grads=True)[0]

        # All elements are added up, then there are a root and the three operations of a gradient.
        for got, reference in ((found, value), (x.grad, gradient)):
            exact = reference(x.data.double().requires_grad_()).detach()
            assert_within(got, exact, error_bound(value, (x.data,), reference=reference, depth=x.numel() + 4))


class TestModule:
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (torch.nn.ReLU(), "part is torch's ReLU, .* use minidl.nn.ReLU"),
            (torch.nn.Parameter(torch.ones(2)), r"assign minidl.nn.Parameter\(t.detach\(\)\)"),
            (torch.ones(2, requires_grad=True), r"assign minidl.nn.Parameter\(t.detach\(\)\)"),
        ],
        ids=["module", "parameter", "leaf"],
    )
    def test_attributes_that_torch_trains_are_refused(self, value, message):
        with pytest.raises(TypeError, match=message):
            nn.Module().part = value

    def test_a_buffer_stays_one(self):
        module = nn.Module()
        module.register_buffer("n", torch.zeros(1, device=default_device()))
        module.register_buffer("hidden", zeros(2), persistent=False)
        module.n += 1
        module.n = module.n + 1
        assert module.state_dict()["n"].tolist() == [2]
        module.n = torch.full((1,), 5.0, device=default_device())
        assert isinstance(module.n, Tensor)
        assert {name: value.tolist() for name, value in module.state_dict().items()} == {"n": [5]}
        assert [name for name, _ in module.named_buffers()] == ["n", "hidden"]
        module.load_state_dict({"n": torch.ones(1)})
        with pytest.raises(TypeError, match=re.escape("n is a buffer: got float, expected a Tensor or None")):
            module.n = 1.0

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
    def test_weights_do_not_become_integers(self, dtype):
        for call in (lambda m: m.to(dtype), lambda m: m.to("cpu", dtype), lambda m: m.to(dtype=dtype)):
            with pytest.raises(TypeError, match=f"Linear.to: got {dtype}, expected a floating type"):
                call(nn.Linear(2, 2))
