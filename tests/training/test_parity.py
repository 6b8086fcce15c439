"""minidl and torch from the same weights on the same batches: they stay together.

The reference is torch in float64. torch in float32 leaves it by its rounding errors, which training amplifies; minidl
may leave it as far, with a factor for another order of sums, and no further.
"""

import numpy as np
import pytest
import torch
from scipy.sparse import random as random_sparse

from minidl import models, ops, optim, random
from minidl.data.batches import Batches
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor

STEPS = 50
FACTOR = 8
FEATURES, CLASSES, HIDDEN = 300, 4, (16, 8)


class TorchMLP(torch.nn.Module):
    """The same network; the sparse product is a product with the dense matrix."""

    def __init__(self, state, names, act):
        super().__init__()
        self.names, self.act = names, act
        self.weights = torch.nn.ParameterDict({name.replace(".", "_"): value.clone() for name, value in state.items()})

    def forward(self, x):
        for i, (weight, bias) in enumerate(self.names):
            w, b = self.weights[weight.replace(".", "_")], self.weights[bias.replace(".", "_")]
            x = x @ (w if w.shape[0] == x.shape[1] else w.T) + b
            if i < len(self.names) - 1:
                x = self.act(x)
        return x


def text_batches():
    rng = np.random.default_rng(3)
    features = random_sparse(256, FEATURES, density=0.05, format="csr", dtype=np.float32, rng=rng)
    return Batches(features, rng.integers(0, CLASSES, 256), batch_size=32, seed=1)


def table_batches():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(256, 12)).astype(np.float32)
    return Batches(x, np.tanh(x @ rng.normal(size=12)).astype(np.float32), batch_size=32, seed=1)


def steps(batches):
    for step in range(STEPS):
        epoch, at = divmod(step, len(batches))
        yield next(batches.epoch(epoch, at))


def ours(model, loss_of, optimizer, batches, device):
    losses = []
    for x, y in steps(batches):
        optimizer.zero_grad()
        loss = loss_of(model(x.to(device) if isinstance(x, CSR) else Tensor(x.to(device))), Tensor(y.to(device)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), {name: value.cpu().double() for name, value in model.state_dict().items()}


def torchs(state, dtype, act, loss_of, make_optimizer, batches):
    names = [(name, name.replace("weight", "bias")) for name in state if name.endswith("weight")]
    model = TorchMLP({name: value.cpu().to(dtype) for name, value in state.items()}, names, act)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for x, y in steps(batches):
        x = x.to_dense() if isinstance(x, CSR) else x
        optimizer.zero_grad()
        loss = loss_of(model(x.to(dtype)), y if y.dtype == torch.int64 else y.to(dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = {name: model.weights[name.replace(".", "_")].detach().double() for name in state}
    return np.array(losses), weights


OPTIMIZERS = {
    "adamw": (
        lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    "sgd": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}


def text_case():
    model = models.TextMLP(FEATURES, CLASSES, HIDDEN, dropout=0.0, std=0.3)
    return (
        model,
        torch.relu,
        text_batches(),
        lambda z, y: ops.cross_entropy(z, y, label_smoothing=0.1),
        lambda z, y: torch.nn.functional.cross_entropy(z, y, label_smoothing=0.1),
    )


def table_case():
    return (
        models.TableMLP(12, 1, HIDDEN),
        torch.tanh,
        table_batches(),
        lambda z, y: ops.mse_loss(ops.flatten(z, 0), y),
        lambda z, y: torch.nn.functional.mse_loss(z.flatten(), y),
    )


@pytest.mark.parametrize(("case", "optimizer"), [(text_case, "adamw"), (table_case, "sgd")])
def test_fifty_steps_stay_with_torch(case, optimizer, device):
    random.manual_seed(0)
    make_ours, make_torchs = OPTIMIZERS[optimizer]
    model, act, batches, our_loss, torch_loss = case()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    exact, exact_weights = torchs(start, torch.float64, act, torch_loss, make_torchs, batches)
    peer, peer_weights = torchs(start, torch.float32, act, torch_loss, make_torchs, batches)
    mine, my_weights = ours(model, our_loss, make_ours(list(model.parameters())), batches, device)

    assert exact[-1] < 0.9 * exact[0], "the run must move for the comparison to say anything"
    bound = FACTOR * np.maximum.accumulate(np.abs(peer - exact)) + 8 * np.finfo(np.float32).eps * np.abs(exact)
    assert (np.abs(mine - exact) <= bound).all(), (np.abs(mine - exact) / bound).max()
    for name, value in exact_weights.items():
        allowed = FACTOR * float((peer_weights[name] - value).abs().max()) + 1e-7
        assert float((my_weights[name] - value).abs().max()) <= allowed, name
