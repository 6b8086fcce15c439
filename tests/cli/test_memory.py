"""Commands that run out of memory: one sentence with what was asked, what was free, and which batch would fit.

torch.OutOfMemoryError is raised by stand-ins; where there is a GPU its memory really runs out.
"""

import errno
import re

import numpy as np
import pytest
import torch
from PIL import Image

from minidl import models
from minidl.generation import passes
from minidl.ops import loss as losses
from minidl.runtime import launch
from minidl.training.loop import epochs, forward
from minidl.training.process import memory_limit, out_of_memory
from minidl.training.run_folder import files
from tests.cli.conftest import SMALL, write_csv

GB = 2**30


@pytest.fixture
def small_gpu(monkeypatch):
    """What is asked of the device when memory runs out."""
    monkeypatch.setattr(out_of_memory, "_of_device", lambda: (3 * GB, 80 * GB))


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB.")


def limited(monkeypatch, most):
    """Losses of more examples than `most` do not fit."""
    real = losses.cross_entropy

    def cross_entropy(x, *args, **options):
        if x.shape[0] > most:
            full()
        return real(x, *args, **options)

    monkeypatch.setattr("minidl.ops.cross_entropy", cross_entropy)


def test_training_names_a_batch_that_fits(command, texts, tmp_path, monkeypatch, small_gpu):
    limited(monkeypatch, 10)
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL)
    assert result.code == 1
    assert result.err == (
        "error: the GPU is out of memory: 20.50 GiB were requested for a step of 32 examples, 3.00 GiB of 80.00 GiB "
        "were free; use a --batch-size of 8: a trial with 8 fitted\n"
    )
    assert not (tmp_path / "run" / "report.json").exists()


def test_a_run_that_is_continued_cannot_have_another_batch(command, texts, tmp_path, monkeypatch, small_gpu):
    start = ("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_tensors", with_a_stop(files.write_tensors))
        assert command(*start).code == 1
    limited(monkeypatch, 10)
    result = command("train", "text", "--out", tmp_path / "run", "--resume")
    assert result.code == 1
    assert "use a new run (--overwrite) with a --batch-size of 8: a trial with 8 fitted\n" in result.err


def test_validation_that_does_not_fit_is_no_matter_of_the_batch(command, texts, tmp_path, monkeypatch, small_gpu):
    limited(monkeypatch, 10)
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL, "--batch-size", "8")
    assert result.code == 1
    assert result.err.endswith("were free; stop other programs, or use less data or a smaller model\n")


def with_a_stop(write):
    """`write`, for which the disk is full after the first checkpoint."""
    written = []

    def stopping(path, tensors):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        return write(path, tensors)

    return stopping


def test_training_that_fits_with_no_batch(command, texts, tmp_path, monkeypatch, small_gpu):
    limited(monkeypatch, 0)
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL)
    assert result.code == 1
    assert "not even a batch of 1 fits: stop other programs on the GPU" in result.err


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_is_full_before_the_steps(command, texts, tmp_path, monkeypatch, small_gpu, kind):
    def raised(*_, **__):
        raise kind("Unable to allocate 7.50 GiB for an array")

    monkeypatch.setattr(epochs.Trainer, "__init__", raised)
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL)
    assert result.code == 1
    assert "out of memory: 7.50 GiB were requested for the networks and their optimizers, " in result.err
    assert result.err.endswith("were free; stop other programs, or use a smaller model\n")


def test_reading_data_that_is_too_large(command, texts, tmp_path, monkeypatch):
    def raised(*_, **__):
        raise MemoryError

    monkeypatch.setattr("minidl.data.corpus.load_corpus", raised)
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL)
    assert result.code == 1
    assert result.err.startswith("error: this machine is out of memory: an allocation for the data failed, ")
    assert result.err.endswith("were free; stop other programs, or use less data\n")
    assert not (tmp_path / "run").exists()


def free(monkeypatch, size):
    """So much is free on the machine, and on the GPU if there is one."""
    monkeypatch.setattr(memory_limit, "free", lambda: size)
    monkeypatch.setattr(out_of_memory, "_of_device", lambda: (size, 80 * GB))


def test_a_model_that_cannot_fit_is_refused_with_one_that_does(command, texts, tmp_path, monkeypatch):
    def made(*_, **more):
        assert more["device"] == "meta", "it was made"
        return real(*_, **more)

    real = models.TextMLP
    start = ("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL, "--no-plots")
    with monkeypatch.context() as patched:
        free(patched, 200 * 2**20)
        patched.setattr(models, "TextMLP", made)
        result = command(*start, "--hidden", "65536,65536")
    assert result.code == 1
    found = re.search(
        r"error: the model has 4,29\d,\d+,\d+ parameters, and their training needs \d+\.\d+ GiB, but this \w+ has "
        r"200\.00 MiB free; stop other programs, or use --hidden ([\d,]+) \((\d+)\.\d+ MiB\)\n",
        result.err,
    )
    assert found, result.err
    assert 40 < int(found[2]) <= 200
    assert not (tmp_path / "run").exists()
    assert command(*start, "--hidden", found[1]).code == 0


def test_a_model_that_is_too_large_with_any_hidden_size(command, texts, tmp_path, monkeypatch):
    free(monkeypatch, 1000)
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL)
    assert result.code == 1
    assert result.err.endswith("1,000 bytes free; stop other programs, or use fewer features or classes\n")


def test_a_generator_that_cannot_fit_is_refused(command, tmp_path, monkeypatch):
    free(monkeypatch, 2**30)
    result = command("train", "gan", "--data", "digits", "--out", tmp_path / "run", "--width", "1024")
    assert result.code == 1
    assert re.search(r"use --width \d+ --latent \d+ \(\d+\.\d+ MiB\)\n", result.err), result.err


@pytest.mark.slow
@pytest.mark.skipif(not launch.INTERPRETED, reason="steps take the GPU's memory")
def test_a_step_beyond_a_control_group_is_told_with_a_batch_that_fits(command, tmp_path, monkeypatch):
    """Linux would kill the process without a word."""
    rows = [(f"{i % 89}", f"{i % 97}", "ab"[i % 2]) for i in range(20_000)]
    write_csv(tmp_path / "tall.csv", rows, ("x", "y", "label"))
    start = ("train", "table", "--data", tmp_path / "tall.csv", "--target", "label", "--out", tmp_path / "run")
    small = ("--epochs", "1", "--hidden", "2048", "--no-plots", "--device", "cpu")
    monkeypatch.setattr(memory_limit, "in_groups", lambda: 120 * 2**20)
    monkeypatch.setattr(memory_limit, "free", lambda: 120 * 2**20)
    result = command(*start, *small, "--batch-size", "14000")
    assert result.code == 1
    found = re.search(
        r"MiB were requested for a step of 14,000 examples, .* use a --batch-size of (\d+): a", result.err
    )
    assert found, result.err
    result = command(*start, *small, "--batch-size", found[1], "--overwrite")
    assert result.code == 0, result.err


def test_a_checkpoint_without_memory_is_no_matter_of_the_batch(command, texts, tmp_path, monkeypatch):
    def raised(*_, **__):
        raise MemoryError

    monkeypatch.setattr(files, "write_tensors", raised)
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *SMALL)
    assert result.code == 1
    assert "an allocation for a checkpoint failed, " in result.err
    assert result.err.endswith("stop other programs, or use a smaller model\n")


def test_prediction_names_a_batch_that_fits(command, text_run, monkeypatch, small_gpu):
    real = forward._apply

    def apply(model, features, size):
        if size > 5:
            full()
        yield from real(model, features, size)

    monkeypatch.setattr(forward, "_apply", apply)
    result = command("predict", text_run[0], *["crude oil"] * 18)
    assert result.code == 1
    assert result.err.endswith(
        "use at most 4 inputs at a time, or --device cpu: a trial with 4 fitted\n"
    )  # fmt: skip
    assert command("predict", text_run[0], *["crude oil"] * 4).code in (0, 1)


def test_generation_on_a_machine_that_is_full(command, tmp_path, monkeypatch):
    def raised(*_, **__):
        raise MemoryError

    monkeypatch.setattr(passes, "images", raised)
    result = command("generate", "--count", "4", "--out", tmp_path / "a")
    assert result.code == 1
    assert result.err.startswith("error: this machine is out of memory: ")


@pytest.mark.gpu
def test_a_gpu_that_is_really_full_names_a_batch_that_fits(command, tmp_path):
    """Of photographs: the network's maps take the memory, which the process is given little of."""
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(300):
            pixels = np.random.default_rng(i + 1000 * ord(label)).integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{i}.png")
    flags = ("--data", tmp_path / "photos", "--size", "64", "--epochs", "1", "--no-plots", "--no-capture")
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**27) / total)
    try:
        result = command("train", "images", *flags, "--batch-size", "400", "--out", tmp_path / "run")
        assert result.code == 1, result.out
        found = re.search(
            r"(\S+ \wiB) were requested for a step of 400 examples, (\S+ \wiB) of (\S+ \wiB) were free; .*"
            r"use a --batch-size of (\d+)\n",
            result.err,
        )
        assert found, result.err
        again = command("train", "images", *flags, "--batch-size", found[4], "--out", tmp_path / "smaller")
        assert again.code == 0, again.err
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
