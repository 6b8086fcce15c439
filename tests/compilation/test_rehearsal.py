"""A rehearsal lists the launches of a step and changes nothing that lasts."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from triton.runtime.jit import JITFunction

import minidl
from minidl import nn, ops, optim
from minidl.compilation import launch_jobs, rehearsal
from minidl.compilation.capture import capture
from minidl.distributed import DataParallel, shards
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.training.process.compile_ahead import compile_ahead
from minidl.training.process.display import Display
from tests.compilation.test_capture import TRAININGS, numbers, text
from tests.graphs import graphs, same_random
from tests.training import test_captured_runs as runs

__all__ = ["graphs", "same_random"]


def described(kernel, grid, args, meta):
    """All of a launch but its values: what a kernel is compiled for, and the programs it has."""

    def kind(value):
        value = getattr(value, "base", value)
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), value.stride()
        return value if isinstance(value, int) or value is None else type(value).__name__

    return kernel.__name__, grid, tuple(map(kind, args)), tuple((k, str(v)) for k, v in meta.items())


def kernels():
    """All kernels of minidl that are imported."""
    modules = [module for name, module in sys.modules.items() if name.startswith("minidl.kernels")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]


def rehearsed(work):
    found = []
    with rehearsal.rehearsal(lambda *launched: found.append(described(*launched))):
        work()
    return found


def launched(work):
    found = []

    def watcher(kernel, grid, args, meta, go):
        found.append(described(kernel, grid, args, meta))
        go()

    with launch.watch(watcher):
        work()
    return found


@pytest.mark.parametrize("make", TRAININGS.values(), ids=TRAININGS)
def test_a_rehearsed_step_launches_what_the_step_launches_and_changes_nothing(make):
    minidl.manual_seed(3)
    one = make()
    # In between, so that nothing is as it was made.
    for i in range(2):
        one.step(*one.inputs(i))
    before, inputs = one.state(), one.inputs(2)
    found = rehearsed(lambda: rehearsal.rehearse(one.step, *inputs))
    after = one.state()
    assert before.keys() == after.keys()
    for name, value in before.items():
        other = after[name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
    assert found == launched(lambda: one.step(*inputs))
    assert len(found) > 5


@pytest.mark.parametrize("make", TRAININGS.values(), ids=TRAININGS)
def test_the_course_after_a_rehearsal_is_the_same_bit_for_bit(graphs, make):
    def course(rehearse):
        minidl.manual_seed(3)
        one = make()
        step = capture(one.step, eager=2)
        losses = []
        for i in range(4):
            if rehearse and i in (0, 3):
                one.optimizer.lr *= 1.0  # sets numbers on the device
                with rehearsal.rehearsal(lambda *launched: None):
                    rehearsal.rehearse(step, *one.inputs(i + 10))
            losses.append(step(*one.inputs(i)).item())
            one.schedule.step()
        return losses, one.state()

    (losses, state), (expected, whole) = course(rehearse=True), course(rehearse=False)
    assert losses == expected
    for name, value in whole.items():
        assert torch.equal(value, state[name]) if isinstance(value, torch.Tensor) else value == state[name], name


def test_a_rehearsed_captured_step_draws_from_the_device_as_its_calls_do(graphs):
    one = text()
    step = capture(one.step)
    first = rehearsed(lambda: rehearsal.rehearse(step, *one.inputs(0)))
    assert first == launched(lambda: step(*one.inputs(0)))


@pytest.mark.parametrize("make", runs.DATA.values(), ids=runs.DATA)
@pytest.mark.parametrize("captured", [False, True])
def test_a_trainers_rehearsal_has_every_kernel_of_its_training(graphs, tmp_path, make, captured):
    def forms(found):
        """Without sizes: batches of other rows have others."""
        return {(name, meta) for name, _, _, meta in found}

    some = forms(rehearsed(lambda: runs.trainer(make, tmp_path / "one", captured).rehearse()))
    whole = forms(launched(lambda: runs.trainer(make, tmp_path / "two", captured).run()))
    assert whole <= some


def test_nothing_unknown_gets_into_memory_that_lasts():
    x = numbers(4, 8)
    kept, count = torch.full((4, 8), 7.0, device=x.device), torch.zeros((), device=x.device)

    def step():
        y = ops.exp(x)
        kept.copy_(y.data)
        kept[0].copy_(y.data[0])
        torch.stack([y.data, y.data], out=torch.empty(2, 4, 8, device=x.device))
        count.add_(1.0)

    rehearsed(step)
    assert (kept == 7.0).all()
    assert count == 0.0


def test_what_the_host_sets_is_set():
    """As an optimiser's numbers are, which it remembers to have set."""
    rate, flags = torch.zeros(3), torch.ones(2)

    def step():
        rate[1:].fill_(0.5)
        rate[0].copy_(torch.tensor(0.25))
        flags.zero_()
        ops.exp(Tensor(rate))

    rehearsed(step)
    assert rate.tolist() == [0.25, 0.5, 0.5]
    assert flags.tolist() == [0.0, 0.0]


def test_it_ends_where_the_host_reads_what_was_not_computed():
    x, read = numbers(4), []

    def step():
        y = ops.sum(ops.exp(x))
        read.append(1)
        read.append(y.item())
        ops.exp(y)

    found = rehearsed(lambda: rehearsal.rehearse(step))
    assert read == [1]
    assert len(found) == len(launched(lambda: ops.sum(ops.exp(x))))
    with pytest.raises(rehearsal.UnknownError), rehearsal.rehearsal(lambda *launched: None):
        step()


def test_known_values_are_read():
    rows = torch.tensor([3, 1, 2])
    read = []
    rehearsed(lambda: read.append((rows + 1).sum().item()))
    assert read == [9]


def _own_generator(x, seen):
    torch.rand(3, generator=seen["generator"], device=x.device)
    x.clone().normal_(generator=seen["generator"])


STEPS_OF_TORCH = {
    "batch norm": lambda x, seen: F.batch_norm(x, seen["mean"], seen["var"], training=True),
    "instance norm": lambda x, seen: F.instance_norm(x, seen["mean"], seen["var"]),
    "draws": lambda x, seen: (torch.rand(2, device=x.device), F.dropout(x, 0.5), x.clone().bernoulli_(0.5)),
    "a generator": _own_generator,
    "half of itself": lambda x, seen: x.copy_(x / 2),
    "through new memory": lambda x, seen: x.copy_(torch.zeros_like(x).copy_(x / 2)),
    "parts that overlap": lambda x, seen: (x[:1].copy_(x[:1] + 1), x[:, 1:].copy_(x[:, :2]), x.copy_(x.flip(0))),
    "a counter": lambda x, seen: seen["mean"].add_(1),
}


@pytest.mark.parametrize("step", STEPS_OF_TORCH.values(), ids=STEPS_OF_TORCH)
def test_operations_of_torch_change_nothing_that_lasts(step, device):
    x, generator = torch.arange(24.0, device=device).reshape(2, 3, 4), torch.Generator(device).manual_seed(1)
    seen = {"mean": torch.ones(3, device=device), "var": torch.ones(3, device=device), "generator": generator}

    def values():
        state = generator.get_state(), torch.get_rng_state(), torch.rand(1, device=device)
        return [x.clone(), seen["mean"].clone(), seen["var"].clone(), *state]

    torch.manual_seed(0)
    before = values()
    torch.manual_seed(0)
    rehearsed(lambda: rehearsal.rehearse(step, x, seen))
    assert all(map(torch.equal, before, values()))


def test_new_memory_is_not_taken_for_what_was_freed():
    """An array of numpy's becomes a tensor without torch's operations being seen."""
    x, reached = numbers(4), []

    def step():
        for _ in range(10):
            ops.exp(x)
            torch.from_numpy(np.arange(4)).to("meta")
            reached.append(1)

    rehearsed(lambda: rehearsal.rehearse(step))
    assert len(reached) == 10


def test_errors_of_the_step_are_its_own():
    with pytest.raises(ValueError, match="not this"), rehearsal.rehearsal(lambda *launched: None):
        rehearsal.rehearse(lambda: (_ for _ in ()).throw(ValueError("not this")))
    assert not launch.handed_over()


@pytest.mark.skipif(not launch.INTERPRETED, reason="kernels are compiled")
def test_nothing_is_compiled_where_kernels_are_interpreted():
    called = []
    assert minidl.compile_ahead(lambda: called.append(1)) == 0
    compile_ahead(lambda: called.append(1), Display(quiet=True))
    assert called == []


@pytest.mark.gpu
@pytest.mark.skipif(launch.INTERPRETED, reason="kernels are interpreted")
def test_a_step_compiles_nothing_after_it_was_compiled_ahead(tmp_path, monkeypatch):
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    one = TRAININGS["pictures"]()
    inputs = one.inputs(0)
    assert minidl.compile_ahead(capture(one.step), *inputs) > 5
    assert minidl.compile_ahead(capture(one.step), *inputs) == 0
    hits = []
    for kernel in kernels():  # of earlier tests, which would not be looked for in the cache
        kernel.device_caches.clear()
    launch.forget()
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **seen: hits.append(seen["cache_hit"]))
    capture(one.step)(*inputs)
    assert hits
    assert all(hits)


def test_only_kernels_that_another_process_can_import_become_jobs():
    assert not launch_jobs.compilable(lambda: None)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_a_step_by_shards_is_rehearsed(norm):
    """Buffers are put back after each shard by an operation that returns nothing; shards in step are threads."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), norm(4), nn.Flatten(), nn.Linear(16, 3))
    parallel, optimizer = DataParallel(model, shards(2)), optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        works = [lambda x=x[i : i + 2], y=y[i : i + 2]: ops.cross_entropy(model(x), y) for i in (0, 2)]
        loss = parallel.step(4, works)[0]
        optimizer.step()
        return loss

    at = default_device()
    x, y = Tensor(torch.randn(4, 1, 4, 4).to(at)), Tensor(torch.tensor([0, 1, 2, 0]).to(at))
    step(x, y)
    before = [tensor.data.clone() for _, tensor in model.named_tensors()]
    found = rehearsed(lambda: rehearsal.rehearse(step, x, y))
    for (_, tensor), was in zip(model.named_tensors(), before, strict=True):
        assert torch.equal(tensor.data, was)
    assert found == launched(lambda: step(x, y))
