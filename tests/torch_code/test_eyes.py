"""What a torch user typed from memory and got something else for: the same as in torch, or refused."""

import operator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import minidl
from minidl import nn, ops
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

    def test_numbers_in_a_list_may_be_tensors(self):
        losses = [ones(1, requires_grad=True).sum() * 2, 3]
        assert minidl.tensor(losses).tolist() == [2, 3]
        with pytest.raises(ValueError, match="only one element tensors"):
            minidl.tensor([ones(2), ones(2)])

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
        assert (x == None, x != None) == (False, True)  # noqa: E711

    def test_numbers_of_numpy_are_numbers(self):
        x, whole = ones(2), minidl.arange(2)
        assert (x * np.float32(3)).tolist() == (np.float32(3) * x).tolist() == [3, 3]
        assert (whole + np.int64(1)).dtype == torch.int64
        assert (whole + np.float32(1)).dtype == torch.float32
        assert (whole & np.int64(1)).tolist() == [0, 1]
        x -= np.float32(1)
        assert x.tolist() == [0, 0]
        assert minidl.arange(np.int64(3)).dtype == torch.int64
        assert zeros(np.int64(3)).shape == (3,)

    def test_arguments_by_the_names_of_numpy(self):
        x = minidl.tensor([[1.0, 2.0]])
        assert x.sum(axis=1, keepdims=True).tolist() == [[3]]
        assert minidl.cat([x, x], axis=1).shape == (1, 4)
        with pytest.raises(TypeError, match="relu: there is no argument 'axis'"):
            ops.relu(x, axis=1)

    def test_whole_numbers_are_places_and_sizes(self):
        index = minidl.tensor(1)
        assert ["a", "b"][index] == "b"
        assert ones(3)[index : minidl.tensor(3)].shape == zeros(minidl.tensor(2)).shape == (2,)
        with pytest.raises(TypeError, match=r"a place in a list is one whole number, got torch.float32"):
            ["a", "b"][minidl.tensor(1.0)]

    def test_format_is_of_the_number(self):
        loss = (ones(2, requires_grad=True) * 1.25).sum()
        assert f"{loss:.4f} {loss} {minidl.tensor(3):>2}" == "2.5000 2.5  3"
        assert f"{ones(1)}" == str(ones(1).data)


class TestNames:
    def test_what_a_tensor_has_not_is_answered_with_what_to_write(self):
        x = ones(2)
        assert not hasattr(x, "prod")
        with pytest.raises(AttributeError, match=r"relu_; write x = minidl\.ops\.relu\(x\)"):
            x.relu_()
        with pytest.raises(AttributeError, match=r"write minidl\.ops\.gelu\(x\)"):
            x.gelu()
        with pytest.raises(AttributeError, match=r"minidl\.Tensor has no softmx; did you mean softmax\?"):
            x.softmx()

    def test_kin_of_a_tensor(self):
        x = ones(2, 3, dtype=torch.float64)
        assert x.stride(0) == 3
        assert (x.new_zeros(1, 2).dtype, x.new_ones((1, 2)).tolist()) == (torch.float64, [[1, 1]])
        assert x.grad_fn is None
        assert (ones(1, requires_grad=True) * 2).grad_fn is not None

    def test_names_at_the_top(self):
        device = minidl.device("cuda" if minidl.cuda.is_available() else "cpu")
        minidl.cuda.manual_seed_all(3)
        first = minidl.rand(2)
        minidl.manual_seed(3)
        assert minidl.rand(2).tolist() == first.tolist()
        assert minidl.Size is torch.Size
        assert minidl.is_tensor(ones(1, device=device))
        assert (minidl.pi, minidl.inf) == (torch.pi, torch.inf)
        with minidl.inference_mode():
            assert not (ones(1, requires_grad=True) * 2).requires_grad
        with pytest.raises(AttributeError, match=r"'utils': torch\.utils\.data works as it is"):
            minidl.utils.data  # noqa: B018
        with pytest.raises(AttributeError, match=r"minidl\.cuda has no amp"):
            minidl.cuda.amp  # noqa: B018

    def test_a_loader_of_torch_joins_tensors(self):
        data = TensorDataset(minidl.arange(6).reshape(3, 2), minidl.arange(3))
        batches = [(x.tolist(), y.tolist()) for x, y in DataLoader(data, batch_size=2)]
        assert batches == [([[0, 1], [2, 3]], [0, 1]), ([[4, 5]], [2])]

    def test_loading_says_what_did_not_fit(self):
        layer = nn.Linear(2, 3)
        assert repr(layer.load_state_dict(layer.state_dict())) == "<All keys matched successfully>"
        found = layer.load_state_dict({"weight": zeros(3, 2), "other": zeros(1)}, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["bias"], ["other"])
        assert nn.init.ones_(layer.weight).tolist() == [[1, 1]] * 3

    def test_a_parameter_is_registered(self):
        layer = nn.Linear(2, 1)
        layer.register_parameter("scale", nn.Parameter(ones(1)))
        layer.register_parameter("bias", None)
        assert list(layer.state_dict()) == ["weight", "scale"]
        with pytest.raises(TypeError, match=r"Linear\.shift is of type Tensor, expected a Parameter"):
            layer.register_parameter("shift", ones(1))

    def test_only_inputs_is_what_grad_does(self):
        x = ones(2, requires_grad=True)
        assert minidl.autograd.grad((x * x).sum(), x, only_inputs=True)[0].tolist() == [2, 2]
        with pytest.raises(ValueError, match="only_inputs=False is not built"):
            minidl.autograd.grad((x * x).sum(), x, only_inputs=False)
