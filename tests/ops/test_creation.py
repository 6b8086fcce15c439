"""Tensors made as by torch: values, types, and whose memory they are."""

import numpy as np
import pytest
import torch

import minidl
from minidl.tensors import default_device


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.tensor([1.0, 2]), lambda m: m.tensor([[1, 2]]), lambda m: m.tensor(True),
        lambda m: m.tensor(3, dtype=m.float64), lambda m: m.from_numpy(np.arange(3.0)), lambda m: m.arange(5),
        lambda m: m.arange(1, 2, 0.25), lambda m: m.arange(5, 0, -2), lambda m: m.arange(3, dtype=m.float16),
        lambda m: m.arange(0.0), lambda m: m.linspace(-1, 1, 5), lambda m: m.linspace(0, 1, 1),
        lambda m: m.linspace(3, 10, 0), lambda m: m.eye(3), lambda m: m.eye(2, 4, dtype=m.int64),
        lambda m: m.zeros_like(m.ones(2, 3, dtype=m.half)), lambda m: m.ones_like(m.arange(2), dtype=m.float32),
        lambda m: m.full_like(m.arange(3), 7), lambda m: m.full((2,), 1), lambda m: m.full((2,), True),
        lambda m: m.empty(2, 0), lambda m: m.empty_like(m.ones(0)), lambda m: m.cat([m.ones(1), m.zeros(2)]),
        lambda m: m.stack([m.ones(2), m.zeros(2)]), lambda m: m.exp(m.zeros(2)),
        lambda m: m.arange(end=5), lambda m: m.arange(0.0, 3), lambda m: m.arange(start=1, end=7, step=3),
        lambda m: m.tensor([[m.tensor(1.5)], [m.tensor(2)]]), lambda m: m.tensor([[m.tensor(1), 2], [3, m.tensor(4)]]),
        lambda m: m.as_tensor([m.tensor(1.5, requires_grad=True).detach(), 2.0]),
        lambda m: m.as_tensor(((m.tensor(1), 2),), dtype=m.float16),
        lambda m: m.cat([m.tensor([3], dtype=m.int32), m.tensor([4]), m.tensor([True])]),
        lambda m: m.cat([m.ones(0), m.tensor([4])]), lambda m: m.stack([m.tensor(1), m.tensor(2.5)]),
        lambda m: m.cat([m.ones(1, dtype=m.float16), m.ones(1, dtype=m.bfloat16), m.tensor([3])]),
    ],
)  # fmt: skip
def test_as_torch(make):
    expected, made = make(torch), make(minidl)
    assert torch.equal(made.data.cpu(), expected)
    assert made.dtype == expected.dtype


def test_evenly_apart_is_rounded_once():
    exact = torch.arange(1000, dtype=torch.float64) * (0.7 - 0.1) / 999 + 0.1
    assert (minidl.linspace(0.1, 0.7, 1000).data.cpu() - exact).abs().max() <= 2.0**-24
    ends = minidl.linspace(0.1, 0.7, 1000, dtype=minidl.float64).tolist()
    assert (ends[0], ends[-1]) == (0.1, 0.7)


def test_a_copy_without_a_graph():
    x = minidl.ones(2, requires_grad=True)
    y = minidl.tensor(x * 2)
    assert not y.requires_grad
    data = torch.ones(2, device=default_device())
    minidl.tensor(data)[0] = 5
    assert data.tolist() == [1, 1]
    assert minidl.tensor([1.0], requires_grad=True).is_leaf


def test_random():
    like = minidl.zeros(3, 4, dtype=minidl.float64)
    for made in (minidl.rand_like(like), minidl.randn_like(like)):
        assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device)
        assert len(set(made.reshape(-1).tolist())) == 12
    assert set(minidl.randint(3, (200,)).tolist()) == {0, 1, 2}
    assert set(minidl.randint(low=5, high=7, size=(99,), dtype=minidl.uint8).tolist()) == {5, 6}
    assert sorted(minidl.randperm(50).tolist()) == list(range(50)) != minidl.randperm(50).tolist()
    assert minidl.randperm(9, seed=1).tolist() == minidl.randperm(9, seed=1).tolist()
    with pytest.raises(TypeError, match=r"size is None, expected a sequence, as in randint\(10, \(2, 3\)\)"):
        minidl.randint(3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: minidl.arange(1, 2, 0), "a step of 0 does not lead from 1 to 2"),
        (lambda: minidl.arange(2, 1), "a step of 1 does not lead from 2 to 1"),
        (lambda: minidl.linspace(0, 1, -1), "steps is -1"),
        (lambda: minidl.as_tensor([[minidl.tensor(1)], [1, 2]]), "expected sequence of length"),
        (lambda: minidl.eye(-1), r"got \[-1, -1\]"),
        (lambda: minidl.tensor([[1.0], [1.0, 2.0]]), "expected sequence of length"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_names_that_there_are_not_say_where_to_look():
    for name, message in {
        "zeross": "did you mean zeros", "cross_entropy": r"it is minidl\.ops\.cross_entropy", "fft": "not provide it",
    }.items():  # fmt: skip
        with pytest.raises(AttributeError, match=message):
            getattr(minidl, name)
    assert "import minidl.torch" in str(minidl._UnknownName("torch"))
    assert minidl.float32 is torch.float32
