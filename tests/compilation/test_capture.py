"""Captured steps against the steps themselves, bit for bit. Without a GPU a stand-in for CUDA's graphs is replayed."""

import functools
import gc
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import sparse

import minidl
from minidl import models, nn, ops, optim, random
from minidl.compilation import cuda_graph
from minidl.compilation.capture import capture
from minidl.data import csr_from_scipy
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from tests.graphs import graphs, same_random

__all__ = ["graphs", "same_random"]


def numbers(*shape, seed=0, dtype=torch.float32):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Tensor(made.to(default_device(), dtype))


def classes(count, of, seed):
    made = torch.randint(of, (count,), generator=torch.Generator().manual_seed(seed))
    return Tensor(made.to(default_device()))


def sparse_rows(count, columns, seed):
    """A batch with room, whose numbers of entries and of columns differ from seed to seed."""
    share = 0.05 + 0.03 * (seed % 4)
    matrix = sparse.random(count, columns, share, format="csr", dtype=np.float32, random_state=seed)
    return csr_from_scipy(matrix).pad(count * columns // 4, columns).to(default_device())


class Training:
    """A model with everything that a step of its training changes; `step` is one, `inputs(i)` are of step i."""

    def __init__(self, model, optimizer, inputs, loss=ops.cross_entropy):
        self.model, self.optimizer, self.inputs, self.loss = model, optimizer, inputs, loss
        self.schedule = optim.CosineLR(optimizer, T_max=50, warmup=4)

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward(self.optimizer.loss_scale)
        self.optimizer.step()
        return loss

    def state(self):
        """All that later steps depend on."""
        kept = {**self.model.state_dict(), **self.optimizer.flat_state(), **random.get_state()}
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kept.items()}


def text():
    model = nn.Sequential(nn.SparseLinear(60, 24, act="relu"), nn.Dropout(0.5), nn.Linear(24, 4))
    return Training(model, optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1), lambda i: (
        sparse_rows(16, 60, i), classes(16, 4, i)
    ))  # fmt: skip


def clipped_text():
    model = nn.Sequential(nn.SparseLinear(60, 24, act="gelu"), nn.Linear(24, 4))
    optimizer = optim.Adam(model.parameters(), lr=0.05, lazy=True, max_norm=0.1)
    return Training(model, optimizer, lambda i: (sparse_rows(16, 60, i), classes(16, 4, i)))


def table():
    model = nn.MLP(12, [16, 16], 1, act="gelu", dropout=0.2)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, max_norm=0.5)
    return Training(
        model, optimizer, lambda i: (numbers(20, 12, seed=i), numbers(20, 1, seed=i + 100)), ops.mse_loss
    )  # fmt: skip


def pictures(dtype=torch.float32, scale=None):
    model = models.SmallCNN(1, (8, 8), 4, dtype=dtype)
    optimizer = optim.AdamW(model.parameters(), lr=0.02, loss_scale=scale)

    def loss(y, truth):
        return ops.cross_entropy(y.to(torch.float32), truth)

    return Training(model, optimizer, lambda i: (numbers(12, 1, 8, 8, seed=i, dtype=dtype), classes(12, 4, i)), loss)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return ops.relu(self.bn(self.conv(x)) + x)


def residual():
    """Blocks of so many values that gradients in two parts are added by the sums of a batch norm."""
    model = nn.Sequential(Residual(), Residual(), nn.Flatten(), nn.Linear(484, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, max_norm=0.5)
    return Training(model, optimizer, lambda i: (numbers(9, 4, 11, 11, seed=i), classes(9, 4, i)))


def half_pictures():
    """A loss scale that is too large at first, so that steps are skipped and the scale falls."""
    return pictures(torch.float16, 2.0**24)


TRAININGS = {
    "text": text, "text, clipped and lazy": clipped_text, "table": table, "pictures": pictures,
    "pictures in float16": half_pictures, "residual": residual,
}  # fmt: skip


def course(make, steps, wrap, calls=None):
    """Losses and states of so many steps after the same beginning, the optimiser's rate moving on."""
    minidl.manual_seed(3)
    one = make()
    step = wrap(one.step)
    losses, states = [], []
    for i in range(steps):
        losses.append(step(*one.inputs(i)).item())
        one.schedule.step()
        states.append(one.state())
    if calls is not None:
        calls.append(step)
    return losses, states


def assert_same(a, b):
    assert a[0] == b[0]
    for mine, other in zip(a[1], b[1], strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same, name


@pytest.mark.parametrize("make", TRAININGS.values(), ids=TRAININGS)
def test_captured_training_is_the_training_itself(graphs, make):
    calls = []
    expected = course(make, 5, lambda step: step)
    found = course(make, 5, functools.partial(capture, eager=2), calls)
    assert_same(found, expected)
    (known,) = calls[0]._recordings.values()
    assert known.graph is not None
    if make is half_pictures:
        assert expected[1][-1]["skipped"].item() > 0
        assert expected[1][-1]["loss_scale"][0].item() < 2.0**24
    if make is text:
        assert known.draws == 1


def test_two_shapes_are_recorded_each_on_its_own(graphs):
    """As the last batch of an epoch, which is smaller."""

    def make():
        one = table()
        one.inputs = lambda i: (
            numbers(20 if i % 3 else 7, 12, seed=i),
            numbers(20 if i % 3 else 7, 1, seed=i + 100),
        )
        return one

    calls = []
    expected = course(make, 12, lambda step: step)
    assert_same(course(make, 12, functools.partial(capture, eager=2, shapes=2), calls), expected)
    assert [known.graph is not None for known in calls[0]._recordings.values()] == [True, True]


def test_an_eager_step_between_replays_changes_nothing(graphs):
    """As validation does, and a step that is run without its graph."""
    expected = course(text, 9, lambda step: step)

    def wrap(step):
        through = capture(step, eager=2)
        count = iter(range(100))
        return lambda *inputs: through(*inputs) if next(count) % 3 else step(*inputs)

    assert_same(course(text, 9, wrap), expected)


def test_a_seed_set_between_calls_counts(graphs):
    step = capture(lambda x: ops.dropout(x, 0.5), eager=1)
    x = numbers(200)
    drawn = {}
    for seed in (1, 2, 1, 1, 2):
        random.manual_seed(seed)
        first, second = step(x), step(x)
        assert torch.equal(drawn.setdefault(seed, first.data), first.data)
        random.manual_seed(seed)
        assert torch.equal(ops.dropout(x, 0.5).data, first.data)
        assert torch.equal(ops.dropout(x, 0.5).data, second.data)
        assert random.get_state() == {"seed": seed, "stream": 2}


def test_a_rate_changed_by_hand_counts(graphs):
    def by_hand(wrap):
        minidl.manual_seed(0)
        one = table()
        step = wrap(one.step)
        for i in range(6):
            one.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            step(*one.inputs(i))
        return one.state()

    expected, found = by_hand(lambda step: step), by_hand(functools.partial(capture, eager=2))
    assert all(torch.equal(expected[name], found[name]) for name in expected if name.endswith("weight"))


def test_results_are_new_and_no_part_of_a_graph(graphs):
    weight = numbers(3, 3)
    weight.requires_grad_()
    step = capture(lambda x: {"y": x @ weight, "parts": [x.data, None], "pair": (x, weight)}, eager=1)
    results = [step(numbers(2, 3, seed=i)) for i in range(3)]
    for i, result in enumerate(results):
        x = numbers(2, 3, seed=i)
        assert torch.equal(result["y"].data, (x @ weight).data)
        assert not result["y"].requires_grad
        assert torch.equal(result["parts"][0], x.data)
        assert result["parts"][1] is None
        assert isinstance(result["pair"][1], Tensor)
    assert results[1]["y"].data.data_ptr() != results[2]["y"].data.data_ptr()


@pytest.mark.parametrize("graph", [False, True])
def test_a_result_is_not_changed_by_the_next_call(request, graph):
    if graph:
        request.getfixturevalue("graphs")
    held = numbers(3)

    def step(x):
        held.data.copy_(x.data)
        return held

    call = capture(step)
    results = [call(numbers(3, seed=i)) for i in range(6)]
    for i, result in enumerate(results):
        assert torch.equal(result.data, numbers(3, seed=i).data)


def test_a_captured_step_in_another_is_a_part_of_it(graphs):
    dropout = nn.Dropout(0.5)
    seen = []

    def inner(x):
        seen.append(1)
        return dropout(x) + 1.0

    def outer(step):
        return lambda x: ops.exp(step(x)) + step(x)

    minidl.manual_seed(3)
    plain = [outer(inner)(numbers(8, seed=i)).data.clone() for i in range(6)]
    seen.clear()
    minidl.manual_seed(3)
    part = capture(inner)
    call = capture(outer(part))
    for i in range(6):
        assert torch.equal(call(numbers(8, seed=i)).data, plain[i])
    assert len(seen) == 2 * 4  # three calls as they are, one recorded
    assert part(numbers(4)).shape == (4,)  # of which the inner one knows no shapes


def test_after_a_step_that_raised_another_is_captured(graphs):
    def raising(x):
        raise KeyError

    with pytest.raises(KeyError):
        capture(raising)(numbers(2))
    calls = []
    step = capture(lambda x: (calls.append(1), ops.relu(x))[1])
    for _ in range(6):
        step(numbers(2))
    assert len(calls) == 4


def test_inputs_are_given_by_position():
    step = capture(lambda x, y: x)
    with pytest.raises(TypeError, match="a captured step takes its inputs by position; got the keywords y, z"):
        step(numbers(2), y=numbers(2), z=1)


def test_a_captured_method_is_refused_in_words():
    class Model:
        @capture
        def step(self, x):
            return x

    with pytest.raises(TypeError, match=r"attribute of the class Model .*self\.step = minidl\.capture\(self\.step\)"):
        Model().step(numbers(2))
    with pytest.raises(TypeError, match="attribute of the class Model and would be called without"):
        capture(lambda x: x).__get__(Model)  # as of a class method
    model = Model()
    model.own = capture(lambda x: x)
    assert torch.equal(model.own(numbers(2)).data, numbers(2).data)


class Doubled:
    """A step that raises at the calls of the given numbers, after its first kernel."""

    def __init__(self, *bad):
        self.calls, self.bad = 0, bad

    def __call__(self, x):
        self.calls += 1
        y = x + ops.rand(*x.shape) * 0.0
        if self.calls in self.bad:
            raise MemoryError
        return y + x


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_call_that_raised_does_not_count(graphs, bad):
    step = Doubled(bad)
    call = capture(step, eager=2)
    raised = 0
    for value in range(7):
        x = Tensor(torch.full((2,), 1.0 + value, device=default_device()))
        try:
            y = call(x)
        except MemoryError:
            raised += 1
            continue
        assert y.tolist() == [2.0 + 2 * value] * 2
    assert raised == 1
    assert step.calls == 4  # two as they are, one recorded, and that which raised


def test_on_a_cpu_a_step_is_run_as_it_is():
    if not launch.INTERPRETED:
        pytest.skip("kernels are compiled here")
    step = Doubled()
    call = minidl.capture(step)
    for _ in range(6):
        call(numbers(2))
    assert step.calls == 6


def test_batches_of_two_sizes_are_told(graphs):
    step = capture(lambda x, y: x + y)
    step(numbers(4, 2), numbers(4, 2))
    with pytest.raises(ValueError, match=r"shapes \[\[3, 2\], \[3, 2\]\], and was called with \[\[4, 2\], \[4, 2\]\]"):
        step(numbers(3, 2), numbers(3, 2))
    step = capture(lambda x: ops.sparse_linear(x, numbers(60, 2)))
    step(sparse_rows(4, 60, 0))
    with pytest.raises(ValueError, match=r"CSR \[3, 60\] of sizes .*capture\(step, shapes=2\)"):
        step(sparse_rows(3, 60, 0))


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (lambda: (1.0,), TypeError, "input 0 is a float: pass a tensor"),
        (lambda: (numbers(2).data.numpy() if launch.INTERPRETED else None,), TypeError, "input 0 is a"),
        (
            lambda: (Tensor(numbers(2).data, requires_grad=True),),
            ValueError,
            r"input 0 .* requires a gradient: \.detach\(\)",
        ),
        (lambda: (numbers(2), Tensor(torch.zeros(2, device="meta"))), ValueError, "expected one device"),
    ],
)
def test_inputs_that_no_graph_takes_are_refused(inputs, error, message):
    with pytest.raises(error, match=message):
        capture(lambda *given: given[0])(*inputs())


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (
            lambda: (numbers(2, dtype=torch.float64),),
            TypeError,
            r"Tensor of torch\.float64, and was a minidl\.Tensor of torch\.fl",
        ),
        (lambda: (numbers(2).data,), TypeError, r"is a torch\.Tensor of torch\.float32, and was a minidl\.Tensor of"),
        (lambda: (numbers(2), numbers(2)), ValueError, "with 1 inputs, now with 2"),
        (lambda: (Tensor(torch.zeros(2, device="meta")),), ValueError, "on meta, and were on"),
    ],
)
def test_inputs_that_are_not_those_of_before_are_refused(graphs, inputs, error, message):
    step = capture(lambda x, *more: x)
    step(numbers(2))
    with pytest.raises(error, match=message):
        step(*inputs())


@pytest.mark.parametrize("result", [1.0, "text", {1, 2}])
def test_results_that_no_graph_gives_are_refused(result):
    with pytest.raises(TypeError, match=f"it returned a {type(result).__name__}"):
        capture(lambda x: (x, result))(numbers(2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": 3}, TypeError, "step is a int"),
        ({"step": len, "eager": 0}, ValueError, "eager is 0, expected a number of at least 1"),
        ({"step": len, "shapes": True}, ValueError, "shapes is True"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        capture(**options)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(), float, bool, lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.data.nonzero(),
        lambda x: x.data.to("cpu", non_blocking=True), lambda x: torch.zeros((), device="cpu").copy_(x.data),
    ],
    ids=["item", "float", "bool", "tolist", "cpu", "nonzero", "to", "copy_"],
)  # fmt: skip
def test_reading_a_value_on_the_host_is_told_in_words(read):
    """The device is the CPU's on a CPU, and what is read there a device that holds no values."""
    device = "meta" if launch.INTERPRETED else "cuda"
    x = Tensor(torch.zeros((), device=device))
    with pytest.raises(RuntimeError, match=r"to the host|on the host"), cuda_graph.NoHostReads(device):
        read(x)


def test_watching_a_recording_does_not_import_the_compiler_of_torch():
    """Its import takes longer than to train many a network."""
    code = """
import sys
import torch
from minidl.compilation.cuda_graph import NoHostReads
with NoHostReads("cuda"):
    torch.zeros(2) + 1
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_step_that_reads_a_value_is_told_when_it_is_recorded(graphs):
    def step(x):
        y = x * 2.0
        return y if y.sum().item() > 0.0 else x

    call = capture(step, eager=1)
    call(numbers(2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reads a value on the host while it is recorded"):
            call(numbers(2))


def test_copying_from_the_host_is_told_in_words():
    device = "meta" if launch.INTERPRETED else "cuda"
    with cuda_graph.NoHostReads(device):
        torch.zeros(2, device=device).fill_(1.0).clone().to(torch.float64)
        torch.zeros(2).clone().copy_(torch.ones(2))
        for copy in (lambda: torch.zeros(2).to(device), lambda: torch.zeros(2, device=device).copy_(torch.ones(2))):
            with pytest.raises(RuntimeError, match="copies a tensor from the host to the device while it is recorded"):
                copy()


def test_a_rate_that_changes_in_the_step_is_told(graphs):
    one = table()

    def step(x, y):
        loss = one.step(x, y)
        one.schedule.step()
        return loss

    call = capture(step, eager=1)
    call(*one.inputs(0))
    with pytest.raises(RuntimeError, match=r"SGD: lr changes inside a captured step.*schedule\.step\(\) after it"):
        call(*one.inputs(1))


def test_a_seed_that_is_set_in_the_step_is_told(graphs):
    def step(x):
        random.manual_seed(0)
        return x

    with pytest.raises(RuntimeError, match="set it outside the step"):
        capture(step)(numbers(2))


def test_weight_decay_that_was_not_captured_is_told(graphs):
    one = table()
    call = capture(one.step, eager=1)
    for i in range(3):
        call(*one.inputs(i))
    one.optimizer.param_groups[0]["weight_decay"] = 0.1
    for i in range(2):
        with pytest.raises(ValueError, match="weight_decay was 0 when the step was captured"):
            call(*one.inputs(i))


def test_a_precision_that_was_not_captured_is_told(graphs):
    call = capture(lambda x: x @ x, eager=1)
    for _ in range(2):
        call(numbers(4, 4))
    before = launch.float32_precision()
    launch.set_float32_precision("ieee" if before != "ieee" else "tf32")
    try:
        with pytest.raises(ValueError, match="capture the step again"):
            call(numbers(4, 4))
    finally:
        launch.set_float32_precision(before)


def test_backward_after_a_replay_finds_that_its_weights_changed(graphs):
    one = table()
    call = capture(one.step, eager=1)
    for i in range(2):
        call(*one.inputs(i))
    x, y = one.inputs(2)
    loss = one.loss(one.model(x), y)
    call(x, y)
    with pytest.raises(RuntimeError, match="was changed in place"):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("make", TRAININGS.values(), ids=TRAININGS)
def test_many_replays_take_no_more_memory(make):
    minidl.manual_seed(0)
    one = make()
    step = capture(one.step)
    inputs = [one.inputs(i) for i in range(4)]
    for i in range(10):
        step(*inputs[i % 4])
    gc.collect()
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for i in range(100):
        step(*inputs[i % 4])
        one.schedule.step()
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == taken


@pytest.mark.gpu
@pytest.mark.parametrize("make", TRAININGS.values(), ids=TRAININGS)
def test_a_hundred_captured_steps_are_a_hundred_steps(make):
    expected = course(make, 100, lambda step: step)
    found = course(make, 100, capture)
    assert expected[0] == found[0]
    assert_same((found[0][-1:], found[1][-1:]), (expected[0][-1:], expected[1][-1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("read", [lambda y: y.item(), lambda y: y.cpu(), lambda y: torch.cuda.synchronize()])
def test_a_step_that_reads_the_device_is_refused_and_the_device_goes_on(read):
    def step(x):
        y = x * 2.0
        read(y)
        return y

    call = capture(step, eager=1)
    x = numbers(1)
    call(x)
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="while it is recorded"):
        call(x)
    assert torch.cuda.current_stream() == stream
    again = capture(lambda x: x * 3.0, eager=1)
    for _ in range(3):
        assert again(x).item() == x.item() * 3.0


@pytest.mark.gpu
def test_csr_batches_are_copied_in_two_copies():
    x = sparse_rows(16, 60, 0)
    assert isinstance(x, CSR)
    assert x.clone().packed is not None
