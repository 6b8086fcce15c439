"""Memory that runs out: what the error says, and which batch is found to fit.

torch.OutOfMemoryError is raised by stand-ins.
"""

import errno
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from triton.runtime.errors import InterpreterError, OutOfResources

from minidl import models, optim
from minidl.data.workers import WorkerError
from minidl.errors import RunError
from minidl.generation import passes
from minidl.training.process import memory_limit, out_of_memory

TORCH = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.10 GiB."
GB = 2**30


@pytest.fixture
def small_gpu(monkeypatch):
    """What is asked of the device when memory runs out."""
    monkeypatch.setattr(out_of_memory, "_of_device", lambda: (3 * GB, 80 * GB))


def full(*_, **__):
    raise torch.OutOfMemoryError(TORCH)


def test_what_torch_asked_for_and_what_was_free(small_gpu):
    found = out_of_memory.read(torch.OutOfMemoryError(TORCH))
    assert found == out_of_memory.Shortage("GPU", int(20.5 * GB), 3 * GB, 80 * GB)
    assert str(found) == (
        "the GPU is out of memory: 20.50 GiB were requested, 3.00 GiB of 80.00 GiB were free"
    )  # fmt: skip


@pytest.mark.parametrize("what", ["CUDA error: out of memory", "Triton Error [CUDA]: out of memory"])
def test_memory_that_is_taken_past_torch(small_gpu, what):
    assert str(out_of_memory.read(RuntimeError(what))) == (
        "the GPU is out of memory: an allocation failed, 3.00 GiB of 80.00 GiB were free"
    )


def test_the_machine_s_memory(monkeypatch):
    monkeypatch.setattr(memory_limit, "free", lambda: 2 * GB)
    for allocate in (lambda: torch.empty(10**15), lambda: np.empty(4 * 10**15, dtype=np.uint8)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            allocate()
        found = out_of_memory.read(caught.value)
        assert 0.99 * 4e15 < found.requested < 1.01 * 4e15
        assert "this machine is out of memory: 3,6" in str(found)
        assert "TiB were requested, 2.00 GiB were free" in str(found)
    assert str(out_of_memory.read(MemoryError())) == (
        "this machine is out of memory: an allocation failed, 2.00 GiB were free"
    )


def test_memory_that_runs_out_inside_an_interpreted_kernel():
    error = InterpreterError("MemoryError((1024, 1024), dtype('float32'))")
    error.__cause__ = MemoryError("Unable to allocate 4.00 MiB for an array with shape (1024, 1024)")
    assert out_of_memory.read(error).requested == 2**22
    assert out_of_memory.read(InterpreterError("something else")) is None


def test_a_kernel_that_is_too_large_is_no_matter_of_batches():
    found = out_of_memory.read(OutOfResources(300_000, 232_448, "shared memory"))
    assert str(found) == "a kernel needs 300,000 of shared memory, but this GPU has 232,448"
    assert "minidl tune" in out_of_memory.advice(found, 64, full)


@pytest.mark.parametrize(
    "error", [RuntimeError("other"), ValueError("out of memory"), RunError("out of memory"), OSError()]
)
def test_other_errors_are_left_as_they_are(error):
    assert out_of_memory.read(error) is None
    with pytest.raises(type(error)) as caught:
        out_of_memory.guarded(lambda: (_ for _ in ()).throw(error), 8, None)
    assert caught.value is error


@pytest.mark.parametrize(
    ("batch", "most", "found"), [(512, 100, 64), (100, 100, 50), (7, 1, 1), (8, 0, None), (1, 1, None)]
)
def test_the_largest_batch_that_gets_through(batch, most, found):
    tried = []

    def attempt(size):
        tried.append(size)
        if size > most:
            full()

    assert out_of_memory.largest(attempt, batch) == found
    assert tried == sorted(tried, reverse=True)
    assert all(size < batch for size in tried)


def test_a_share_of_the_free_memory_is_left(monkeypatch, small_gpu):
    used = 0

    def attempt(size):
        nonlocal used
        used = size * GB // 10

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: used)
    assert out_of_memory.largest(attempt, 64) == 16
    assert out_of_memory.largest(attempt, 64, 0.5) == 8


def test_an_attempt_that_fails_otherwise_is_told():
    with pytest.raises(ZeroDivisionError):
        out_of_memory.largest(lambda size: 1 // 0, 8)


def test_generation_names_a_batch_that_fits(small_gpu):
    short = out_of_memory.read(torch.OutOfMemoryError(TORCH))
    assert "use --batch-size 64" in passes.too_little(short, 256, 64, lambda count: None)
    assert "one pass of 64 images, does not fit" in passes.too_little(short, 256, 64, full)
    assert "one pass of 64 images, does not fit" in passes.too_little(short, 64, 64, lambda count: None)
    assert "GPU" not in passes.too_little(out_of_memory.Shortage("machine", 4 * GB, GB), 256, 64, full)


def test_a_batch_is_named_only_after_a_trial():
    """A machine has no memory for more than the work takes, so that nothing else is killed for a trial."""
    short = out_of_memory.Shortage("machine", 64 * GB, 16 * GB)

    def attempt(size):
        if size > 20:
            torch.empty(10**15)

    assert out_of_memory.advice(short, 100) == "stop other programs, or use less data or a smaller model"
    assert out_of_memory.advice(short, 100, attempt) == "use a --batch-size of 12: a trial with 12 fitted"
    assert (
        out_of_memory.advice(short, 100, full)
        == "not even a batch of 1 fits: stop other programs, or use a smaller model"
    )


def test_a_trial_on_a_machine_stays_within_what_is_free(monkeypatch):
    # Sizes far above what other threads and malloc free or keep meanwhile; empty() does not touch its memory.
    monkeypatch.setattr(memory_limit, "free", lambda: 2400 * 2**20)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    tried = []

    def attempt(size):
        tried.append(size)
        torch.empty(size * 2**23)

    assert out_of_memory.largest(attempt, 400, where="machine") == 50
    assert tried == [200, 100, 50, 50, 50, 50]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_what_asked_for_the_memory_is_told_with_what_helps(monkeypatch):
    monkeypatch.setattr(memory_limit, "free", lambda: 2 * GB)
    with (
        pytest.raises(MemoryError) as caught,
        out_of_memory.used_for("the data"),
        out_of_memory.used_for("a plot", "--no-plots"),
    ):
        raise MemoryError
    short = out_of_memory.read(caught.value)
    assert str(short) == "this machine is out of memory: an allocation for a plot failed, 2.00 GiB were free"
    assert out_of_memory.advice(short, 64, full) == "stop other programs, or use --no-plots"


@pytest.mark.parametrize(
    "error",
    [
        ImportError("scipy/_core.so: failed to map segment from shared object"),
        ImportError("libtorch.so: cannot open shared object file: Cannot allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_libraries_that_find_no_memory(error):
    assert out_of_memory.read(error).where == "machine"
    assert out_of_memory.read(type(error)("something else")) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("std::system_error: Resource temporarily unavailable"),
    ],
)
def test_a_limit_of_threads_is_no_lack_of_memory(monkeypatch, error):
    monkeypatch.setattr(memory_limit, "free", lambda: 2 * GB)
    short = out_of_memory.read(error)
    assert str(short) == "no more threads or processes can be started"
    assert out_of_memory.advice(short, 64, full).startswith(
        "stop other programs, or raise the limit of processes (ulimit -u"
    )
    monkeypatch.setattr(memory_limit, "free", lambda: 2**20)  # no room for a stack
    assert out_of_memory.read(error).where == "machine"
    assert out_of_memory.read(WorkerError(str(error))) is None


def test_nothing_is_imported_to_tell_that_memory_is_full():
    """An import fails where memory has run out."""
    code = """
import builtins, typer
from minidl.cli import common
def no(name, *more): raise ImportError(f"{name}: failed to map segment from shared object")
try:
    with common.errors():
        builtins.__import__ = no
        raise MemoryError
except typer.Exit as end:
    print(end.exit_code)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.stderr.startswith("error: this machine is out of memory: an allocation failed, ")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == "1\n"


def test_the_memory_of_a_model_is_known_before_it_is_made():
    made = models.TableMLP(10, 3, (16, 8), device="meta")
    parameters, need = out_of_memory._training([(made, optim.AdamW(made.parameters()))], on_gpu=True)
    real = models.TableMLP(10, 3, (16, 8))
    assert parameters == real.num_parameters()
    assert 16 * parameters <= need < 17 * parameters + 2**12
