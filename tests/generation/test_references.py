import numpy as np
import pytest

from minidl.data import Images
from minidl.generation import evaluate
from minidl.generation.quality import nearest


def images(count=12):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 6, 5, 1), dtype=np.uint8)
    return Images(pixels, np.arange(count) % 3)


def test_a_blur_keeps_the_mean_and_smooths():
    point = np.zeros((1, 15, 15, 1), dtype=np.uint8)
    point[0, 7, 7, 0] = 255
    found = evaluate.blurred(point)
    assert abs(int(found.sum()) - 255) < 10
    assert found.max() == round(255 / (2 * np.pi)) == found[0, 7, 7, 0]
    assert found[0, 6, 7, 0] == found[0, 7, 8, 0] > found[0, 6, 6, 0]


def test_ten_images_over_and_over():
    found = evaluate.collapsed(images(), 7)
    assert (found == images().pixels[[0, 1, 2, 0, 1, 2, 0]]).all()


def test_samples_are_different_pictures():
    found = evaluate.subset(images(), 5)
    assert len({picture.tobytes() for picture in found.pixels}) == 5
    assert len(evaluate.subset(images(), 100)) == 12
    assert (evaluate.subset(images(), 5).pixels == found.pixels).all()
    assert evaluate.noise((2, 6, 5, 1)).shape == (2, 6, 5, 1)


def test_the_nearest_picture_and_its_distance():
    training = images(40).pixels
    wanted = np.array([31, 4, 17])
    moved = training[wanted].copy()
    moved[0] ^= 1
    distances, indices = nearest(moved, training)
    assert indices.tolist() == wanted.tolist()
    assert distances.tolist() == pytest.approx([1 / 255, 0.0, 0.0])
    everything = training.reshape(40, -1) / 255.0
    other = images(60).pixels[40:]
    squares = ((other.reshape(20, 1, -1) / 255.0 - everything) ** 2).mean(-1)
    distances, indices = nearest(other, training)
    assert (indices == squares.argmin(1)).all()
    assert distances == pytest.approx(np.sqrt(squares.min(1)))
    with pytest.raises(ValueError, match="pictures have shape"):
        nearest(other[:, :3], training)
