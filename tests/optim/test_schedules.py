"""Schedules against torch's, warm-up, groups, and a schedule that continues."""

import itertools
import json

import pytest
import torch

from minidl import optim
from minidl.tensors import Tensor


def leaves():
    return [Tensor(torch.zeros(2), requires_grad=True) for _ in range(3)]


def rates(schedule, steps):
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.lr)
        assert schedule.lr() == found[-1] == schedule.get_last_lr()[0]
        schedule.step()
    return found


def peer_rates(make, steps, lr=0.5):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("ours", "peer"),
    [
        (lambda o: optim.CosineLR(o, 12, 0.1), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12, 0.1)),
        (lambda o: optim.LinearDecayLR(o, 12), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 12)),
        (optim.WarmupLR, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0)),
        (
            lambda o: optim.WarmupLR(o, warmup=5),
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 5)),
        ),
    ],
    ids=["cosine", "linear", "constant", "warmup"],
)
def test_schedules_as_torch(ours, peer):
    found = rates(ours(optim.SGD(leaves(), lr=0.5)), 13)
    assert found == pytest.approx(peer_rates(peer, 13), rel=1e-12, abs=1e-16)


@pytest.mark.parametrize("name", ["CosineLR", "LinearDecayLR"])
def test_warm_up_joins_the_schedule(name):
    """The full rate is reached by the last step of warm-up, and the schedule begins there."""
    schedule = getattr(optim, name)(optim.SGD(leaves(), lr=1.0), 12, 0.1, warmup=4)
    found = rates(schedule, 20)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(later <= earlier for earlier, later in itertools.pairwise(found[4:]))
    assert found[12:] == pytest.approx([0.1] * 8)
    assert [schedule.lr(step) for step in range(20)] == found


def test_a_schedule_scales_every_group_and_resumes():
    params = leaves()

    def made():
        optimizer = optim.SGD([{"params": params[:2], "lr": 1.0}, {"params": params[2:]}], lr=0.2)
        return optim.LinearDecayLR(optimizer, 8)

    schedule = made()
    for _ in range(6):
        schedule.step()
    assert schedule.get_last_lr() == [0.25, 0.05]
    again = made()
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert [group["lr"] for group in again.optimizer.param_groups] == [0.25, 0.05]
    with pytest.raises(ValueError, match="the state is of 'LinearLR' with 2 groups, expected 'ConstantLR' with 2"):
        optim.WarmupLR(again.optimizer).load_state_dict(schedule.state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: optim.CosineLR(o, 5, warmup=5), "T_max is 5, expected more than the 5 steps"),
        (lambda o: optim.WarmupLR(o, warmup=-1), "warmup is -1"),
        (lambda o: optim.LinearDecayLR(o, 5, eta_min=-1.0), "eta_min is -1.0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make(optim.SGD(leaves()))
