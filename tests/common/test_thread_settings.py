"""What is of a thread stays there, and what threads share serves one at a time."""

import contextlib
import threading
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import minidl
from minidl import nn, ops, random
from minidl.autograd import detect_anomaly, is_anomaly_enabled, is_grad_enabled, no_grad
from minidl.compilation import rehearsal
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.torch import registry
from tests.battery import same_bits
from tests.graphs import graphs, same_random  # noqa: F401 (fixtures)
from tests.threads import THREADS, at_once, numbers, often  # noqa: F401 (a fixture)


def test_modes_are_of_one_thread():
    ready = threading.Barrier(2)

    def changes():
        with no_grad(), detect_anomaly():
            ready.wait(60)
            ready.wait(60)
            return is_grad_enabled(), is_anomaly_enabled()

    def stays():
        ready.wait(60)
        x = Tensor(numbers(2).data, requires_grad=True)
        seen = is_grad_enabled(), is_anomaly_enabled(), (x * 2).requires_grad
        ready.wait(60)
        return seen

    assert at_once(changes, stays) == [(False, True), (True, False, True)]


def test_the_default_dtype_of_torch_is_that_of_new_layers_and_changes_no_result():
    x = numbers(3, 8)
    layer = nn.Linear(8, 4)
    expected = layer(x).data
    torch.set_default_dtype(torch.float64)
    try:
        for y, made in at_once(*[lambda: (layer(x).data, nn.Linear(2, 2).weight.dtype)] * THREADS):
            assert same_bits(y, expected)
            assert made == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_random_streams_of_a_copy_of_the_state_are_of_one_thread():
    """A rehearsed step draws what the step draws; no other thread draws any of it twice."""
    random.manual_seed(0)
    drawn, ready = [], threading.Barrier(2)

    def copies():
        for _ in range(100):
            with random.forked():
                before = random.get_state()["stream"]
                assert [random.key()[1], random.key()[1]] == [before, before + 1]
            ready.wait(60)

    def draws():
        for _ in range(100):
            drawn.append(random.key()[1])
            ready.wait(60)

    at_once(copies, draws)
    assert drawn == list(range(100))
    assert random.get_state() == {"seed": 0, "stream": 100}


def test_one_dropout_in_threads_draws_other_numbers_each_time():
    x, dropout = Tensor(torch.ones(64, device=default_device())), nn.Dropout(0.5)
    found = at_once(*[lambda: {tuple(dropout(x).tolist()) for _ in range(5)}] * THREADS)
    assert len(set.union(*found)) == 5 * THREADS


def test_launches_are_recorded_of_one_thread():
    """Other threads compute meanwhile, and their launches are not listed."""
    x, ready, listed = numbers(8), threading.Barrier(2), []

    def rehearses():
        with rehearsal.rehearsal(lambda kernel, *_: listed.append(kernel.__name__)):
            assert launch.handed_over()
            assert not launch.runs()
            ready.wait(60)
            ops.softmax(x.reshape(2, 4), -1)
            ready.wait(60)

    def computes():
        ready.wait(60)
        found = launch.handed_over(), launch.runs(), launch.for_other_target(), ops.exp(x).data
        ready.wait(60)
        return found

    *seen, y = at_once(rehearses, computes)[1]
    assert seen == [False, True, False]
    assert same_bits(y, ops.exp(x).data)
    assert listed
    assert all("softmax" in name for name in listed)


def test_launches_of_a_thread_that_torch_begins_for_a_rehearsed_backward_are_recorded():
    """As its engine does on a GPU, a thread takes over the modes of torch, and nothing of minidl."""
    assert "softmax" in registry.NAMES
    x, listed, seen = torch.ones(2, 4, device=default_device()), [], []

    def engine():
        for mode in modes:
            with mode:
                torch.ops.minidl.softmax(x, -1, False)
        seen.append(launch.handed_over())

    with rehearsal.rehearsal(lambda kernel, *_: listed.append(kernel.__name__)):
        modes = _get_current_dispatch_mode_stack()
        at_once(engine)
    assert len(listed) == len(modes) == 1
    assert seen == [False]


def test_tiles_of_another_target_are_of_one_thread():
    def targets(target):
        for _ in range(200):
            with launch.record(lambda *_: None, target):
                assert (launch.target(), launch.processors()) == (target, 132)

    def own():
        return {(launch.target(), launch.processors(), launch.for_other_target()) for _ in range(2000)}

    expected = {(launch.target(), launch.processors(), False)}
    assert at_once(lambda: targets("sm_80"), lambda: targets("sm_90"), own)[2] == expected


def test_watchers_that_end_in_another_order_than_they_began():
    seen, first = Counter(), contextlib.ExitStack()
    x = numbers(4)

    def watcher(name):
        return lambda kernel, grid, args, meta, go: (seen.update([name]), go())

    first.enter_context(launch.watch(watcher("first")))
    with launch.watch(watcher("second")):
        first.close()
        ops.exp(x)
        assert seen == {"second": 1}
    ops.exp(x)
    assert not launch.handed_over()
    assert seen == {"second": 1}


def test_one_captured_step(graphs):  # noqa: F811
    """Its calls share memory: they run one after another."""
    layer = nn.Linear(8, 4)
    step = minidl.capture(layer)
    inputs = [numbers(3, 8, seed=seed) for seed in range(THREADS)]
    with no_grad():
        expected = [layer(x).data for x in inputs]

    def answers(x):
        with no_grad():
            return [step(x).data for _ in range(6)]

    for found, y in zip(at_once(*(lambda x=x: answers(x) for x in inputs)), expected, strict=True):
        assert all(same_bits(each, y) for each in found)


@pytest.mark.gpu
def test_a_captured_step_on_streams_follows_its_last_call():
    step = minidl.capture(lambda x: ops.exp(x) * 2, eager=1)
    inputs = [numbers(1 << 20, seed=seed) for seed in range(THREADS)]
    for x in inputs[:2]:
        step(x)

    def answers(x):
        return [step(x).data for _ in range(20)]

    for x, found in zip(inputs, at_once(*(lambda x=x: answers(x) for x in inputs)), strict=True):
        expected = (ops.exp(x) * 2).data
        assert all(same_bits(each.cpu(), expected.cpu()) for each in found)
