"""An accelerated model in inference folds all its batch norms in one launch, with the values that they have then."""

import copy

import pytest
import torch
from torch import nn

import minidl.torch as mt
from minidl.runtime import launch


class Net(nn.Module):
    """Three batch norms after convolutions, and two without, which torch.fx cannot trace."""

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
            if index < 2 and x.sum() > -1:
                x = self.plain[index](x)
        return x


def folds(model, x):
    """How many launches of the kernel a call makes, and its result."""
    found = []

    def watcher(kernel, grid, args, meta, go):
        found.append(kernel.__name__)
        go()

    with launch.watch(watcher), torch.no_grad():
        y = model(x)
    return found.count("batch_norm_fold_kernel"), y


@pytest.fixture
def nets(device):
    torch.manual_seed(0)
    theirs = Net().double().eval().to(device)
    for norm in (m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            tensor.data.uniform_(0.5, 1.5)
    x = torch.rand(2, 8, 3, 2, dtype=torch.float64, device=device)
    return mt.accelerate(copy.deepcopy(theirs)), theirs, x


def test_a_second_call_makes_all_of_a_kind_at_once(nets):
    ours, theirs, x = nets
    for model in (ours, nn.parallel.DataParallel(ours), copy.deepcopy(ours)):
        first, second = folds(model, x), folds(model, x)
        assert second[0] == 2
        for _, y in (first, second):
            torch.testing.assert_close(y, theirs(x), rtol=1e-10, atol=1e-10)
    assert folds(mt.restore(ours), x)[0] == 0
    assert type(ours) is Net


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


@pytest.mark.parametrize(
    ("change", "within"), [(c, w) for c in CHANGES for w in (False, True) if not (w and "data" in c)]
)
def test_a_change_is_seen(nets, change, within):
    """Also within a call, but for changes by `.data`, which torch's version counters do not see."""
    ours, theirs, x = nets
    folds(ours, x)
    for model in (ours, theirs):
        done = []

        def once(model=model, done=done):
            if not done:
                done.append(CHANGES[change](model))

        with torch.no_grad():
            if within:
                model.between = once
            else:
                once()
    torch.testing.assert_close(folds(ours, x)[1], folds(theirs, x)[1], rtol=1e-10, atol=1e-10)


class Plain(nn.Module):
    """What torch can trace whole: two residual blocks, one of which is used twice, and a norm that is."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.ModuleList([nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)]) for _ in "ab")
        self.odd, self.small = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        for conv, norm in (self.a, self.b, self.a):
            x = torch.relu(norm(conv(x)) + x)
        return self.small(self.odd(x))


@pytest.mark.unsanitized  # torch.compile does not know what watches
def test_a_trace_begins_with_one_operator_for_all(device):
    torch.manual_seed(0)
    theirs = Plain().double().eval().to(device)
    for norm in (theirs.a[1], theirs.b[1], theirs.small):
        norm.running_var.uniform_(0.5, 1.5)
    ours, x = mt.accelerate(copy.deepcopy(theirs)), torch.rand(2, 8, 3, 2, dtype=torch.float64, device=device)
    graphs = []
    compiled = torch.compile(ours, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
    with torch.no_grad():
        for _ in "ab":
            torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-10, atol=1e-10)
            for model in (ours, theirs):
                model.b[1].running_mean.add_(1)
                model.a[1].weight.data.mul_(2)
        (graph,) = graphs
        called = [str(node.target) for node in graph.graph.nodes]
        assert called.count("minidl.fold_batch_norms.default") == 1
        program = torch.export.export(ours, (x,))
        assert sum("fold_batch_norms" in str(node.target) for node in program.graph.nodes) == 1
        torch.testing.assert_close(program.module()(x), theirs(x), rtol=1e-10, atol=1e-10)
    assert not any("folded" in name for module in ours.modules() for name in vars(module))


def test_torch_finds_that_operator_registered_as_it_should_be(device):
    vector, op = torch.rand(3, 8, dtype=torch.float64, device=device) + 1, torch.ops.minidl.fold_batch_norms.default
    both = [vector[0], vector[1]]
    torch.library.opcheck(op, (both, both, [], both, both, 1e-5, True))

    def fold(each):
        return op([each, vector[0]], both, both, [], [vector[1], each], 1e-5, True)

    mapped = torch.vmap(fold)(vector)
    for made, wanted in zip(mapped, zip(*map(fold, vector), strict=True), strict=True):
        assert torch.equal(made, torch.stack(wanted))
