import errno
import os

import numpy as np
import pytest
from PIL import Image

from minidl.generation import output


def test_pixels_are_the_nearest_steps():
    images = np.array([-1.0, 1.0, 0.0, -2.0, 2.0, 0.5 / 127.5, -1 + 0.4 / 127.5], dtype=np.float32)
    found = output.pixels(images.reshape(7, 1, 1, 1)).ravel()
    assert found.tolist() == [0, 255, 128, 0, 255, 128, 0]
    colours = np.zeros((2, 3, 4, 5), dtype=np.float16)
    colours[1, 2, 3, 4] = 1
    assert output.pixels(colours).shape == (2, 4, 5, 3)
    assert output.pixels(colours)[1, 3, 4, 2] == 255


def test_every_level_comes_back():
    levels = np.arange(256, dtype=np.float32)
    assert (output.pixels((levels / 127.5 - 1).reshape(-1, 1, 1, 1)).ravel() == levels).all()


def test_a_grid_goes_row_by_row():
    pictures = np.arange(1, 6, dtype=np.uint8)[:, None, None, None] * np.full((1, 300, 300, 1), 40, np.uint8)
    sheet = output.grid(pictures, 2, 3)
    assert sheet.shape == (603, 904, 1)
    places = [[int(sheet[150 + 301 * row, 150 + 301 * column, 0]) for column in range(3)] for row in range(2)]
    assert places == [[40, 80, 120], [160, 200, 0]]
    with pytest.raises(ValueError, match="5 pictures do not fit into a grid of 2 x 2"):
        output.grid(pictures, 2, 2)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("suffix", ["png", "bmp"])
def test_pictures_come_back(tmp_path, channels, suffix):
    picture = np.random.default_rng(0).integers(0, 256, (5, 4, channels), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    output.write_picture(path, picture, {"seed": "7", "model_sha256": "ab" * 32})
    with Image.open(path) as image:
        read = np.asarray(image).reshape(5, 4, channels)
        assert (read == picture).all()
        if suffix == "png":
            assert image.text == {"seed": "7", "model_sha256": "ab" * 32}
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_an_array_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "images.npy"
    whole = np.random.default_rng(0).normal(size=(5, 1, 2, 3)).astype(np.float32)
    with output.array_file(path, whole.shape, whole.dtype) as write:
        write(whole[:3].transpose(0, 1, 2, 3))
        assert not path.exists()
        write(np.asfortranarray(whole[3:]))
    assert (np.load(path) == whole).all()
    assert [*tmp_path.iterdir()] == [path]
    # In slices of several threads, the channel last in memory.
    many = np.random.default_rng(1).normal(size=(700, 32, 32, 3)).astype(np.float16).transpose(0, 3, 1, 2)
    with output.array_file(path, many.shape, many.dtype) as write:
        write(many[:601])
        write(many[601:601])
        write(many[601:])
    assert (np.load(path) == many).all()
    with pytest.raises(KeyError), output.array_file(tmp_path / "b.npy", (2, 1), np.dtype("f4")):
        raise KeyError
    assert [file.name for file in tmp_path.iterdir()] == ["images.npy"]


def test_an_array_that_the_disk_does_not_hold_leaves_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"), output.array_file(tmp_path / "a.npy", (1,), np.dtype("f4")) as write:
        write(np.zeros(1, dtype=np.float32))
    assert not list(tmp_path.iterdir())
