"""The text classifier with attention: torch's layers have its values, padding has no influence."""

import numpy as np
import pytest
import torch

import minidl
from minidl import ops, optim
from minidl.models import TextAttention
from minidl.tensors import Tensor, default_device
from tests.test_nothing_outside_triton import classes, steps


@pytest.fixture
def model():
    minidl.manual_seed(0)
    return TextAttention(20, 3, width=8, heads=2, length=12, dropout=0.1)


TEXTS = [[3, 1, 4, 1, 5, 9], [2, 7], [8]]


def padded(rows, length):
    numbers = torch.zeros(len(rows), length, dtype=torch.int32)
    for row, values in zip(numbers, rows, strict=True):
        row[: len(values)] = torch.tensor(values)
    return Tensor(numbers.to(default_device()))


def reference(model, row):
    """The logits of one text without padding, in float64 by torch's layers."""
    width = model.embedding.embedding_dim
    state = {name: tensor.double().cpu() for name, tensor in model.state_dict().items()}
    x = state["embedding.weight"][row] + state["position.weight"][: len(row)]
    for i in range(len(model.layers)):
        layer = torch.nn.TransformerEncoderLayer(
            width, 2, 2 * width, activation="gelu", batch_first=True, norm_first=True, dtype=torch.float64
        ).eval()
        layer.load_state_dict(
            {n.removeprefix(f"layers.{i}."): t for n, t in state.items() if n.startswith(f"layers.{i}.")}
        )
        x = layer(x[None])[0]
    mean = torch.nn.functional.layer_norm(x.mean(0), [width], state["norm.weight"], state["norm.bias"])
    return state["head.weight"] @ mean + state["head.bias"]


@pytest.mark.parametrize("length", [6, 11])
def test_each_text_has_the_logits_that_torch_gives_it_alone(model, length):
    logits = model.eval()(padded(TEXTS, length)).data.double().cpu()
    with torch.no_grad():
        expected = torch.stack([reference(model, row) for row in TEXTS])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


def test_the_rows_of_padding_get_no_gradient(model):
    ops.cross_entropy(model(padded(TEXTS, 9)), classes(3, 3)).backward()
    used = sorted({n for row in TEXTS for n in row})
    rows = model.embedding.weight.grad.data.abs().sum(1)
    assert rows.nonzero().flatten().tolist() == used
    assert model.position.weight.grad.data.abs().sum(1).nonzero().flatten().tolist() == list(range(6))


def test_steps_compute_nothing_outside_triton(model):
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    x, y = padded(TEXTS, 6), classes(3, 3)
    losses = steps(model, optimizer, lambda m: ops.cross_entropy(m(x), y), count=4)
    assert losses[-1] < losses[0]
