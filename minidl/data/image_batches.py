"""Batches of pictures: the data set is on the device, and kernels select, augment, standardise and mix each batch.

A data set too large for that stays in host memory, and batches are copied ahead of their use. The order of the
pictures and their augmentation depend only on the seed, the epoch and the picture's index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from minidl.data.ahead import ahead, fits, pinned
from minidl.data.augmenting import epoch_mixes, epoch_moves, epoch_parts
from minidl.data.batches import Epochs
from minidl.data.records import Augment, Pictures
from minidl.kernels import crops, images, mixing
from minidl.tensors import default_device


class ImageBatches(Epochs):
    """Batches (x, y) on the device: x [B, C, H, W] of `dtype` in channels-last memory, y int64 [B], or where pictures
    are mixed float32 [B, classes].

    `sizes` are pairs of an epoch and the (height, width) of pictures from there on, in ascending order; before the
    first of them pictures have their own size. Orders and sizes of batches are those of `Batches`. The pixels are kept
    on the device if they take at most a quarter of its free memory; `resident` overrides this. Raises ValueError as
    `Epochs`, and for a negative shift, a crop out of its range, a mean that is not finite or a deviation that is not
    above 0; TypeError for an integer `dtype`.
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
        sizes: Sequence[tuple[int, tuple[int, int]]] = (),
        classes: int | None = None,
    ) -> None:
        super().__init__(len(pictures), np.asarray(targets, dtype=np.int64), batch_size, seed, shuffle)
        if augment is not None and (augment.shift < 0 or not 0 < augment.crop <= 1):
            raise ValueError(f"the shift must be 0 or more, the crop above 0 to 1, got {augment.shift}, {augment.crop}")
        if not (np.isfinite(pictures.mean).all() and np.isfinite(pictures.std).all() and np.min(pictures.std) > 0):
            raise ValueError(f"expected finite means and deviations above 0, got {pictures.mean} and {pictures.std}")
        if not dtype.is_floating_point:
            raise TypeError(f"expected a floating dtype for the batches, got {dtype}")
        self.dtype, self.sizes = dtype, sizes
        self._classes = int(self.targets.max(initial=0)) + 1 if classes is None else classes
        self.augment = None if augment is None or augment == Augment(replicate=augment.replicate) else augment
        self._device = default_device()
        self._host = pictures.pixels
        self._pixels: torch.Tensor | None = None
        if fits(pictures.pixels.nbytes, self._device) if resident is None else resident:
            self._pixels = self._put(np.ascontiguousarray(pictures.pixels))
        self._mean, self._std = (self._put(np.array(v, dtype=np.float32)) for v in (pictures.mean, pictures.std))

    def _visit(self, epoch: int, order: np.ndarray, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        augment, count = self.augment or Augment(), len(self.targets)
        own, size = self._host.shape[1:3], self.size(epoch)
        index, targets = self._put(order), self._put(self.targets[order])
        resized = size != own or augment.crop < 1
        changes = mixed = next_ones = None
        if resized:
            changes = self._put(epoch_parts(count, own, augment, self.seed, epoch)[order])
        elif augment.shift or augment.flip:
            changes = self._put(epoch_moves(count, augment, self.seed, epoch)[order])
        if augment.mixup or augment.cutmix:
            found = epoch_mixes(count, size, augment, self.seed, epoch)
            mixed = tuple(self._put(each[order]) for each in (found.share, found.box, found.part))
            next_ones = self._next_ones(rows)
        parts = [slice(start, start + rows) for start in range(0, len(order), rows)]
        for part, (pixels, picked) in zip(parts, self._pictures(order, index, parts, rows), strict=True):
            how = self._mean, self._std, self.dtype, augment.replicate
            change = None if changes is None else changes[part]
            if resized and change is not None:
                x = crops.crop(pixels, picked, change, size, *how)
            else:
                x = images.pick(pixels, picked, change, *how)
            y = targets[part]
            if mixed is not None:
                whole = len(picked) == rows
                partner = next_ones if whole and next_ones is not None else self._next_ones(len(picked))
                share, box, own_part = (each[part] for each in mixed)
                x = mixing.mix(x, partner, share, box)
                y = mixing.mix_targets(y, partner, own_part, self._classes)
            yield x, y

    def _next_ones(self, count: int) -> torch.Tensor:
        """The place of each picture's partner: the next one of the batch, of the last one the first."""
        return self._put(np.roll(np.arange(count), -1))

    def size(self, epoch: int) -> tuple[int, int]:
        """(height, width) of the pictures of an epoch."""
        size = self._host.shape[1:3]
        for begin, other in self.sizes:
            if epoch >= begin:
                size = other
        return size

    def _pictures(
        self, order: np.ndarray, index: torch.Tensor, parts: Sequence[slice], rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For every batch, pixels on the device and the indices of its pictures in them."""
        if self._pixels is not None:
            for part in parts:
                yield self._pixels, index[part]
            return
        straight = self._put(np.arange(rows))
        copied = (pinned(torch.from_numpy(self._host[order[part]]), self._device) for part in parts)
        for (pixels,) in ahead(((pixels,) for pixels in copied), self._device):
            yield pixels, straight[: len(pixels)]

    def _put(self, array: np.ndarray) -> torch.Tensor:
        # A copy: torch refuses read-only arrays, such as those over the bytes of a file.
        return torch.from_numpy(array.copy()).to(self._device)
