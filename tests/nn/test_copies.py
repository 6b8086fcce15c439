"""copy.deepcopy, copy.copy and pickles of tensors, modules, optimisers and schedulers: what torch's have."""

import copy
import pickle  # noqa: TID251 (of users)

import pytest
import torch

import minidl
from minidl import nn, optim
from minidl.tensors import Tensor

KITS = pytest.mark.parametrize("kit", [minidl, torch], ids=["minidl", "torch"])


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


WAYS = pytest.mark.parametrize("way", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])


@KITS
@WAYS
def test_a_module_keeps_all_but_its_gradients(kit, way):
    model = kit.nn.Sequential(kit.nn.Conv2d(1, 2, 3), kit.nn.BatchNorm2d(2))
    model.register_buffer("hidden", kit.ones(1), persistent=False)
    model[1].weight.requires_grad_(False)
    x = kit.ones(2, 1, 4, 4)
    model(x).sum().backward()
    again = way(model.eval())
    assert [type(p) for p in again.parameters()] == [kit.nn.Parameter] * 4
    assert [p.requires_grad for p in again.parameters()] == [True, True, False, True]
    assert all(p.grad is None for p in again.parameters())
    assert again(x).tolist() == model(x).tolist()
    with kit.no_grad():
        again[0].weight.fill_(0.0)
    assert model[0].weight.abs().sum() > 0
    assert list(again.state_dict()) == list(model.state_dict())


@KITS
def test_tensors(kit):
    leaf = kit.ones(2, requires_grad=True)
    (leaf * 3).sum().backward()
    assert copy.deepcopy(leaf).grad.tolist() == [3, 3]
    assert copy.copy(leaf).grad is None
    assert pickled(leaf).requires_grad
    result = leaf * 2
    with pytest.raises(RuntimeError):
        copy.deepcopy(result)
    for again in (copy.copy(result), pickled(result)):
        assert again.is_leaf
        assert again.requires_grad
    base = kit.zeros(4)
    whole, part = copy.deepcopy((base, base[1:]))
    part += 1  # of the same memory still
    assert whole.tolist() == [0, 1, 1, 1]


OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}, "AdamW": {"weight_decay": 0.1},
    "RMSprop": {"centered": True}, "Adagrad": {"initial_accumulator_value": 0.5}, "Muon": {},
    "Adamax": {"eps": 1e-4}, "RAdam": {"decoupled_weight_decay": True}, "NAdam": {"momentum_decay": 0.1},
}  # fmt: skip


def step(layer, optimizer, value=1.0):
    layer.weight.grad = Tensor(torch.full_like(layer.weight.data, value))
    optimizer.step()


@WAYS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_with_the_model_it_was_copied_with(way, name):
    layer = nn.Linear(2, 2, bias=False)
    optimizer = getattr(optim, name)(layer.parameters(), lr=0.1, max_norm=0.5, **OPTIMIZERS[name])
    step(layer, optimizer)
    other, again = way((layer, optimizer))
    assert again.param_groups[0]["params"][0] is other.weight
    assert (again.max_norm, again.defaults) == (optimizer.max_norm, optimizer.defaults)
    before = other.weight.tolist()
    step(layer, optimizer, 2.0)
    assert other.weight.tolist() == before
    step(other, again, 2.0)
    assert other.weight.tolist() == layer.weight.tolist()
    again.add_param_group({"params": [nn.Parameter(torch.ones_like(layer.weight.data))], "lr": 0.5})
    assert len(optimizer.param_groups) == 1


@WAYS
@pytest.mark.parametrize(
    "schedule",
    [lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 10), lambda o: optim.CosineLR(o, 10)],
    ids=["torchs", "minidls"],
)
@pytest.mark.filterwarnings("ignore:Seems like .optimizer.step... has been overridden")
def test_a_schedule_goes_on_with_its_optimizer(way, schedule):
    layer = nn.Linear(2, 2, bias=False)
    first = schedule(optim.SGD(layer.parameters(), lr=0.1))
    before = layer.weight.tolist()
    again = way(first)
    again.optimizer.param_groups[0]["params"][0].grad = Tensor(torch.ones_like(layer.weight.data))
    again.optimizer.step()
    assert layer.weight.tolist() == before  # the copy's was changed
    again.step()
    step(layer, first.optimizer)
    first.step()
    assert again.get_last_lr() == first.get_last_lr() == [again.optimizer.lr]
