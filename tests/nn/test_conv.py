"""The convolution layers."""

import math

import pytest
import torch

import minidl
from minidl import nn, no_grad, optim
from minidl.kernels import check, conv
from minidl.tensors import Tensor, default_device


def images(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(default_device())


@pytest.mark.parametrize(
    "how", [{}, {"stride": 2, "padding": 1}, {"padding": "same", "dilation": 2}, {"groups": 3, "bias": False}]
)
def test_torchs_weights_load(how):
    theirs = torch.nn.Conv2d(6, 9, 3, **how, dtype=torch.float64, device=default_device())
    ours = nn.Conv2d(6, 9, 3, **how, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = images(2, 6, 8, 9)
    torch.testing.assert_close(ours(Tensor(x)).data, theirs(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool", ["max", "avg"])
def test_a_pool_is_the_same_with_a_gradient_and_without(pool):
    layer = nn.Conv2d(3, 8, 3, act="relu", pool=pool, dtype=torch.float64)
    x = Tensor(images(2, 3, 9, 8))
    y = layer(x)
    assert y.requires_grad
    with no_grad():
        fused = layer(x)
    torch.testing.assert_close(fused.data, y.data, rtol=1e-14, atol=1e-14)
    y.sum().backward()
    assert layer.weight.grad is not None


def test_what_a_layer_shows():
    layer = nn.Conv2d(3, 8, 3, stride=2, padding=1, act="relu", pool="max")
    assert repr(layer) == ("Conv2d(3, 8, kernel_size=(3, 3), stride=2, padding=1, bias=True, act='relu', pool='max')")
    with pytest.raises(ValueError, match="both channels multiples of groups"):
        nn.Conv2d(3, 8, 3, groups=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel_size": 0}, "kernel_size is 0, expected a whole number from 1"),
        ({"kernel_size": -1}, "kernel_size is -1"),
        ({"kernel_size": 3, "stride": 0}, "stride is 0"),
        ({"kernel_size": 3, "padding": -1}, "padding is -1"),
        ({"kernel_size": 3, "padding": "full"}, 'expected "same", "valid"'),
        ({"kernel_size": 3, "padding": "same", "stride": 2}, 'padding "same" is for stride 1'),
        ({"kernel_size": 3, "dilation": 0}, "dilation is 0"),
        ({"kernel_size": 3, "pool": "mean"}, "pool is 'mean'"),
    ],
)
def test_bad_settings_are_told_when_the_layer_is_made(settings, message):
    with pytest.raises(ValueError, match=message):
        nn.Conv2d(3, 4, **settings)


@pytest.mark.parametrize("kernel_size", [3.0, True, (3, True), (3, 3, 3), (), "3", None])
def test_a_kernel_size_is_whole_numbers(kernel_size):
    with pytest.raises(TypeError, match=r"kernel_size is .*, expected a whole number from 1 to .*, or a pair"):
        nn.Conv2d(3, 4, kernel_size)


def test_the_weight_stays_in_the_layout_that_the_kernels_read():
    layer = nn.Conv2d(4, 6, (3, 2), dtype=torch.float32)

    def is_last(t):
        return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()

    assert is_last(layer.weight.data)
    assert layer.weight.shape == (6, 4, 3, 2)
    weight = images(6, 4, 3, 2)
    layer.load_state_dict({"weight": weight, "bias": images(6)})
    assert is_last(layer.weight.data)
    layer.to(torch.float64)
    assert is_last(layer.weight.data)
    assert torch.equal(layer.state_dict()["weight"], weight.float().double())
    layer(Tensor(images(2, 4, 5, 5))).sum().backward()
    assert layer.weight.grad.data.stride() == layer.weight.data.stride()
    assert conv.channels_last(layer.weight.data).data_ptr() == layer.weight.data.data_ptr()


def test_the_layout_does_not_change_what_is_drawn():
    minidl.manual_seed(3)
    layer = nn.Conv2d(4, 6, 3)
    minidl.manual_seed(3)
    plain = Tensor(torch.empty(6, 4, 3, 3, device=default_device()))
    nn.init.kaiming_uniform_(plain, a=math.sqrt(5.0))
    assert torch.equal(layer.weight.data, plain.data)


@pytest.mark.parametrize(
    "how", [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2}, {"groups": 3, "bias": False}]
)
def test_torchs_transposed_weights_load(how):
    theirs = torch.nn.ConvTranspose2d(6, 9, 3, **how, dtype=torch.float64, device=default_device())
    ours = nn.ConvTranspose2d(6, 9, 3, **how, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = images(2, 6, 5, 4)
    torch.testing.assert_close(ours(Tensor(x)).data, theirs(x).detach(), rtol=1e-12, atol=1e-12)


def test_a_transposed_layer_starts_in_torchs_range():
    layer = nn.ConvTranspose2d(40, 6, 5, groups=2, dtype=torch.float64)
    bound = 1 / (3 * 25) ** 0.5
    for parameter in layer.parameters():
        assert bound / 2 < parameter.data.abs().max() <= bound


def test_what_a_transposed_layer_shows():
    layer = nn.ConvTranspose2d(4, 2, 5, stride=2, padding=2, output_padding=1, groups=2, act="tanh")
    assert repr(layer) == (
        "ConvTranspose2d(4, 2, kernel_size=(5, 5), stride=2, padding=2, output_padding=1, groups=2, bias=True, "
        "act='tanh')"
    )
    with pytest.raises(ValueError, match="ConvTranspose2d: got 3 input and 8 output channels in 2 groups"):
        nn.ConvTranspose2d(3, 8, 3, groups=2)
    with pytest.raises(ValueError, match="output_padding is 1, expected less than stride 1"):
        nn.ConvTranspose2d(3, 8, 3, output_padding=1)


OTHERS = [
    (nn.Conv1d, torch.nn.Conv1d, (2, 6, 9), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (nn.Conv1d, torch.nn.Conv1d, (2, 6, 9), {"kernel_size": 4, "groups": 3, "bias": False}),
    (nn.ConvTranspose1d, torch.nn.ConvTranspose1d, (2, 6, 5), {"kernel_size": 3, "stride": 2, "output_padding": 1}),
    (nn.Conv3d, torch.nn.Conv3d, (2, 6, 4, 5, 6), {"kernel_size": (1, 2, 3), "padding": (0, 1, 1), "dilation": 2}),
    (nn.ConvTranspose3d, torch.nn.ConvTranspose3d, (2, 6, 2, 3, 4), {"kernel_size": (2, 2, 3), "stride": 2}),
]


@pytest.mark.parametrize(("ours", "theirs", "shape", "how"), OTHERS)
def test_torchs_sequences_and_volumes(ours, theirs, shape, how):
    """Weights load both ways, an optimizer takes them as they lie, and initial values are in torch's range."""
    theirs = theirs(6, 9, **how, dtype=torch.float64, device=default_device())
    ours = ours(6, 9, **how, dtype=torch.float64)
    bound = 1 / math.prod(ours.weight.shape[1:]) ** 0.5
    assert bound / 2 < ours.weight.data.abs().max() <= bound
    ours.load_state_dict(theirs.state_dict())
    assert not ours.weight.data.is_contiguous()
    x = images(*shape)
    adams = torch.optim.AdamW(theirs.parameters(), lr=0.1), optim.AdamW(ours.parameters(), lr=0.1)
    for _ in range(2):
        y, expected = ours(Tensor(x)), theirs(x)
        torch.testing.assert_close(y.data, expected.detach(), rtol=1e-12, atol=1e-12)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert check.memory_order(ours.weight.grad.data) == check.memory_order(ours.weight.data)
        for adam in adams:
            adam.step()
            adam.zero_grad()
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs(x).detach(), ours(Tensor(x)).data, rtol=1e-12, atol=1e-12)


def test_what_other_layers_show_and_refuse():
    assert repr(nn.Conv1d(4, 8, 3, padding="causal")) == "Conv1d(4, 8, kernel_size=(3,), padding='causal', bias=True)"
    assert repr(nn.Conv3d(4, 8, 3, stride=(1, 2, 2))) == (
        "Conv3d(4, 8, kernel_size=(3, 3, 3), stride=(1, 2, 2), bias=True)"
    )
    with pytest.raises(TypeError, match=r"conv1d: kernel_size is \(3, 3\), .* or a sequence of one"):
        nn.Conv1d(4, 8, (3, 3))
    with pytest.raises(ValueError, match="Conv3d: got 3 input"):
        nn.Conv3d(3, 8, 3, groups=2)
    with pytest.raises(ValueError, match="conv_transpose1d: output_padding is 1"):
        nn.ConvTranspose1d(4, 8, 3, output_padding=1)
