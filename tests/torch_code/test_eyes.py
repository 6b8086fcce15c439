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
        with pytest.raises(
            TypeError, match=r"//=: the result is torch.float32, which does not fit in place of torch.int"
        ):
            x //= of_numbers
        with pytest.raises(TypeError, match=r"clamp_: the result is torch.float32, which does not fit in place of"):
            minidl.tensor([1, 2, 9]).clamp_(max=minidl.tensor([2.7]))
        with pytest.raises(ValueError, match=r"%=: the result has shape \[3, 2\]"):
            x %= ones(3, 2, dtype=torch.int64)

    @pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32])
    @pytest.mark.parametrize(
        "change",
        [
            operator.iadd, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
            operator.iand, lambda x, y: x.add_(y, alpha=2), lambda x, y: x.floor_divide_(y),
            lambda x, y: x.div_(y, rounding_mode="trunc"), lambda x, y: x.clamp_(max=y),
        ],
        ids=[
            "iadd", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "add_alpha", "floor_divide_", "div_trunc",
            "clamp_",
        ],
    )  # fmt: skip
    def test_of_two_dtypes_is_torchs_or_refused_as_by_torch(self, change, kind):
        others = [torch.tensor([2, 300]).to(dtype) for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64)]
        others += [torch.tensor(2), torch.tensor(2.5, dtype=torch.float64), 2, True]
        if not kind.is_floating_point:
            others += [torch.tensor([2.5, 1.0]), 0.5]
        changed = 0
        for other in others:
            theirs, x = torch.tensor([7, 200], dtype=kind), minidl.tensor([7, 200], dtype=kind)
            ours = Tensor(other.to(x.device)) if isinstance(other, torch.Tensor) else other
            try:
                change(theirs, other)
            except (RuntimeError, TypeError):
                with pytest.raises((RuntimeError, TypeError)):
                    change(x, ours)
                continue
            change(x, ours)
            torch.testing.assert_close(x.data.cpu(), theirs)
            changed += 1
        assert changed or kind == torch.bool or change in (operator.itruediv, operator.iand)

    def test_a_number_of_a_wider_type_passes_its_gradient(self):
        x, y = minidl.ones(2) * 1, minidl.tensor(3.0, dtype=torch.float64, requires_grad=True)
        x *= y
        x.sum().backward()
        assert (x.dtype, x.tolist(), y.grad.dtype, y.grad.tolist()) == (torch.float32, [3, 3], torch.float64, 2)

    def test_a_difference_of_bools_is_refused_whatever_alpha(self):
        for alpha in (1, 2):
            with pytest.raises(TypeError, match=r"sub: got dtype torch\.bool"):
                minidl.tensor([True]).sub_(minidl.tensor([True]), alpha=alpha)
        x = minidl.tensor([9, 9], dtype=torch.uint8)
        assert x.sub_(minidl.tensor([1, 2], dtype=torch.uint8), alpha=2).tolist() == [7, 5]

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


class TestDimensions:
    @pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "logsumexp", "any", "all", "std", "var"])
    def test_several_one_by_one_are_answered_with_a_tuple(self, name):
        x = ones(2, 3, 4)
        for m in (torch, ops):
            with pytest.raises(TypeError, match=r"bool|invalid comb|write several dimensions as dim=\(1, 2\)"):
                getattr(m, name)(torch.ones(2, 3, 4) if m is torch else x, 1, 2)
        assert getattr(x, name)(dim=(1, 2)).shape == getattr(x, name)((1, 2), keepdim=False).shape == (2,)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda x: x.max(0, 1), "max: keepdim is 1, expected True or False$"),
            (lambda x: x.argmax(0, 1), "argmax: keepdim is 1, expected True or False$"),
            (lambda x: x.prod(0, 1), "prod: keepdim is 1, expected True or False$"),
            (lambda x: x.sort(0, 1), "sort: descending is 1, expected True or False$"),
            (lambda x: x.argsort(0, 1), "argsort: descending is 1"),
            (lambda x: x.topk(1, 0, 1), "topk: largest is 1"),
            (lambda x: ops.avg_pool2d(x, 1, 1, 0, 1), "avg_pool2d: ceil_mode is 1"),
            (lambda x: x.argmax(dim=(0, 1)), r"argmax: dim is \(0, 1\), expected a whole number"),
            (lambda x: x.argmin([0]), r"argmin: dim is \[0\], expected a whole number"),
            (lambda x: x.sum(True), "sum: dim is True, expected whole numbers"),
            (lambda x: x.mean((False, 1)), r"mean: dim is \(False, 1\), expected whole numbers"),
            (lambda x: x.max(True), "max: dim is True, expected one dimension"),
            (lambda x: x.argmax(True), "argmax: dim is True, expected a whole number"),
            (lambda x: x.softmax(True), "dim is True"),
        ],
    )  # fmt: skip
    def test_what_is_no_dimension_or_no_truth_is_refused(self, call, message):
        with pytest.raises(TypeError, match=message):
            call(ones(2, 3, 3))

    @pytest.mark.parametrize("dims", [(), (0,), (0, 1), ((0, 2),), (1,)])
    def test_squeeze_takes_several(self, dims):
        assert ones(1, 2, 1).squeeze(*dims).shape == torch.ones(1, 2, 1).squeeze(*dims).shape
        assert ones(1, 2, 1).squeeze(dim=0).shape == ops.squeeze(ones(1, 2, 1), dim=[0]).shape == (2, 1)


class TestOperators:
    @pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, torch.bool])
    @pytest.mark.parametrize("shift", [operator.lshift, operator.rshift])
    def test_shifts(self, shift, kind):
        values = torch.tensor([1, 4, 200], dtype=kind)
        x = minidl.tensor(values)
        for other in (1, 70):
            for ours, theirs in ((shift(x, other), shift(values, other)), (shift(other, x), shift(other, values))):
                assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
        whole = values.int()
        assert shift(x, Tensor(whole.to(x.device))).tolist() == shift(values, whole).tolist()
        with pytest.raises(TypeError, match=r"got torch\.float32, expected integers or bools"):
            shift(x, ones(3))

    def test_a_shift_in_place(self):
        x = held = minidl.tensor([1, 4])
        x <<= 3
        x >>= minidl.tensor([1, 2], dtype=torch.int32)
        assert held is x
        assert x.tolist() == [4, 8]

    def test_plus_is_the_tensor_itself(self):
        x = ones(2)
        assert +x is x
        with pytest.raises(TypeError, match=r"\+x: got torch.bool, expected numbers"):
            +minidl.tensor([True])

    def test_in_asks_for_any_element(self):
        values = [[1.0, 2.0], [3.0, float("nan")]]
        x, theirs = minidl.tensor(values), torch.tensor(values)
        for element in (1, 2.0, 5, float("nan"), np.float32(3), True):
            assert (element in x) is (element in theirs)
        for row in ([1.0, 7.0], [7.0, 7.0], 2.0):
            assert (minidl.tensor(row) in x) is (torch.tensor(row) in theirs)
        assert 1 not in ones(0)
        for other in ("a", None, [1.0]):
            with pytest.raises(TypeError, match=r"in: got .*, expected a number or a Tensor"):
                other in x  # noqa: B015

    @pytest.mark.parametrize(
        "call",
        [
            operator.eq, operator.ne, operator.lt, operator.add, operator.sub, operator.mul, operator.truediv,
            operator.floordiv, operator.pow, operator.matmul, operator.iadd,
        ],
    )  # fmt: skip
    def test_an_array_is_answered_with_what_to_write(self, call):
        x, array = ones(2), np.ones(2, np.float32)
        for left, right in ((x, array), (array, x))[: 1 if call is operator.iadd else 2]:
            with pytest.raises(TypeError, match=r"(got|is of type) ndarray, expected .*; use minidl.as_tensor"):
                call(left, right)

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
        with pytest.raises(TypeError, match=r"an index is one integer, got torch.float32"):
            ["a", "b"][minidl.tensor(1.0)]

    def test_format_is_of_the_number(self):
        loss = (ones(2, requires_grad=True) * 1.25).sum()
        assert f"{loss:.4f} {loss} {minidl.tensor(3):>2}" == "2.5000 2.5  3"
        assert f"{ones(1)}" == str(ones(1).data)


class TestNames:
    def test_what_a_tensor_has_not_is_answered_with_what_to_write(self):
        x = ones(2)
        assert not hasattr(x, "logdet")
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
        with pytest.raises(AttributeError, match=r"'utils'; write torch\.utils\.data, which works as it is"):
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

    def test_a_state_without_counts_of_batches_is_loaded(self):
        ours, theirs = nn.Sequential(nn.BatchNorm1d(2)), torch.nn.Sequential(torch.nn.BatchNorm1d(2))
        state = {f"0.{name}": torch.full((2,), 3.0) for name in ("weight", "bias", "running_mean", "running_var")}
        ours[0].num_batches_tracked.fill_(4)
        theirs[0].num_batches_tracked.fill_(4)
        found, expected = ours.load_state_dict(state), theirs.load_state_dict(dict(state))
        assert (found.missing_keys, found.unexpected_keys) == (expected.missing_keys, expected.unexpected_keys)
        for name, tensor in theirs.state_dict().items():
            assert ours.state_dict()[name].tolist() == tensor.tolist()
        del state["0.running_var"]
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.running_var"'):
            ours.load_state_dict(state)

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
        with pytest.raises(ValueError, match="only_inputs=False is not supported"):
            minidl.autograd.grad((x * x).sum(), x, only_inputs=False)
