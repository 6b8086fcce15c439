"""The nearest training picture of each picture, by squared differences of pixels.

|a - b|^2 = |a|^2 + |b|^2 - 2 a b: the products of all pairs are matrix products, by minidl's kernel on a GPU and
NumPy's on a CPU. They select the neighbour; its distance is then computed from the pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from minidl.kernels import gemm
from minidl.runtime import launch
from minidl.tensors import default_device

Product = Callable[[np.ndarray], np.ndarray]  # rows [n, d] -> their products with all training pictures
_ROWS = 1024
_SCALE = 1.0 / 255.0


def nearest(pictures: np.ndarray, training: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distances float64 [N], indices [N]) of the nearest of `training` for uint8 pictures [N, H, W, C].

    A distance is the root of the mean squared difference of pixels from 0 to 1. Raises ValueError for pictures of
    different shapes and an empty training set.
    """
    if pictures.shape[1:] != training.shape[1:] or not len(training):
        raise ValueError(f"pictures have shape {list(pictures.shape)}, the training pictures {list(training.shape)}")
    x, y = _flat(pictures), _flat(training)
    half = np.square(y, dtype=np.float32).sum(axis=1) / 2
    product = _product_numpy(y) if launch.INTERPRETED else _product_kernel(y)
    indices = np.concatenate(
        [(half - product(x[start : start + _ROWS])).argmin(axis=1) for start in range(0, len(x), _ROWS)]
        or [np.zeros(0, dtype=np.int64)]
    )
    differences = (pictures.astype(np.float64) - training[indices]) * _SCALE
    return np.sqrt(np.square(differences).reshape(len(x), -1).mean(axis=1)), indices


def _flat(pictures: np.ndarray) -> np.ndarray:
    return pictures.reshape(len(pictures), -1).astype(np.float32) * np.float32(_SCALE)


def _product_numpy(y: np.ndarray) -> Product:
    return lambda x: x @ y.T


def _product_kernel(y: np.ndarray) -> Product:
    on_device = torch.from_numpy(y).to(default_device())
    return lambda x: gemm.gemm(torch.from_numpy(x).to(on_device.device), on_device.t()).cpu().numpy()
