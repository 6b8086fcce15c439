"""The baselines of pictures: what the linear machine gets, and what it reaches."""

import numpy as np
import pytest
from scipy import sparse

from minidl.data import Pictures, load_images
from minidl.data.workers import Workers
from minidl.training.report import baselines


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
    blocks = baselines._pooled(pictures(pixels), 3).reshape(2, 2, 3, 3)
    for i, rows in enumerate((slice(0, 3), slice(3, 5))):
        for j, columns in enumerate((slice(0, 3), slice(3, 6), slice(6, 7))):
            expected = pixels[:, rows, columns].astype(np.float64).mean((1, 2)) / 255
            assert np.allclose(blocks[:, i, j], expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 8, 8, 1), (33, 50, 70, 3), (3, 100, 100, 1), (2, 301, 90, 3), (1, 1, 1, 1)])
def test_blocks_have_the_bits_of_all_pictures_at_once(shape):
    """The coefficients of a run's baseline depend on every bit."""
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    step = baselines._step(shape)
    means = pixels.astype(np.float32)
    for axis in (1, 2):
        starts = np.arange(0, means.shape[axis], step)
        counts = np.diff(np.append(starts, means.shape[axis])).astype(np.float32)
        sums = np.add.reduceat(means, starts, axis=axis)
        means = sums / counts.reshape([-1 if i == axis else 1 for i in range(4)])
    expected = means.reshape(len(means), -1) / np.float32(255)
    assert baselines._pooled(pictures(pixels), step).tobytes() == expected.tobytes()


def test_digits():
    dataset = load_images("digits")
    parts = [(pictures(part.pixels), part.labels) for part in (dataset.train, dataset.validation, dataset.test)]
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


def overlapping(count, kind, seed=0, classes=3):
    draw = np.random.default_rng(seed)
    y = draw.integers(0, classes, count)
    x = draw.normal(size=(count, 12)).astype(np.float32) + 2.0 * np.eye(12, dtype=np.float32)[y]
    if kind == "pictures":
        return pictures((x.reshape(count, 3, 4, 1) * 30 + 120).clip(0, 255).astype(np.uint8)), y
    return (sparse.csr_matrix(x * (x > 0)) if kind == "sparse" else x), y


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", ["sparse", "dense", "pictures", "many"])
def test_machines_learn_the_same_in_processes(kind, classes, monkeypatch):
    if kind == "many":
        monkeypatch.setattr(baselines, "_MOST_EXACT", 100)
    parts = [overlapping(n, kind if kind != "many" else "sparse", n, classes) for n in (150, 40, 60)]
    expected = baselines.classification(*parts, classes)
    with Workers(2) as workers:
        scores = baselines.Linear(*parts[:2], classes, workers).scores(parts[2])
    assert scores == expected
    assert 0.4 < scores["linear"]["accuracy"] < 1.0
    method = {"pictures": "logistic", "many": "SGDClassifier(alpha=0.0001), same features"}.get(kind, "LinearSVC(C=1)")
    assert scores["linear"]["method"].startswith(method)
    assert scores["linear_all"]["method"].endswith(", training and validation split")


def test_machines_whose_process_is_killed_learn_here(monkeypatch):
    parts = [overlapping(n, "dense", n) for n in (150, 40, 60)]
    expected = baselines.classification(*parts, 3)
    with Workers(2) as workers:
        workers.start()
        for process in workers._processes:
            process._popen.kill()
        assert baselines.Linear(*parts[:2], 3, workers).scores(parts[2]) == expected
