"""Networks measured end to end without a GPU, wrong ones, rows in parts, and their results files."""

import json

import pytest
import torch

from benchmarks.bench import network_clocks, network_results, network_run, network_sides, network_table
from benchmarks.bench.network_rows import NETS, Net
from minidl.errors import ConfigError
from minidl.runtime import launch

MACHINE = {"device": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-01"}
SMALL = Net("small_cnn", 3, 8, True, arguments=(1, (8, 8), 10), channels=1)
GAN = Net("dcgan", 2, 8, True, arguments=(), options=(("latent", 5), ("width", 4)))
PEERS = ["eager", "graph"]
ROW = "networks unet inference 16x256x256"


@pytest.fixture(autouse=True)
def _one_call(monkeypatch):
    """Clocks call once."""
    monkeypatch.setattr(network_clocks.HostClock, "most", 1)
    monkeypatch.setattr(network_clocks, "in_turn", lambda clocks: {name: [c.time()] for name, c in clocks.items()})


def measured(net, peers=PEERS):
    rows = []
    network_run.measured(net, peers, rows.append, "cpu", torch.float32)
    return rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels are measured")
@pytest.mark.parametrize(("net", "copied"), [(SMALL, {}), (GAN, {"cat 2x3x8x8": 1})], ids=["classifier", "gan"])
def test_a_network_is_measured_beside_each_peer(net, copied):
    first, row = measured(net)
    assert list(first["peers_ms"]) == ["torch"]
    assert row["error_ok"]
    assert list(row["peers_ms"]) == list(row["ratios"]) == ["torch", "torch, CUDA graph"]
    assert row["ratio"] == min(row["ratios"].values())
    assert row["errors"]["gradients"] < 1e-5
    assert 0 < row["launches"] <= row["launches_plain"]
    assert (row["copies"], row["copied"]) == (sum(copied.values()), copied)  # a GAN joins its pictures
    assert row["first_step_s"].keys() == {"ours", "torch"}
    json.dumps(row)


@pytest.mark.gpu
@pytest.mark.skipif(launch.INTERPRETED, reason="kernels are interpreted")
@pytest.mark.parametrize("training", [False, True])
def test_a_network_is_measured_on_a_gpu(training):
    """With graphs of both sides, and their memory."""
    rows = []
    net = Net("resnet18", 4, 32, training, arguments=(10,), options=(("small", True),))
    network_run.measured(net, PEERS, rows.append)
    row = rows[-1]
    assert row["error_ok"], row
    assert row["peak_mb"].keys() == {"ours", "torch"}
    assert row["pool_mb"].keys() == {"ours", "torch, CUDA graph"}
    assert all(0 < value < 2000 for value in row["peak_mb"].values())
    assert row["ours_ms"] < row["peers_ms"]["torch"]
    assert row["copies"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels are measured")
@pytest.mark.parametrize("which", ["a gradient", "a loss"])
def test_a_wrong_step_is_not_timed(monkeypatch, which):
    right = network_sides.Side.gradients

    def wrong(self, batch):
        losses, gradients = right(self, batch)
        if isinstance(self.networks[""], torch.nn.Module):
            return losses, gradients
        if which == "a loss":
            return [loss * 1.01 for loss in losses], gradients
        return losses, [gradients[0] * 1.1, *gradients[1:]]

    monkeypatch.setattr(network_sides.Side, "gradients", wrong)
    (row,) = measured(SMALL)
    assert not row["error_ok"]
    assert row["ratio"] is None


def test_an_untrained_network_in_float16_is_compared_by_values_that_are_there():
    """Wrong shifts and scales of a channel are detected."""
    torch.manual_seed(0)
    net = Net("mobilenet_v2", 2, 32, False, arguments=(10,))
    exact, half = (network_sides.Side(net, network_sides.torchs("cpu", t)) for t in (torch.float64, torch.float16))
    batch = network_sides.batch_of(net, "cpu", torch.float16)

    def errors_and_verdict():
        (errors,) = network_sides.errors_of([half], exact, batch)
        return errors, network_sides.right(errors, errors, torch.float16)

    half.load(exact)
    exact.load(half)
    assert errors_and_verdict() == (network_sides.Errors(1.0), False)  # zeros
    exact.take_statistics(batch)
    half.load(exact)
    exact.load(half)
    errors, right = errors_and_verdict()
    assert right
    assert errors.loss < 2**-8
    norm = half.networks[""].features[18][1]
    for wrong, value in ((norm.running_mean, 0.0), (norm.running_var, norm.running_var.mean())):
        before = wrong.clone()
        wrong.fill_(value)
        assert not errors_and_verdict()[1]
        wrong.copy_(before)


def described(ratios, **more):
    """A row as `measured` makes it."""
    peer = min(ratios, key=ratios.get)
    return {
        "name": "unet", "dtype": "float16", "error_ok": True, "ours_ms": 1.0, "peer": peer, "peer_ms": ratios[peer],
        "ratio": ratios[peer], "share_of_floor": 0.5, "images_per_second": 16000, "peers_ms": ratios, "ratios": ratios,
        "first_step_s": {"ours": 7.0}, "peak_mb": {"ours": 100.0}, "pool_mb": {"ours": 50.0}, **more,
    }  # fmt: skip


def test_peers_of_earlier_runs_stay(monkeypatch):
    eager, graph, compiled = (network_clocks.PEERS[peer] for peer in ("eager", "graph", "compile"))
    before = described({eager: 2.0, graph: 1.5}, left_out={compiled: "no memory"})
    assert network_run.is_complete(before, ["eager", "compile"])
    assert not network_run.is_complete(before, ["autotune"])
    row = network_run.merged(before, described({graph: 1.6, compiled: 1.4}))
    assert row["ratios"] == {eager: 2.0, graph: 1.6, compiled: 1.4}
    assert (row["peer"], row["ratio"]) == (compiled, 1.4)
    assert "left_out" not in row
    measured_rows = []

    def in_process(net, peers, seconds, module):
        measured_rows.append(net.row)
        return (None, "it failed: no memory") if "vgg" in net.row else (described({graph: 1.0}), "")

    monkeypatch.setattr(network_run, "_in_process", in_process)
    rows, messages = {ROW: described({graph: 1.0})}, []
    nets = [NETS[ROW], NETS["networks vgg16_bn training 64x224x224"], NETS["networks resnet50 inference 1x224x224"]]
    left, failures = network_run.run(nets, rows, ["graph"], rows.__setitem__, messages.append)
    assert measured_rows == [net.row for net in nets[1:]]
    assert (left, len(failures), len(messages)) == (0, 1, 2)
    assert network_run.run(nets, {}, ["graph"], rows.__setitem__, messages.append, minutes=0.1) == (3, [])


def test_parts_are_joined_and_shown(tmp_path, capsys):
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    names = ROW, "networks resnet50 training 64x224x224"
    for path, name, ratio in zip(parts, names, (1.25, 1.1), strict=True):
        results = network_results.empty(dict(MACHINE))
        results.add(name, described({"torch": ratio}))
        results.save(path)
    network_table.main([str(tmp_path / "whole.json"), *map(str, parts)])
    with pytest.raises(SystemExit, match="exists: give a new file"):
        network_table.main([str(tmp_path / "whole.json"), *map(str, parts)])
    printed = capsys.readouterr().out
    assert "| unet inference 16x256x256 | 1.000 | 1.250 (torch) | 1.25 | 1 |" in printed
    assert "inference 1.25 in geometric mean (at its goal of 1.2); training 1.10" in printed
    joined = network_results.load(tmp_path / "whole.json")
    assert sorted(joined.rows) == sorted(names)
    with pytest.raises(ConfigError, match="different machines: their device differ"):
        network_table.joined([joined, network_results.empty({**MACHINE, "device": "NVIDIA H100"})])


def test_the_picture_has_every_network():
    pytest.importorskip("matplotlib")
    results = network_results.empty(dict(MACHINE))
    for name in list(NETS)[::4]:
        results.add(name, described({"torch": 0.9}))
    assert network_table.picture(results) == network_table.picture(results)
    assert network_table.picture(results, "png").startswith(b"\x89PNG")
