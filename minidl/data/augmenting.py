"""Choose the augmentation of each training picture: moves, crops, and mixing with another picture.

It depends only on the seed, the epoch and the picture's index; the partner of a picture also depends on its position in
the batch. Each purpose has a Philox generator keyed by (seed, epoch); 24 bits of its 64-bit words make a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minidl.data.records import Augment

# Philox counters, one per purpose; `epoch_order` has 0.
_MOVES, _PARTS, _MIXES = 1, 2, 3
_TRIES = 10  # as torchvision's RandomResizedCrop
_LEAST_RATIO, _MOST_RATIO = 3 / 4, 4 / 3


def _words(count: int, columns: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """Return uint64 [count, columns]."""
    generator = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=[0, 0, 0, purpose])
    return generator.random_raw(count * columns).reshape(count, columns)


def _unit(words: np.ndarray, shift: int) -> np.ndarray:
    """Return float64 in [0, 1), of 24 bits."""
    return (words >> np.uint64(shift) & np.uint64(0xFFFFFF)).astype(np.float64) / 2**24


def epoch_moves(count: int, augment: Augment, seed: int, epoch: int) -> np.ndarray:
    """Return int32 [count, 3]: shift down and right, from -augment.shift to augment.shift, and whether to mirror."""
    words = _words(count, 1, seed, epoch, _MOVES)[:, 0]
    span = np.uint64(2 * augment.shift + 1)
    moves = np.empty((count, 3), dtype=np.int32)
    # 24 bits each: the bias of the remainder is below span / 2^24.
    moves[:, 0] = (words & np.uint64(0xFFFFFF)) % span
    moves[:, 1] = (words >> np.uint64(24) & np.uint64(0xFFFFFF)) % span
    moves[:, :2] -= augment.shift
    moves[:, 2] = (words >> np.uint64(63)) if augment.flip else 0
    return moves


def epoch_parts(count: int, size: tuple[int, int], augment: Augment, seed: int, epoch: int) -> np.ndarray:
    """Return int32 [count, 5] for `kernels.crops`: top, left, rows, columns, mirrored.

    With augment.crop below 1 as in torchvision's RandomResizedCrop: a share of the area from augment.crop to 1 and a
    ratio of sides from 3/4 to 4/3, uniform in its logarithm, the first of ten that fits; if none fits, the largest
    centered part with a ratio in range. Otherwise the full picture, moved by `epoch_moves`.
    """
    height, width = size
    moves = epoch_moves(count, augment, seed, epoch)
    parts = np.empty((count, 5), dtype=np.int32)
    parts[:, 4] = moves[:, 2]
    if augment.crop >= 1:
        # A picture moved down begins above its top edge. Pictures are mirrored after the crop.
        parts[:, 0], parts[:, 1] = -moves[:, 0], np.where(moves[:, 2] != 0, moves[:, 1], -moves[:, 1])
        parts[:, 2:4] = size
        return parts
    words = _words(count, _TRIES + 1, seed, epoch, _PARTS)
    area = height * width * (augment.crop + (1 - augment.crop) * _unit(words[:, 1:], 0))
    ratio = np.exp(np.log(_LEAST_RATIO) + np.log(_MOST_RATIO / _LEAST_RATIO) * _unit(words[:, 1:], 24))
    columns, rows = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (columns >= 1) & (columns <= width) & (rows >= 1) & (rows <= height)
    first = np.arange(count), fits.argmax(1)
    least, most = min(height, round(width / _LEAST_RATIO)), min(width, round(height * _MOST_RATIO))
    parts[:, 2] = np.where(fits.any(1), rows[first], max(1, least))
    parts[:, 3] = np.where(fits.any(1), columns[first], max(1, most))
    for axis, (length, sides) in enumerate(((height, parts[:, 2]), (width, parts[:, 3]))):
        room = length - sides
        start = np.floor(_unit(words[:, 0], 24 * axis) * (room + 1))
        parts[:, axis] = np.where(fits.any(1), start, room // 2)
    return parts


@dataclass(frozen=True)
class Mixes:
    """The arguments of `kernels.mixing` for N pictures: share float32 [N], box int32 [N, 4], part float32 [N]."""

    share: np.ndarray
    box: np.ndarray
    part: np.ndarray


def epoch_mixes(count: int, size: tuple[int, int], augment: Augment, seed: int, epoch: int) -> Mixes:
    """Return how each picture of `size` is mixed with its partner: by mixup, by cutmix, or by one of them at random.

    A picture's share has a beta distribution of (alpha, alpha), by its quantiles. A cutmix box has the area of the
    partner's share and its center anywhere in the picture; it is clipped to the picture.
    """
    height, width = size
    words = _words(count, 2, seed, epoch, _MIXES)
    cut = np.full(count, augment.cutmix > 0)
    if augment.mixup > 0 and augment.cutmix > 0:
        cut = words[:, 0] >> np.uint64(63) != 0
    shares = np.where(cut, _beta(words[:, 0], augment.cutmix), _beta(words[:, 0], augment.mixup))
    half = np.sqrt(1 - shares) / 2
    middles = np.floor(_unit(words[:, 1], 0) * height), np.floor(_unit(words[:, 1], 24) * width)
    box = np.zeros((count, 4), dtype=np.int32)
    for axis, (length, middle) in enumerate(zip(size, middles, strict=True)):
        reach = np.floor(half * length)
        box[:, axis] = np.where(cut, np.maximum(middle - reach, 0), 0)
        box[:, axis + 2] = np.where(cut, np.minimum(middle + reach, length), 0)
    boxed = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) / (height * width)
    share = np.where(cut, 1.0, shares).astype(np.float32)
    return Mixes(share, box, np.where(cut, 1 - boxed, share).astype(np.float32))


def _beta(words: np.ndarray, alpha: float) -> np.ndarray:
    """Return float64 numbers of the beta distribution of (alpha, alpha); 1 if alpha is not positive."""
    from scipy.special import betaincinv

    if alpha <= 0:
        return np.ones(len(words))
    # The middle of each of the 2^24 steps, so that no share is 0 or 1 by rounding alone.
    return betaincinv(alpha, alpha, _unit(words, 0) + 2.0**-25)
