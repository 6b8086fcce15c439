"""`nn.utils.weight_norm`, `spectral_norm` and their newer forms: torch's names in the state, values and gradients."""

import copy

import pytest
import torch

from minidl import nn
from minidl.tensors import Tensor, default_device
from tests.nn.test_as_torch import numbers

LAYERS = {
    "linear": (lambda f: f.Linear(5, 4), (6, 5)),
    "conv": (lambda f: f.Conv2d(3, 4, 3), (2, 3, 5, 5)),
    "transposed": (lambda f: f.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
}
NORMS = {
    "weight_norm": lambda utils, layer: utils.weight_norm(layer),
    "weight_norm, all": lambda utils, layer: utils.weight_norm(layer, dim=None),
    "spectral_norm": lambda utils, layer: utils.spectral_norm(layer, n_power_iterations=2),
    "newer weight_norm": lambda utils, layer: utils.parametrizations.weight_norm(layer, dim=1),
    "newer spectral_norm": lambda utils, layer: utils.parametrizations.spectral_norm(layer),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_steps_are_torchs(kind, norm):
    """Three steps of a loss that calls the layer twice, as a critic does with true and made pictures."""
    make, shape = LAYERS[kind]
    theirs = NORMS[norm](torch.nn.utils, make(torch.nn)).double()
    ours = NORMS[norm](nn.utils, make(nn)).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    ours.load_state_dict(theirs.state_dict())
    x = numbers(*shape).double().cpu()
    for _ in range(3):
        for layer, value in ((theirs, x), (ours, Tensor(x.to(default_device())))):
            layer.zero_grad()
            (layer(value).sin().sum() - layer(2 * value).sum()).backward()
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(own.grad.data.cpu(), other.grad, rtol=1e-10, atol=1e-11)
            other.data.sub_(0.1 * other.grad)
            own.data.copy_(other.data)
        for own, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(own.data.cpu(), other)
    twin = copy.deepcopy(ours)
    ours.eval()
    twin.train()(Tensor(x.to(default_device())))  # its iterations are its own
    value = ours(Tensor(x.to(default_device()))).data
    torch.testing.assert_close(value.cpu(), theirs.eval()(x))
    assert nn.utils.remove_spectral_norm(ours) is ours
    assert (type(ours), sorted(ours.state_dict())) == (type(make(nn)), ["bias", "weight"])
    torch.testing.assert_close(ours(Tensor(x.to(default_device()))).data, value)


def test_two_norms_of_a_module_and_their_removal():
    layer = nn.utils.spectral_norm(nn.utils.weight_norm(nn.LSTM(3, 4), "weight_hh_l0"), "weight_ih_l0")
    assert {"weight_hh_l0_g", "weight_ih_l0_u"} <= {*layer.state_dict()}
    nn.utils.remove_weight_norm(layer, "weight_hh_l0")
    assert isinstance(layer.weight_hh_l0, nn.Parameter)
    assert not isinstance(layer.weight_ih_l0, nn.Parameter)
    nn.utils.remove_spectral_norm(layer, "weight_ih_l0")
    assert type(layer) is nn.LSTM


def test_layers_with_a_norm_are_neither_folded_nor_converted():
    layers = nn.utils.weight_norm(nn.Conv2d(1, 2, 3)), nn.utils.spectral_norm(nn.Linear(32, 32))
    model = nn.Sequential(layers[0], nn.BatchNorm2d(2)).eval()
    assert isinstance(nn.fold_batch_norms(model)[1], nn.BatchNorm2d)
    assert nn.to_float8(layers[1]).weight.dtype == torch.float32
    assert all("weight" not in dict(layer.named_buffers()) for layer in layers)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: nn.utils.weight_norm(m, "wieght"), "Linear has no parameter 'wieght', or it has a norm already"),
        (lambda m: nn.utils.spectral_norm(nn.utils.spectral_norm(m)), "has no parameter 'weight', or it has a norm"),
        (lambda m: nn.utils.spectral_norm(m, n_power_iterations=0), "n_power_iterations is 0, expected 1 or more"),
        (nn.utils.remove_weight_norm, "Linear has no weight_norm or spectral_norm of 'weight'"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(nn.Linear(3, 2))
