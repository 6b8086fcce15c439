"""Threads that compute at the same time: each gets what it gets alone, bit for bit. On a GPU each has its own stream."""

import contextlib
import sys
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

import minidl
from minidl import later, nn, ops, random, rehearsal
from minidl.autograd import Function, detect_anomaly, is_anomaly_enabled, is_grad_enabled, no_grad
from minidl.kernels import elementwise
from minidl.runtime import launch, replay
from minidl.tensors import Tensor, default_device
from minidl.testing.specs import all_specs
from minidl.testing.specs.make import SeededMake
from tests.battery import outputs_and_gradients, pose, same_bits
from tests.graphs import graphs, same_random  # noqa: F401 (fixtures)

THREADS = 4


@pytest.fixture(autouse=True)
def often():
    """Threads give way to each other as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def stream_of_its_own():
    """On a GPU a stream, which begins after what was queued before, and has ended at the end."""
    if launch.INTERPRETED:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def at_once(*works, context=stream_of_its_own):
    """What works give, each in a thread; they begin together. Raises what one of them raises."""
    begin, results, errors = threading.Barrier(len(works)), [None] * len(works), []

    def run(place, work):
        try:
            with context():
                begin.wait(60)
                results[place] = work()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def numbers(*shape, seed=0):
    return Tensor(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device()))


def whole_numbers(*shape, seed=0):
    """Sums of these are exact, in whatever order they are added."""
    made = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    return Tensor(made.float().to(default_device()))


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
        y = self.first(ops.round(x))
        return sum(at_once(*(lambda layers=layers: layers(y) for layers in self.each), context=contextlib.nullcontext))


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


class Slow(later.Later):
    """Counts how often it is computed."""

    def compute(self):
        self.computed = getattr(self, "computed", 0) + 1
        time.sleep(0.05)
        return numbers(*self.shape)


def test_a_result_is_settled_by_one_of_several_threads():
    """No operation of another thread takes it in."""
    with later.deferring(nn.Identity()):
        slow = Slow((2, 3), torch.float32, default_device(), False)
        y = Tensor._of_later(slow)
        assert later.waiting(y) is slow
        assert at_once(lambda: later.waiting(y)) == [None]
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

    def back(x, often=10):
        for _ in range(often):
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
        so_far = ctx.arrived(0)
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


def test_the_default_dtype_of_torch_changes_no_result():
    x = numbers(3, 8)
    layer = nn.Linear(8, 4)
    expected = layer(x).data
    torch.set_default_dtype(torch.float64)
    try:
        for y, made in at_once(*[lambda: (layer(x).data, nn.Linear(2, 2).weight.dtype)] * THREADS):
            assert same_bits(y, expected)
            assert made == torch.float32
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
    found = sum(at_once(*[lambda: [tuple(dropout(x).tolist()) for _ in range(5)]] * THREADS), [])
    assert len(set(found)) == len(found)


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
        found = launch.handed_over(), launch.runs(), launch.recording(), ops.exp(x).data
        ready.wait(60)
        return found

    *seen, y = at_once(rehearses, computes)[1]
    assert seen == [False, True, False]
    assert same_bits(y, ops.exp(x).data)
    assert listed
    assert all("softmax" in name for name in listed)


def test_tiles_of_another_target_are_of_one_thread():
    def targets(target):
        for _ in range(200):
            with launch.record(lambda *_: None, target):
                assert (launch.target(), launch.processors()) == (target, 132)

    def own():
        return {(launch.target(), launch.processors(), launch.recording()) for _ in range(2000)}

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
    step = minidl.capture(lambda x: layer(x))
    inputs = [numbers(3, 8, seed=seed) for seed in range(THREADS)]
    with no_grad():
        expected = [layer(x).data for x in inputs]

    def answers(x):
        with no_grad():
            return [step(x).data for _ in range(6)]

    for found, y in zip(at_once(*(lambda x=x: answers(x) for x in inputs)), expected, strict=True):
        assert all(same_bits(each, y) for each in found)


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
        torch.cuda._sleep(200_000_000)
        (weight * x).sum().backward()
        ready.wait(60)

    def next_one():
        ready.wait(60)
        (weight * x * 2).sum().backward()

    at_once(late, next_one)
    assert same_bits(weight.grad.data, torch.full_like(weight.data, 3.0))


@pytest.mark.gpu
def test_a_captured_step_on_streams_follows_its_last_call():
    step = minidl.capture(lambda x: ops.exp(x) * 2, eager=1)
    inputs = [numbers(1 << 20, seed=seed) for seed in range(THREADS)]
    for x in inputs[:2]:
        step(x)

    def answers(x):
        found = []
        for _ in range(20):
            found.append(step(x).data)
        return found

    for x, found in zip(inputs, at_once(*(lambda x=x: answers(x) for x in inputs)), strict=True):
        expected = (ops.exp(x) * 2).data
        assert all(same_bits(each.cpu(), expected.cpu()) for each in found)
