"""The gradient penalty by a difference, against torch's autograd, and a whole step of both networks."""

import pytest
import torch
from torch.nn import functional

from minidl import nn, ops, random
from minidl.compilation import rehearsal
from minidl.models import Discriminator
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.training.loop import adversaries
from minidl.training.loop.adversaries import PENALTY, REACH, Adversaries, squared_slope

SETTINGS = {"latent": 5, "channels": 1, "size": (8, 8), "width": 4, "layers": 2, "kernel": 5}
COUNT = 6
# Terms of the longest sum that a logit or its gradient is made of: 100 of a convolution, then 128 of the linear layer.
# That of a weight has at most 4 x 4 places of COUNT pictures more.
TERMS = 400
EPS = torch.finfo(torch.float64).eps


def pictures(seed=0, dtype=torch.float64):
    drawn = torch.rand(COUNT, 1, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * drawn - 1).to(dtype)


def on_device(x):
    return Tensor(x.to(default_device()))


def adversaries_of(seed=0):
    random.manual_seed(seed)
    return Adversaries(SETTINGS, COUNT, 1e-3, seed)


@pytest.fixture
def networks():
    """With a discriminator in float64, whose weights are large enough for slopes well above 0."""
    networks = adversaries_of()
    random.manual_seed(1)
    networks.discriminator = Discriminator(1, (8, 8), 4, dtype=torch.float64)
    for parameter in networks.discriminator.parameters():
        parameter.data.mul_(8.0)
        if parameter.ndim == 1:
            parameter.data.add_(0.1)
    return networks


def in_torch(network):
    """The weights by name: copies in float64 that torch's autograd follows."""
    return {name: t.detach().cpu().double().clone().requires_grad_() for name, t in network.state_dict().items()}


def hidden(weights, x):
    """What each layer of the discriminator gives before its activation: two of [N, M, H, W], and the logits [N]."""
    values = []
    for layer in range(2):
        name = f"downward.{layer}"
        x = functional.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride=2, padding=2)
        values.append(x)
        x = functional.leaky_relu(x, 0.2)
    features = x.permute(0, 2, 3, 1).flatten(1)
    return [*values, functional.linear(features, weights["judge.weight"], weights["judge.bias"]).flatten()]


def judged(weights, x):
    return hidden(weights, x)[-1]


def slopes(weights, x, create_graph=False):
    """grad D(x) [N, 1, 8, 8], each picture's own."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(judged(weights, x).sum(), x, create_graph=create_graph)[0]


def lengths(gradient):
    return gradient.flatten(1).norm(dim=1)


def steps_of(weights, x, reach):
    gradient = slopes(weights, x)
    return reach * gradient / lengths(gradient).reshape(-1, 1, 1, 1)


def penalty_of(networks, x):
    """`squared_slope` of pictures [N, 1, 8, 8] as `Adversaries` takes it."""
    x = on_device(x)
    ahead = networks._ascent(x)
    logits = networks.discriminator(ops.cat([x + ahead, x - ahead])).reshape(2, -1)
    return squared_slope(logits[0], logits[1])


def test_the_reference_is_the_same_network(networks):
    x = pictures()
    logits = networks.discriminator(on_device(x)).data.cpu()
    expected = judged(in_torch(networks.discriminator), x).detach()
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < TERMS * EPS * expected.abs().max()


@pytest.mark.parametrize("reach", [REACH, 1e-4])
def test_the_step_is_the_unit_gradient_times_the_reach(networks, monkeypatch, reach):
    monkeypatch.setattr(adversaries, "REACH", reach)
    x = pictures()
    ahead = networks._ascent(on_device(x))
    assert not ahead.requires_grad
    assert torch.allclose(lengths(ahead.data.cpu()), torch.tensor(reach, dtype=torch.float64), rtol=1e-13, atol=0)
    expected = steps_of(in_torch(networks.discriminator), x, reach)
    assert (ahead.data.cpu() - expected).abs().max() < TERMS * EPS * reach


def test_the_step_leaves_the_weights_and_the_pictures_alone(networks):
    x = on_device(pictures())
    networks._ascent(x)
    assert x.grad is None
    assert torch.equal(x.data.cpu(), pictures())
    for parameter in networks.discriminator.parameters():
        assert parameter.requires_grad
        assert parameter.grad is None


def test_without_a_slope_there_is_no_step(networks):
    networks.discriminator.judge.weight.data.zero_()
    assert not networks._ascent(on_device(pictures())).data.any()
    penalty = penalty_of(networks, pictures())
    penalty.backward()
    assert penalty.data.item() == 0
    for parameter in networks.discriminator.parameters():
        assert not parameter.grad.data.any()  # NaN would be true


class Brightness(nn.Module):
    """The sum of the pixels above 0, so that a dark picture has no slope."""

    def forward(self, x):
        return ops.sum(ops.relu(x).flatten(1), 1)


def test_a_picture_without_a_slope_does_not_stop_the_others(networks):
    networks.discriminator = Brightness()
    x = -pictures().abs()
    x[2, 0, 3, :4] = 0.5
    expected = torch.zeros_like(x)
    expected[2, 0, 3, :4] = REACH / 2
    assert torch.allclose(networks._ascent(on_device(x)).data.cpu(), expected, rtol=1e-14, atol=0)


def test_the_gradient_is_that_of_the_penalty_by_double_backward(networks, monkeypatch):
    reach = 1e-4
    monkeypatch.setattr(adversaries, "REACH", reach)
    x, weights = pictures(), in_torch(networks.discriminator)
    step = steps_of(weights, x, reach)
    with torch.no_grad():
        ends = [hidden(weights, point)[:2] for point in (x + step, x - step)]
    # Between kinks of the activations the logit is linear, and the difference exact but for rounding.
    assert all(torch.equal(one > 0, other > 0) for one, other in zip(*ends, strict=True))

    expected = lengths(slopes(weights, x, create_graph=True)).square().mean()
    expected.backward()
    size = sum(judged(weights, point).abs().max().item() for point in (x + step, x - step))
    steepest = lengths(slopes(weights, x)).max().item()
    penalty = penalty_of(networks, x)
    # Each slope is off by the rounding of two logits, divided by their distance.
    off = TERMS * EPS * size / (2 * reach)
    assert abs(penalty.data.item() - expected.item()) < 2 * steepest * off
    penalty.backward()
    for name, parameter in networks.discriminator.named_parameters():
        expected = weights[name].grad if weights[name].grad is not None else torch.zeros(1, dtype=torch.float64)
        # 2 |slope| / 2r times the difference of the logit's gradients at both ends, each rounded as the logits are.
        largest = max(gradient.abs().max().item() for gradient in gradients_by(weights, name, x))
        bound = 2 * steepest * TERMS * EPS * largest / reach + 2 * off * expected.abs().max().item() / steepest
        assert bound < 1e-8
        assert (parameter.grad.data.cpu() - expected).abs().max() < bound, name
        # Between kinks no bias changes a slope.
        assert (expected.abs().max() > 1e-2) == name.endswith("weight"), name


def gradients_by(weights, name, x):
    """The gradient of each picture's logit by one of the weights."""
    return [torch.autograd.grad(judged(weights, one[None]).sum(), weights[name])[0] for one in x]


def test_the_default_reach_takes_the_mean_slope_along_the_way(networks):
    x, weights = pictures(), in_torch(networks.discriminator)
    step = steps_of(weights, x, 1.0)
    count = 400
    along = [
        (slopes(weights, x + REACH * ((2 * i + 1) / count - 1) * step) * step).flatten(1).sum(dim=1)
        for i in range(count)
    ]
    along = torch.stack(along)
    assert (along.max(dim=0).values - along.min(dim=0).values).max() > 1e-3  # there are kinks on the way
    expected = along.mean(dim=0).square().mean().item()
    penalty = penalty_of(networks, x).data.item()
    assert penalty == pytest.approx(expected, rel=1e-3)
    # The way is a tenth of a picture of 8 x 8 pixels long, three times as much of it as at 28 x 28.
    assert penalty == pytest.approx(lengths(slopes(weights, x)).square().mean().item(), rel=0.15)


def test_the_update_follows_the_loss_with_its_penalty(monkeypatch):
    """The gradients that a step leaves at the discriminator, against torch's of half the loss in the docstring."""
    networks = adversaries_of(2)
    for parameter in networks.discriminator.parameters():
        parameter.data.mul_(8.0)
    x, weights = pictures(dtype=torch.float32), in_torch(networks.discriminator)
    fakes = []
    monkeypatch.setattr(networks, "generator", Noted(networks.generator, fakes))
    losses, believed = networks.step(on_device(x))

    real, fake = judged(weights, x.double()), judged(weights, fakes[0].cpu().double())
    step = steps_of(weights, x.double(), REACH)
    difference = (judged(weights, x.double() + step) - judged(weights, x.double() - step)) / (2 * REACH)
    plain = functional.softplus(-real).mean() + functional.softplus(fake).mean()
    names, tensors = list(weights), list(weights.values())
    by_loss = torch.autograd.grad(plain / 2, tensors, retain_graph=True)
    by_penalty = torch.autograd.grad(PENALTY / 4 * difference.square().mean(), tensors)
    parameters = dict(networks.discriminator.named_parameters())
    for name, one, other in zip(names, by_loss, by_penalty, strict=True):
        gradient = parameters[name].grad.data.cpu().double()
        size = (one.abs() + other.abs()).max()
        # float32: sums of up to TERMS numbers, each rounded by 6e-8 of it to one side or the other.
        assert (gradient - one - other).abs().max() < 2e-5 * size, name
        assert name == "judge.bias" or other.abs().max() > 1e-3 * size, name
    assert losses[0].item() == pytest.approx(plain.item() / 2, rel=1e-5)
    expected = torch.stack([real.sigmoid().mean(), fake.sigmoid().mean()]).float()
    assert torch.allclose(believed.cpu(), expected, rtol=1e-5)


class Noted(nn.Module):
    """A generator whose pictures are stored in a list."""

    def __init__(self, generator, pictures):
        super().__init__()
        self.inner, self.latent, self.pictures = generator, generator.latent, pictures

    def forward(self, z):
        picture = self.inner(z)
        self.pictures.append(picture.data.clone())
        return picture


def test_steps_change_every_weight():
    networks = adversaries_of(3)
    before = {name: tensor.clone() for name, tensor in networks.weights().items()}
    x = on_device(pictures(dtype=torch.float32))
    for _ in range(2):
        losses, believed = networks.step(x)
        assert losses.isfinite().all()
        assert ((believed > 0) & (believed < 1)).all()
    for name, tensor in networks.weights().items():
        assert tensor.isfinite().all(), name
        measured = name.startswith("average") and ("running" in name or "tracked" in name)
        assert torch.equal(tensor, before[name]) == measured, name
    assert all(parameter.requires_grad for parameter in networks.discriminator.parameters())
    assert networks.skipped == 0


@pytest.mark.parametrize("scale", [0.0, 1e-14, 1e-13, 1e-12, 1e-9])
def test_a_discriminator_that_is_almost_flat_is_trained(scale):
    """Down to slopes that float32 has few digits of."""
    networks = adversaries_of()
    for parameter in networks.discriminator.parameters():
        parameter.data.mul_(scale)
    x = on_device(pictures(dtype=torch.float32))
    norms = lengths(networks._ascent(x).data.cpu())
    assert torch.allclose(norms, torch.full_like(norms, REACH if scale == 1e-9 else 0.0))
    networks.step(x)
    assert networks.skipped == 0


def test_a_rehearsal_has_every_kernel_of_a_step_and_of_the_average():
    x, rehearsed, launched = on_device(pictures(dtype=torch.float32)), [], []

    def watcher(kernel, grid, args, meta, go):
        launched.append((kernel.__name__, grid, str(meta)))
        go()

    networks = adversaries_of()
    with rehearsal.rehearsal(lambda kernel, grid, args, meta: rehearsed.append((kernel.__name__, grid, str(meta)))):
        rehearsal.rehearse(networks.step, x)
        rehearsal.rehearse(networks.calibrate)
    networks = adversaries_of()
    with launch.watch(watcher):
        networks.step(x)
        networks.calibrate()
    assert rehearsed == launched
