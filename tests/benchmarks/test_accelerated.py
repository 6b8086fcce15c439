"""Models in torch measured with minidl's operators; their rows and summary."""

import dataclasses
import json
import sys
import types

import pytest
import torch
from torch import nn

from benchmarks.bench import accelerated_rows, accelerated_run, network_clocks, network_results, network_sides
from minidl.runtime import launch

MACHINE = {"device": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-01"}
interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted kernels are measured")


class Segmenter(nn.Module):
    """Features of models: residuals, a result in a dict, a layer without a kernel, dropout, an unused parameter."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.odd, self.head = nn.Dropout(0.5), nn.PReLU(), nn.Conv2d(4, 2, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return {"out": self.head(self.drop(self.odd(y)) + y)}


@pytest.fixture(autouse=True)
def _one_call(monkeypatch):
    """Clocks call once."""
    monkeypatch.setattr(network_clocks.HostClock, "most", 1)
    monkeypatch.setattr(network_clocks, "in_turn", lambda clocks: {name: [c.time()] for name, c in clocks.items()})


@pytest.fixture
def torchvision(monkeypatch):
    calls = []
    module = types.ModuleType("torchvision.models")
    module.get_model = lambda name, **options: calls.append((name, options)) or Segmenter()
    monkeypatch.setitem(sys.modules, "torchvision.models", module)
    return calls


def measured(word, training, **changed):
    (net,) = (net for net in accelerated_rows.chosen([word]) if net.training == training)
    rows = []
    accelerated_run.measured(dataclasses.replace(net, **changed), ["eager", "graph"], rows.append, "cpu", torch.float32)
    return net, rows


@interpreted
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_model_is_measured_beside_itself(torchvision, training):
    net, rows = measured("lraspp_mobilenet_v3_large", training, images=3, size=6)
    assert torchvision == [("lraspp_mobilenet_v3_large", {"weights": None, "weights_backbone": None})]
    row = rows[-1]
    assert list(rows[0]["peers_ms"]) == ["torch"]
    assert list(row["peers_ms"]) == list(row["ratios"]) == ["torch", "torch, CUDA graph"]
    assert row["error_ok"]
    assert 0 < row["errors"]["loss"] < 1e-5
    assert ("errors_in_evaluation" in row) == training
    assert row["launched_ms"].keys() == {"2" if training else "1", "3"}
    assert row["layers_alone"]["left_to_torch"] == ["1 PReLU: no operator"]
    results = network_results.empty(dict(MACHINE))
    results.add(net.row, json.loads(json.dumps(row)))
    assert results.in_order[0]["goal"] == 1.0


@interpreted
def test_wrong_gradients_in_evaluation_are_seen(monkeypatch):
    right = network_sides.errors_of

    def wrong(sides, exact, batch):
        errors = right(sides, exact, batch)
        if not exact.networks[""].training:
            errors[0] = dataclasses.replace(errors[0], gradients=0.1)
        return errors

    monkeypatch.setattr(network_sides, "errors_of", wrong)
    _, (row,) = measured("dcgan_discriminator", True, images=2, arguments=(1,))
    assert (row["error_ok"], row["ratio"]) == (False, None)
    assert row["errors"]["gradients"] < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(launch.INTERPRETED, reason="kernels are interpreted")
def test_a_model_is_measured_on_a_gpu():
    (net,) = (net for net in accelerated_rows.chosen(["dcgan_generator"]) if net.training)
    rows = []
    accelerated_run.measured(dataclasses.replace(net, images=8), ["eager", "graph"], rows.append)
    row = rows[-1]
    assert row["error_ok"], row
    assert row["layers_alone"]["ms"] > 0
    assert row["launched_ms"].keys() == {"2", "8"}


def test_rows_are_found_by_names_and_words():
    names = {net.name for net in accelerated_rows.chosen(["resnet50"])}
    assert names == {"resnet50"}  # not models that contain it
    assert {net.name for net in accelerated_rows.chosen(["resnet"])} == {
        "resnet18", "resnet50", "fcn_resnet50", "deeplabv3_resnet50", "timm/resnetv2_50"
    }  # fmt: skip
    assert len(accelerated_rows.chosen(["in-torch"])) == len(accelerated_rows.NETS)


def test_the_summary_has_the_mean_and_the_least_of_those_counted():
    ratios = {"resnet18": 1.0, "resnet50": 1.44, "fcn_resnet50": 0.5}
    rows = {net.row: {"error_ok": True, "ratio": ratios[net.name]} for net in accelerated_rows.NETS.values()
            if net.name in ratios}  # fmt: skip
    text = accelerated_rows.summary(rows)
    assert text == (
        "6 of 6 rows right, 4 not behind torch's best; of 4 counted (of 18) the geometric mean is 1.200 (goal 1.1), "
        "the least 1.000 (goal 0.97)"
    )
