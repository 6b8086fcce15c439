"""A fused graph keeps the order of changes: in place, through views, by functions of any kind, of statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidl.torch as mt


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.c, self.d = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.b, self.e = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.gamma = nn.Parameter(torch.rand(3, 1, 1) + 0.5)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def between(change, end=lambda s, x, y: F.relu(y)):
    """What reads x, then a change of x, then what follows the layer."""

    def body(s, x):
        x = x * 1
        y = s.b(s.c(x))
        change(s, x)
        return end(s, x, y) + x

    return body


def _inner(y):
    y = y * 2
    y.mul_(3)
    return y


def _changed_alias(s, x):
    y = s.c(x)
    y.flatten(1).mul_(2)
    return y


def _reshaped_alias(s, x):
    y = s.c(x)
    y.reshape(-1).add_(1)
    return F.relu(s.b(y))


def _statistics(s, x):
    a = s.b(s.c(x))
    s.e(x)  # updates its statistics in training
    m = s.b.running_mean.detach()
    y = F.relu(a)
    return y + m.sum()


def _scaled(s, x):
    t = torch.empty_like(x).copy_(x)
    y, noise = s.gamma * t, torch.ones(2, 1, 1, 1, dtype=x.dtype)
    t.zero_()
    return y * noise + x


def _dense(s, x):
    parts = [s.c(x)]
    for norm, conv in ((s.b, s.d),):
        parts.append(conv(F.relu(norm(torch.cat(parts, 1)))))
        parts[0].reshape(-1).mul_(2)
    return F.batch_norm(torch.cat(parts, 1), None, None, training=True)


BODIES = {
    "by position": between(lambda s, x: F.elu(x, 1.0, True)),
    "setitem": between(lambda s, x: x.__setitem__((slice(None), 0), 3.0)),
    "out": between(lambda s, x: torch.where(x > 0, x, x * 2, out=x)),
    "aten": between(lambda s, x: torch.ops.aten.mul_.Scalar(x, 3.0)),
    "foreach": between(lambda s, x: torch._foreach_mul_([x], 3.0)),
    "bits": between(lambda s, x: x.view(torch.int64).zero_()),
    "a view": between(lambda s, x: x[:, 1].mul_(3)),
    "statistics": between(
        lambda s, x: s.b.running_mean.detach().add_(1), lambda s, x, y: F.relu(y) + s.b.running_mean.sum()
    ),
    "counter": between(lambda s, x: s.b.num_batches_tracked.zero_()),
    "instance norm": between(lambda s, x: F.instance_norm(x, s.b.running_mean, s.b.running_var)),
    "checkpoint": lambda s, x: checkpoint(_inner, s.c(x), use_reentrant=False) + 1,
    "alias by flatten": _changed_alias,
    "alias by reshape": _reshaped_alias,
    "view": lambda s, x: F.relu(s.b(s.c(x))).view(2, -1),
    "view of a pool": lambda s, x: F.max_pool2d(s.c(x), 2).view(2, -1),
    "as_strided": lambda s, x: torch.as_strided(s.c(x), (2, 10), (108, 1)),
    "moved statistics": _statistics,
    "a factor": _scaled,
    "a dense block": _dense,
    "detach_": lambda s, x: F.silu(s.c(x)).detach_(),
    "a bias that is broadcast": lambda s, x: F.linear(x, s.gamma.view(1, 3).repeat(5, 2), s.gamma[:1, 0, 0]),
    "stride of nothing": lambda s, x: F.max_pool2d(s.c(x), 2, []),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_changes_keep_their_order(name, training, device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    theirs = Net(BODIES[name]).double().to(device).train(training)
    for norm in (theirs.b, theirs.e):
        norm.running_var.uniform_(0.5, 2)
    ours = copy.deepcopy(theirs)
    run, x = torch.compile(ours, backend=mt.backend), torch.randn(2, 3, 6, 6, dtype=torch.float64, device=device)
    with torch.no_grad(), torch.device(device):
        for _ in "ab":
            torch.testing.assert_close(run(x), theirs(x), rtol=1e-9, atol=1e-9)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
