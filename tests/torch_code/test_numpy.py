"""NumPy's numbers as sizes, indices and settings: taken as Python's, as by torch."""

import numpy as np
import pytest
import torch

import minidl
from minidl import nn, ops
from minidl.tensors import Tensor

N, F = np.int64, np.float32
CALLS = {
    "Linear": lambda kit, x: kit.nn.Linear(N(6), N(2))(x),
    "Conv2d": lambda kit, x: kit.nn.Conv2d(N(1), N(2), N(3), N(2), N(1), N(1), N(1))(x.reshape(1, 1, 3, 4)),
    "Conv2d of pairs": lambda kit, x: kit.nn.Conv2d(1, 2, (N(3), 1), (N(2), N(1)))(x.reshape(1, 1, 3, 4)),
    "Conv2d of an array": lambda kit, x: kit.nn.Conv2d(1, 2, np.array([3, 1]))(x.reshape(1, 1, 3, 4)),
    "Conv1d": lambda kit, x: kit.nn.Conv1d(N(2), N(2), N(3), groups=np.int32(2))(x),
    "ConvTranspose2d": lambda kit, x: kit.nn.ConvTranspose2d(N(1), 2, N(3), N(2), output_padding=N(1))(
        x.reshape(1, 1, 3, 4)
    ),
    "BatchNorm1d": lambda kit, x: kit.nn.BatchNorm1d(N(6), F(1e-3), F(0.1))(x),
    "LayerNorm": lambda kit, x: kit.nn.LayerNorm(N(6), F(1e-3))(x),
    "RMSNorm": lambda kit, x: kit.nn.RMSNorm((N(6),), F(1e-3))(x),
    "GroupNorm": lambda kit, x: kit.nn.GroupNorm(N(3), N(6), F(1e-3))(x),
    "MaxPool2d": lambda kit, x: kit.nn.MaxPool2d(N(2), N(1))(x.reshape(1, 1, 3, 4)),
    "AvgPool2d": lambda kit, x: kit.nn.AvgPool2d(N(2), divisor_override=N(2))(x.reshape(1, 1, 3, 4)),
    "AdaptiveAvgPool2d": lambda kit, x: kit.nn.AdaptiveAvgPool2d((N(2), None))(x.reshape(1, 1, 3, 4)),
    "ZeroPad2d": lambda kit, x: kit.nn.ZeroPad2d(N(1))(x.reshape(1, 1, 3, 4)),
    "Hardtanh": lambda kit, x: kit.nn.Hardtanh(F(-0.25), F(0.25))(x),
    "CrossEntropyLoss": lambda kit, x: kit.nn.CrossEntropyLoss(ignore_index=N(1))(x, kit.tensor([0, 1])),
    "NLLLoss": lambda kit, x: kit.nn.NLLLoss(ignore_index=N(1))(x, kit.tensor([0, 1])),
    "conv2d": lambda kit, x: kit.nn.functional.conv2d(
        x.reshape(1, 1, 3, 4), kit.ones(1, 1, 2, 2), stride=N(2), padding=(N(1), 0), groups=N(1)
    ),
    "zeros": lambda kit, x: kit.zeros(N(3), N(2)), "full": lambda kit, x: kit.full((N(3),), F(2)),
    "linspace": lambda kit, x: kit.linspace(F(0), N(1), N(3)), "reshape": lambda kit, x: x.reshape(N(3), N(-1)),
    "index": lambda kit, x: x[N(1)], "narrow index": lambda kit, x: x[np.uint8(1), np.int8(-1)],
    "max": lambda kit, x: x.max(N(1)).values, "chunk": lambda kit, x: x.chunk(N(3), N(1))[1],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_gives_what_torch_gives(name):
    torch.manual_seed(0)
    theirs = torch.randn(2, 6)
    ours, expected = CALLS[name](minidl, Tensor(theirs.to(minidl.ones(1).device))), CALLS[name](torch, theirs)
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    if not expected.requires_grad or "Norm" in name:  # else of weights of their own
        torch.testing.assert_close(ours.data.cpu(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_random_numbers():
    assert minidl.randint(N(0), N(3), (N(50),)).max() <= 2
    assert sorted(minidl.randperm(N(3)).tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.Conv2d(1, 1, np.float64(3.0)), lambda: nn.MaxPool2d(np.array([2.5, 2.5]))(minidl.ones(1, 1, 4, 4)),
        lambda: nn.LayerNorm(F(3)), lambda: ops.conv2d(minidl.ones(1, 1, 4, 4), minidl.ones(1, 1, 2, 2), groups=F(1)),
        lambda: minidl.ones(3)[F(1)],
    ],
)  # fmt: skip
def test_fractions_are_refused(call):
    with pytest.raises((TypeError, ValueError), match=r"expected|indexed"):
        call()
