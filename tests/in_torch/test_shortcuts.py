"""What is scaled, dropped for some examples and added is one operator in a fused model, with torch's numbers."""

import copy
import types

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import minidl.torch as mt
from minidl.runtime import launch


class StochasticDepth(nn.Module):
    """As torchvision's of that name."""

    __module__ = "torchvision.ops.stochastic_depth"

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
        return x * noise.bernoulli_(1 - self.p).div_(1 - self.p)


class Block(nn.Module):
    """As torchvision's CNBlock."""

    def __init__(self, channels, p):
        super().__init__()
        self.block = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.layer_scale = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)
        self.stochastic_depth = StochasticDepth(p)

    def forward(self, input):
        result = self.layer_scale * self.block(input)
        result = self.stochastic_depth(result)
        result += input
        return result


class Rows(nn.Module):
    """A scale of the last dimension, as timm has it of channels; nothing is dropped."""

    def __init__(self, channels):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(channels) + 0.5)
        self.depth, self.shortcut = nn.Identity(), nn.Identity()

    def forward(self, x):
        y = self.depth(x.square().mul(self.gamma.reshape(1, 1, -1)))
        return y + self.shortcut(x)


def fused(model):
    torch._dynamo.reset()
    return torch.compile(model, backend=mt.backend)


def _model(device, dtype=torch.float64):
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(3, 6, 1), Block(6, 0.5), Block(6, 0.0)).to(device, dtype)
    return fused(copy.deepcopy(theirs)), theirs, torch.randn(5, 3, 4, 3, dtype=dtype, device=device)


def _launched(call):
    """Names of the kernels that a call launches, and its result."""
    names = []
    with launch.watch(lambda kernel, grid, args, meta, go: (names.append(kernel.__name__), go())):
        y = call()
    return names, y


def _results(model, x, seed=3):
    """Result, gradients, and the random number that follows."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    results = [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return [*results, torch.rand(1, device=x.device)]


def _same(ours, theirs, x):
    pairs = zip(_results(ours, x), _results(theirs, x), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_training_and_evaluation(device):
    ours, theirs, x = _model(device)
    for training in (True, False):
        _same(ours.train(training), theirs.train(training), x)
        names, _ = _launched(lambda training=training: _results(ours, x))
        assert [names.count(f"scaled_sum{way}_kernel") for way in ("", "_grad")] == [2, 2]


def test_scales_of_the_last_dimension(device):
    theirs = Rows(5).double().to(device)
    ours, x = fused(copy.deepcopy(theirs)), torch.randn(3, 4, 5, dtype=torch.float64, device=device)
    assert _launched(lambda: ours(x))[0] == ["scaled_sum_kernel"]
    _same(ours, theirs, x)
    _same(ours, theirs, x[:, :1].expand(3, 4, 5))  # copied by torch's lines only


def test_what_does_not_fit_is_computed_as_it_was(device):
    theirs = _model(device)[1]
    ours, plain = copy.deepcopy(theirs[1]), theirs[1]
    block = fused(ours)
    last = torch.randn(5, 4, 3, 6, dtype=torch.float64, device=device).movedim(-1, 1)

    def alike(x, count):
        names, _ = _launched(lambda: block(x))
        assert names.count("scaled_sum_kernel") == count
        _same(block, plain, x)

    alike(last, 1)
    alike(last.contiguous(), 0)  # what is added lies otherwise
    for module in (ours, plain):
        module.layer_scale = nn.Parameter(torch.full((1, 6, 4, 1), 2.0, dtype=torch.float64, device=device))
    alike(last, 0)
    for module in (ours, plain):
        module.layer_scale = nn.Parameter(torch.full((1, 6, 1, 1), 2.0, dtype=torch.float64, device=device))
        module.stochastic_depth = nn.Dropout(0.0)  # with p a GPU drops by places in memory
    alike(last, 0)
    for module in (ours, plain):
        module.stochastic_depth = StochasticDepth(0.5)
        module.stochastic_depth.register_forward_hook(lambda module, args, y: y * 2)
    alike(last, 0)


def test_a_sum_in_place_keeps_the_dtype_of_what_is_added_to(device):
    plain = _model(device, torch.float32)[1][1]
    ours = copy.deepcopy(plain)
    low = torch.randn(5, 4, 3, 6, device=device).movedim(-1, 1).half()
    for input in (low, low.double()):
        results = []
        for module, call in ((ours, fused(ours)), (plain, plain)):
            module.block = nn.Identity()
            module.block.forward = types.MethodType(lambda self, x: x.half(), module.block)
            torch.manual_seed(0)
            results.append(call(input))
        assert [y.dtype for y in results] == [torch.float32] * 2
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype, device):
    """The scaled sum of float16 or bfloat16, float32 and float32 has float32's bits of torch's lines."""
    plain = _model(device, torch.float32)[1][1]
    plain.block = nn.Identity()
    if not launch.INTERPRETED:  # which has no bfloat16
        plain.block.forward = types.MethodType(lambda self, x: x.to(dtype), plain.block)
    ours = copy.deepcopy(plain)
    x = torch.randn(5, 4, 3, 6, device=device).movedim(-1, 1)
    results = []
    for block, call in ((ours, fused(ours)), (plain, plain)):
        torch.manual_seed(0)
        with torch.autocast(device.type, dtype):
            y = call(x)
        y.sum().backward()
        results.append((y, block.layer_scale.grad))
    assert results[0][0].dtype == torch.float32
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(*(gradient for _, gradient in results), rtol=1e-5, atol=1e-5)


def test_inductor_takes_what_lies_between(device, monkeypatch):
    """`mode` and `options` go to Inductor, with a graph of operators."""
    seen = []

    class Inductor:
        def __init__(self, mode, options, dynamic):
            seen.append((mode, options))

        def __call__(self, module, inputs):
            return aot_autograd(fw_compiler=lambda graph, inputs: seen.append(graph) or make_boxed_func(graph))(
                module, inputs
            )

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Inductor)
    theirs, x = _model(device)[1:]
    torch._dynamo.reset()
    ours = torch.compile(copy.deepcopy(theirs), backend=mt.backend, mode="reduce-overhead")
    _same(ours, theirs, x)
    assert seen[0] == ("reduce-overhead", None)
    assert "minidl.scaled_sum" in str(seen[1].graph)


@pytest.mark.parametrize("between", ["draws", "changes", "seen", "changes the input"])
def test_order_is_kept(between, device):
    """Nothing is joined over changes in between, or where something else reads or gets the sum; random numbers are
    drawn in their order."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma, self.depth = nn.Parameter(torch.rand(4) + 0.5), StochasticDepth(0.5)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            x = x + 0
            y = self.gamma * x
            if between == "changes":
                x += 1
                return y + x
            if between == "changes the input":
                z = x.relu()
                x += y.exp()
                z += y
                return z + x
            if between == "seen":
                return (y + x) * y
            return self.depth(y) + self.dropout(x)

    theirs = Net().double().to(device)
    ours, x = fused(copy.deepcopy(theirs)), torch.randn(3, 4, dtype=torch.float64, device=device)
    count = 1 if between == "draws" else 0
    assert _launched(lambda: ours(x))[0].count("scaled_sum_kernel") == count
    if not between.startswith("changes"):  # torch has no gradient then
        _same(ours, theirs, x)
    with torch.no_grad():
        torch.testing.assert_close(*(model.eval()(x.clone()) for model in (ours, theirs)))
