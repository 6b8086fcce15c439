"""Grids of pictures and the film of them."""

import numpy as np
import pytest
import torch
from PIL import Image

from minidl import random
from minidl.tensors import Tensor, default_device
from minidl.training.loop.adversaries import latents
from minidl.training.report import samples


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_grid_has_its_pictures_in_order(tmp_path, channels, mode):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 5, 7, channels), dtype=np.uint8)
    sheet = samples.grid(pixels)
    times = sheet.shape[1] // (8 * 8 + 1)
    assert sheet.shape == (times * (2 * 6 + 1), times * (8 * 8 + 1), channels)
    small = sheet[::times, ::times]
    assert np.array_equal(small[1:6, 1:8], pixels[0])
    assert np.array_equal(small[7:12, 9:16], pixels[9])
    assert (small[0] == 96).all()
    path = samples.path(tmp_path, 3)
    samples.write_grid(path, pixels)
    assert path.name == "epoch-003.png"
    with Image.open(path) as opened:
        assert opened.mode == mode
        assert np.array_equal(np.asarray(opened).reshape(sheet.shape), sheet)


def test_large_pictures_are_not_enlarged():
    assert samples.grid(np.zeros((64, 64, 64, 3), dtype=np.uint8)).shape == (8 * 65 + 1, 8 * 65 + 1, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_film_shows_the_epochs_that_are_there(tmp_path, channels):
    samples.write_film(tmp_path, 3)
    assert not (tmp_path / "training.gif").exists()
    for epoch in (1, 3):
        pixels = np.full((64, 8, 8, channels), 60 * epoch, dtype=np.uint8)
        samples.write_grid(samples.path(tmp_path, epoch), pixels)
    samples.write_film(tmp_path, 3)
    with Image.open(tmp_path / "training.gif") as film:
        assert film.n_frames == 2
        film.seek(1)
        assert film.info["duration"] == 2000


@pytest.mark.parametrize("length", [0, 20, 60, -20])
def test_a_grid_that_is_cut_off_is_left_out_of_the_film(tmp_path, length):
    for epoch in (1, 2):
        samples.write_grid(samples.path(tmp_path, epoch), np.zeros((64, 8, 8, 1), dtype=np.uint8))
    path = samples.path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:length])
    samples.write_film(tmp_path, 2)
    with Image.open(tmp_path / "training.gif") as film:
        assert film.n_frames == 1


def test_pixels_are_rounded_and_latents_belong_to_their_seed():
    random.manual_seed(0)
    z = latents(range(5), 6)
    assert z.shape == (5, 6)
    assert torch.equal(z.data[3:], latents(range(3, 5), 6).data)

    def model(_):
        values = torch.tensor([-1.0, 0.0, 1.0, 0.5]).reshape(1, 1, 2, 2)
        return Tensor(values.to(default_device()))

    assert samples.draw(model, z).reshape(-1).tolist() == [0, 128, 255, 191]
