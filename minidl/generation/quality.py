"""The quality of generated pictures: distances between two sets of feature vectors, float64 in NumPy and SciPy.

    Frechet distance   |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))   of two normal distributions with the sets' means
                       and covariances (Heusel, Ramsauer, Unterthiner, Nessler and Hochreiter, NIPS 2017,
                       arXiv 1706.08500)
    kernel distance    the unbiased estimate of the squared maximum mean discrepancy under k(x, y) = (x y / d + 1)^3
                       (Binkowski, Sutherland, Arbel and Gretton, ICLR 2018, arXiv 1801.01401)
    precision          the share of generated points within the ball about some real point that reaches its third
                       nearest real neighbour; recall: the share of real points within the balls about generated ones
                       (Kynkaanniemi, Karras, Laine, Lehtinen and Aila, NeurIPS 2019, arXiv 1904.06991)
    nearest            the distance of each picture to the nearest training picture; `memorised` is the share nearer
                       than the 1st percentile of those of real pictures that were not trained on

The features, and on a GPU the products of pictures, come from minidl's kernels; NumPy computes the statistics, which
are not part of the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from minidl.kernels import gemm
from minidl.runtime import launch
from minidl.tensors import default_device

NEIGHBOURS = 3
_ROWS = 1024  # of a matrix of distances at a time
_SCALE = 1.0 / 255.0


def moments(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean [d] and covariance [d, d] (of N - 1) of features [N, d]. Raises ValueError for one row or none."""
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(f"features have shape {list(features.shape)}, expected two rows or more of a matrix")
    x = features.astype(np.float64)
    return x.mean(axis=0), np.atleast_2d(np.cov(x, rowvar=False))


def frechet(mean_1: np.ndarray, cov_1: np.ndarray, mean_2: np.ndarray, cov_2: np.ndarray) -> float:
    """Return the Frechet distance of two normal distributions: 0 or more.

    The trace of (C1 C2)^(1/2) equals the trace of (A C2 A)^(1/2) with A = C1^(1/2). That matrix is symmetric, so there
    are no complex numbers for any rank.
    """
    values, vectors = np.linalg.eigh(cov_1)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    inner = root @ cov_2 @ root
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh((inner + inner.T) / 2), 0.0)).sum()
    difference = mean_1 - mean_2
    return max(0.0, float(difference @ difference + np.trace(cov_1) + np.trace(cov_2) - 2.0 * cross))


def frechet_distance(real: np.ndarray, generated: np.ndarray) -> float:
    """Return `frechet` of the moments of features [N, d] and [M, d]."""
    return frechet(*moments(real), *moments(generated))


def kernel_distance(real: np.ndarray, generated: np.ndarray) -> float:
    """Return the kernel distance of features [N, d] and [M, d]; near 0, possibly below, for equal distributions.

    Raises ValueError for fewer than two rows.
    """
    x, y = real.astype(np.float64), generated.astype(np.float64)
    if min(len(x), len(y)) < 2:
        raise ValueError(f"{len(x)} and {len(y)} features, expected two or more of each")
    within = 0.0
    for z in (x, y):
        diagonal = float((((z * z).sum(axis=1) / z.shape[1] + 1.0) ** 3).sum())
        within += (_kernel_sum(z, z) - diagonal) / (len(z) * (len(z) - 1))
    return float(within - 2.0 * _kernel_sum(x, y) / (len(x) * len(y)))


def _kernel_sum(x: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    for start in range(0, len(x), _ROWS):
        total += float(((x[start : start + _ROWS] @ y.T / x.shape[1] + 1.0) ** 3).sum())
    return total


def precision_recall(real: np.ndarray, generated: np.ndarray, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """Return (precision, recall) of features [N, d] and [M, d].

    Raises ValueError for sets of no more than `neighbours` rows.
    """
    if min(len(real), len(generated)) <= neighbours:
        raise ValueError(f"{len(real)} and {len(generated)} features, expected more than {neighbours} of each")
    balls, balls_generated = _radii(real, neighbours), _radii(generated, neighbours)
    covered = np.zeros(len(generated), dtype=bool)
    reached = np.zeros(len(real), dtype=bool)
    for start, squares in _squares(real, generated):
        part = slice(start, start + len(squares))
        covered |= (squares <= balls[part, None]).any(axis=0)
        reached[part] = (squares <= balls_generated[None, :]).any(axis=1)
    return float(covered.mean()), float(reached.mean())


def _radii(x: np.ndarray, neighbours: int) -> np.ndarray:
    """Return the squared distance of each row to its k-th nearest neighbour, k = `neighbours`; k = 0 is the row."""
    return np.concatenate([np.partition(squares, neighbours, axis=1)[:, neighbours] for _, squares in _squares(x, x)])


def _squares(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the index of a row of x, and the squared distances of the rows from it on to all rows of y."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    lengths = (y * y).sum(axis=1)
    for start in range(0, len(x), _ROWS):
        part = x[start : start + _ROWS]
        squares = (part * part).sum(axis=1)[:, None] + lengths - 2.0 * (part @ y.T)
        yield start, np.maximum(squares, 0.0)


def nearest(pictures: np.ndarray, training: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (distances float64 [N], indices [N]) of the nearest of `training` for uint8 pictures [N, H, W, C].

    A distance is the root of the mean squared difference of pixels from 0 to 1. With |a - b|^2 = |a|^2 + |b|^2 - 2 a b
    the products of all pairs are matrix products. They select the neighbour; its distance is then computed from the
    pixels. Raises ValueError for pictures of different shapes and an empty training set.
    """
    if pictures.shape[1:] != training.shape[1:] or not len(training):
        raise ValueError(f"pictures have shape {list(pictures.shape)}, the training pictures {list(training.shape)}")
    x, y = _flat(pictures), _flat(training)
    half = np.square(y, dtype=np.float32).sum(axis=1) / 2
    product = (lambda rows: rows @ y.T) if launch.INTERPRETED else _product_kernel(y)
    indices = np.concatenate(
        [(half - product(x[start : start + _ROWS])).argmin(axis=1) for start in range(0, len(x), _ROWS)]
        or [np.zeros(0, dtype=np.int64)]
    )
    differences = (pictures.astype(np.float64) - training[indices]) * _SCALE
    return np.sqrt(np.square(differences).reshape(len(x), -1).mean(axis=1)), indices


def _flat(pictures: np.ndarray) -> np.ndarray:
    return pictures.reshape(len(pictures), -1).astype(np.float32) * np.float32(_SCALE)


def _product_kernel(y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that multiplies rows [n, d] with all rows of y."""
    on_device = torch.from_numpy(y).to(default_device())
    return lambda x: gemm.gemm(torch.from_numpy(x).to(on_device.device), on_device.t()).cpu().numpy()


def histogram(classes: np.ndarray, count: int) -> list[float]:
    """Return the share of each of `count` classes among class indices [N]."""
    return (np.bincount(classes, minlength=count) / max(1, len(classes))).tolist()


def memorised(distances: np.ndarray, real_distances: np.ndarray) -> float:
    """Return the share of distances below the 1st percentile of those of real pictures that were not trained on."""
    return float((distances < np.percentile(real_distances, 1.0)).mean())


def median_percentile(distances: np.ndarray, real_distances: np.ndarray) -> float:
    """Return the percentile of the median distance among the distances of real pictures."""
    return float(100.0 * (real_distances < np.median(distances)).mean())
