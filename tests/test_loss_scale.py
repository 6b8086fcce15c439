"""Loss scaling: the update is that of the plain loss, and the scale follows what the gradients allow."""

import math

import pytest
import torch

from minidl import nn, ops, optim, random
from minidl.kernels import update
from minidl.tensors import Tensor, default_device

MAKERS = {
    "sgd": lambda p, **more: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **more),
    "rmsprop": lambda p, **more: optim.RMSprop(p, lr=0.01, **more),
    "adagrad": lambda p, **more: optim.Adagrad(p, lr=0.1, **more),
    "adam": lambda p, **more: optim.Adam(p, lr=0.01, **more),
    "adamw, clipped": lambda p, **more: optim.AdamW(p, lr=0.01, max_norm=0.5, **more),
}


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device(), dtype)


def parameter(dtype=torch.float32):
    return Tensor(values(5, 7, dtype=dtype), requires_grad=True)


def scale(optimizer):
    return float(optimizer.loss_scale.item())


@pytest.mark.parametrize("name", MAKERS)
def test_the_update_is_that_of_the_plain_loss(name):
    """A power of two moves no digit, so the results are equal bit for bit."""
    plain, scaled = parameter(), parameter()
    one, other = MAKERS[name]([plain]), MAKERS[name]([scaled], loss_scale=1024.0)
    for step in range(5):
        x = Tensor(values(5, 7, seed=step + 1))
        for param, optimizer in ((plain, one), (scaled, other)):
            optimizer.zero_grad()
            loss = (param * x).square().sum()
            loss.backward(optimizer.loss_scale)
            optimizer.step()
        assert torch.equal(plain.data, scaled.data)
        assert one.grad_norm.item() == pytest.approx(other.grad_norm.item(), rel=1e-6)
    assert one.loss_scale is None
    assert scale(other) == 1024.0


def test_a_gradient_that_overflows_is_skipped_and_the_scale_halved():
    param = parameter(torch.float16)
    optimizer = optim.AdamW([param], lr=0.1, loss_scale=2.0**16)
    before = param.data.clone()
    for step in range(3):
        optimizer.zero_grad()
        (param * 100.0).sum().backward(Tensor(optimizer.loss_scale.data.to(torch.float16)))
        optimizer.step()
        assert torch.equal(param.data, before)
        assert optimizer.skipped == step + 1
        assert scale(optimizer) == 2.0 ** (15 - step)


def test_the_scale_never_falls_below_1():
    param = parameter()
    optimizer = optim.SGD([param], lr=0.1, loss_scale=2.0)
    for _ in range(3):
        param.grad = Tensor(torch.full_like(param.data, math.inf))
        optimizer.step()
    assert scale(optimizer) == 1.0


def step_with_good(optimizer, good, gradient=1.0):
    """One step of an optimiser that has seen so many finite gradients since its scale changed."""
    state = optimizer.state_dict()
    kept = state["minidl"]
    kept["loss_scale"] = torch.tensor([kept["loss_scale"][0].item(), good], device=default_device())
    optimizer.load_state_dict(state)
    param = optimizer.param_groups[0]["params"][0]
    param.grad = Tensor(torch.full_like(param.data, gradient))
    optimizer.step()
    return optimizer.state_dict()["minidl"]["loss_scale"].tolist()


def test_the_scale_doubles_after_the_interval_and_no_sooner():
    interval = update.GROWTH_INTERVAL.value
    optimizer = optim.SGD([parameter()], lr=0.0, loss_scale=8.0)
    assert step_with_good(optimizer, interval - 2.0) == [8.0, interval - 1.0]
    assert step_with_good(optimizer, interval - 1.0) == [16.0, 0.0]
    assert step_with_good(optimizer, 5.0, math.nan) == [8.0, 0.0]
    largest = optim.SGD([parameter()], lr=0.0, loss_scale=2.0**24)
    assert step_with_good(largest, interval - 1.0) == [2.0**24, 0.0]


def test_the_state_is_saved_and_restored():
    optimizer = optim.Adam([parameter()], loss_scale=64.0)
    step_with_good(optimizer, 7.0)
    other = optim.Adam([parameter()], loss_scale=2.0)
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["minidl"]["loss_scale"].tolist() == [64.0, 8.0]
    with pytest.raises(ValueError, match="unknown loss_scale"):
        optim.Adam([parameter()]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="missing loss_scale"):
        other.load_state_dict(optim.Adam([parameter()]).state_dict())


@pytest.mark.parametrize("value", [0.5, 3.0, -2.0, 2.0**25, math.inf, True])
def test_a_scale_that_is_no_power_of_two_is_refused(value):
    with pytest.raises(ValueError, match=r"SGD: loss_scale is .*, expected a number from 1 to 2\^24, a power of two"):
        optim.SGD([parameter()], loss_scale=value)


def test_float16_learns_what_is_too_small_without_a_scale():
    """A gradient of 2^-26 is 0 in float16, and the weight does not move; scaled by 2^16 it is there."""
    for loss_scale, moves in ((None, False), (2.0**16, True)):
        random.manual_seed(0)
        model = nn.Linear(4, 1, bias=False, dtype=torch.float16)
        optimizer = optim.Adam(model.parameters(), lr=0.125, eps=1e-12, loss_scale=loss_scale)
        before = model.weight.data.clone()
        x = Tensor(torch.full((1, 4), 2.0**-13, dtype=torch.float16, device=default_device()))
        loss = ops.sum(model(x).to(torch.float32)) * 2.0**-13
        loss.backward(optimizer.loss_scale)
        optimizer.step()
        assert torch.equal(model.weight.data, before) != moves
