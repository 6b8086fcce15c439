"""Results that are computed when they are first needed: the same values and gradients, fewer launches, no surprise."""

import collections

import pytest
import torch

import minidl
from minidl import models, nn, ops
from minidl.autograd import no_grad
from minidl.kernels.norm import alone
from minidl.ops.batchnorm import BatchNorm
from minidl.optim import SGD
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device


@pytest.fixture
def in_bands(monkeypatch):
    """Batch norms of few values as those of many: statistics, then values."""
    monkeypatch.setattr(alone, "fits", lambda x: False)


def launches(call):
    """The result, and how often each kernel was launched."""
    found = collections.Counter()

    def watcher(kernel, grid, args, meta, go):
        found[kernel.__name__] += 1
        go()

    with launch.watch(watcher):
        result = call()
    return result, found


def image(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(default_device())


class Block(nn.Module):
    """A convolution, batch norm, a sum, an activation, as torchvision writes them."""

    def __init__(self, act=ops.relu):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), act
        generator = torch.Generator().manual_seed(1)
        for t in (self.bn.weight, self.bn.bias, self.bn.running_mean):
            t.data.copy_(torch.randn(8, generator=generator))

    def forward(self, x):
        return self.act(self.bn(self.conv(x)) + x)


def in_a_module(function):
    """What the function returns, called as the `forward` of a module."""

    class Body(nn.Module):
        def forward(self):
            return function()

    return Body()()


def step(model, x, training):
    """Result, gradients and running statistics."""
    model.train(training)
    model.zero_grad()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    leaf = Tensor(x, requires_grad=training)
    if training:
        y = model(leaf)
        y.backward(Tensor(torch.ones_like(y.data)))
    else:
        with no_grad():
            y = model(leaf)
    found = [y.data, *(p.grad.data for p in (leaf, *model.parameters()) if p.grad is not None)]
    found += [t.clone() for name, t in model.state_dict().items() if "running" in name]
    model.load_state_dict(before)
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", [ops.relu, ops.relu6, ops.tanh, ops.gelu, ops.leaky_relu])
def test_a_block_has_the_same_values_and_gradients(act, training, in_bands):
    model, x = Block(act), image(2, 8, 5, 6)
    fused = step(model, x, training)
    with minidl.fusion(False):
        plain = step(model, x, training)
    assert len(fused) == len(plain) == (7 if training else 3)
    for a, b in zip(fused, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_block_is_computed_in_few_launches(in_bands):
    model, x = Block(), image(2, 8, 5, 6).contiguous(memory_format=torch.channels_last)
    with no_grad():
        _, found = launches(lambda: model.eval()(Tensor(x)).data)
        assert found["batch_norm_fold_kernel"] == 1
        assert found.total() - found["conv_band_kernel"] == 2  # the convolution has all that follows
    _, found = launches(lambda: model.train()(Tensor(x)).data)
    assert found["batch_norm_kernel"] == 1  # with the sum and the activation
    assert not found["flat_kernel"]
    with minidl.fusion(False):
        _, found = launches(lambda: model.train()(Tensor(x)).data)
    assert found["batch_norm_kernel"] == 1
    assert found["flat_kernel"] == 2


@pytest.mark.parametrize("act", [ops.relu, ops.tanh, lambda x: x])
def test_sums_of_gradients_are_taken_in_by_the_batch_norm_before(act, in_bands, monkeypatch):
    """What a block passes to the next and beside it comes back in two parts: the same bits in fewer launches."""
    model, x = nn.Sequential(*(Block(act) for _ in range(3))), image(2, 8, 5, 6)
    x = x.contiguous(memory_format=torch.channels_last)
    taken, few = launches(lambda: step(model, x, True))
    monkeypatch.setattr(BatchNorm, "accepts_pending_sums", staticmethod(lambda: False))
    apart, many = launches(lambda: step(model, x, True))
    # That of the picture itself is left.
    assert few["flat_kernel"] == 1
    assert many["flat_kernel"] == 3
    assert many - few == {"flat_kernel": 2}
    for a, b in zip(taken, apart, strict=True):
        assert torch.equal(a, b)


def test_sums_that_a_convolution_takes_in():
    """As either operand, with a sum of its own or none; of two convolutions the first takes the second's result."""
    conv, down = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
    x = Tensor(image(2, 8, 3, 3).contiguous(memory_format=torch.channels_last))
    for body, convolutions, sums in (
        (lambda: ops.relu(conv(x) + x), 1, 0),
        (lambda: ops.relu(x + conv(x)), 1, 0),
        (lambda: ops.relu(conv(x) + down(x)), 2, 0),
        (lambda: ops.relu(down(x) + (conv(x) + x)), 2, 0),
        (lambda: ops.relu(conv(x)) + x, 1, 1),
        (lambda: conv(x) + x + x, 1, 1),
        (lambda: ops.batch_norm(conv(x) + x, *(Tensor(torch.ones(8, device=x.device)) for _ in range(4))), 1, 0),
    ):
        with no_grad():
            y, found = launches(lambda body=body: in_a_module(body).data)
            with minidl.fusion(False):
                expected = body().data
        assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
        assert (found["gemm_tma_kernel"] + found["gemm_pointer_kernel"], found["flat_kernel"]) == (convolutions, sums)


def test_a_sum_that_is_recorded_is_none_of_the_convolution():
    conv, x = nn.Conv2d(4, 4, 1), Tensor(image(2, 4, 3, 3))
    conv.requires_grad_(False)
    other = Tensor(image(2, 4, 3, 3, seed=1), requires_grad=True)
    in_a_module(lambda: ops.relu(conv(x) + other)).sum().backward()
    assert torch.equal(other.grad.data, (ops.conv2d(x, conv.weight, conv.bias).data + other.data > 0).float())


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_a_network_is_as_without_fusing(name):
    model = getattr(models, name)(4).eval()
    x = Tensor(image(2, 3, 32, 32))
    with no_grad():
        y, fused = launches(lambda: model(x).data)
        with minidl.fusion(False):
            expected, plain = launches(lambda: model(x).data)
    assert torch.allclose(y, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert fused.total() < 0.55 * plain.total()
    assert not fused["flat_kernel"]


def test_what_is_used_twice_is_right_both_times():
    conv, x = nn.Conv2d(4, 4, 1), Tensor(image(2, 4, 3, 3), requires_grad=True)

    def total():
        z = conv(x)
        return ops.relu(z).sum() + (z * z).sum()

    found = []
    for fused in (True, False):
        with minidl.fusion(fused):
            x.grad = None
            y = in_a_module(total)
            y.backward()
            found.append((y.data, x.grad.data))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


def test_nothing_is_deferred_outside_of_a_module_or_left_by_one():
    conv, x = nn.Conv2d(4, 6, 3), Tensor(image(2, 4, 5, 7))
    kept = []

    def kept_and_used():
        kept.append(conv(x))
        assert kept[0]._deferred is not None
        return kept[0] + 1.0

    assert conv(x)._deferred is None
    assert ops.conv2d(x, conv.weight)._deferred is None
    y = in_a_module(kept_and_used)
    assert (y._deferred, kept[0]._deferred) == (None, None)


def test_shapes_and_types_are_known_before():
    conv, x = nn.Conv2d(4, 6, 3), Tensor(image(2, 4, 5, 7))

    def shapes():
        z = conv(x)
        known = list(z.shape), z.ndim, z.numel(), z.dtype, z.size(1), z.requires_grad
        assert z._deferred is not None
        assert not z.is_leaf
        assert z._deferred is None
        return known

    assert in_a_module(shapes) == ([2, 6, 3, 5], 4, 180, torch.float32, 6, True)


def test_after_an_error_nothing_is_open():
    conv, x = nn.Conv2d(4, 4, 1), Tensor(image(2, 4, 3, 3))

    def failing():
        z = conv(x)
        raise KeyError(z.ndim)

    with pytest.raises(KeyError):
        in_a_module(failing)
    with pytest.raises(ZeroDivisionError), minidl.fusion(False):
        raise ZeroDivisionError
    assert in_a_module(lambda: conv(x)._deferred is not None)


def test_the_mode_is_that_of_the_call():
    conv, x = nn.Conv2d(4, 4, 1), Tensor(image(2, 4, 3, 3))

    def mixed():
        with no_grad():
            z = conv(x)
        assert not z.requires_grad
        assert ops.relu(z).is_leaf
        z = conv(x)
        with no_grad():
            assert not ops.relu(z).requires_grad
            assert z.data is not None
        assert z.requires_grad
        return z

    in_a_module(mixed).sum().backward()
    assert conv.weight.grad is not None


def test_own_changes_in_place_come_after():
    """An optimiser's step, load_state_dict, to() and freezing compute what is open before they change it."""
    x, other = Tensor(image(2, 4, 3, 3)), nn.Conv2d(4, 4, 1).state_dict()
    for change in (
        lambda conv: SGD(conv.parameters(), lr=1.0).step(),
        lambda conv: conv.load_state_dict(other),
        lambda conv: conv.to(torch.float64),
        lambda conv: conv.weight.detach().zero_(),
        lambda conv: conv.requires_grad_(False),
    ):
        conv = nn.Conv2d(4, 4, 1)
        expected = ops.conv2d(x, conv.weight, conv.bias).data.clone()
        conv(x).sum().backward()

        def changed(conv=conv, change=change):
            y = conv(x)
            change(conv)
            return y

        y = in_a_module(changed)
        assert torch.equal(y.data, expected)
        assert y.requires_grad


def test_changes_by_torch_are_refused():
    conv, x = nn.Conv2d(4, 4, 1), Tensor(image(2, 4, 3, 3))

    def of_the_image():
        y = conv(x)
        x.data.add_(1)
        return y

    def of_the_weight():
        y = conv(x)
        conv.weight.data = conv.weight.data.clone()
        return y

    with pytest.raises(
        RuntimeError, match=r"tensor of shape \[2, 4, 3, 3\] was changed in place before a result of it"
    ):
        in_a_module(of_the_image)
    with pytest.raises(RuntimeError, match="was changed in place before"):
        in_a_module(of_the_weight)


def test_hooks_come_before_the_use():
    conv, x = nn.Conv2d(4, 4, 1), Tensor(image(2, 4, 3, 3))
    seen = []

    def before():
        z = conv(x)
        z.register_hook(lambda grad: seen.append(grad.shape))
        z.retain_grad()
        return ops.relu(z).sum(), z

    loss, z = in_a_module(before)
    loss.backward()
    assert len(seen) == 1
    assert z.grad is not None

    def after():
        z = conv(x)
        y = ops.relu(z)
        with pytest.raises(RuntimeError, match="register_hook: this tensor was computed as a part of the operation"):
            z.register_hook(print)
        with pytest.raises(RuntimeError, match="retain_grad: this tensor was computed as a part of the operation"):
            z.retain_grad()
        return y

    in_a_module(after)


def test_running_statistics_are_those_of_the_call(in_bands):
    bn, x = nn.BatchNorm2d(4).eval(), Tensor(image(3, 4, 5, 5))
    expected = ops.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias).data.clone()

    def mixed():
        y = bn(x)
        bn.train()(x)
        return y

    assert torch.allclose(in_a_module(mixed).data, expected)


def test_errors_are_raised_by_the_call():
    conv = nn.Conv2d(4, 4, 1)
    with pytest.raises(TypeError):
        conv(Tensor(image(2, 4, 3, 3).double()))

    def norm_of_others():
        with no_grad():
            z = conv(Tensor(image(2, 4, 3, 3)))
            with pytest.raises(ValueError, match="running_mean has shape"):
                ops.batch_norm(z, Tensor(torch.zeros(3)), Tensor(torch.ones(3)))
        with pytest.raises(ValueError, match="unknown activation"):
            ops.bias_act(z, None, "swish")
        with pytest.raises(ValueError, match="needs a slope above 0"):
            ops.leaky_relu(conv(Tensor(image(2, 4, 3, 3))), -1.0)

    in_a_module(norm_of_others)


def test_fusion_is_a_setting():
    with pytest.raises(TypeError, match="fusion: enabled is 1, expected True or False"):
        minidl.fusion(1)
    conv, x = nn.Conv2d(4, 4, 1), Tensor(image(2, 4, 3, 3))

    def deferred():
        return conv(x)._deferred is not None

    with minidl.fusion(False):
        assert not in_a_module(deferred)
        with minidl.fusion(True):
            assert in_a_module(deferred)
        assert not in_a_module(deferred)
    assert in_a_module(deferred)
    with torch.inference_mode():
        assert not in_a_module(deferred)


def test_a_drawing_shows_what_was_fused(in_bands):
    y = Block()(Tensor(image(2, 8, 5, 6)))
    assert "BatchNorm + sum, relu" in minidl.draw(y).dot
    with minidl.fusion(False):
        dot = minidl.draw(Block()(Tensor(image(2, 8, 5, 6)))).dot
    assert "BatchNorm + sum" not in dot
    assert "BiasAct, relu" in dot
