"""What a torch user typed from memory and got something else for: the same as in torch, or refused."""

import operator

import numpy as np
import pytest
import torch

import minidl
from minidl.tensors import Tensor, ones, zeros


class TestInPlace:
    @pytest.mark.parametrize(
        ("change", "values", "other"),
        [
            (operator.ifloordiv, [-3, 2, 7], 2),
            (operator.imod, [-3, 2, 7], 4),
            (operator.iand, [-3, 2, 7], 6),
            (operator.ior, [True, False], torch.tensor([False, False])),
            (operator.ixor, [True, False], True),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_of_integers_and_bools_is_seen_by_whoever_holds_the_tensor(self, change, values, other):
        x = minidl.tensor(values)
        held = x
        assert change(x, Tensor(other.to(x.device)) if isinstance(other, torch.Tensor) else other) is held
        assert held.tolist() == change(torch.tensor(values), other).tolist()

    def test_of_whole_numbers_refuses_what_does_not_fit(self):
        x, of_numbers = ones(2, dtype=torch.int64), minidl.tensor([2.0, 3.0])
        with pytest.raises(TypeError, match="expected integers or bools"):
            x //= of_numbers
        with pytest.raises(ValueError, match=r"%=: the result has shape \[3, 2\]"):
            x %= ones(3, 2, dtype=torch.int64)

    @pytest.mark.parametrize("change", [lambda x, y: x.add_(y), lambda x, y: x.copy_(y)], ids=["add_", "copy_"])
    def test_a_view_does_not_take_the_gradient_from_what_it_is_a_view_of(self, change):
        buffer, y = zeros(2, 3), ones(3, requires_grad=True)
        with pytest.raises(RuntimeError, match="shares memory with a view of it"):
            change(buffer[0], y)
        assert not buffer.data.any()
        whole = zeros(3)
        change(whole, y).sum().backward()
        assert y.grad.tolist() == [1, 1, 1]


class TestMaking:
    def test_whole_numbers_that_want_a_gradient_are_refused(self):
        with pytest.raises(TypeError, match="only floating tensors can have a gradient"):
            minidl.arange(3, requires_grad=True)

    def test_data_takes_a_tensor(self):
        x = ones(2, requires_grad=True)
        x.data = zeros(3)
        assert isinstance(x.data, torch.Tensor)
        assert x.tolist() == [0, 0, 0]


class TestIndex:
    @pytest.mark.parametrize(
        "index", [[[0, 1], [1, 0]], [slice(1), 0], [torch.tensor([0]), torch.tensor([1])]], ids=repr
    )
    def test_a_list_that_torch_takes_apart_is_refused(self, index):
        x = minidl.arange(6).reshape(2, 3)
        with pytest.raises(TypeError, match=r"write that, or x\[minidl\.tensor\(index\)\]"):
            x[index]
        with pytest.raises(TypeError, match="a list of lists"):
            x[index] = 1
        assert x[[1, 0]].tolist() == [[3, 4, 5], [0, 1, 2]]
        assert x[[np.int64(1), 0]].tolist() == [[3, 4, 5], [0, 1, 2]]
        assert x[[True, False]].tolist() == [[0, 1, 2]]
        assert x[:, [[0, 1]]].shape == (2, 1, 2)
        assert x[[]].shape == (0, 3)


class TestOperators:
    def test_no_tensor_is_none(self):
        x = ones(2)
        assert (x == None, x != None, x in [None]) == (False, True, False)  # noqa: E711
