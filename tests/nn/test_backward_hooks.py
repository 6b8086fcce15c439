"""Hooks of modules: on gradients, with keyword arguments, and before other hooks."""

import pytest
import torch

import minidl
from minidl import nn
from minidl.tensors import Tensor, default_device


class TwoInputs:
    """torch's or minidl's module of two inputs and two results."""

    def __new__(cls, f):
        class Both(f.Module):
            def forward(self, x, y, scale, factor=1.0):
                return x * y * scale, (x + y) * factor, None

        return Both()


def seen(f, tensor, recorded=True):
    """What the hooks of a module get, in order, and the gradients of its inputs."""
    module, calls = TwoInputs(f), []
    x, y = tensor([1.0, 2.0]), tensor([3.0, 5.0])
    if recorded:
        x.requires_grad_(), y.requires_grad_()
    z = tensor([0.5, 4.0]).requires_grad_()

    def plain(part):
        return [None if g is None or not any(g.tolist()) else g.tolist() for g in part]  # torch has zeros for None

    module.register_full_backward_hook(lambda m, gi, go: calls.append(("second", plain(gi), plain(go))))
    module.register_full_backward_hook(
        lambda m, gi, go: tuple(None if g is None else g * 2 for g in gi) if recorded else None, prepend=True
    )
    module.register_full_backward_hook(lambda m, gi, go: calls.append(("first", plain(gi), plain(go))), prepend=True)
    if recorded:
        product, total, nothing = module(x, y, 3.0, factor=2.0)
        assert nothing is None
        (product * z + total).sum().backward()
        return calls, x.grad.tolist(), y.grad.tolist()
    product, _, _ = module(x, y, z)
    product.sum().backward()
    return calls, z.grad.tolist()


@pytest.mark.parametrize("recorded", [True, False])
def test_backward_hooks_get_and_change_what_torchs_do(recorded):
    expected = seen(torch.nn, torch.tensor, recorded)
    assert [name for name, *_ in expected[0]] == ["first", "second"]
    assert seen(nn, minidl.tensor, recorded) == expected


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_module_whose_inputs_record_nothing_has_its_hooks_called():
    def calls(f, x):
        layer, found = f.Linear(2, 2), []
        layer.load_state_dict({"weight": torch.eye(2), "bias": torch.ones(2)})
        layer.register_full_backward_hook(lambda m, gi, go: found.append((gi, go[0].tolist())))
        layer(x).sum().backward()
        return found, layer.weight.grad.tolist()

    assert calls(nn, minidl.ones(1, 2)) == calls(torch.nn, torch.ones(1, 2)) == (
        [((None,), [[1.0, 1.0]])], [[1.0, 1.0], [1.0, 1.0]]
    )  # fmt: skip


def test_second_derivatives_pass_through_a_backward_hook():
    layer, shapes = nn.Linear(3, 1), []
    x = minidl.ones(4, 3, requires_grad=True)
    handle = layer.register_full_backward_hook(lambda m, gi, go: shapes.append(gi[0].shape))
    (slope,) = minidl.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    slope.norm().backward()
    gradient = layer.weight.grad.data.clone()
    handle.remove()
    layer.zero_grad()
    (slope,) = minidl.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    slope.norm().backward()
    assert torch.equal(layer.weight.grad.data, gradient)
    assert len(shapes) == 2


def test_hooks_with_keyword_arguments_and_in_front():
    class Scaled(nn.Module):
        def forward(self, x, factor=1.0):
            return x * factor

    module, calls = Scaled(), []
    module.register_forward_hook(lambda m, args, kwargs, y: calls.append(kwargs) or y + 1.0, with_kwargs=True)
    module.register_forward_hook(lambda m, args, y: calls.append("in front") or y * 10.0, prepend=True)
    module.register_forward_pre_hook(lambda m, args, kwargs: (args, {"factor": 3.0}), with_kwargs=True)
    module.register_forward_pre_hook(lambda m, args: args[0] + 1.0, prepend=True)
    assert module(Tensor(torch.ones(1, device=default_device())), factor=2.0).item() == 61.0
    assert calls == ["in front", {"factor": 3.0}]
