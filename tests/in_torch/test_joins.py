"""What a fused model joins or normalises for the layers after it: no more is copied, the numbers stay."""

import copy
import weakref

import pytest
import torch
from torch import nn

import minidl.torch as mt
from minidl.ops.join import Room
from minidl.torch import rows
from minidl.torch.fusion import joining


class Layer(nn.Module):
    """As torchvision's _DenseLayer."""

    def __init__(self, inputs, outputs, halves=False):
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.halves = halves

    def joined(self, inputs):
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

    def forward(self, input):
        prev = [input] if isinstance(input, torch.Tensor) else input
        return self.joined(prev)


class Dense(nn.ModuleDict):
    """As _DenseBlock; `halved` halves the inputs of this layer."""

    def __init__(self, inputs=16, growth=8, layers=4, halved=None):
        super().__init__({f"layer{i}": Layer(inputs + i * growth, growth) for i in range(layers)})
        self.halved = halved

    def forward(self, x):
        features = [x]
        for i, layer in enumerate(self.values()):
            if i == self.halved:
                features[1].mul_(0.5)
            features.append(layer(features))
        return torch.cat(features, 1)


@pytest.fixture
def copied(monkeypatch):
    """Channels that are copied into rooms."""
    channels = []
    add = Room.add

    def counted(self, part):
        channels.append(part.shape[1])
        add(self, part)

    monkeypatch.setattr(Room, "add", counted)
    return channels


def fused(net):
    torch._dynamo.reset()
    return torch.compile(net, backend=mt.backend)


def run(net, x, device):
    for parameter in net.parameters():
        parameter.grad = None
    x = x.to(device).contiguous(memory_format=torch.channels_last).requires_grad_(net.training)
    if not net.training:
        with torch.no_grad():
            return [net(x)]
    y = net(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("training", [True, False])
def test_a_dense_block_copies_what_is_new_alone_and_computes_the_same(training, device, copied, monkeypatch):
    torch.manual_seed(0)
    net = Dense().to(device).train(training)
    with torch.no_grad():
        for each in net.modules():
            if isinstance(each, nn.BatchNorm2d):
                each.running_mean.normal_()
                each.running_var.uniform_(0.5, 2)
    plain = copy.deepcopy(net)
    x = torch.randn(2, 16, 5, 6)
    results = run(fused(net), x, device)
    assert copied == [16, 8, 8, 8]
    monkeypatch.setattr(joining, "_fits", lambda *_: False)
    plain_found = run(fused(plain), x, device)
    assert copied == [16, 8, 8, 8]
    for a, b in zip(results, plain_found, strict=True):
        # Where three add up to a gradient, their order differs.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6) if training else torch.testing.assert_close(
            a, b, rtol=0, atol=0
        )


def test_what_was_joined_and_then_changed_is_joined_anew(device, copied):
    torch.manual_seed(0)
    net = Dense(halved=3).to(device).double().eval()  # torch's convolutions in float32 may be TF32's
    theirs, net = copy.deepcopy(net), fused(net)
    x = torch.randn(2, 16, 5, 6).double()
    torch.testing.assert_close(run(net, x, device), run(theirs, x, device), rtol=1e-9, atol=1e-9)
    assert copied == [16, 8, 8]  # those before the change
    with torch.inference_mode():
        torch.testing.assert_close(net(x.to(device)), theirs(x.to(device)), rtol=1e-9, atol=1e-9)


def test_nothing_is_kept_after_a_call(device):
    net = fused(Dense().to(device).eval())
    x = torch.randn(1, 16, 4, 4, device=device).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        net(x)
        rooms = []
        contents = Room.contents
        Room.contents = lambda self: rooms.append(weakref.ref(self)) or contents(self)
        try:
            net(x)
        finally:
            Room.contents = contents
    assert rooms
    assert all(room() is None for room in rooms)


class Mixer(nn.Module):
    def __init__(self, read=False):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24)
        self.read = read

    def forward(self, x):
        n = self.norm(x)
        y = self.down(self.act(self.up(n)))
        return y + n if self.read else y


@pytest.mark.parametrize("read", [False, True])
def test_layer_norms_under_autocast_are_written_as_the_layers_read_them(read, device, monkeypatch):
    torch.manual_seed(0)
    net = Mixer(read).to(device)
    theirs = copy.deepcopy(net)
    alone = mt.accelerate(copy.deepcopy(theirs))
    net, dtypes = fused(net), []
    norm = rows.layer_norm
    monkeypatch.setattr(rows, "layer_norm", lambda *args: dtypes.append(args[-1]) or norm(*args))
    x = torch.randn(70, 24, device=device).half()
    results = []
    for each in (net, alone, theirs):
        input = x.clone().requires_grad_()
        with torch.autocast(torch.device(device).type, torch.float16):
            y = each(input)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), input.grad, *(p.grad for p in each.parameters())])
    for a, b in zip(*results[:2], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for a, b in zip(results[0], results[2], strict=True):  # torch's dtype is another one on a CPU
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2 * float(b.float().abs().max()))
