"""Random tensors and dropout in the graph: seeds, streams, and the same draw backward as forward."""

import pytest
import torch

from minidl import from_torch, manual_seed, ops, random


@pytest.fixture(autouse=True)
def unchanged():
    """Leave the state as other tests expect it."""
    before = random.get_state()
    yield
    random.set_state(before)


def test_a_seed_repeats_a_program():
    def program():
        x = ops.rand(20, 30, requires_grad=True)
        y = ops.dropout(x, 0.3)
        y.backward(ops.randn(20, 30))
        return x.data, y.data, x.grad.data

    manual_seed(3)
    first = program()
    second = program()
    manual_seed(3)
    for a, b, c in zip(first, program(), second, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_a_given_seed_takes_no_stream():
    manual_seed(3)
    assert torch.equal(ops.randn(5, seed=1).data, ops.randn(5, seed=1).data)
    assert random.get_state() == {"seed": 3, "stream": 0}


def test_the_gradient_passes_where_dropout_did(device):
    x = from_torch(torch.ones(1000, device=device), requires_grad=True)
    y = ops.dropout(x, 0.25)
    y.backward(from_torch(torch.ones(1000, device=device)))
    assert torch.equal(x.grad.data, y.data)


def test_dropout_without_training_is_the_tensor_itself(device):
    x = from_torch(torch.ones(3, device=device))
    assert ops.dropout(x, 0.5, training=False) is x
    assert ops.dropout(x, 0.0) is x


def test_shapes_as_numbers_or_a_sequence():
    assert ops.rand(2, 3).shape == ops.rand((2, 3)).shape == torch.Size([2, 3])
    assert ops.randn().shape == ()
    assert ops.rand(2, dtype=torch.float16).dtype == torch.float16
