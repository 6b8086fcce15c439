"""Training takes no more memory the longer it lasts. A thousand steps: `python -m tests.trials.growth`."""

import gc

import pytest
import torch

from tests.trials import growth


@pytest.mark.parametrize(("kind", "steps"), [("text", 14), ("table", 14), ("images", 5), ("gan", 2)])
def test_steps_leave_nothing_behind(kind, steps):
    """So few steps tell objects that stay, of which a tensor is several, and cycles; not what allocators keep."""
    found = growth.measure(kind, steps, warm_up=2, traced_steps=0)
    assert found.cycles == 0
    assert found.objects < steps


def test_a_tensor_that_stays_and_a_cycle_are_seen():
    """One of each a step, planted: both are told."""
    kept, run = [], growth.steps("table")
    (objects,) = growth._grown(run, 4, lambda: (len(gc.get_objects()),))

    def leaking():
        while True:
            next(run)
            kept.append([torch.zeros(1)])
            yield

    (more,) = growth._grown(leaking(), 4, lambda: (len(gc.get_objects()),))
    assert more >= objects + 4
    gc.collect()
    one, other = torch.zeros(1), torch.zeros(1)
    one.other, other.one = other, one
    del one, other
    assert growth._cycles() >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("kind", growth.KINDS)
def test_the_device_memory_stays_the_same(kind, captured):
    """Bytes and blocks in use and reserved are equal after 50 and after 1,000 steps."""

    def state():
        torch.cuda.synchronize()
        gc.collect()
        found = torch.cuda.memory_stats()
        # Not "active": blocks that another stream has used count until their events are looked at.
        return torch.cuda.memory_allocated(), found["allocation.all.current"], torch.cuda.memory_reserved()

    run = growth.steps(kind, captured)
    for _ in range(50):
        next(run)
    before = state()
    for _ in range(1000):
        next(run)
    assert state() == before
