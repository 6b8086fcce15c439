"""Replayed operations: what is replayed, what never is, and that a replay is the operation."""

import sys

import pytest
import torch

import minidl
from minidl import nn, ops
from minidl.autograd import no_grad
from minidl.autograd.deferred import fusion
from minidl.cpu import run as cpu
from minidl.nn import functional
from minidl.runtime import launch
from minidl.runtime.launch_cache import recorded_call, replay


@pytest.fixture(autouse=True)
def at_once():
    with replay.replaying(True, at_once=True):
        yield
    launch.forget()


@pytest.fixture
def replays(monkeypatch):
    """The function that replays one call returns its count."""
    counted, original = [], recorded_call.RecordedCall.replay

    def count(self, *how):
        counted.append(self)
        return original(self, *how)

    monkeypatch.setattr(recorded_call.RecordedCall, "replay", count)

    def of(call):
        counted.clear()
        call()
        return len(counted)

    return of


def tensor(*shape, device, **how):
    return minidl.tensor(torch.randn(*shape), device=device, **how)


CALLS = {
    "log_softmax": lambda x: ops.log_softmax(x, -1),
    "logsumexp": lambda x: ops.logsumexp(x, 1),
    "sum": lambda x: x.sum(dim=1),
    "multiple": lambda x: 0.5 * x,
    "gelu": ops.gelu,
    "layer_norm": lambda x: ops.layer_norm(x, (6,)),
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "var": lambda x: x.var(1, keepdim=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_a_gradient_is_one_replay(name, device, replays):
    call = CALLS[name]
    with replay.replaying(False):
        x = tensor(5, 6, device=device)
        expected = call(x)
    call(x)
    results = []
    assert replays(lambda: results.append(call(x))) == 1
    for one, two in zip(*(r if isinstance(r, tuple) else (r,) for r in (results[0], expected)), strict=True):
        assert torch.equal(one.data, two.data)
    assert type(results[0]) is type(expected)


def test_gradients_are_recorded_as_ever(device):
    x = tensor(5, 6, device=device)
    for _ in range(2):
        ops.gelu(x)
    leaf = minidl.tensor(x.data, requires_grad=True)
    y = ops.gelu(leaf)
    assert y.requires_grad
    with no_grad():
        assert not ops.gelu(leaf).requires_grad


def test_results_in_the_memory_of_an_argument_are_not_replayed(device, replays):
    x = tensor(4, 6, device=device)
    for call in (lambda: ops.relu(x, inplace=True), lambda: ops.adaptive_avg_pool2d(x[None], 6), lambda: x.T):
        call()
        call()
    with no_grad():
        y = ops.relu(x, inplace=True)
        version = x.data._version
        assert ops.relu(x, inplace=True) is x is y
        assert x.data._version > version


def test_statistics_move_at_every_call(device):
    norm, x = nn.BatchNorm2d(3).to(device), tensor(4, 3, 2, 2, device=device) + 1.0
    reference = torch.nn.BatchNorm2d(3)
    with no_grad():
        for _ in range(4):
            norm(x)
            reference(x.data.cpu())
    torch.testing.assert_close(norm.running_mean.data.cpu(), reference.running_mean)
    assert norm.num_batches_tracked.item() == 4


def test_a_check_that_reads_values_runs_every_time(device):
    if torch.device(device).type != "cpu":
        pytest.skip("on a GPU the check would wait for the device")
    x, target = tensor(4, 3, device=device), minidl.tensor([0, 1, 2, 0])
    for _ in range(3):
        functional.cross_entropy(x, target)
    with pytest.raises(IndexError, match="target holds 7"):
        functional.cross_entropy(x, minidl.tensor([0, 1, 7, 0]))


def test_the_default_dtype_is_part_of_a_call(device):
    a = minidl.tensor([1, 2, 3], device=device)
    for _ in range(3):
        assert ops.div(a, 2).dtype == torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert ops.div(a, 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_autocast_is_not_replayed(device):
    x, w = tensor(4, 8, device=device), tensor(3, 8, device=device)
    for _ in range(2):
        ops.linear(x, w)
    with torch.autocast(torch.device(device).type, torch.float16):
        assert ops.linear(x, w).dtype == torch.float16
    assert ops.linear(x, w).dtype == torch.float32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return ops.relu(self.conv(x))


def test_operations_that_were_replayed_alone_are_fused_in_modules(device):
    block, x = Block().to(device), tensor(2, 3, 8, 8, device=device)
    launches = []
    with no_grad():
        for _ in range(3):
            ops.relu(block.conv(x))
        y = block(x)
        with launch.watch(lambda kernel, grid, args, meta, go: (launches.append(kernel), go())):
            assert torch.equal(block(x).data, y.data)
        fused = len(launches)
        launches.clear()
        with fusion(False), launch.watch(lambda kernel, grid, args, meta, go: (launches.append(kernel), go())):
            block(x)
    assert len(launches) == fused + 1


MOST = {
    "log_softmax": 12,
    "sum": 12,
    "GELU": 15,
    "MaxPool2d": 15,
    "LayerNorm": 15,
    "Linear": 15,
    "Conv2d": 16,
    "chain": 100,
}


@pytest.mark.parametrize("name", MOST)
def test_a_warm_call_takes_few_calls_in_python(name, device, monkeypatch):
    """Without those of launches. (Python 3.12 takes fewer, as a comprehension is no call there.)"""
    layers = {
        "log_softmax": lambda x: ops.log_softmax(x, -1), "sum": lambda x: ops.sum(x, -1), "GELU": nn.GELU(),
        "MaxPool2d": nn.MaxPool2d(2), "LayerNorm": nn.LayerNorm(8), "Linear": nn.Linear(8, 4),
        "Conv2d": nn.Conv2d(3, 4, 3), "chain": nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU()),
    }  # fmt: skip
    layer, x, count = layers[name], tensor(2, 3, 8, 8, device=device), 0
    if isinstance(layer, nn.Module):
        layer.to(device)
    for launching in ("_run", "_launch"):
        monkeypatch.setattr(recorded_call, launching, lambda *_: None)
    monkeypatch.setattr(cpu.Launch, "run", lambda *_: None)

    def on_event(frame, event, argument):
        nonlocal count
        count += event == "call" and "minidl" in frame.f_globals.get("__name__", "")

    with no_grad():
        for _ in range(3):
            layer(x)
        sys.setprofile(on_event)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    assert 0 < count <= MOST[name]
