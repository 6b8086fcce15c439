"""Compute the images of many latents, in passes of constant size, with copies that overlap the kernels.

An image's values depend only on its latent, not on other images of its batch. A kernel's form, tile and split follow
from the shape of its input, so on a GPU every pass has the same number of images (`pass_size`; the last one is padded).
In the interpreter, where a product's rounding depends on the row's position in the matrix, a pass is one image. A batch
is as many passes as memory allows: its results are copied to pinned memory on a second stream while the next batch
runs. From the second pass on, a pass replays a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from minidl import nn
from minidl.autograd import no_grad
from minidl.compilation.capture import Captured, capture
from minidl.compilation.rehearsal import rehearse
from minidl.data.threads import in_slices
from minidl.errors import ConfigError, RunError
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.training.process import out_of_memory
from minidl.training.process.compile_ahead import compile_ahead
from minidl.training.process.display import Display

_MAX_PASS = 256
_MIN_PASS = 16
_PASS_VALUES = 2**22  # in the pictures of one pass: their feature maps have up to about twenty times as many
_BATCH_BYTES = 2**28  # of pictures being copied to the host: more is not faster
_MEMORY_SHARE = 0.25
_EXPONENT = 0x7C00  # of float16


def pass_size(channels: int, size: tuple[int, int]) -> int:
    """Return the images per pass on a GPU: a power of two from 16 to 256 that depends only on the size of a picture."""
    values = channels * size[0] * size[1]
    return max(_MIN_PASS, min(_MAX_PASS, 1 << max(0, (_PASS_VALUES // values).bit_length() - 1)))


def batch_size(pass_: int, image_bytes: int, limit: int | None, free: int | None) -> int:
    """Return the images per copy to the host: those of at least one pass, a multiple of `pass_`.

    `limit` None: as many as fit into a quarter of the device's `free` bytes, and into 2^28 bytes. `free` None: the
    free memory is unknown.
    """
    images = limit
    if images is None:
        images = min(_BATCH_BYTES, _BATCH_BYTES if free is None else int(free * _MEMORY_SHARE)) // image_bytes
    return max(1, -(-images // pass_) if limit is not None else images // pass_) * pass_


def too_little(short: out_of_memory.Shortage, batch: int, one_pass: int, attempt: Callable[[int], object]) -> str:
    """Return advice after memory ran out: a batch has at least one pass."""
    if short.where != "GPU":
        return out_of_memory.advice(short, batch)
    # Half of the free memory: a graph keeps memory of its own.
    if batch > one_pass and out_of_memory.fits(attempt, one_pass, 0.5):
        return f"a batch of {one_pass} images fits, which was tested: use --batch-size {one_pass}"
    return (
        f"the smallest batch, one pass of {one_pass} images, does not fit: stop other programs on the GPU, or use "
        "--precision float16 or --device cpu"
    )


def images(
    model: nn.Module,
    latents: np.ndarray,
    channels: int,
    size: tuple[int, int],
    batch: int | None = None,
    together: int = 1,
) -> Iterator[np.ndarray]:
    """Yield the images of latents float32 [N, latent], in order: arrays [n, channels, H, W] of the model's dtype.

    An array is overwritten by the second one after it: use it, or copy it. In the interpreter a pass has `together`
    images; more than 1 is about twenty times faster, but then an image's last bits may depend on its position.
    Raises RunError if the device has not enough memory for one pass.
    """
    if launch.ON_CPU:
        return _interpreted(model, latents, batch or 1, together)
    return Passes(model, channels, size, batch).images(latents)


def _interpreted(model: nn.Module, latents: np.ndarray, batch: int, together: int) -> Iterator[np.ndarray]:
    rows = torch.from_numpy(latents.copy()).to(_dtype(model))
    batch = max(batch, together)
    for start in range(0, len(rows), batch):
        with no_grad():
            outputs = [model(Tensor(part)).data.numpy() for part in rows[start : start + batch].split(together)]
        yield np.concatenate(outputs)


class Passes:
    """A network on a GPU for several sets of latents: it reuses the memory of batches and a CUDA graph of a pass.

    Arguments as for `images`. The network's weights must keep their addresses.
    """

    def __init__(self, model: nn.Module, channels: int, size: tuple[int, int], batch: int | None = None) -> None:
        self.model, self.dtype, self.shape = model, _dtype(model), (*size, channels)
        self.device = default_device()
        self.one_pass = pass_size(channels, size)
        image_bytes = channels * size[0] * size[1] * self.dtype.itemsize
        self.batch = batch_size(self.one_pass, image_bytes, batch, torch.cuda.mem_get_info(self.device)[0])
        self._copies = torch.cuda.Stream(self.device)
        # By the precision of float32 products, which a graph fixes.
        self._passes: dict[str, Captured[tuple[torch.Tensor]]] = {}
        self._slots: list[_Slot] = []

    def images(self, latents: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the images of latents float32 [N, latent] as `images` does; the next call overwrites them, too.

        Several calls may run at the same time.
        """
        batch = min(self.batch, max(1, -(-len(latents) // self.one_pass)) * self.one_pass)
        # Reserved until the end: another call in between allocates its own.
        slots, self._slots = self._slots, []
        short: out_of_memory.Shortage | None = None
        slot: _Slot | None = None
        waiting: tuple[_Slot, int] | None = None
        try:
            if not slots or slots[0].count < batch:
                slots = [_Slot(batch, latents.shape[1], self.shape, self.dtype, self.device) for _ in range(2)]
            for number, start in enumerate(range(0, len(latents), batch)):
                part = latents[start : start + batch]
                slot = slots[number % 2]
                with no_grad():
                    self._run(slot, part)
                if waiting is not None:
                    yield waiting[0].result(waiting[1])
                waiting = slot, len(part)
            if waiting is not None:
                yield waiting[0].result(waiting[1])
        except Exception as error:
            short = out_of_memory.read(error)
            if short is None:
                raise
        finally:
            self._slots = slots
        if short is not None:
            # The error no longer holds memory, and the slots are freed, too: only one pass is tried.
            self._slots = slots = []
            slot = waiting = None
            advice = too_little(short, batch, self.one_pass, lambda count: self._attempt(count, latents.shape[1]))
            raise RunError(f"{short}; {advice}")

    def _attempt(self, count: int, latent: int) -> None:
        """Run one pass without a graph."""
        with no_grad():
            pictures(self.model, self.dtype, Tensor(torch.zeros(count, latent, device=self.device)))

    def _run(self, slot: _Slot, latents: np.ndarray) -> None:
        """Enqueue the passes of up to one batch of latents, each with its copy to the host."""
        kernels = torch.cuda.current_stream()
        pictures_of = self._pass(Tensor(slot.z_device[: self.one_pass]))
        count = len(latents)
        padded = -(-count // self.one_pass) * self.one_pass
        # No kernel reads this slot's latents any more: `result` has waited for its pictures.
        slot.z[:count] = torch.from_numpy(latents.copy())
        slot.z[count:padded] = 0.0
        slot.z_device[:padded].copy_(slot.z[:padded], non_blocking=True)
        for start in range(0, padded, self.one_pass):
            (pictures,) = pictures_of(Tensor(slot.z_device[start : start + self.one_pass]))
            self._copies.wait_stream(kernels)
            with torch.cuda.stream(self._copies):
                slot.pictures[start : start + self.one_pass].copy_(pictures, non_blocking=True)
            # The allocator must not reuse the memory before the copy has read it.
            pictures.record_stream(self._copies)
        slot.copied.record(self._copies)

    def _pass(self, example: Tensor) -> Captured[tuple[torch.Tensor]]:
        """Return the captured pass in the current precision, with compiled kernels."""
        precision = launch.float32_precision()
        if precision not in self._passes:
            # Not a method: a reference to self would be a cycle, which keeps memory until the next collection.
            step = capture(partial(pictures, self.model, self.dtype), eager=1)
            compile_ahead(lambda: rehearse(step, example), Display(quiet=True))
            self._passes[precision] = step
        return self._passes[precision]


class _Slot:
    """The memory of one batch: latents and pictures [batch, H, W, C], pinned on the host, and latents on the device."""

    def __init__(
        self, batch: int, latent: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count = batch
        self.z = torch.zeros(batch, latent, dtype=torch.float32, pin_memory=True)
        self.z_device = torch.zeros(batch, latent, dtype=torch.float32, device=device)
        self.pictures = torch.empty(batch, *shape, dtype=dtype, pin_memory=True)
        self.copied = torch.cuda.Event()

    def result(self, count: int) -> np.ndarray:
        """Wait until the first `count` pictures are on the host, and return them [count, C, H, W]."""
        self.copied.synchronize()
        return self.pictures[:count].permute(0, 3, 1, 2).numpy()


def pictures(model: nn.Module, dtype: torch.dtype, z: Tensor) -> tuple[torch.Tensor]:
    """Return the pictures [one pass, H, W, C] of latents float32."""
    y = model(Tensor(z.data.to(dtype))).data
    return (y.permute(0, 2, 3, 1).contiguous(),)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters())


def check_finite(images: np.ndarray, first: int) -> None:
    """Raise ConfigError if an image has a value that is not finite; `first` is the number of images before these."""

    def check(start: int, part: np.ndarray) -> None:
        # NumPy converts float16 one value at a time; a non-finite value has all exponent bits set.
        half = part.dtype == np.float16
        finite = (part.view(np.uint16) & _EXPONENT) != _EXPONENT if half else np.isfinite(part)
        bad = np.flatnonzero(~finite.all(axis=(1, 2, 3)))
        if len(bad):
            raise ConfigError(
                f"image {first + start + int(bad[0]) + 1} has values that are not finite: its latent is too large for "
                "the model or for --precision"
            )

    in_slices(check, images)


def everything(
    model: nn.Module,
    latents: np.ndarray,
    channels: int,
    size: tuple[int, int],
    batch: int | None = None,
    together: int = 1,
) -> np.ndarray:
    """Return all images of latents as one array [N, channels, H, W] of the model's dtype.

    Raises the errors of `images`, and ConfigError for values that are not finite.
    """
    parts: list[np.ndarray] = []
    for part in images(model, latents, channels, size, batch, together):
        check_finite(part, sum(map(len, parts)))
        parts.append(part.copy())
    return np.concatenate(parts) if parts else torch.zeros(0, channels, *size, dtype=_dtype(model)).numpy()
