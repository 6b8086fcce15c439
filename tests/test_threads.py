"""Threads that compute at the same time: each gets what it gets alone, bit for bit."""

import contextlib
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

import minidl
from minidl import nn, ops
from minidl.autograd import Function, deferred, no_grad
from minidl.kernels import elementwise
from minidl.runtime import launch
from minidl.runtime.launch_cache import replay
from minidl.tensors import Tensor, default_device
from minidl.testing.specs import all_specs
from minidl.testing.specs.make import SeededMake
from tests.battery import outputs_and_gradients, pose, same_bits
from tests.threads import THREADS, at_once, numbers, often, same_stream, whole_numbers  # noqa: F401 (a fixture)


def problem(spec, place):
    """The problem of a thread: two have one shape, with other numbers."""
    made = pose(spec, SeededMake(place // 2, torch.float32, default_device(), sizes=(1, 2, 3, 5, 8, 17)), "threads")
    turned = made.case.map(lambda x: x.roll(1, 0) if x.is_floating_point() and x.dim() else x)
    return replace(made, case=turned) if place % 2 else made


@pytest.mark.parametrize("name", all_specs())
def test_every_operation(name):
    """Launched for the first time, and replayed; forward and backward."""
    problems = [problem(all_specs()[name], place) for place in range(THREADS)]

    def twice(posed):
        return [outputs_and_gradients(posed) for _ in range(2)]

    with replay.replaying(True, at_once=True):
        found = at_once(*(lambda posed=posed: twice(posed) for posed in problems))
    for posed, rounds in zip(problems, found, strict=True):
        expected = outputs_and_gradients(posed)
        for values in rounds:
            assert all(map(same_bits, values, expected)), posed.describe("other threads change the result")


class Branches(nn.Module):
    """Hands a result that is not computed yet to threads. Its numbers are whole: their sums have any order."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3)
        self.each = nn.ModuleList([nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 1)) for _ in range(2)])
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(whole_numbers(*parameter.shape, seed=seed).data)

    def forward(self, x):
        y, here = self.first(ops.round(x)), same_stream()
        return sum(at_once(*(lambda layers=layers: layers(y) for layers in self.each), context=here))


class Dense(nn.Module):
    """Joins its input with all results so far, before batch norms."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for channels in (8, 16, 24)])
        self.convs = nn.ModuleList([nn.Conv2d(channels, 8, 1) for channels in (8, 16, 24)])

    def forward(self, x):
        x = ops.cat([x, x], 1)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = ops.cat([x, conv(ops.relu(norm(x)))], 1)
        return x


def convolutions():
    first = nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32, 5))


def perceptron():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))


@pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "recorded"])
@pytest.mark.parametrize("make", [convolutions, perceptron, Dense, Branches])
def test_one_model(make, recorded):
    model = make().eval()
    inputs = [numbers(2, 4, 6, 6, seed=seed) for seed in range(THREADS)]

    def answers(x):
        with contextlib.nullcontext() if recorded else no_grad():
            found = []
            for _ in range(2):
                x = Tensor(x.data, requires_grad=recorded)
                y = model(x)
                found.append([y.data, *(minidl.autograd.grad(y.sum(), x)[0].data for _ in range(recorded))])
            return found

    found = at_once(*(lambda x=x: answers(x) for x in inputs))
    for x, rounds in zip(inputs, found, strict=True):
        for one, other in zip(rounds, answers(x), strict=True):
            assert all(map(same_bits, one, other))


class Slow(deferred.Deferred):
    """Counts how often it is computed."""

    def compute(self):
        self.computed = getattr(self, "computed", 0) + 1
        time.sleep(0.05)
        return numbers(*self.shape)


def test_a_result_is_settled_by_one_of_several_threads():
    """No operation of another thread takes it in."""
    with deferred.deferring(nn.Identity()):
        slow = Slow((2, 3), torch.float32, default_device(), False)
        y = Tensor._of_deferred(slow)
        assert deferred.waiting(y) is slow
        assert at_once(lambda: deferred.waiting(y)) == [None]
        first, *others = at_once(*[lambda: y.data] * THREADS)
        assert all(values is first for values in others)
    assert slow.computed == 1


def test_sums_of_gradients_at_shared_leaves():
    """Also rows of an embedding, and those of tensors that retain theirs."""
    model = nn.Linear(5, 3, bias=False)
    table = nn.Embedding(7, 5)
    rows = torch.arange(4, device=default_device())
    for parameter in (model.weight, table.weight):
        parameter.data.copy_(whole_numbers(*parameter.shape).data)
    inputs = [whole_numbers(4, 5, seed=seed) for seed in range(THREADS)]

    def back(x, times=4):
        for _ in range(times):
            model(x + table(rows)).backward(whole_numbers(4, 3))

    def gradients(work):
        model.zero_grad()
        table.zero_grad()
        work()
        return [model.weight.grad.data.clone(), table.weight.grad.data.clone()]

    expected = gradients(lambda: [back(x) for x in inputs])
    found = gradients(lambda: at_once(*(lambda x=x: back(x) for x in inputs)))
    assert all(map(same_bits, found, expected))


class Meets(Function):
    """The identity, in whose backward threads wait for one another."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        if ctx.barrier.wait(60) == ctx.barrier.parties - 1 > 0:
            time.sleep(0.05)  # the others first
        so_far = ctx.pending_gradient(0)
        ctx.barrier.wait(60)
        return dy if so_far is None else elementwise.add(dy, so_far), None


@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy", "sums"])
def test_one_graph_that_is_retained(loss):
    """Threads go back through one graph with other gradients; what one walk has found is not another's."""
    x = Tensor(numbers(4, 8).data, requires_grad=True)
    target = torch.tensor([0, 2, 1, 0], device=default_device())
    barrier = threading.Barrier(THREADS)
    if loss == "sums":  # what relu gives has arrived before
        y = x * 3
        z = Meets.apply(y, barrier)
        root = (ops.relu(y) * z).sum()
    elif loss == "cross_entropy":
        root = Meets.apply(ops.cross_entropy(x, target), barrier)
    else:
        root = Meets.apply(ops.linear_cross_entropy(x, numbers(3, 8, seed=1), target), barrier)

    def gradients(factor):
        seed = Tensor(torch.full_like(root.data, factor))
        return minidl.autograd.grad(root, x, seed, retain_graph=True)[0].data

    found = at_once(*(lambda factor=factor: gradients(factor) for factor in range(1, 1 + THREADS)))
    barrier._parties = 1
    for factor, dx in enumerate(found, start=1):
        assert same_bits(dx, gradients(factor))


def test_a_graph_that_another_thread_frees_is_refused():
    """With the error of a second backward, or none: never by halves."""
    for _ in range(20):
        x = Tensor(numbers(4, 8).data, requires_grad=True)
        root = ops.relu(ops.exp(x) * 2).sum()

        def back(root=root):
            with contextlib.suppress(RuntimeError):
                root.backward()
                return True

        assert Counter(at_once(back, back))[True] >= 1


def test_batch_norms_that_threads_ask_for_first_are_made_at_once_afterwards():
    model, names = convolutions().eval(), []

    @no_grad()
    def call():
        model(numbers(2, 4, 6, 6))

    at_once(*[call] * THREADS)
    with launch.watch(lambda kernel, grid, args, meta, go: (names.append(kernel.__name__), go())):
        call()
    assert Counter(names)["batch_norm_fold_kernel"] == 1


@pytest.mark.gpu
def test_gradients_that_streams_add_up_follow_one_another():
    """What one stream adds to a sum waits for what another one has added, however long that takes."""
    weight = nn.Parameter(torch.zeros(1024, 1024, device=default_device()))
    x = Tensor(torch.ones(1024, 1024, device=default_device()))
    ready = threading.Barrier(2)

    def late():
        torch.cuda._sleep(1_000_000_000)
        (weight * x).sum().backward()
        ready.wait(60)

    def next_one():
        ready.wait(60)
        (weight * x * 2).sum().backward()

    for _ in range(2):  # the second time kernels are loaded
        weight.grad = None
        at_once(late, next_one)
        assert same_bits(weight.grad.data, torch.full_like(weight.data, 3.0))
