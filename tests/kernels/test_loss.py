"""What is special to the losses of elements: accuracy near 0, every gradient of binary cross-entropy."""

import math

import pytest
import torch
import torch.nn.functional as F

from minidl.kernels import loss

MEAN = loss.Loss("binary_cross_entropy_with_logits")
EACH = MEAN._replace(reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_binary_cross_entropy_is_accurate_where_it_is_tiny(dtype, device):
    x = torch.linspace(-80, 80, 1001, dtype=dtype)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    u = torch.finfo(dtype).eps / 2
    for target, sign in ((zero, 1.0), (one, -1.0)):
        got = loss.elements_loss(EACH, x.to(device), target.to(device)).cpu()
        for z, value in zip(x.tolist(), got.tolist(), strict=True):
            exact = math.log1p(math.exp(-abs(z))) + max(sign * z, 0.0)
            assert abs(value - exact) <= (40 + 3 * abs(z)) * u * exact


def test_binary_cross_entropy_against_torch(device):
    x = (5 * torch.randn(6, 7, dtype=torch.float64, device=device)).requires_grad_()
    target = torch.rand(6, 7, dtype=torch.float64, device=device).requires_grad_()
    weight, pos_weight = (torch.rand(7, dtype=torch.float64, device=device) + 0.5 for _ in range(2))
    expected = F.binary_cross_entropy_with_logits(x, target, weight, pos_weight=pos_weight)
    expected.backward()
    given = x.detach(), target.detach(), weight, pos_weight
    torch.testing.assert_close(loss.elements_loss(MEAN, *given), expected.detach())
    dx, dt = loss.elements_loss_grad(MEAN, torch.ones((), dtype=torch.float64, device=device), *given)
    torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(dt, target.grad)
