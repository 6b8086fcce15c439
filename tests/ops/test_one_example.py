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
        ("conv_transpose3d", (1, *IMAGE), (torch.ones(1, 2, 2, 2, 2),)), ("max_pool3d", (2, *IMAGE), (3, 2, 1)),
        ("avg_pool3d", (2, *IMAGE), (2,)), ("adaptive_avg_pool3d", (2, *IMAGE), (2,)),
        ("adaptive_max_pool3d", (2, *IMAGE), ((2, 3, 4),)),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("name", "options"),
    [("max_pool3d", {"kernel_size": 2}),
     ("max_pool3d", {"kernel_size": (2, 3, 2), "stride": 1, "padding": 1, "dilation": (1, 2, 1)}),
     ("max_pool3d", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
     ("adaptive_max_pool3d", {"output_size": (3, 4, 1)}), ("adaptive_max_pool3d", {"output_size": 2}),
     ("adaptive_max_pool3d", {"output_size": (2, 0, 3)})],
)  # fmt: skip
def test_places_of_maxima_in_volumes(name, options, dtype):
    """Of equal maxima the first, of several NaN the last, and the first voxel of a volume of -inf."""
    x = torch.randint(-1, 2, (3, 2, 6, 7, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :, 2:5, 3, 1:3], x[1] = float("nan"), float("-inf")
    wide = x.double().requires_grad_()
    y, places = getattr(F, name)(wide, **options, return_indices=True)
    ours = tensor(x, True)
    z, at = getattr(ops, name)(ours, **options, return_indices=True)
    assert torch.equal(at.data.cpu(), places)
    torch.testing.assert_close(z.data.cpu().double(), y.detach(), rtol=0, atol=0, equal_nan=True)
    if y.numel() == 0:  # torch has no gradient then
        return
    dy = torch.randint(-3, 4, y.shape, generator=torch.Generator().manual_seed(1)).double()
    y.backward(dy)
    z.backward(tensor(dy.to(dtype)))
    torch.testing.assert_close(ours.grad.data.cpu().double(), wide.grad, rtol=0, atol=0)
    torch.testing.assert_close(getattr(ops, name)(tensor(x), **options).data, z.data, rtol=0, atol=0, equal_nan=True)


def test_sums_between_slices_are_not_rounded():
    """2048 + 1 - 2048 is 0 where float16 holds the sum in between."""
    x = torch.tensor([[2048.0, 1.0], [-2048.0, 0.0]], dtype=torch.float16)
    assert ops.avg_pool3d(tensor(x.view(1, 1, 2, 1, 2)), (2, 1, 2), divisor_override=1).item() == 1
    for pool in (ops.max_pool3d, lambda *how: 4 * ops.avg_pool3d(*how)):
        voxel = tensor(torch.ones(1, 1, 1, 1, 1, dtype=torch.float16), True)
        pool(voxel, (2, 1, 2), 1, (1, 0, 1)).backward(tensor(x.T.reshape(1, 1, 2, 1, 2)))
        assert voxel.grad.item() == 1


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
