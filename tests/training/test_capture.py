"""A step that raises is neither counted nor recorded. Without a GPU a stand-in for CUDA's graphs is replayed."""

import contextlib

import pytest
import torch

from minidl.kernels import launch
from minidl.tensor import Tensor, default_device
from minidl.training.capture import Captured


class Graph:
    """What is launched in its context runs again in `replay`."""

    recording = None

    def __init__(self):
        self.launched = []

    def replay(self):
        for kernel in self.launched:
            kernel()


@contextlib.contextmanager
def recorded_in(graph):
    Graph.recording = graph
    try:
        yield
    finally:
        Graph.recording = None


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says otherwise."""

    device = torch.device("cuda", 0)


@pytest.fixture
def given(monkeypatch):
    """A function to Tensors that steps are recorded of."""
    if not launch.INTERPRETED:
        return lambda *values: Tensor(torch.tensor(values, device=default_device()))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recorded_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return lambda *values: Tensor(torch.tensor(values).as_subclass(OnGpu))


class Doubled:
    """A step that raises at the calls of the given numbers, after its first kernel."""

    def __init__(self, *bad):
        self.calls, self.bad = 0, bad

    def __call__(self, x):
        self.calls += 1
        half, y = torch.empty_like(x.data), torch.empty_like(x.data)
        self.run(lambda: half.copy_(x.data))
        if self.calls in self.bad:
            raise MemoryError
        self.run(lambda: y.copy_(half + x.data))
        return (y,)

    def run(self, kernel):
        kernel()
        if Graph.recording is not None:
            Graph.recording.launched.append(kernel)


def test_calls_after_the_first_are_replayed(given):
    step = Doubled()
    call = Captured(step, eager=2)
    for value in range(6):
        (y,) = call(given(1.0 + value, -value))
        assert y.tolist() == [2.0 + 2 * value, -2 * value]
    assert step.calls == 3


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_call_that_raised_does_not_count(given, bad):
    step = Doubled(bad)
    call = Captured(step, eager=2)
    raised = 0
    for value in range(7):
        try:
            (y,) = call(given(1.0 + value))
        except MemoryError:
            raised += 1
            continue
        assert y.tolist() == [2.0 + 2 * value]
    assert raised == 1
    assert step.calls == 4  # two as they are, one recorded, and that which raised
