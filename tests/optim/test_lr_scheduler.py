"""torch's schedulers on minidl's optimisers, beside torch's, for 50 steps."""

import inspect

import pytest
import torch

import minidl
from minidl import optim
from minidl.compilation import capture
from minidl.optim import lr_scheduler
from minidl.tensors import Tensor, default_device

MADE = {
    "StepLR": lambda s, o: s.StepLR(o, 7, 0.5),
    "MultiStepLR": lambda s, o: s.MultiStepLR(o, [5, 20], 0.3),
    "ExponentialLR": lambda s, o: s.ExponentialLR(o, 0.95),
    "CosineAnnealingLR": lambda s, o: s.CosineAnnealingLR(o, 20, 0.01),
    "OneCycleLR": lambda s, o: s.OneCycleLR(o, 0.5, total_steps=51),
    "LinearLR": lambda s, o: s.LinearLR(o, 0.25, 0.75, 12),
    "ConstantLR": lambda s, o: s.ConstantLR(o, 0.5, 4),
    "LambdaLR": lambda s, o: s.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 5), s.StepLR(o, 3)], [5]),
    "CosineAnnealingWarmRestarts": lambda s, o: s.CosineAnnealingWarmRestarts(o, 7, 2),
    "ReduceLROnPlateau": lambda s, o: s.ReduceLROnPlateau(o, patience=2),
}


def made(framework, optimizer, tensor):
    groups = [{"params": [tensor(torch.ones(3))], "lr": 0.2}, {"params": [tensor(torch.ones(2))]}]
    return getattr(framework, optimizer)(groups, lr=0.1)


@pytest.mark.parametrize("name", MADE)
def test_rates_and_weights_as_torch(name):
    """A rate that is set by hand included: torch's schedules go on from it, or do not, each in its way."""
    ours = made(optim, "Adam", lambda t: Tensor(t.to(default_device()), requires_grad=True))
    theirs = made(torch.optim, "Adam", torch.nn.Parameter)
    here, there = MADE[name](lr_scheduler, ours), MADE[name](torch.optim.lr_scheduler, theirs)
    for step in range(50):
        if step == 30:
            ours.lr = 0.3
            for group in theirs.param_groups:
                group["lr"] = 0.3
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
        for optimizer, wrap in ((ours, Tensor), (theirs, lambda t: t)):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = wrap(torch.full(param.shape, float(step % 5 - 1)).to(param.device))
            optimizer.step()
        args = (1.0 / (1 + step % 9),) if name == "ReduceLROnPlateau" else ()
        here.step(*args)
        there.step(*args)
    if name != "LambdaLR":
        here.load_state_dict(there.state_dict())
    for own, their in zip(ours.param_groups, theirs.param_groups, strict=True):
        # Each step is of at most a few rates; both round it and the sum.
        way = 50 * 2 * 2.0**-24 * 4
        assert float((own["params"][0].data.cpu() - their["params"][0].detach()).abs().max()) <= way


def test_the_names_of_before_are_refused():
    with pytest.raises(AttributeError, match=r"it is minidl\.optim\.lr_scheduler\.StepLR, as in torch"):
        optim.StepLR  # noqa: B018
    with pytest.raises(AttributeError, match=r"minidl\.optim has no ASGD: minidl does not provide it"):
        optim.ASGD  # noqa: B018


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "LBFGS", "Muon"]
)
def test_arguments_are_torch_s(name):
    """All of torch's, in its order, with its defaults; our own come after them and by name."""
    ours, theirs = (inspect.signature(getattr(home, name)).parameters for home in (optim, torch.optim))
    assert list(ours)[: len(theirs)] == list(theirs)
    for key, their in theirs.items():
        assert (ours[key].kind, ours[key].default) == (their.kind, their.default)
    assert all(ours[key].kind is inspect.Parameter.KEYWORD_ONLY for key in list(ours)[len(theirs) :])


def test_a_schedule_inside_a_recorded_step_is_refused(monkeypatch):
    """Its replays would not repeat it."""
    optimizer = made(optim, "SGD", lambda t: Tensor(t.to(default_device()), requires_grad=True))
    schedules = lr_scheduler.ExponentialLR(optimizer, 0.5), optim.CosineLR(optimizer, 10)
    optimizer.step()
    monkeypatch.setattr(capture._thread, "recording", True, raising=False)
    for schedule in schedules:
        with pytest.raises(RuntimeError, match="SGD: lr changes inside a captured step"):
            schedule.step()


def test_a_schedule_of_a_captured_step():
    """Rates that a scheduler sets between calls reach the step, on a GPU the recorded one."""
    weight = Tensor(torch.zeros(1, device=default_device()), requires_grad=True)
    optimizer = optim.SGD([weight], lr=1.0)
    schedule = lr_scheduler.StepLR(optimizer, 1, 0.5)

    @minidl.capture
    def step(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()

    for _ in range(6):
        step(minidl.ones(1))
        schedule.step()
    assert weight.item() == -(1 + 0.5 + 0.25 + 0.125 + 0.0625 + 0.03125)
