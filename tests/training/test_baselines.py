"""The baselines of pictures: what the linear machine gets, and what it reaches."""

import numpy as np
import pytest

from minidl.data import Pictures, load_images
from minidl.training import baselines


def pictures(pixels):
    channels = pixels.shape[-1]
    return Pictures(pixels, (0.0,) * channels, (1.0,) * channels)


@pytest.mark.parametrize(
    ("shape", "step"), [((8, 8, 1), 1), ((32, 32, 1), 1), ((33, 32, 1), 2), ((64, 64, 3), 4), ((1024, 1024, 3), 57)]
)
def test_large_pictures_are_shrunk(shape, step):
    assert baselines._step((5, *shape)) == step


def test_blocks_are_means_also_at_the_ends():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    found = baselines._flat(pictures(pixels), 3).reshape(2, 2, 3, 3)
    for i, rows in enumerate((slice(0, 3), slice(3, 5))):
        for j, columns in enumerate((slice(0, 3), slice(3, 6), slice(6, 7))):
            expected = pixels[:, rows, columns].astype(np.float64).mean((1, 2)) / 255
            assert np.allclose(found[:, i, j], expected, atol=1e-6)


def test_digits():
    found = load_images("digits")
    parts = [(pictures(part.pixels), part.labels) for part in (found.train, found.validation, found.test)]
    scores = baselines.classification(*parts, 10)
    assert scores["majority"]["accuracy"] == pytest.approx(0.1, abs=0.01)
    assert 0.92 < scores["linear"]["accuracy"] < 0.98
    assert scores["linear_all"]["method"] == "logistic regression on the pixels, training and validation split"


def test_an_interrupt_while_a_network_learns_is_one(monkeypatch):
    """A run whose baseline had stopped early would be finished, with another baseline than it has."""
    from sklearn.neural_network import MLPRegressor

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(MLPRegressor, "_backprop", interrupted)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(30, 3)).astype(np.float32), draw.normal(size=30).astype(np.float32)
    with pytest.raises(KeyboardInterrupt):
        baselines.regression(x, y, x, y, 0.0, 1.0)
