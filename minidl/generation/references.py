"""Sets of pictures with known faults. Their scores are the scale on which to read a generator's scores.

real               training pictures: the best possible
a class missing    training pictures without one class, the one whose absence changes the Frechet distance least
blurred            training pictures under a Gaussian blur of one pixel
ten images         ten training pictures, one of each class, over and over
noise              every pixel drawn from the uniform distribution
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from minidl.data import Images


def blurred(pixels: np.ndarray) -> np.ndarray:
    """uint8 [N, H, W, C] under a Gaussian blur with a standard deviation of one pixel."""
    smooth = ndimage.gaussian_filter(pixels.astype(np.float32), (0, 1, 1, 0))
    return np.clip(np.rint(smooth), 0, 255).astype(np.uint8)


def collapsed(images: Images, count: int) -> np.ndarray:
    """`count` pictures: the first of each class, over and over."""
    firsts = [int(np.flatnonzero(images.labels == label)[0]) for label in np.unique(images.labels)]
    return images.pixels[np.resize(firsts, count)]


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Pixels uint8 of a shape, drawn from the uniform distribution on 0 to 255."""
    return np.random.Generator(np.random.Philox(seed)).integers(0, 256, shape, dtype=np.uint8)


def sample(images: Images, count: int, seed: int = 0) -> Images:
    """`count` different pictures in a random order given by the seed; all of them if there are fewer."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(images))[:count]
    return Images(images.pixels[order], images.labels[order])
