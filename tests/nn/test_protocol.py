"""Modules that override what torch calls on every module of a model, and what such a call leaves: as in torch."""

import numpy as np
import pytest
import torch

import minidl
from minidl import nn, optim
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor, default_device

KITS = pytest.mark.parametrize("kit", [nn, torch.nn], ids=["minidl", "torch"])


def block(kit, calls, names):
    """A module that notes which of its methods are called, `named_modules` apart."""

    class Block(kit.Module):
        _version = 3

        def __init__(self):
            super().__init__()
            self.inner, self.bn = kit.Linear(2, 2), kit.BatchNorm1d(2)
            self.rest = 0

        def forward(self, x):
            return self.bn(self.inner(x))

        def train(self, mode=True):
            calls.append("train")
            super().train(mode)
            self.bn.eval()
            return self

        def _apply(self, fn, recurse=True):
            calls.append("_apply")
            return super()._apply(fn, recurse)

        def apply(self, fn):
            calls.append("apply")
            return super().apply(fn)

        def state_dict(self, *args, **kwargs):
            calls.append("state_dict")
            return super().state_dict(*args, **kwargs)

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "more"] = torch.ones(1)

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            calls.append(("load", prefix, local_metadata.get("version"), state_dict.pop(prefix + "more", None) is None))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
            calls.append(("loaded", self.inner.bias.tolist()))

        def get_extra_state(self):
            return {"rest": self.rest}

        def set_extra_state(self, state):
            self.rest = state["rest"]

        def named_modules(self, *args, **kwargs):
            names.append(1)
            return super().named_modules(*args, **kwargs)

        def extra_repr(self):
            return "one line\nand another"

    return Block()


@KITS
def test_overridden_methods_are_called_below(kit):
    calls, names = [], []
    model = kit.Sequential(kit.Sequential(block(kit, calls, names)), kit.ReLU())
    with torch.no_grad():
        model[0][0].inner.bias.fill_(5.0)
    modes = [module.training for module in (model, model[0][0].inner, model[0][0].bn)]
    assert modes == [True, True, True]
    model.train()
    modes = [module.training for module in (model, model[0][0].inner, model[0][0].bn)]
    assert modes == [True, True, False]
    model.eval().half().float().to(torch.float64)
    model.apply(lambda module: None)
    model[0][0].rest = 7
    state = model.state_dict()
    assert state["0.0._extra_state"] == {"rest": 7}
    assert state["0.0.more"].tolist() == [1.0]
    model[0][0].rest = 0
    model.load_state_dict(state)
    assert model[0][0].rest == 7
    names.clear()
    list(model.parameters())
    assert calls == [
        "train", "train", "_apply", "_apply", "_apply", "apply", "state_dict", ("load", "0.0.", 3, False),
        ("loaded", [5.0, 5.0]),
    ]  # fmt: skip
    assert names
    assert "one line\n" in repr(model)


@KITS
def test_a_mode_is_a_bool_and_children_come_once(kit):
    with pytest.raises(ValueError, match="mode"):
        kit.Linear(1, 1).train("eval")
    shared = kit.Linear(1, 1)
    model = kit.Sequential(shared, shared)
    model.add_module("none", None)
    assert len(list(model.children())) == 1
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == ["", "0", "1"]
    assert model.train().eval().half().float() is model


class TestNames:
    @KITS
    @pytest.mark.parametrize("name", ["", "a.b", "forward", "weight", 3], ids=repr)
    def test_that_no_file_can_hold_or_that_exist_are_refused(self, kit, name):
        layer = kit.Linear(2, 2)
        tensor = torch.zeros(1)
        for register in (
            lambda: layer.add_module(name, kit.ReLU()),
            lambda: layer.register_module(name, kit.ReLU()),
            lambda: layer.register_buffer(name, tensor),
            lambda: layer.register_parameter("forward" if name == "weight" else name, kit.Parameter(tensor)),
        ):
            with pytest.raises((KeyError, TypeError)):
                register()
        with pytest.raises((KeyError, TypeError)):
            kit.ModuleDict({"keys" if name == "weight" else name: kit.ReLU()})
        assert list(layer.state_dict()) == ["weight", "bias"]

    @pytest.mark.parametrize("name", ["", "a.b"], ids=repr)
    def test_also_of_attributes(self, name):
        for value in (nn.ReLU(), nn.Parameter(torch.zeros(1))):
            with pytest.raises(KeyError, match="nothing can be named"):
                setattr(nn.Module(), name, value)

    @KITS
    def test_a_module_or_a_missing_bias_is_not_replaced_by_anything_else(self, kit):
        model = kit.Sequential(kit.Linear(2, 2, bias=False))
        with pytest.raises(TypeError):
            setattr(model, "0", 3)
        with pytest.raises(TypeError):
            model[0].bias = torch.zeros(2)
        model[0].bias = kit.Parameter(torch.zeros(2))
        assert list(model.state_dict()) == ["0.weight", "0.bias"]


class TestMoving:
    @KITS
    def test_gradients_and_parameters_stay(self, kit):
        layer = kit.Conv2d(2, 3, 3)
        ones = minidl.ones if kit is nn else torch.ones
        layer(ones(1, 2, 3, 3)).sum().backward()
        weight, grad = layer.weight, layer.weight.grad.tolist()
        for move in (lambda: layer.to("cpu"), lambda: layer.to(layer.weight), layer.float, layer.cpu):
            move()
            assert layer.weight is weight
            assert weight.grad.tolist() == grad
        layer.to(memory_format=torch.channels_last, dtype=torch.float64)
        assert layer.weight is weight
        assert weight.grad.dtype == torch.float64
        assert weight.grad.tolist() == grad

    @KITS
    def test_zeros_are_filled_in_where_the_gradient_lies(self, kit):
        layer = kit.Linear(1, 1)
        layer(minidl.ones(1, 1) if kit is nn else torch.ones(1, 1)).sum().backward()
        grad = layer.weight.grad
        layer.zero_grad(set_to_none=False)
        assert grad.tolist() == layer.weight.grad.tolist() == [[0]]

    def test_a_gradient_of_few_rows_stays_one(self):
        layer = nn.Embedding(5, 2)
        place = layer.weight.device
        rows = RowGrad(torch.tensor([3], dtype=torch.int32, device=place), torch.ones(1, 2, device=place), (5, 2))
        layer.weight._grad = rows
        assert layer.to(layer.weight.device).weight.raw_grad is rows
        layer.double()
        assert type(layer.weight.raw_grad) is type(rows)
        assert layer.weight.grad.tolist() == rows.dense().tolist()
        assert layer.weight.grad.dtype == torch.float64

    def test_an_own_tensor_moves_along(self):
        class Table(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = minidl.ones(2)

            def _apply(self, fn, recurse=True):
                self.table = fn(self.table)
                return super()._apply(fn, recurse)

        assert nn.Sequential(Table()).double()[0].table.dtype == torch.float64


class TestState:
    def test_is_live_for_every_parameter(self):
        model = nn.Sequential(
            nn.Conv1d(2, 3, 3), nn.Conv2d(2, 3, 3), nn.Conv3d(2, 2, 2), nn.ConvTranspose2d(2, 3, 3), nn.Linear(2, 3),
            nn.BatchNorm1d(2),
        )  # fmt: skip
        views = [p.detach() for p in model.parameters()]
        state = model.state_dict()
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        for parameter in model.parameters():
            parameter.grad = Tensor(torch.ones_like(parameter.data))
        optimizer.step()
        now = model.state_dict()
        assert all(torch.equal(state[name], now[name]) for name in now)
        assert all(torch.equal(view.data, p.data) for view, p in zip(views, model.parameters(), strict=True))
        for name, tensor in state.items():
            tensor.zero_()
            assert not dict(model.named_tensors())[name].data.any()

    def test_with_keep_vars_it_has_the_parameters(self):
        layer = nn.Linear(1, 1)
        assert layer.state_dict(keep_vars=True)["weight"] is layer.weight

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"0.bias": None}, r'named "0.bias", expected [\s\S]* received <class .NoneType.>'),
            ({"0.bias": np.zeros(2)}, r"received <class .numpy.ndarray.>"),
            ({"0.bias": torch.zeros(3), "1.weight": torch.zeros(1)}, r"size mismatch for 0.bias[\s\S]*for 1.weight"),
            (
                {"0.other": torch.zeros(3), "2.x": torch.zeros(1)},
                r'Unexpected key\(s\) in state_dict: "2.x", "0.other"',
            ),
            ({"0.bias": torch.eye(2).to_sparse()[0]}, "0.bias"),
        ],
        ids=["none", "numpy", "sizes", "names", "sparse"],
    )
    @KITS
    def test_errors_are_torchs_and_collected(self, kit, change, message):
        model = kit.Sequential(kit.Linear(2, 2), kit.Linear(2, 2))
        before = {name: value.tolist() for name, value in model.state_dict().items()}
        state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict({**state, **change})
        if kit is nn:  # torch has loaded what fits
            assert {name: value.tolist() for name, value in model.state_dict().items()} == before

    def test_nothing_changes_where_an_override_fails(self):
        class Failing(nn.Linear):
            def _load_from_state_dict(self, *args):
                raise RuntimeError("no")

        model = nn.Sequential(nn.Linear(1, 1), Failing(1, 1))
        before = model[0].weight.tolist()
        with pytest.raises(RuntimeError, match="no"):
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        assert model[0].weight.tolist() == before

    def test_what_is_no_dict_and_what_requires_grad(self):
        with pytest.raises(TypeError, match="expected a dict of tensors by name"):
            nn.Linear(1, 1).load_state_dict([1])
        layer = nn.Linear(1, 1)
        layer.load_state_dict(torch.nn.Linear(1, 1).state_dict(keep_vars=True))
        assert not layer.weight.data.requires_grad
        layer.register_buffer("n", torch.zeros((), device=default_device()))
        layer.load_state_dict({"n": torch.ones(1)}, strict=False)  # as states of old have it
        assert layer.n.item() == 1

    @KITS
    def test_counts_of_batches_are_missed_in_states_that_have_them(self, kit):
        state = kit.BatchNorm1d(2).state_dict()
        del state["num_batches_tracked"]
        with pytest.raises(RuntimeError, match="num_batches_tracked"):
            kit.BatchNorm1d(2).load_state_dict(state)
        kit.BatchNorm1d(2).load_state_dict(dict(state))
