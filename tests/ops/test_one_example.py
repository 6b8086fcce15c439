"""One example without the dimension of the batch, and the places of maxima, as torch's."""

import pytest
import torch

from minidl import nn, ops
from minidl.tensors import Tensor, default_device


def tensor(data, requires_grad=False):
    return Tensor(data.to(default_device()), requires_grad)


IMAGE, SEQUENCE = (3, 9, 8), (3, 9)
F = torch.nn.functional


@pytest.mark.parametrize(
    ("name", "shape", "rest"),
    [
        ("conv1d", SEQUENCE, (torch.ones(2, 3, 3),)), ("conv_transpose1d", SEQUENCE, (torch.ones(3, 2, 3),)),
        ("conv2d", IMAGE, (torch.ones(2, 3, 3, 3),)), ("conv_transpose2d", IMAGE, (torch.ones(3, 2, 3, 3),)),
        ("conv3d", (1, *IMAGE), (torch.ones(2, 1, 2, 2, 2),)), ("max_pool2d", IMAGE, (3, 2, 1)),
        ("avg_pool2d", IMAGE, (2,)), ("adaptive_avg_pool2d", IMAGE, (3,)), ("adaptive_max_pool2d", IMAGE, ((3, 4),)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_one_example(name, shape, rest):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ours = tensor(x.detach(), True)
    y = getattr(F, name)(x, *rest)
    z = getattr(ops, name)(ours, *(tensor(t) if isinstance(t, torch.Tensor) else t for t in rest))
    y.sum().backward()
    z.sum().backward()
    torch.testing.assert_close(z.data.cpu().contiguous(), y.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.data.cpu().contiguous(), x.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 2}, {"kernel_size": (3, 2), "stride": (2, 1), "padding": 1, "dilation": 2},
     {"kernel_size": 12, "stride": 3, "padding": 5, "ceil_mode": True}],
)  # fmt: skip
def test_places_of_maxima(options):
    x = torch.randn(2, 3, 11, 13, generator=torch.Generator().manual_seed(0))
    x[0, 0, 3, 4], x[1] = float("nan"), x[1].round()
    y, places = F.max_pool2d(x, **options, return_indices=True)
    ours = tensor(x, True)
    z, found = nn.MaxPool2d(**options, return_indices=True)(ours)
    assert found.dtype == torch.int64
    assert torch.equal(found.data.cpu(), places)
    assert torch.equal(z.data.cpu().nan_to_num(9), y.nan_to_num(9))
    z.sum().backward()
    assert ours.grad.data.sum().item() == y.numel()
