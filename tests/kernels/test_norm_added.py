"""The gradient of a batch norm with a sum before its activation, which the sums of the batch norm take in."""

import pytest
import torch
import torch.nn.functional as F

from minidl.kernels import activation, elementwise, norm
from minidl.ops.batchnorm import BatchNorm
from minidl.runtime import launch
from minidl.tensors import Tensor
from minidl.testing import GuardedAllocations
from tests.autograd.test_deferred import launches
from tests.kernels.test_norm import INF, NAN, SMALL, numbers

SAME = {"rtol": 0, "atol": 0, "equal_nan": True}


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """Several bands also where one program would do."""
    monkeypatch.setattr(launch, "processors", lambda: 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("act", [*activation.FROM_OUTPUT, ("leaky_relu", 0.3)])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_sums_write_the_gradient_of_what_was_added(parts, act, dtype, device):
    """As one launch for dz and one for its sums make it, bit for bit where act' is 0 or 1."""
    guards = GuardedAllocations()
    x, added, dy, more = (numbers(23, 3, 5, 1, seed=i, dtype=dtype).to(device) for i in (0, 1, 2, 5))
    weight, bias = (numbers(3, seed=i).to(device, launch.acc_torch(dtype)) for i in (3, 4))
    found = norm.batch_statistics(x, 1e-5, None, None)
    x[0, 1, 0, 0], added[1, 1, 1, 0], dy[2, 1, 0, 0] = NAN, INF, -INF
    x, added, dy, more = map(guards.guard, (x, added, dy, more))
    with launch.force(**SMALL), guards:
        y = norm.normalise(x, found, weight, bias, act, added)
        given = {"y": y, "more": more if parts == 2 else None}
        *got, dz = norm.normalise_grad(dy, x, found, weight, bias, act, True, **given)
        total = elementwise.add(dy, more) if parts == 2 else dy
        expected = elementwise.act_grad(total, y, act, from_output=True)
        *apart, _ = norm.normalise_grad(expected, x, found, weight, bias, None, True)
        *_, unsummed = norm.normalise_grad(dy, x, found, None, None, act, False, want_affine=False, **given)
    guards.check()
    torch.testing.assert_close(dz, expected, **SAME)
    torch.testing.assert_close(unsummed, expected, **SAME)
    for a, b in zip(got, apart, strict=True):
        torch.testing.assert_close(a, b, **SAME if act in (None, "relu", "relu6") else {"equal_nan": True})


@pytest.mark.parametrize("act", [None, "relu", "gelu"])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "one part in another order"])
def test_a_gradient_in_two_parts_is_added_by_the_sums(rows, act, device):
    x, dy, more = (numbers(23, 3, 5, 2, seed=i, dtype=torch.float32).to(device) for i in range(3))
    x, dy, more = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy, more))
    more = more if rows else more.contiguous()
    weight, bias = (numbers(3, seed=i, dtype=torch.float32).to(device) for i in (3, 4))
    with launch.force(**SMALL):
        found = norm.batch_statistics(x, 1e-5, None, None)
        total = elementwise.add(dy, more)
        expected = norm.normalise_grad(total, x, found, weight, bias, act, True)
        got, launched = launches(lambda: norm.normalise_grad(dy, x, found, weight, bias, act, True, more=more))
    assert launched["flat_kernel"] + launched["tile_kernel"] == (0 if rows else 1)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(6, 5), (5, 3, 4, 6), (200, 1)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("forced", [{}, SMALL], ids=["table", "small tiles"])
def test_gradients_are_torchs(shape, training, forced, device):
    C = shape[1]
    leaves = [numbers(*s, seed=i).to(device) for i, s in enumerate((shape, (C,), (C,), shape))]
    dy = numbers(*shape, seed=9).to(device)
    x, weight, bias, added = (Tensor(t, requires_grad=True) for t in leaves)
    found = norm.batch_statistics(x.data, 1e-5, None, None)
    with launch.force(**forced):
        BatchNorm.apply(x, weight, bias, added, found, training, "tanh").backward(Tensor(dy))
    theirs = [t.clone().requires_grad_() for t in leaves]
    rows = leaves[0].transpose(0, 1).reshape(C, -1)
    running = rows.mean(1), rows.var(1, correction=0)
    z = F.batch_norm(theirs[0], *running, theirs[1], theirs[2], training) + theirs[3]
    z.tanh().backward(dy)
    for a, e in zip((x, weight, bias, added), theirs, strict=True):
        torch.testing.assert_close(a.grad.data, e.grad, rtol=1e-11, atol=1e-11)
