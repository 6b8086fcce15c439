"""Layers in float8: which are, what they compute, that they can be saved, and what is refused."""

import pytest
import torch

from minidl import manual_seed, nn, ops
from minidl.autograd import no_grad
from minidl.nn.float8 import Float8Conv2d, Float8Linear
from minidl.ops.float8 import Float8
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.testing.specs import float8 as specs


def drawn(*shape, seed=0):
    return Tensor(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(default_device()))


def model():
    manual_seed(0)
    found = nn.Sequential(
        nn.Conv2d(3, 32, 3, act="relu"),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 32, 1, stride=2, act="relu", pool="max"),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    found[2].running_mean = drawn(64)
    return found.eval()


@pytest.mark.parametrize("fold", [False, True])
def test_a_model(fold):
    net, x = model(), drawn(2, 3, 10, 10)
    with no_grad():
        if fold:
            nn.fold_batch_norms(net, x)
        before = net(x)
        assert nn.to_float8(net) is net
        after = net(x)
    kinds = [type(layer) for layer in net]
    assert kinds == [nn.Conv2d, Float8Conv2d] + [nn.BatchNorm2d] * (not fold) + [Float8Conv2d, nn.Flatten, Float8Linear]
    assert net[1].weight.dtype == torch.float8_e4m3fn
    off = (after.data - before.data).norm() / before.data.norm()
    assert 0 < off < 0.1
    other = model()
    with no_grad():
        nn.to_float8(nn.fold_batch_norms(other, x) if fold else other)
        other.load_state_dict(net.state_dict())
        assert torch.equal(other(x).data, after.data)
    assert all(p.requires_grad for p in net.parameters())
    assert [name for name, _ in net.named_parameters()] == [
        "0.weight", "0.bias", *["2.weight", "2.bias"] * (not fold)
    ]  # fmt: skip


def test_another_type_is_that_of_the_other_layers():
    net, x = nn.to_float8(model()), drawn(2, 3, 10, 10)
    with no_grad():
        before = net(x)
        after = net.to(torch.float64).to(torch.float32)(x)
    assert net[1].weight.dtype == torch.float8_e4m3fn
    assert torch.equal(after.data, before.data)


def test_operations_are_those_of_the_values():
    x, w, bias = drawn(3, 5, 64), drawn(40, 64, seed=1), drawn(40, seed=2)
    small, weight = ops.float8.quantize(x), ops.float8.quantize(w, torch.float8_e5m2)
    wide = [ops.float8.dequantize(t).data.double() for t in (small, weight)]
    expected = torch.relu(wide[0] @ wide[1].T + bias.data.double())
    got = ops.float8.linear(small, weight, bias, "relu")
    assert got.dtype == torch.float32
    total = wide[0].abs() @ wide[1].abs().T + bias.data.double().abs()
    bound = specs.sum_error(total, 64, "float16" if launch.INTERPRETED else "float8")
    assert ((got.data.double() - expected).abs() <= bound).all()
    half = ops.float8.linear(x.to(torch.float16), weight)
    assert half.dtype == torch.float16
    given = ops.float8.quantize(x, scale=small.scale)
    assert torch.equal(given.values.data.view(torch.uint8), small.values.data.view(torch.uint8))
    image = Float8(Tensor(small.values.data.reshape(15, 64, 1, 1)), small.scale)
    kernel = Float8(Tensor(weight.values.data.reshape(40, 64, 1, 1)), weight.scale)
    same = ops.float8.conv2d(image, kernel, bias, act="relu")
    assert torch.equal(same.data.reshape(3, 5, 40), got.data)
    result = ops.float8.linear(small, weight, bias, "relu", scale_result=ops.float8.quantize(got).scale)
    assert result.values.dtype == torch.float8_e5m2
    assert torch.equal(
        result.values.data.float(), ops.float8.quantize(got, torch.float8_e5m2, result.scale).values.data.float()
    )


@pytest.mark.parametrize("shapes", [((0, 64), (8, 64)), ((64,), (8, 64)), ((2, 0), (3, 0)), ((2, 7), (0, 7))])
def test_empty_and_small(shapes):
    x, w = map(torch.ones, shapes)
    y = ops.float8.linear(Tensor(x.to(default_device())), Tensor(w.to(default_device())))
    assert torch.equal(y.data.cpu(), x @ w.T)


def test_refusals():
    x, w = drawn(3, 64), drawn(8, 64)
    with pytest.raises(ValueError, match=r"expected x .* and weight"):
        ops.float8.linear(x, drawn(8, 32))
    with pytest.raises(ValueError, match="bias has shape"):
        ops.float8.linear(x, w, drawn(7))
    with pytest.raises(ValueError, match="float8 is for inference"):
        ops.float8.linear(Tensor(x.data, requires_grad=True), w)
    with pytest.raises(ValueError, match="float8 is for inference"):
        ops.float8.linear(x, w, Tensor(drawn(8).data, requires_grad=True))
    pictures = drawn(1, 32, 4, 4), drawn(32, 32, 1, 1)
    with pytest.raises(ValueError, match="float8 is for inference"):
        ops.float8.conv2d(*pictures, scale=Tensor(drawn(32).data, requires_grad=True))
    with pytest.raises(ValueError, match="one float32"):
        ops.float8.quantize(x, scale=drawn(2))
    if default_device().type == "cpu":
        with pytest.raises(TypeError, match="bfloat16 is not supported on the CPU"):
            ops.float8.linear(x, w, out_dtype=torch.bfloat16)
