"""What is scaled, dropped for some examples and added is one operator in an accelerated model, with torch's numbers."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.func import vmap

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


def _model(device, dtype=torch.float64):
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(3, 6, 1), Block(6, 0.5), Block(6, 0.0)).to(device, dtype)
    return mt.accelerate(copy.deepcopy(theirs)), theirs, torch.randn(5, 3, 4, 3, dtype=dtype, device=device)


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
    found = [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return [*found, torch.rand(1, device=x.device)]


def _same(ours, theirs, x):
    found = zip(_results(ours, x), _results(theirs, x), strict=True)
    for one, other in found:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_training_and_evaluation(device):
    ours, theirs, x = _model(device)
    lines = {line.module: line for line in mt.report(ours)}
    assert lines["1"][1:] == ("Block", "blocks", "layer_scale + stochastic_depth + sum")
    for training in (True, False):
        _same(ours.train(training), theirs.train(training), x)
        names, _ = _launched(lambda training=training: _results(copy.deepcopy(ours), x))
        assert [names.count(f"scaled_sum{way}_kernel") for way in ("", "_grad")] == [2, 2]
    assert not _launched(lambda: mt.restore(ours)(x))[0]


def test_scales_of_the_last_dimension(device):
    theirs = Rows(5).double().to(device)
    ours, x = mt.accelerate(copy.deepcopy(theirs)), torch.randn(3, 4, 5, dtype=torch.float64, device=device)
    assert "gamma + depth + sum" in str(mt.report(ours))
    assert _launched(lambda: ours(x))[0] == ["scaled_sum_kernel"]
    _same(ours, theirs, x)
    _same(ours, theirs, x[:, :1].expand(3, 4, 5))  # copied by torch's lines only


def test_what_does_not_fit_is_computed_as_it_was(device):
    ours, theirs, _ = _model(device)
    block, plain = ours[1], theirs[1]
    last = torch.randn(5, 4, 3, 6, dtype=torch.float64, device=device).movedim(-1, 1)

    def alike(x, count):
        names, _ = _launched(lambda: block(x))
        assert names.count("scaled_sum_kernel") == count
        _same(block, plain, x)

    alike(last, 1)
    alike(last.contiguous(), 0)  # what is added lies otherwise
    for module in (block, plain):
        module.layer_scale = nn.Parameter(torch.full((1, 6, 4, 1), 2.0, dtype=torch.float64, device=device))
    alike(last, 0)
    for module in (block, plain):
        module.layer_scale = nn.Parameter(torch.full((1, 6, 1, 1), 2.0, dtype=torch.float64, device=device))
        module.stochastic_depth = nn.Dropout(0.0)  # with p a GPU drops by places in memory
    alike(last, 0)
    for module in (block, plain):
        module.stochastic_depth = StochasticDepth(0.5)
        module.stochastic_depth.register_forward_hook(lambda module, args, y: y * 2)
    alike(last, 0)


def test_a_sum_in_place_keeps_the_dtype_of_what_is_added_to(device):
    ours, theirs, _ = _model(device, torch.float32)
    low = torch.randn(5, 4, 3, 6, device=device).movedim(-1, 1).half()
    for input in (low, low.double()):
        made = []
        for module in (ours[1], theirs[1]):
            module.block = nn.Identity()
            module.block.forward = types.MethodType(lambda self, x: x.half(), module.block)
            torch.manual_seed(0)
            made.append(module(input))
        assert [y.dtype for y in made] == [torch.float32] * 2
        torch.testing.assert_close(*made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype, device):
    """The scaled sum of float16 or bfloat16, float32 and float32 has float32's bits of torch's lines."""
    ours, theirs, _ = _model(device, torch.float32)
    x = torch.randn(5, 4, 3, 6, device=device).movedim(-1, 1)
    made = []
    for block in (ours[1], theirs[1]):
        block.block = nn.Identity() if launch.INTERPRETED else nn.Conv2d(6, 6, 1, device=device)
        block.block.load_state_dict(ours[1].block.state_dict())
        torch.manual_seed(0)
        with torch.autocast(device.type, dtype):
            y = block(x)
        y.sum().backward()
        made.append((y, block.layer_scale.grad))
    assert made[0][0].dtype == torch.float32
    assert torch.equal(made[0][0], made[1][0])
    torch.testing.assert_close(*(gradient for _, gradient in made), rtol=1e-5, atol=1e-5)


def test_compiled_and_mapped(device):
    ours, theirs, _ = _model(device)
    block, x = ours[1], torch.randn(5, 4, 3, 6, dtype=torch.float64, device=device).movedim(-1, 1)
    _same(torch.compile(block, fullgraph=True, backend="aot_eager"), theirs[1], x)
    xs = torch.stack([x, -x])
    made = []
    for model in (block, theirs[1]):
        torch.manual_seed(0)
        made += [vmap(model, randomness="same")(xs), vmap(model.eval())(xs)]
    for one, other in zip(made[:2], made[2:], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("between", ["draws", "changes", "seen", "changes what is given"])
def test_order_is_kept(between, device):
    """Nothing is joined over random numbers or changes in between, or where another one reads or gets the sum."""

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
            if between == "changes what is given":
                z = x.relu()
                x += y.exp()
                z += y
                return z + x
            if between == "seen":
                return (y + x) * y
            return self.depth(y) + self.dropout(x)

    theirs = Net().double().to(device)
    ours, x = mt.accelerate(copy.deepcopy(theirs)), torch.randn(3, 4, dtype=torch.float64, device=device)
    assert _launched(lambda: ours(x))[0] == []
    if not between.startswith("changes"):  # torch has no gradient then
        _same(ours, theirs, x)
    with torch.no_grad():
        torch.testing.assert_close(*(model.eval()(x.clone()) for model in (ours, theirs)))
