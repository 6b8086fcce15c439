"""Batches of pictures: the data set is on the device, and a kernel selects, augments and standardises each batch.

A data set too large for that stays in host memory, and batches are copied ahead of their use. The order of the
pictures and their augmentation depend only on the seed, the epoch and the picture's index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from minidl.data.ahead import ahead, fits, pinned
from minidl.data.batches import Epochs
from minidl.data.records import Augment, Pictures
from minidl.kernels import images
from minidl.tensors import default_device

_MOVES = 1  # in Philox's counter: keeps these words apart from those of `epoch_order`


def epoch_moves(count: int, augment: Augment, seed: int, epoch: int) -> np.ndarray:
    """int32 [count, 3]: shift down and right, from -augment.shift to augment.shift, and whether to mirror.

    Picture i takes raw word i of a Philox generator keyed by (seed, epoch).
    """
    generator = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=[0, 0, 0, _MOVES])
    words = generator.random_raw(count)
    span = np.uint64(2 * augment.shift + 1)
    moves = np.empty((count, 3), dtype=np.int32)
    # 24 bits each: the bias of the remainder is below span / 2^24.
    moves[:, 0] = (words & np.uint64(0xFFFFFF)) % span
    moves[:, 1] = (words >> np.uint64(24) & np.uint64(0xFFFFFF)) % span
    moves[:, :2] -= augment.shift
    moves[:, 2] = (words >> np.uint64(63)) if augment.flip else 0
    return moves


class ImageBatches(Epochs):
    """Batches (x, y) on the device: x [B, C, H, W] of `dtype` in channels-last memory, y int64 [B].

    Orders and sizes are those of `Batches`. The pixels are kept on the device if they take at most a quarter of its
    free memory; `resident` overrides this. Raises ValueError as `Epochs`, and for a negative shift, a mean that is not
    finite or a deviation that is not above 0; TypeError for an integer `dtype`.
    """

    def __init__(
        self,
        pictures: Pictures,
        targets: Sequence[int] | np.ndarray,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | None = None,
        dtype: torch.dtype = torch.float32,
        resident: bool | None = None,
    ) -> None:
        super().__init__(len(pictures), np.asarray(targets, dtype=np.int64), batch_size, seed, shuffle)
        if augment is not None and augment.shift < 0:
            raise ValueError(f"the shift must be 0 or more, got {augment.shift}")
        if not (np.isfinite(pictures.mean).all() and np.isfinite(pictures.std).all() and np.min(pictures.std) > 0):
            raise ValueError(f"expected finite means and deviations above 0, got {pictures.mean} and {pictures.std}")
        if not dtype.is_floating_point:
            raise TypeError(f"expected a floating dtype for the batches, got {dtype}")
        self.dtype = dtype
        self.augment = None if augment is None or augment == Augment(replicate=augment.replicate) else augment
        self._device = default_device()
        self._host = pictures.pixels
        self._pixels: torch.Tensor | None = None
        if fits(pictures.pixels.nbytes, self._device) if resident is None else resident:
            self._pixels = self._put(np.ascontiguousarray(pictures.pixels))
        self._mean, self._std = (self._put(np.array(v, dtype=np.float32)) for v in (pictures.mean, pictures.std))

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches of an epoch from a step on, which are what the whole epoch yields after its first ones."""
        order = self.order(epoch)
        index, targets = self._put(order), self._put(self.targets[order])
        moves = None
        if self.augment is not None:
            moves = self._put(epoch_moves(len(order), self.augment, self.seed, epoch)[order])
        replicate = self.augment is not None and self.augment.replicate
        places = range(start_step * self.batch_size, len(order), self.batch_size)
        parts = [slice(start, start + self.batch_size) for start in places]
        for part, (pixels, picked) in zip(parts, self._pictures(order, index, parts), strict=True):
            moved = None if moves is None else moves[part]
            yield images.pick(pixels, picked, moved, self._mean, self._std, self.dtype, replicate), targets[part]

    def _pictures(
        self, order: np.ndarray, index: torch.Tensor, parts: Sequence[slice]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For every batch, pixels on the device and the indices of its pictures in them."""
        if self._pixels is not None:
            for part in parts:
                yield self._pixels, index[part]
            return
        straight = self._put(np.arange(self.batch_size))
        copied = (pinned(torch.from_numpy(self._host[order[part]]), self._device) for part in parts)
        for (pixels,) in ahead(((pixels,) for pixels in copied), self._device):
            yield pixels, straight[: len(pixels)]

    def _put(self, array: np.ndarray) -> torch.Tensor:
        # A copy: torch refuses read-only arrays, such as those over the bytes of a file.
        return torch.from_numpy(array.copy()).to(self._device)
