"""Batch norms of a module in evaluation: scales, shifts and statistics of all at once, from its second call on."""

import pytest
import torch

import minidl
from minidl import nn, ops
from minidl.autograd import no_grad
from minidl.compilation.capture import capture
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from tests.graphs import graphs, same_random  # noqa: F401 (fixtures)

FOLD = "batch_norm_fold_kernel"


class Net(nn.Module):
    """Three batch norms after convolutions, one of them of 5 channels, and two after sums."""

    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.Conv2d(16, 32, 1), nn.Conv2d(32, 5, 1))
        self.norms = nn.Sequential(nn.BatchNorm2d(16), nn.BatchNorm2d(32), nn.BatchNorm2d(5))
        self.plain = nn.Sequential(nn.BatchNorm2d(16), nn.BatchNorm2d(32))
        self.between = lambda index: None
        for index, norm in enumerate([*self.norms, *self.plain]):
            change(norm, index)

    def forward(self, x):
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = ops.relu(norm(conv(x)))
            if index < 2:
                x = self.plain[index](x + x)
            self.between(index)
        return x


def change(norm, seed):
    drawn = torch.Generator().manual_seed(seed)
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        tensor.data.copy_(torch.rand(tensor.shape, generator=drawn) + 0.5)


def image():
    return Tensor(torch.rand(2, 3, 7, 6, generator=torch.Generator().manual_seed(9)).to(default_device()))


def folds(work):
    """How many launches of the kernel there are."""
    found = []

    def watcher(kernel, grid, args, meta, go):
        found.append(kernel.__name__)
        go()

    with launch.watch(watcher), no_grad():
        result = work()
    return found.count(FOLD), result.data.clone()


@pytest.fixture
def net():
    return Net().eval()


def test_a_second_call_makes_all_of_them_at_once(net):
    first = folds(lambda: net(image()))
    second = folds(lambda: net(image()))
    # Alike are the two plain ones; the first two convolutions differ in their bias, the last has 5 channels.
    assert (first[0], second[0]) == (5, 4)
    assert torch.equal(first[1], second[1])
    net.convs[0].bias = nn.Parameter(torch.zeros(16, device=default_device()))
    folds(lambda: net(image()))
    assert folds(lambda: net(image()))[0] == 3


@pytest.mark.parametrize(
    "happens",
    [
        lambda net: change(net.norms[1], 20),
        lambda net: change(net.plain[1], 21),
        lambda net: setattr(net.norms[1], "running_mean", Tensor(torch.rand(32, device=default_device()))),
        lambda net: net.plain.load_state_dict({k: t + 1.0 for k, t in net.plain.state_dict().items()}),
        lambda net: net.plain[1].train()(Tensor(torch.rand(4, 32, 3, 3, device=default_device()))),
        lambda net: net.norms[1].train()(Tensor(torch.rand(4, 32, 3, 3, device=default_device()))),
    ],
    ids=["by torch", "by torch, no convolution", "another tensor", "loaded", "trained", "trained after a convolution"],
)
@pytest.mark.parametrize("within", [False, True], ids=["between calls", "within a call"])
def test_a_change_is_seen(happens, within):
    """Results are those of a network that never made two at once."""

    def course(calls):
        minidl.manual_seed(3)
        torch.manual_seed(3)
        net = Net().eval()
        for _ in range(calls):
            folds(lambda: net(image()))
        done = []

        def once(index=0):
            if index == 0 and not done:
                done.append(happens(net))
                net.eval()

        if within:
            net.between = once
        else:
            once()
        return folds(lambda: net(image()))[1]

    assert torch.equal(course(3), course(0))


def test_a_captured_call_reads_them_at_each_replay(graphs, net):  # noqa: F811
    def answer(x):
        with no_grad():
            return net(x)

    step = capture(answer)
    for _ in range(5):
        step(image())
    for index, norm in enumerate([*net.norms, *net.plain]):
        change(norm, 30 + index)
    assert torch.equal(step(image()).data, folds(lambda: net(image()))[1])


@torch.inference_mode()
def test_a_network_made_in_inference_mode():
    """Its tensors have no versions, by which a change would be found."""
    net = Net().eval()
    first, second = (net(image()).data.clone() for _ in range(2))
    assert torch.equal(first, second)
