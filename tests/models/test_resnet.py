"""ResNet-18 in torch and in minidl, of one code: torch's weights load, the logits agree, and training takes the same
course."""

import pytest
import torch
from torch import nn as torch_nn

from benchmarks.bench.network_rows import in_torch
from minidl import models, no_grad, ops, optim
from minidl.tensors import Tensor, default_device


def pair(dtype, weights=None):
    """The network of minidl and that of torch, with the same weights: `weights`, or drawn ones."""
    torch.manual_seed(0)
    theirs = in_torch("resnet18", 10).to(default_device(), dtype)
    if weights is not None:
        theirs.load_state_dict(weights)
    for module in theirs.modules() if weights is None else ():
        if isinstance(module, torch_nn.BatchNorm2d):
            torch_nn.init.uniform_(module.weight, 0.5, 1.5)
            torch_nn.init.normal_(module.bias, std=0.1)
            torch_nn.init.normal_(module.running_mean, std=0.1)
            torch_nn.init.uniform_(module.running_var, 0.5, 1.5)
    ours = models.resnet18(10).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@torch.no_grad()
def test_logits_in_eval_mode():
    """float64 agrees to its last digits. In float32 we are no further from float64 than torch is, by a factor of 2."""
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64, device=default_device())
    ours, theirs = pair(torch.float64)
    exact = theirs.eval()(x)
    with no_grad():
        assert (ours.eval()(Tensor(x)).data - exact).norm() < 1e-13 * exact.norm()
        ours, theirs = pair(torch.float32, theirs.state_dict())
        error = ours.eval()(Tensor(x.float())).data - exact
    assert error.norm() <= 2 * (theirs.eval()(x.float()) - exact).norm() + 2.0**-24 * exact.norm()


# In the interpreter, a step of its eleven million weights takes eight seconds.
@pytest.mark.gpu
def test_twenty_steps_in_parity():
    """Loss by loss, and in the end weight by weight and buffer by buffer, to 9 digits in float64."""
    ours, theirs = pair(torch.float64)
    mine = optim.SGD(ours.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    other = torch.optim.SGD(theirs.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randn(3, 3, 40, 40, dtype=torch.float64, generator=generator).to(default_device())
        y = torch.randint(10, (3,), generator=generator).to(default_device())
        mine.zero_grad()
        loss = ops.cross_entropy(ours(Tensor(x)), Tensor(y))
        loss.backward()
        mine.step()
        other.zero_grad()
        expected = torch_nn.functional.cross_entropy(theirs(x), y)
        expected.backward()
        other.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert expected.item() < 10
    for (name, a), (_, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert (a.double() - b.double()).norm() <= 1e-9 * b.double().norm() + 1e-12, name
