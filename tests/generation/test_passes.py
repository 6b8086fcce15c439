"""The same latent gives the same floats, whatever stands beside it."""

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import minidl
from minidl.errors import ConfigError
from minidl.generation import latents, passes
from minidl.generation.model import prepared
from minidl.models import dcgan
from minidl.runtime import launch

ROOT = Path(__file__).parents[2]


def small(size=(8, 8), width=8, latent=16):
    minidl.manual_seed(3)
    return prepared(dcgan.Generator(latent=latent, size=size, width=width))


def whatever_the_batch(model, size, count):
    """Assert that batches of 1, 7 and 64, forwards and backwards, give the same bits."""
    z = latents.from_seeds(range(count), 16)
    first = passes.everything(model, z, 1, size, 1)
    assert first.shape == (count, 1, *size)
    assert len(np.unique(first.reshape(count, -1), axis=0)) == count
    for batch in (7, 64, None):
        assert (passes.everything(model, z, 1, size, batch) == first).all(), batch
        backwards = passes.everything(model, np.ascontiguousarray(z[::-1]), 1, size, batch)
        assert (backwards[::-1] == first).all(), batch
    assert (passes.everything(model, z[3:4], 1, size) == first[3:4]).all()


@pytest.mark.slow
def test_floats_do_not_depend_on_batch_and_order():
    whatever_the_batch(small(), (8, 8), 9)


def test_nor_with_other_blas_kernels():
    code = (
        "from tests.generation.test_passes import small, whatever_the_batch\n"
        "whatever_the_batch(small((28, 28), 16), (28, 28), 8)\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OPENBLAS_CORETYPE": "Haswell",
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(28, 28), (64, 64)])
def test_nor_on_a_gpu_where_passes_are_filled_up(size):
    model = small(size, 32)
    whatever_the_batch(model, size, 70)
    one_pass = passes.pass_size(1, size)
    whatever_the_batch(model, size, 2 * one_pass + 5)


def test_passes_of_several_images_agree_closely():
    model = small()
    z = latents.from_seeds(range(9), 16)
    one, several = (passes.everything(model, z, 1, (8, 8), None, together) for together in (1, 4))
    assert np.abs(one - several).max() < 1e-5


def test_a_prepared_generator_is_the_one_it_was_made_of():
    minidl.manual_seed(5)
    generator = dcgan.Generator(latent=16, size=(8, 8), width=8)
    for _ in range(3):
        generator(minidl.randn(16, 16))
    generator.eval()
    z = minidl.randn(4, 16)
    with minidl.no_grad():
        expected = generator(z).data.cpu().numpy()
        found = prepared(generator)(z).data.cpu().numpy()
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(expected).max() > 1e-3
    assert "BatchNorm" not in repr(prepared(generator))


def test_the_size_of_a_pass_depends_on_the_picture_alone():
    assert passes.pass_size(1, (28, 28)) == 256
    assert passes.pass_size(3, (64, 64)) == 256
    assert passes.pass_size(3, (256, 256)) == 16
    assert passes.batch_size(256, 3136, 1, None) == 256
    assert passes.batch_size(256, 3136, 300, None) == 512
    assert passes.batch_size(256, 3136, None, 2**20) == 256
    assert passes.batch_size(256, 2**14, None, 2**30) == 2**14


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_images_that_are_not_finite_are_told(dtype, bad):
    """Also as they come from a GPU, the channel last in memory, and where several threads find one."""
    found = np.full((3000, 10, 9, 1), np.finfo(dtype).max, dtype=dtype).transpose(0, 3, 1, 2)
    passes.check_finite(found, 0)
    passes.check_finite(found[:0], 0)
    found[1, 0, 9, 8] = found[2999] = bad
    with pytest.raises(ConfigError, match="image 12 has values that are not finite"):
        passes.check_finite(found, 10)


@pytest.fixture
def overlapped(monkeypatch):
    """`Passes` of 4 images in any process: without a GPU its streams do everything at once, and a graph is a call."""
    monkeypatch.setattr(passes, "pass_size", lambda *_: 4)
    if not launch.INTERPRETED:
        return
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**30, 2**30))
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for make in (torch.zeros, torch.empty):
        monkeypatch.setattr(torch, make.__name__, lambda *a, pin_memory=False, make=make, **k: make(*a, **k))


def copies(found):
    return [part.copy() for part in found]


def test_several_sets_of_latents_under_way_at_a_time(overlapped):
    model = small()
    sets = [latents.from_seeds(range(first, first + count), 16) for first, count in ((0, 19), (100, 10), (200, 14))]
    expected = [copies(passes.Passes(model, 1, (8, 8), 4).images(z)) for z in sets]
    assert [len(parts) for parts in expected] == [5, 3, 4]
    found = passes.Passes(model, 1, (8, 8), 4)
    next(found.images(sets[2]))  # and no more of these
    both = zip(found.images(sets[0]), found.images(sets[1]), strict=False)
    for part, (one, other) in enumerate(both):
        assert np.array_equal(one, expected[0][part])
        assert np.array_equal(other, expected[1][part])
    assert part == 2
    for z, parts in zip(sets, expected, strict=True):
        assert np.array_equal(np.concatenate(copies(found.images(z))), np.concatenate(parts))


def test_the_memory_of_passes_is_given_back_with_them(overlapped):
    found = passes.Passes(small(), 1, (8, 8))
    assert len(copies(found.images(latents.from_seeds(range(9), 16)))[0]) == 9
    gone = weakref.ref(found)
    gc.disable()
    try:
        del found
        assert gone() is None
    finally:
        gc.enable()


def test_every_precision_has_its_graph(overlapped, monkeypatch):
    recorded = []

    class Graph:
        """Keeps the precision that it is called in first, as a graph that is recorded then."""

        def __init__(self, step, eager):
            self.step, self.precision = step, None

        def __call__(self, z):
            self.precision = self.precision or launch.float32_precision()
            recorded.append((self.precision, launch.float32_precision()))
            return self.step(z)

    monkeypatch.setattr(passes, "capture", Graph)
    found, z = passes.Passes(small(), 1, (8, 8)), latents.from_seeds(range(5), 16)
    before = launch.float32_precision()
    try:
        for precision in ("tf32x3", "tf32", "tf32x3"):
            launch.set_float32_precision(precision)
            copies(found.images(z))
    finally:
        launch.set_float32_precision(before)
    assert len(recorded) == 6
    assert all(one == other for one, other in recorded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_latents_are_no_images(overlapped, dtype):
    minidl.manual_seed(3)
    model = prepared(dcgan.Generator(latent=16, size=(8, 8), width=8), dtype)
    none = np.zeros((0, 16), dtype=np.float32)
    found = passes.Passes(model, 1, (8, 8))
    assert copies(found.images(none)) == []
    assert sum(map(len, found.images(latents.from_seeds(range(3), 16)))) == 3
    array = passes.everything(model, none, 1, (8, 8))
    assert (array.shape, array.dtype) == ((0, 1, 8, 8), np.dtype(str(dtype).removeprefix("torch.")))
