"""Layers against torch's, with the same weights."""

import pytest
import torch

import minidl
from minidl import nn
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device


def tensor(*shape, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Tensor(values.to(default_device()))


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5), (5,), (0, 5)])
def test_linear_is_torchs_linear(shape):
    ours = nn.Linear(5, 4, dtype=torch.float64)
    theirs = torch.nn.Linear(5, 4, dtype=torch.float64)
    theirs.load_state_dict({k: v.cpu() for k, v in ours.state_dict().items()})
    x = tensor(*shape)
    torch.testing.assert_close(ours(x).data.cpu(), theirs(x.data.cpu()).detach())


def test_linear_starts_as_torchs_does():
    minidl.manual_seed(3)
    layer = nn.Linear(100, 50)
    bound = 0.1
    for values in (layer.weight.data, layer.bias.data):
        assert values.abs().max() <= bound
        assert values.abs().max() > 0.9 * bound
        assert abs(values.mean()) < 0.03


def test_the_same_seed_gives_the_same_weights():
    def weights(seed):
        minidl.manual_seed(seed)
        return nn.MLP(8, [6, 5], 3).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


@pytest.mark.parametrize("hidden", [[], [7], [7, 6, 5]])
@pytest.mark.parametrize("act", ["relu", "gelu", ("leaky_relu", 0.2)])
def test_mlp_is_its_layers_in_torch(hidden, act):
    ours = nn.MLP(4, hidden, 3, act=act, dtype=torch.float64)
    function = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}.get(
        act, lambda z: torch.nn.functional.leaky_relu(z, 0.2)
    )
    x = tensor(5, 4)
    y = x.data.cpu()
    state = {k: v.cpu() for k, v in ours.state_dict().items()}
    for index in range(len(hidden) + 1):
        y = y @ state[f"{index}.weight"].t() + state[f"{index}.bias"]
        y = function(y) if index < len(hidden) else y
    torch.testing.assert_close(ours(x).data.cpu(), y)


def test_sparse_first_layer_is_the_dense_product():
    x = tensor(6, 9).data
    x[x < 0.3] = 0
    crow = torch.cat([torch.zeros(1, dtype=torch.int64), (x != 0).sum(1).cumsum(0).cpu()])
    col = x.cpu().nonzero()[:, 1]
    sparse = CSR.from_torch(crow, col, x.cpu()[x.cpu() != 0], (6, 9)).to(default_device())
    model = nn.MLP(9, [5], 2, sparse=True, dtype=torch.float64)
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    hidden = torch.relu(x.cpu() @ state["0.weight"] + state["0.bias"])
    expected = hidden @ state["1.weight"].t() + state["1.bias"]
    torch.testing.assert_close(model(sparse).data.cpu(), expected)


def test_dropout_acts_in_training_only():
    layer = nn.Dropout(0.5)
    x = tensor(40, 40)
    assert (layer(x).data == 0).float().mean() > 0.4
    assert torch.equal(layer.eval()(x).data, x.data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Dropout(1.5), "expected a probability"),
        (lambda: nn.Linear(3, 2, act="swish"), "unknown activation 'swish'"),
        (lambda: nn.MLP(0, [3], 2), "layer sizes must be 1 or more"),
        (lambda: nn.Linear(3, 2)(tensor(4, 5).float()), r"Linear: input has shape \[4, 5\], weight \[2, 3\]"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
