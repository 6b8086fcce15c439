"""Every measure against values worked out by hand, or by SciPy in a straightforward way."""

import numpy as np
import pytest
from scipy import linalg, spatial

from minidl.generation import quality


def points(count, dims, seed=0, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, (count, dims)).astype(np.float32)


def test_frechet_of_known_distributions():
    zero, one = np.zeros(2), np.eye(2)
    assert quality.frechet(zero, one, zero, one) == pytest.approx(0.0, abs=1e-12)
    assert quality.frechet(zero, one, np.array([3.0, 4.0]), one) == pytest.approx(25.0)
    # Commuting covariances: the sum of squared differences of deviations.
    assert quality.frechet(zero, np.diag([4.0, 9.0]), zero, np.diag([1.0, 25.0])) == pytest.approx(1.0 + 4.0)
    # One of them of lower rank: tr(C1) - 0.
    assert quality.frechet(zero, np.diag([4.0, 0.0]), zero, np.diag([0.0, 9.0])) == pytest.approx(13.0)


def test_frechet_agrees_with_scipys_matrix_root():
    x, y = points(200, 6) @ points(6, 6, 1), points(300, 6, 2) @ points(6, 6, 3) + 0.5
    m1, m2 = (np.mean(z, axis=0, dtype=np.float64) for z in (x, y))
    c1, c2 = (np.cov(z.T) for z in (x, y))
    root = linalg.sqrtm(c1 @ c2)
    expected = np.sum((m1 - m2) ** 2) + np.trace(c1 + c2 - 2 * root.real)
    assert quality.frechet_distance(x, y) == pytest.approx(expected, rel=1e-6)


def test_moments():
    mean, cov = quality.moments(np.array([[0.0, 0.0], [2.0, 4.0]]))
    assert mean.tolist() == [1.0, 2.0]
    assert cov.tolist() == [[2.0, 4.0], [4.0, 8.0]]
    with pytest.raises(ValueError, match="two rows or more"):
        quality.moments(np.zeros((1, 3)))


def test_kernel_distance_is_the_sum_over_pairs(monkeypatch):
    x, y = points(9, 3).astype(np.float64), points(7, 3, 1).astype(np.float64)

    def k(a, b):
        return (a @ b / 3 + 1) ** 3

    def within(z):
        return np.mean([k(z[i], z[j]) for i in range(len(z)) for j in range(len(z)) if i != j])

    expected = within(x) + within(y) - 2 * np.mean([k(a, b) for a in x for b in y])
    assert quality.kernel_distance(x, y) == pytest.approx(expected)
    monkeypatch.setattr(quality, "_ROWS", 2)
    assert quality.kernel_distance(x, y) == pytest.approx(expected)
    with pytest.raises(ValueError, match="two or more of each"):
        quality.kernel_distance(x[:1], y)


def test_kernel_distance_is_unbiased():
    found = [quality.kernel_distance(points(50, 4, 2 * i), points(50, 4, 2 * i + 1)) for i in range(40)]
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(len(found))
    assert quality.kernel_distance(points(100, 4), points(100, 4, 1) + 1) > 5 * np.std(found)


def test_precision_and_recall_by_hand():
    # On a line, with one neighbour: balls of radius 1 about 0, 1 and 2; of 10 about 12.
    real = np.array([[0.0], [1.0], [2.0], [12.0]])
    generated = np.array([[0.5], [2.9], [3.5], [23.0], [22.5]])
    # 0.5 and 2.9 and 3.5 (8.5 from 12) lie in balls, 23 and 22.5 do not.
    # Balls about generated ones: 0.5: 2.4, 2.9: 0.6, 3.5: 0.6, 23: 0.5, 22.5: 0.5.
    assert quality.precision_recall(real, generated, 1) == (3 / 5, 3 / 4)
    with pytest.raises(ValueError, match="expected more than 3 of each"):
        quality.precision_recall(real, generated[:3])


def test_precision_and_recall_agree_with_all_distances(monkeypatch):
    monkeypatch.setattr(quality, "_ROWS", 7)
    x, y = points(40, 5), points(30, 5, 1, 1.3)
    between = spatial.distance.cdist(x, y)
    radius_x, radius_y = (np.sort(spatial.distance.cdist(z, z))[:, 3] for z in (x, y))
    expected = (between <= radius_x[:, None]).any(0).mean(), (between <= radius_y[None]).any(1).mean()
    assert quality.precision_recall(x, y) == pytest.approx(expected)


def test_classes_and_distances():
    assert quality.histogram(np.array([0, 2, 2, 2]), 4) == [0.25, 0.0, 0.75, 0.0]
    real = np.arange(101.0)
    assert quality.memorised(np.array([0.0, 0.5, 1.0, 50.0]), real) == 0.5
    assert quality.median_percentile(np.array([49.5, 0.0, 200.0]), real[:100]) == 50.0
