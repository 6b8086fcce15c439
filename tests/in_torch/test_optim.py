"""Optimisers of torch with a step of one launch: torch's numbers, states, schedulers, scaler and copies."""

import copy
import io

import pytest
import torch
from torch import nn

import minidl.torch as mt
from minidl.runtime import launch

CASES = {
    "SGD": [
        {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.25, "maximize": True},
    ],
    "RMSprop": [{"momentum": 0.5, "centered": True}, {"alpha": 0.5, "weight_decay": 0.1}],
    "Adagrad": [{"lr": 0.1, "lr_decay": 0.5, "initial_accumulator_value": 0.25}],
    "Adam": [
        {"lr": 0.1, "amsgrad": True},
        {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "AdamW": [{"lr": 0.1, "weight_decay": 0.1}],
}  # fmt: skip


def _model(device, dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3), nn.Linear(3, 2)).to(device, dtype)
    model[3].bias.requires_grad_(False)
    return model


def _steps(model, optimizer, count=3, skips=None, scheduler=None):
    for step in range(count):
        x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(step)).to(model[0].weight)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        if skips is not None and step == 1:
            model[skips].weight.grad = None
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def _groups(model, **more):
    return [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), **more}]


def _same(ours, theirs, within=1e-10):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=within, atol=within)


def _same_states(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        assert ours["state"][key].keys() == state.keys()
        for name, value in state.items():
            if value is not None:
                torch.testing.assert_close(ours["state"][key][name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, cases in CASES.items() for each in cases])
def test_numbers_and_states_are_torchs_and_go_both_ways(device, name, options):
    models = _model(device), _model(device)
    kinds = getattr(mt.optim, name), getattr(torch.optim, name)
    ours, theirs = (kind(_groups(m, lr=0.05), **options) for kind, m in zip(kinds, models, strict=True))
    for model, optimizer in zip(models, (ours, theirs), strict=True):
        _steps(model, optimizer, skips=2, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    _same(*models)
    _same_states(ours, theirs)
    # Each goes on from the other's state, also after a pickle.
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)  # noqa: TID251 (a user's)
    file.seek(0)
    states = theirs.state_dict(), torch.load(file)  # noqa: TID251
    reloaded = [kind(_groups(m), **options) for kind, m in zip(kinds, models, strict=True)]
    for model, optimizer, state in zip(models, reloaded, copy.deepcopy(states), strict=True):
        optimizer.load_state_dict(state)
        _steps(model, optimizer)
    _same(*models)
    _same_states(*reloaded)


def test_muon_is_torchs_with_iterations_that_are_not_rounded(device, monkeypatch):
    """Groups of other iterations and rates, a matrix without a gradient, a state that torch's goes on from."""

    def iterated(x, coefficients, steps, eps):
        a, b, c = coefficients
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            x = a * x + (b * x @ x.T + c * x @ x.T @ x @ x.T) @ x
        return x

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", iterated)
    shapes = (3, 2), (2, 4), (3, 2)
    models = [[nn.Parameter(torch.ones(s, dtype=torch.float64, device=device)) for s in shapes] for _ in "ab"]

    def new_muon(kind, params):
        other = {"params": params[2:], "ns_steps": 2, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}
        return kind([{"params": params[:2]}, other], lr=0.25, weight_decay=0.5)

    def steps(optimizer, params):
        for step in range(3):
            for index, param in enumerate(params):
                generator = torch.Generator().manual_seed(10 * step + index)
                param.grad = torch.randn(*param.shape, generator=generator, dtype=torch.float64).to(device)
                if step == index == 1:
                    param.grad = None
            optimizer.step()

    optimizers = [
        new_muon(kind, params) for kind, params in zip((mt.optim.Muon, torch.optim.Muon), models, strict=True)
    ]
    for optimizer, params in zip(optimizers, models, strict=True):
        steps(optimizer, params)
    torch.testing.assert_close(*models, rtol=1e-10, atol=1e-10)
    _same_states(*optimizers)
    reloaded = [new_muon(kind, params) for kind, params in zip((mt.optim.Muon, torch.optim.Muon), models, strict=True)]
    for optimizer, other, params in zip(reloaded, reversed(optimizers), models, strict=True):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        steps(optimizer, params)
    torch.testing.assert_close(*models, rtol=1e-10, atol=1e-10)
    _same_states(*reloaded)
    with pytest.raises(ValueError, match="2D parameters"):
        mt.optim.Muon([nn.Parameter(torch.ones(3, device=device))])


def test_a_step_is_one_launch_of_the_update_and_groups_may_be_added(device):
    model, twin = _model(device), _model(device)
    ours, theirs = (kind(m[:3].parameters(), lr=0.1) for kind, m in ((mt.optim.Adam, model), (torch.optim.Adam, twin)))
    _steps(model, ours), _steps(twin, theirs)
    ours.add_param_group({"params": model[3].parameters(), "lr": 0.2})
    theirs.add_param_group({"params": twin[3].parameters(), "lr": 0.2})
    names = []
    with launch.watch(lambda kernel, grid, args, meta, go: (names.append(kernel.__name__), go())):
        ours.step()
    assert names == ["measure_kernel", "prepare_kernel", "update_kernel"]
    theirs.step()
    seen = []
    ours.register_step_post_hook(lambda *_: seen.append(1))
    _steps(model, ours), _steps(twin, theirs)
    _same(model, twin)
    assert len(seen) == 3
    (other,) = copy.deepcopy([ours])
    assert isinstance(other, mt.optim.Adam)
    ours.state.clear(), theirs.state.clear()
    _steps(model, ours), _steps(twin, theirs)
    _same(model, twin)
    assert ours.step(lambda: torch.tensor(3.0)) == 3.0


def test_parameters_of_16_bits_have_masters_which_follow_changes(device):
    model, twin = _model(device, torch.float16), _model(device, torch.float32)
    ours, theirs = mt.optim.SGD(model.parameters(), 0.1, 0.9), torch.optim.SGD(twin.parameters(), 0.1, 0.9)
    _steps(model, ours, 2), _steps(twin, theirs, 2)
    state = ours.state_dict()
    assert {v.dtype for entry in state["state"].values() for v in entry.values()} == {torch.float32}
    ours.load_state_dict(copy.deepcopy(state))
    assert torch.equal(ours.state[model[2].weight]["master"], state["state"][2]["master"])
    _same(model.float(), twin, 0.02)
    model.half()
    with torch.no_grad():
        model[2].weight.fill_(3.0)
    model[2].weight.grad.zero_()
    for entry in ours.state.values():
        entry["momentum_buffer"].zero_()
    ours.step()
    assert torch.equal(model[2].weight, torch.full_like(model[2].weight, 3.0))


def test_accelerated_weights_a_scaler_and_changes_of_a_group(device):
    model, twin = _model(device, torch.float32), _model(device, torch.float32)
    ours = mt.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, device=device))
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for net, optimizer in ((model, ours), (twin, theirs)):
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        for step in range(3):
            if step == 1 and net is model:
                mt.accelerate(net)  # puts weights in another order
            optimizer.zero_grad()
            x = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(step)).to(device)
            scaler.scale(net(x * (float("inf") if step == 1 else 1.0)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
    _same(model, twin, 1e-5)


def test_states_that_others_put_there(device):
    """A parameter that comes later, and a state that is another tensor."""
    ours, theirs = (nn.Parameter(torch.ones(3, device=device)) for _ in "ab")
    late, twin = (nn.Parameter(torch.ones(3, device=device)) for _ in "ab")
    # torch 2.11's Adagrad rejects later parameters: in that version it has no gradient in the first step.
    pair = [
        (mt.optim.Adagrad([ours], initial_accumulator_value=0.3), ours, late),
        (torch.optim.Adagrad([theirs, twin], initial_accumulator_value=0.3), theirs, twin),
    ]
    for optimizer, first, second in pair:
        first.grad = torch.ones_like(first)
        optimizer.step()
        if second is late:
            optimizer.add_param_group({"params": [second]})
        second.grad = torch.ones_like(second)
        optimizer.step()
        optimizer.state[first]["sum"] = torch.full_like(first, 9.0)
        optimizer.step()
    torch.testing.assert_close(late, twin)
    torch.testing.assert_close(ours, theirs)


def test_what_is_refused(device):
    p = nn.Parameter(torch.ones(3, 2, device=device))
    with pytest.raises(ValueError, match="differentiable"):
        mt.optim.SGD([p], differentiable=True).step()
    optimizer = mt.optim.SGD([p])
    p.grad = torch.ones(3, 2, device=device).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
