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


def test_multinomial_draws_by_probability(device):
    p = torch.tensor([[0, 0.2, 0.3, 0, 0.5, 0], [1, 0, 0, 0, 2, 0]])
    count, weights = 20000, from_torch(p.to(device))
    drawn = ops.multinomial(weights, count, True, seed=3).data.cpu()
    shares = torch.stack([torch.bincount(row, minlength=6) / count for row in drawn])
    expected = p / p.sum(1, keepdim=True)
    # Five standard deviations of a share.
    assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()
    assert torch.equal(ops.multinomial(weights, count, True, seed=3).data.cpu(), drawn)


def test_multinomial_without_replacement(device):
    p = torch.tensor([1.0, 2.0, 0.0, 1.0]).expand(count := 2000, 4).contiguous()
    drawn = ops.multinomial(from_torch(p.to(device)), 3, seed=5).data.cpu()
    assert torch.equal(drawn.sort(1).values, torch.tensor([0, 1, 3]).expand(count, 3))
    second = torch.bincount(drawn[:, 1], minlength=4) / count
    # After 0 or 3 (a quarter each), 1 has a share of 2/3; after 1 (one half), the others have 1/2 each.
    expected = torch.tensor([0.25 + 1 / 12, 1 / 3, 0, 0.25 + 1 / 12])
    assert ((second - expected).abs() < 5 * (0.25 / count) ** 0.5).all()
    one = from_torch(torch.tensor([0.0, 3.0], dtype=torch.float16, device=device))
    assert ops.multinomial(one, 1).tolist() == [1]


@pytest.mark.parametrize(
    ("values", "count", "replacement", "message"),
    [
        ([1.0, -1.0], 1, False, "negative, infinite or NaN"), ([1.0, float("nan")], 1, True, "negative, infinite"),
        ([0.0, 0.0], 1, True, "fewer than 1 probabilities"), ([1.0, 0.0], 2, False, "fewer than 2 probabilities"),
        ([1.0, 1.0], 3, False, "num_samples is 3, expected 1 to 2"), ([1.0], 0, True, "num_samples is 0"),
        ([[[1.0]]], 1, True, r"input has shape \[1, 1, 1\]"), ([], 1, True, r"input has shape \[0\]"),
    ],
)  # fmt: skip
def test_multinomial_refuses(values, count, replacement, message):
    with pytest.raises(ValueError, match=message):
        ops.multinomial(from_torch(torch.tensor(values)), count, replacement)
