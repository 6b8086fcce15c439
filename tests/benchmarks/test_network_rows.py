"""Whole networks: torch runs the same definitions, with the same results; operations counted from the layers."""

import pytest
import torch

from benchmarks.bench import network_results, network_rows
from benchmarks.bench.drawn_command import part_of
from benchmarks.bench.in_torch import in_torch
from minidl import models, ops
from minidl.autograd import no_grad
from minidl.tensors import Tensor, default_device
from minidl.tools.bench import goals

# Large enough that the last batch norms have several values.
SIZES = {"resnet18": 40, "resnet50": 40, "mobilenet_v2": 40, "densenet121": 64, "unet": 16}


@pytest.mark.parametrize("name", SIZES)
def test_torch_runs_the_same_definition(name):
    """In evaluation, and a step's loss and gradients in training."""
    options = {"width": 4, "depth": 2} if name == "unet" else {}
    ours, theirs = getattr(models, name)(7, **options), in_torch(name, 7, **options)
    for layer in (*ours.modules(), *theirs.modules()):
        if type(layer).__name__ == "Dropout":
            layer.p = 0.0
    state = {key: t.double().cpu() for key, t in ours.state_dict().items()}
    theirs = theirs.double()
    theirs.load_state_dict(state)
    x = torch.randn(2, 3, SIZES[name], SIZES[name], generator=torch.Generator().manual_seed(0))
    with no_grad(), torch.no_grad():
        got, exact = ours.eval()(Tensor(x.to(default_device()))).data, theirs.eval()(x.double())
    assert (got.double().cpu() - exact).norm() <= 1e-5 * exact.norm()
    target = torch.randint(0, 7, (2, *exact.shape[2:]), generator=torch.Generator().manual_seed(1))
    loss = ops.cross_entropy(ours.train()(Tensor(x.to(default_device()))), Tensor(target.to(default_device())))
    loss.backward()
    wanted = torch.nn.functional.cross_entropy(theirs.train()(x.double()), target)
    wanted.backward()
    wanted = float(wanted.detach())
    assert abs(float(loss) - wanted) <= 1e-4 * wanted
    for key in ("running_mean", "running_var"):
        for (which, mine), (_, other) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
            if which.endswith(key):
                assert torch.allclose(mine.double().cpu(), other, rtol=1e-3, atol=1e-4), which
    last = next(reversed(list(theirs.parameters())))
    mine = next(reversed(list(ours.parameters()))).grad.data
    assert torch.allclose(mine.double().cpu(), last.grad, rtol=1e-3, atol=1e-5)


def test_operations_are_counted_from_the_layers():
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.ConvTranspose2d(8, 2, 2, 2), torch.nn.Flatten(), torch.nn.Linear(128, 5),
    )  # fmt: skip
    elements, flop = network_rows.work_of(layers, torch.zeros(4, 3, 8, 8))
    assert flop == 2 * 4 * (64 * 8 * 27 + 16 * 8 * 8 + 5 * 128)
    assert elements == 4 * (192 + 512 + 512 + 128 + 128 + 128 + 128 + 5) + 216 + 64 + 640


def test_a_pool_in_a_convolution_is_counted_by_what_it_pools():
    layer = in_torch("ece408").get_submodule("0")
    elements, flop = network_rows.work_of(layer, torch.zeros(3, 1, 28, 28))
    assert (elements, flop) == (3 * (784 + 32 * 144) + 800, 2 * 3 * 32 * 576 * 25)


def test_a_training_step_is_three_forwards():
    training, inference = (network_rows.floor_of(network_rows.Net("resnet18", 2, 64, which)) for which in (True, False))
    assert training == pytest.approx(3 * inference)
    assert all(network_rows.floor_of(net) > 0 for net in network_rows.NETS.values() if net.name == "dcgan")


def test_networks_are_measured_where_they_are_asked_for():
    assert not any(name.startswith("networks") for name in goals.chosen([]))
    nets = network_rows.chosen(())
    assert [net.row for net in nets] == [name for name in network_results.GOALS if name.startswith("networks")]
    assert [net.row for net in network_rows.chosen(("unet",))] == [
        "networks unet inference 16x256x256", "networks unet training 16x256x256"
    ]  # fmt: skip
    halves = [part_of(nets, part) for part in ("1/2", "2/2")]
    assert {net.row for half in halves for net in half} == {net.row for net in nets}
    for part in ("3/2", "0/2", "half", "1"):
        with pytest.raises(ValueError, match="expected a part as 1/2"):
            part_of(nets, part)
    with pytest.raises(ValueError, match="no network's row contains 'vgg19'"):
        network_rows.chosen(("unet", "vgg19"))
