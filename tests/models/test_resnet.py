"""ResNet-18 as torchvision has it (He et al., arXiv 1512.03385), from minidl's layers: torch's weights load, the logits
agree, and training takes the same course."""

import pytest
import torch
from torch import nn as torch_nn

from minidl import nn, no_grad, ops, optim
from minidl.tensors import Tensor, default_device

STAGES = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))


def basic_block(kit, add_relu):
    """The class of a block with two 3x3 convolutions, from a kit of layers (minidl.nn or torch.nn)."""

    class BasicBlock(kit.Module):
        def __init__(self, channels, width, stride, **place):
            super().__init__()
            self.conv1 = kit.Conv2d(channels, width, 3, stride, padding=1, bias=False, **place)
            self.bn1 = kit.BatchNorm2d(width, **place)
            self.relu = kit.ReLU()
            self.conv2 = kit.Conv2d(width, width, 3, padding=1, bias=False, **place)
            self.bn2 = kit.BatchNorm2d(width, **place)
            self.downsample = None
            if stride != 1 or channels != width:
                self.downsample = kit.Sequential(
                    kit.Conv2d(channels, width, 1, stride, bias=False, **place), kit.BatchNorm2d(width, **place)
                )

        def forward(self, x):
            y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return add_relu(y, x if self.downsample is None else self.downsample(x))

    return BasicBlock


def resnet18(kit, add_relu, classes=10, **place):
    block = basic_block(kit, add_relu)

    class ResNet18(kit.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = kit.Conv2d(3, 64, 7, 2, padding=3, bias=False, **place)
            self.bn1 = kit.BatchNorm2d(64, **place)
            self.relu = kit.ReLU()
            self.maxpool = kit.MaxPool2d(3, 2, padding=1)
            for i, (channels, width, stride) in enumerate(STAGES):
                blocks = block(channels, width, stride, **place), block(width, width, 1, **place)
                setattr(self, f"layer{i + 1}", kit.Sequential(*blocks))
            self.avgpool = kit.AdaptiveAvgPool2d(1)
            self.flatten = kit.Flatten()
            self.fc = kit.Linear(512, classes, **place)

        def forward(self, x):
            x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
            x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
            return self.fc(self.flatten(self.avgpool(x)))

    return ResNet18()


@pytest.fixture(scope="module")
def models():
    """Both networks with the same float64 weights."""
    torch.manual_seed(0)
    theirs = resnet18(torch_nn, lambda a, b: torch.relu(a + b), dtype=torch.float64, device=default_device())
    for module in theirs.modules():
        if isinstance(module, torch_nn.BatchNorm2d):
            torch_nn.init.uniform_(module.weight, 0.5, 1.5)
            torch_nn.init.normal_(module.bias, std=0.1)
            torch_nn.init.normal_(module.running_mean, std=0.1)
            torch_nn.init.uniform_(module.running_var, 0.5, 1.5)
    ours = resnet18(nn, lambda a, b: ops.relu(a + b), dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_the_names_of_the_weights_are_torchs(models):
    ours, theirs = models
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert len(ours.state_dict()) == 122


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_in_eval_mode(models, dtype):
    """float64 agrees to its last digits. In float32 we are no further from float64 than torch is, by a factor of 2."""
    _, theirs = models
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64, device=default_device())
    theirs.eval()
    with torch.no_grad():
        exact = theirs(x)
    mine = resnet18(nn, lambda a, b: ops.relu(a + b), dtype=dtype)
    other = resnet18(torch_nn, lambda a, b: torch.relu(a + b), dtype=dtype, device=default_device())
    mine.load_state_dict({name: value.to(dtype) if value.is_floating_point() else value
                          for name, value in theirs.state_dict().items()})  # fmt: skip
    other.load_state_dict(theirs.state_dict())
    mine.eval()
    other.eval()
    with no_grad():
        got = mine(Tensor(x.to(dtype))).data
    with torch.no_grad():
        peer = other(x.to(dtype))
    error = (got.double() - exact).norm() / exact.norm()
    if dtype == torch.float64:
        assert error < 1e-13
    else:
        assert error <= 2 * (peer.double() - exact).norm() / exact.norm() + 2.0**-24


# In the interpreter, a step of its eleven million weights takes eight seconds.
@pytest.mark.gpu
def test_twenty_steps_in_parity(models):
    """Loss by loss, and in the end weight by weight and buffer by buffer, to 9 digits in float64."""
    ours, theirs = models
    start = {name: value.clone() for name, value in theirs.state_dict().items()}
    ours.load_state_dict(start)
    ours.train()
    theirs.train()
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
    theirs.load_state_dict(start)
