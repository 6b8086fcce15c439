"""A fused model in inference folds all its batch norms in one launch, with the values that they have then."""

import copy

import pytest
import torch
from torch import nn

import minidl.torch as mt
from minidl.runtime import launch


class Net(nn.Module):
    """Three batch norms after convolutions, and two without; `between` is called after each part."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in "abc"
        )
        self.plain = nn.ModuleList(nn.BatchNorm2d(8) for _ in "ab")
        self.between = lambda: None

    def forward(self, x):
        for index, part in enumerate(self.parts):
            x = part(x)
            self.between()
            if index < 2:
                x = self.plain[index](x)
        return x


def folds(model, x):
    """How many launches of the kernel a call makes, and its result."""
    names = []

    def watcher(kernel, grid, args, meta, go):
        names.append(kernel.__name__)
        go()

    with launch.watch(watcher), torch.no_grad():
        y = model(x)
    return names.count("batch_norm_fold_kernel"), y


@pytest.fixture
def nets(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    theirs = Net().double().eval().to(device)
    for norm in (m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            tensor.data.uniform_(0.5, 1.5)
    x = torch.rand(2, 8, 3, 2, dtype=torch.float64, device=device)
    return copy.deepcopy(theirs), theirs, x


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_call_makes_all_of_a_kind_at_once(nets, accelerated):
    ours, theirs, x = nets
    count, y = folds(torch.compile(mt.accelerate(ours) if accelerated else ours, backend=mt.backend), x)
    assert count == 2  # one for those after convolutions, one for the two alone
    torch.testing.assert_close(y, theirs(x), rtol=1e-10, atol=1e-10)


def _stepped(net):
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(net.parameters(), lr=0.1).step()


CHANGES = {
    "in place": lambda net: net.parts[1][1].running_mean.add_(1),
    "weights": lambda net: net.plain[1].weight.mul_(2) + net.parts[2][1].bias.sub_(1),
    "loaded": lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}),
    "another tensor": lambda net: setattr(net.parts[1][1], "weight", nn.Parameter(net.parts[1][1].weight + 1)),
    "trained": lambda net: (net.parts[1].train()(net.parts[1][1].weight.new_ones(2, 8, 3, 3)), net.eval()),
    "an optimizer": _stepped,
    "by data": lambda net: net.parts[1][1].running_var.data.mul_(3),
    "data set": lambda net: setattr(net.parts[1][1].weight, "data", net.parts[1][1].weight + 1),
}  # fmt: skip


@pytest.mark.parametrize(("change", "within"), [(c, w) for c in CHANGES for w in (False, True)])
def test_a_change_is_seen(nets, change, within):
    """Also within a call, where Python runs the change between two graphs or Dynamo has it in one."""
    ours, theirs, x = nets
    fused = torch.compile(ours, backend=mt.backend)
    folds(fused, x)
    for model in (ours, theirs):
        done = []

        @torch.compiler.disable
        def once(model=model, done=done):
            if not done:
                done.append(CHANGES[change](model))

        with torch.no_grad():
            if within:
                model.between = once
            else:
                once()
    torch.testing.assert_close(folds(fused, x)[1], folds(theirs, x)[1], rtol=1e-10, atol=1e-10)


def test_statistics_that_a_graph_changes_are_folded_where_they_are_read(device):
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)) for _ in "ab")

        def forward(self, x):
            y = self.a(x)
            self.b[1].running_mean.add_(y.mean())
            return self.b(y)

    torch._dynamo.reset()
    theirs = Moves().double().eval().to(device)
    ours, x = copy.deepcopy(theirs), torch.rand(2, 8, 3, 2, dtype=torch.float64, device=device)
    fused = torch.compile(ours, backend=mt.backend)
    with torch.no_grad():
        for _ in "ab":
            torch.testing.assert_close(fused(x), theirs(x), rtol=1e-10, atol=1e-10)


def test_torch_finds_that_operator_registered_as_it_should_be(device):
    vector, op = torch.rand(3, 8, dtype=torch.float64, device=device) + 1, torch.ops.minidl.fold_batch_norms.default
    both = [vector[0], vector[1]]
    torch.library.opcheck(op, (both, both, [], both, both, 1e-5, True))
