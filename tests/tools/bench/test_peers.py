"""Other projects' kernels in the benchmark, by modules with their functions that compute with torch."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.bench import results_page
from minidl.tools.bench import measure, peers, results, run
from minidl.tools.bench.measure import HostClock, Work

MODULES = {"attorch": "attorch", "FlagGems": "flag_gems", "Liger": "liger_kernel"}


class Norm(torch.nn.BatchNorm2d):
    """attorch's layer in the version that fuses an activation."""

    def __init__(self, channels, act_func=None, device=None):
        super().__init__(channels, device=device)
        self.act = act_func

    def forward(self, x):
        y = super().forward(x)
        return y.relu() if self.act == "relu" else y


class PlainNorm(torch.nn.BatchNorm2d):
    """The version without."""

    def __init__(self, channels, device=None):
        super().__init__(channels, device=device)


class LigerCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, weight, ignore_index, square_scale, smoothing, reduction):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = F.cross_entropy(leaf, target, ignore_index=ignore_index, reduction=reduction)
            (ctx.grad,) = torch.autograd.grad(value, leaf)
        return value.detach(), None

    @staticmethod
    def backward(ctx, dy, _):
        return ctx.grad * dy, *[None] * 6


def install(monkeypatch, *names, **changed):
    """Fake modules of these names; `changed` replaces functions of FlagGems."""
    made = {
        "attorch": {
            "Softmax": torch.nn.Softmax, "BatchNorm2d": Norm, "Conv2d": torch.nn.Conv2d, "ReLU": torch.nn.ReLU,
        },
        "flag_gems": {
            "mm": torch.mm,
            "softmax": lambda x, dim, half_to_float=False: torch.softmax(x, dim),
            "conv2d": F.conv2d,
            "conv_transpose2d": F.conv_transpose2d,
            **changed,
        },
        "liger_kernel": {},
    }  # fmt: skip
    for name in MODULES.values():
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)
        vars(module).update(made[name])
        monkeypatch.setitem(sys.modules, name, module if name in names else None)
    ops = ModuleType("liger_kernel.ops")
    ops.LigerSoftmaxFunction = SimpleNamespace(apply=lambda x: torch.softmax(x, -1))
    ops.LigerCrossEntropyFunction = LigerCrossEntropyFunction
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)


@pytest.fixture
def all_there(monkeypatch):
    install(monkeypatch, *MODULES.values())


def made(others):
    return {name: [call() for call in make()] for name, make in others}


def test_which_there_are(monkeypatch):
    install(monkeypatch, "flag_gems")
    assert list(peers.installed()) == ["FlagGems"]
    assert peers.missing() == [
        "attorch is not installed: pip install git+https://github.com/BobMcDear/attorch",
        "Liger is not installed: pip install liger-kernel",
    ]
    x = torch.randn(3, 4)
    assert list(made(peers.softmax([x]))) == ["FlagGems"]


def test_each_peer_is_called_as_its_functions_are(all_there):
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    assert made(peers.products([(x, y), (2 * x, y)]))["FlagGems"][1].equal(2 * x @ y)
    got = made(peers.softmax([x]))
    assert list(got) == ["attorch", "FlagGems", "Liger"]
    assert all(outputs[0].equal(torch.softmax(x, -1)) for outputs in got.values())
    images, w = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last), torch.randn(4, 3, 3, 3)
    for outputs in made(peers.conv2d([images], w, [1, 1])).values():
        torch.testing.assert_close(outputs[0], F.conv2d(images, w, padding=1))
    how = {"stride": 2, "padding": 2, "output_padding": 1}
    w = torch.randn(3, 4, 5, 5)
    (outputs,) = made(peers.conv_transpose2d([images], w, **how)).values()
    torch.testing.assert_close(outputs[0], F.conv_transpose2d(images, w, **how))


def test_gradients_of_the_loss(all_there):
    x, target = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    ((value, grad),) = made(peers.cross_entropy(x, target))["Liger"]
    leaf = x.clone().requires_grad_()
    wanted = F.cross_entropy(leaf, target)
    torch.testing.assert_close(value, wanted.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, leaf)[0])
    assert x.grad_fn is None
    assert not x.requires_grad


@pytest.mark.parametrize("norm", [Norm, PlainNorm])
def test_batch_norm_with_relu_fused_or_after(all_there, monkeypatch, norm):
    monkeypatch.setattr(sys.modules["attorch"], "BatchNorm2d", norm)
    x, dy, weight, bias = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5), torch.rand(3) + 0.5, torch.randn(3)
    ((y, *grads),) = made(peers.batch_norm_relu(x, weight, bias, dy))["attorch"]
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    wanted = F.relu(F.batch_norm(leaves[0], None, None, *leaves[1:], training=True))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(tuple(grads), torch.autograd.grad(wanted, leaves, dy))


def softmax_row(x, judge=None):
    """A row whose sides run on the CPU."""
    exact = torch.softmax(x.double(), -1)
    return Work(
        "softmax", "float32", [lambda: torch.softmax(x, -1)], {"torch": [lambda: torch.softmax(x, -1)]}, 1e-3,
        judge=lambda y: bool((y.double() - exact).abs().max() < 1e-6), others=lambda: peers.softmax([x]),
    )  # fmt: skip


def test_a_row_has_its_peers_with_their_versions(all_there):
    row = measure.measure(softmax_row(torch.randn(8, 8)), True, HostClock)
    assert set(row["peers_ms"]) == {"torch", "attorch", "FlagGems", "Liger"}
    assert row["others"] == dict.fromkeys(("attorch", "FlagGems", "Liger"), "unknown")
    assert row["peer_ms"] == min(row["peers_ms"].values())
    assert "left_out" not in row
    without = measure.measure(softmax_row(torch.randn(8, 8)), False, HostClock)
    assert set(without["peers_ms"]) == {"torch"}
    assert "others" not in without


def test_a_peer_that_reads_the_device_is_timed_without_a_graph(all_there, monkeypatch):
    kinds = {name: type(name, (HostClock,), {}) for name in ("Replay", "Launched")}
    for name, kind in kinds.items():
        monkeypatch.setattr(measure, name, kind)
    seen = {}

    def in_turn(sides, rounds, agree):
        seen.update({name: type(side).__name__ for name, side in sides.items()})
        return {name: [side.time()] for name, side in sides.items()}

    monkeypatch.setattr(measure, "in_turn", in_turn)
    work = softmax_row(torch.randn(8, 8))
    measure.measure(work, True)
    assert seen.pop("Liger") == "Replay"
    work.name = "cross-entropy forward+backward"
    measure.measure(work, True)
    assert seen == {"ours": "Replay", "torch": "Replay", "attorch": "Replay", "FlagGems": "Replay", "Liger": "Launched"}


def test_a_wrong_peer_and_one_that_fails_are_left_out_by_name(monkeypatch):
    def fail(x, dim):
        raise RuntimeError("no kernel\nmore")

    install(monkeypatch, *MODULES.values(), softmax=fail)
    monkeypatch.setattr(
        sys.modules["liger_kernel.ops"], "LigerSoftmaxFunction", SimpleNamespace(apply=lambda x: x.exp())
    )
    row = measure.measure(softmax_row(torch.randn(8, 8)), True, HostClock)
    assert row["left_out"] == {"FlagGems": "RuntimeError: no kernel", "Liger": "its result is wrong"}
    assert set(row["peers_ms"]) == {"torch", "attorch"}
    assert list(row["others"]) == ["attorch"]


def test_results_keep_them_and_the_table_names_them(all_there, tmp_path):
    stored = results.Results({"device": "d", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-01"})
    stored.add("softmax 65536x128", measure.measure(softmax_row(torch.randn(8, 8)), True, HostClock))
    stored.save(tmp_path / "r.json")
    loaded = results.load(tmp_path / "r.json")
    assert loaded.in_order == stored.in_order
    page = results_page.markdown(loaded)
    assert "the fastest of torch (eager or compiled), FlagGems, Liger and attorch, divided by" in page
    assert run.table(loaded, ["softmax 65536x128"]).row_count == 1
