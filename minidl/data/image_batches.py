"""Batches of pictures: kernels select, augment, standardize and mix pictures of a data set on the device.

A data set too large for the device stays in host memory, and batches are copied ahead of their use. The order of the
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
    """Batches (x, y) on the device: x [B, C, H, W] of `dtype` in channels-last memory, y int64 [B], or float32
    [B, classes] if pictures are mixed.

    `sizes` are pairs of an epoch and the (height, width) of pictures from this epoch on, in ascending order; earlier
    epochs have the original size. Batches have the orders and sizes of `Batches`. The pixels stay on the device if they
    take at most a quarter of its free memory; `resident` overrides this. Raises ValueError as `Epochs`, and for a
    negative shift, a crop out of range, a mean that is not finite or a deviation that is not positive; TypeError for an
    integer `dtype`.
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
        original, size = self._host.shape[1:3], self.size(epoch)
        index, targets = self._put(order), self._put(self.targets[order])
        resized = size != original or augment.crop < 1
        changes = mixed = next_indices = None
        if resized:
            changes = self._put(epoch_parts(count, original, augment, self.seed, epoch)[order])
        elif augment.shift or augment.flip:
            changes = self._put(epoch_moves(count, augment, self.seed, epoch)[order])
        if augment.mixup or augment.cutmix:
            mixes = epoch_mixes(count, size, augment, self.seed, epoch)
            mixed = tuple(self._put(array[order]) for array in (mixes.share, mixes.box, mixes.part))
            next_indices = self._next_indices(rows)
        parts = [slice(start, start + rows) for start in range(0, len(order), rows)]
        for part, (pixels, indices) in zip(parts, self._pictures(order, index, parts, rows), strict=True):
            arguments = self._mean, self._std, self.dtype, augment.replicate
            change = None if changes is None else changes[part]
            if resized and change is not None:
                x = crops.crop(pixels, indices, change, size, *arguments)
            else:
                x = images.pick(pixels, indices, change, *arguments)
            y = targets[part]
            if mixed is not None:
                partner = next_indices if len(indices) == rows else None
                partner = self._next_indices(len(indices)) if partner is None else partner
                share, box, target_share = (tensor[part] for tensor in mixed)
                x = mixing.mix(x, partner, share, box)
                y = mixing.mix_targets(y, partner, target_share, self._classes)
            yield x, y

    def _next_indices(self, count: int) -> torch.Tensor:
        """Return the index of each picture's partner: the next picture of the batch, and the first for the last."""
        return self._put(np.roll(np.arange(count), -1))

    def size(self, epoch: int) -> tuple[int, int]:
        """Return (height, width) of the pictures of an epoch."""
        size = self._host.shape[1:3]
        for begin, other in self.sizes:
            if epoch >= begin:
                size = other
        return size

    def _pictures(
        self, order: np.ndarray, index: torch.Tensor, parts: Sequence[slice], rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return for every batch pixels on the device and the indices of its pictures in them."""
        if self._pixels is not None:
            for part in parts:
                yield self._pixels, index[part]
            return
        indices = self._put(np.arange(rows))
        copied = (pinned(torch.from_numpy(self._host[order[part]]), self._device) for part in parts)
        for (pixels,) in ahead(((pixels,) for pixels in copied), self._device):
            yield pixels, indices[: len(pixels)]

    def _put(self, array: np.ndarray) -> torch.Tensor:
        # Copy, because torch refuses read-only arrays, such as views of the bytes of a file.
        return torch.from_numpy(array.copy()).to(self._device)
