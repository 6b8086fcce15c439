"""The network over many latents: passes of a constant size, copies hidden behind the kernels.

An image's floats depend on its latent alone, not on the others beside it. A kernel's form, tile and split follow from
the shape of its input, so on a GPU every pass has the same number of images (`pass_size`; the last one is filled up);
in the interpreter, where a product's rounding depends on the row's place in the matrix, a pass is one image. A batch,
which memory limits, is some passes: their results go to pinned memory on a second stream while the next batch runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from minidl import nn
from minidl.autograd import no_grad
from minidl.kernels import launch
from minidl.tensor import Tensor, default_device
from minidl.training.errors import ConfigError, RunError

_MAX_PASS = 256
_MIN_PASS = 16
_PASS_VALUES = 2**22  # of the pictures of one pass: the maps before them have at most some twenty times as many
_BATCH_BYTES = 2**28  # of pictures on their way to the host: more gains nothing
_MEMORY_SHARE = 0.25


def pass_size(channels: int, size: tuple[int, int]) -> int:
    """Images of one pass on a GPU: a power of two from 16 to 256, by the size of a picture alone."""
    values = channels * size[0] * size[1]
    return max(_MIN_PASS, min(_MAX_PASS, 1 << max(0, (_PASS_VALUES // values).bit_length() - 1)))


def batch_size(pass_: int, image_bytes: int, wanted: int | None, free: int | None) -> int:
    """Images between two copies to the host: whole passes, at least one.

    `wanted` None: what a quarter of the `free` bytes of the device holds, at most 2^28 bytes. `free` None: no limit is
    known.
    """
    images = wanted
    if images is None:
        images = min(_BATCH_BYTES, _BATCH_BYTES if free is None else int(free * _MEMORY_SHARE)) // image_bytes
    return max(1, -(-images // pass_) if wanted is not None else images // pass_) * pass_


def images(
    model: nn.Module,
    latents: np.ndarray,
    channels: int,
    size: tuple[int, int],
    batch: int | None = None,
    together: int = 1,
) -> Iterator[np.ndarray]:
    """The images of latents float32 [N, latent], in order: arrays [n, channels, H, W] of the model's dtype.

    An array is overwritten by the one after the next: use it, or copy it. `together` images make a pass in the
    interpreter; more than 1 are some twenty times faster, and their last bits may depend on each other's places.
    Raises RunError when the device has no memory for one pass.
    """
    if launch.INTERPRETED:
        return _interpreted(model, latents, batch or 1, together)
    return _overlapped(model, latents, channels, size, batch)


def _interpreted(model: nn.Module, latents: np.ndarray, batch: int, together: int) -> Iterator[np.ndarray]:
    rows = torch.from_numpy(latents.copy()).to(_dtype(model))
    batch = max(batch, together)
    for start in range(0, len(rows), batch):
        with no_grad():
            found = [model(Tensor(part)).data.numpy() for part in rows[start : start + batch].split(together)]
        yield np.concatenate(found)


def _overlapped(
    model: nn.Module, latents: np.ndarray, channels: int, size: tuple[int, int], batch: int | None
) -> Iterator[np.ndarray]:
    dtype, device = _dtype(model), default_device()
    one_pass = pass_size(channels, size)
    values = channels * size[0] * size[1]
    batch = batch_size(one_pass, values * dtype.itemsize, batch, torch.cuda.mem_get_info(device)[0])
    batch = min(batch, -(-len(latents) // one_pass) * one_pass)
    try:
        slots = [_Slot(batch, latents.shape[1], (*size, channels), dtype, device) for _ in range(2)]
        copies = torch.cuda.Stream(device)
        waiting: tuple[_Slot, int] | None = None
        for number, start in enumerate(range(0, len(latents), batch)):
            part = latents[start : start + batch]
            slot = slots[number % 2]
            with no_grad():
                slot.run(model, part, one_pass, copies)
            if waiting is not None:
                yield waiting[0].result(waiting[1])
            waiting = slot, len(part)
        if waiting is not None:
            yield waiting[0].result(waiting[1])
    except torch.cuda.OutOfMemoryError:
        raise RunError(
            f"the GPU has no memory for a batch of {batch} images in passes of {one_pass}; end other programs on it, "
            "or give a smaller --batch-size"
        ) from None


class _Slot:
    """The memory of one batch: latents and pictures [batch, H, W, C], pinned on the host, and the latents' copy."""

    def __init__(
        self, batch: int, latent: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.z = torch.zeros(batch, latent, dtype=torch.float32, pin_memory=True)
        self.z_device = torch.zeros(batch, latent, dtype=torch.float32, device=device)
        self.pictures = torch.empty(batch, *shape, dtype=dtype, pin_memory=True)
        self.copied = torch.cuda.Event()

    def run(self, model: nn.Module, latents: np.ndarray, one_pass: int, copies: torch.cuda.Stream) -> None:
        """Enqueue the passes of up to a batch of latents, and each one's copy to the host."""
        kernels = torch.cuda.current_stream()
        dtype = _dtype(model)
        count = len(latents)
        padded = -(-count // one_pass) * one_pass
        # The kernels that read this slot's latents before are done: its pictures have been waited for.
        self.z[:count] = torch.from_numpy(latents.copy())
        self.z[count:padded] = 0.0
        self.z_device[:padded].copy_(self.z[:padded], non_blocking=True)
        for start in range(0, padded, one_pass):
            y = model(Tensor(self.z_device[start : start + one_pass].to(dtype))).data
            pictures = y.permute(0, 2, 3, 1).contiguous()
            copies.wait_stream(kernels)
            with torch.cuda.stream(copies):
                self.pictures[start : start + one_pass].copy_(pictures, non_blocking=True)
            # The allocator must not hand the memory out again before the copy has read it.
            pictures.record_stream(copies)
        self.copied.record(copies)

    def result(self, count: int) -> np.ndarray:
        """The first `count` pictures [n, C, H, W], as soon as they are on the host."""
        self.copied.synchronize()
        return self.pictures[:count].permute(0, 3, 1, 2).numpy()


def _dtype(model: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters())


def check_finite(found: np.ndarray, first: int) -> None:
    """Raises ConfigError when an image, the first of them being number `first`, has a value that is not finite."""
    bad = np.flatnonzero(~np.isfinite(found.reshape(len(found), -1)).all(axis=1))
    if len(bad):
        raise ConfigError(
            f"image {first + int(bad[0]) + 1} has values that are not finite: its latent is too large for the model "
            "or for --precision"
        )


def everything(
    model: nn.Module,
    latents: np.ndarray,
    channels: int,
    size: tuple[int, int],
    batch: int | None = None,
    together: int = 1,
) -> np.ndarray:
    """All the images of latents as one array [N, channels, H, W] of the model's dtype.

    Raises as `images`, and ConfigError for values that are not finite.
    """
    parts: list[np.ndarray] = []
    for part in images(model, latents, channels, size, batch, together):
        check_finite(part, sum(map(len, parts)))
        parts.append(part.copy())
    return np.concatenate(parts) if parts else np.zeros((0, channels, *size), dtype=np.float32)
