"""Module: names, modes, state."""

import pytest
import torch

from minidl import nn
from minidl.tensors import Tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, act="relu")
        self.second = nn.Linear(4, 2, bias=False)
        self.register_buffer("steps", Tensor(torch.zeros(1)))
        self.width = 4

    def forward(self, x):
        return self.second(self.first(x))


def test_parameters_buffers_and_modules_are_found_in_order_of_assignment():
    block = Block()
    assert [name for name, _ in block.named_parameters()] == ["first.weight", "first.bias", "second.weight"]
    assert [name for name, _ in block.named_buffers()] == ["steps"]
    assert [name for name, _ in block.named_modules()] == ["", "first", "second"]
    assert block.num_parameters() == 12 + 4 + 8


def test_a_shared_parameter_counts_once_but_is_saved_under_both_names():
    block = Block()
    block.third = nn.Linear(3, 4)
    block.third.weight = block.first.weight
    assert len(list(block.parameters())) == 4
    assert {"first.weight", "third.weight"} <= set(block.state_dict())


def test_state_dict_goes_to_torch_and_back():
    ours = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    theirs = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(value.cpu(), ours.state_dict()[name].cpu())


def test_loading_is_all_or_nothing():
    block = Block()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    state = {name: torch.ones_like(value) for name, value in before.items()}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) .* "steps"[\s\S]*Unexpected key\(s\) .* "extra"'):
        block.load_state_dict({**{k: v for k, v in state.items() if k != "steps"}, "extra": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for second.weight: .*\[9\].*\[2, 4\]"):
        block.load_state_dict({**state, "second.weight": torch.ones(9)})
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    block.load_state_dict({"first.bias": torch.ones(4)}, strict=False)
    assert torch.equal(block.first.bias.data.cpu(), torch.ones(4))


def test_train_and_eval_reach_every_module():
    block = Block()
    assert all(not module.training for module in block.eval().modules())
    assert all(module.training for module in block.train().modules())


def test_attributes_change_kind_cleanly():
    block = Block()
    block.first = None
    assert "first.weight" not in block.state_dict()
    block.width = nn.ReLU()
    assert [name for name, _ in block.named_children()] == ["second", "width"]
    del block.second
    with pytest.raises(AttributeError, match="Block has no attribute 'second'"):
        _ = block.second
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="is a parameter"):
        layer.weight = Tensor(torch.zeros(2, 2))


def test_setting_before_init_is_explained():
    class Early(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(1, 1)

    with pytest.raises(AttributeError, match="call super"):
        Early()


def test_a_module_without_forward_says_so():
    with pytest.raises(NotImplementedError, match="does not define forward"):
        nn.Module()(1)


def test_to_changes_floating_values_only():
    block = Block()
    block.register_buffer("count", Tensor(torch.zeros(1, dtype=torch.int64)))
    block.to(dtype=torch.float64)
    assert {value.dtype for value in block.state_dict().values()} == {torch.float64, torch.int64}


def test_repr_shows_the_structure():
    assert repr(nn.Sequential(nn.Linear(3, 2, act="relu"), nn.Dropout(0.1))) == (
        "Sequential(\n  (0): Linear(3, 2, bias=True, act='relu')\n  (1): Dropout(p=0.1)\n)"
    )
