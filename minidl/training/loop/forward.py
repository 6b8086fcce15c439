"""Apply a model to a split; the outputs come in parts of bounded size."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from minidl import nn
from minidl.autograd import no_grad
from minidl.compilation.rehearsal import UnknownError
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.data.records import Pictures
from minidl.errors import DamagedError, DivergedError
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from minidl.training.process import out_of_memory
from minidl.training.process.compile_ahead import compile_ahead
from minidl.training.process.display import Display

BATCH = 1024
_BATCH_PIXELS, _BATCH_TERMS = 2**20, 2**16
_BATCH_VALUES, _PART_VALUES = 2**24, 2**26  # outputs of a batch and of a part; most splits are one part
_compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose kernels are compiled
_FEWER = "at most {} inputs at a time, or --device cpu"


def outputs(model: nn.Module, features: Any, width: int = 1, smaller: str | None = None) -> Iterator[np.ndarray]:
    """Yield the model's outputs in evaluation mode, in order: parts float32 [n, width], at least one.

    `features` are scipy CSR, an array [N, F] or Pictures; `smaller` is the phrase that asks for fewer inputs, None if
    their number is fixed. Raises DivergedError when an output is not finite, and RunError when memory runs out.
    """
    size = _size(features, width)
    batch_outputs: list[np.ndarray] = []
    batches = _apply(model, features, size)
    attempt = None if smaller is None else lambda n: next(_apply(model, features, n))
    most = min(size, features.shape[0])

    def batch() -> np.ndarray | None:
        with out_of_memory.used_for(f"the outputs of {most:,} inputs"):
            return next(batches, None)

    while True:
        y = out_of_memory.guarded(batch, most, attempt, smaller=smaller or "")
        if batch_outputs and (y is None or sum(each.size for each in batch_outputs) >= _PART_VALUES):
            part = np.concatenate(batch_outputs)
            batch_outputs.clear()
            if not np.isfinite(part).all():
                raise DivergedError("the model's outputs are not finite")
            yield part
        if y is None:
            break
        batch_outputs.append(y)
    if features.shape[0] == 0:
        yield np.zeros((0, width), dtype=np.float32)


def _size(features: Any, width: int) -> int:
    """Return the number of inputs in a batch."""
    size = max(1, min(BATCH, _BATCH_VALUES // width))
    if isinstance(features, Pictures):
        size = min(size, max(1, _BATCH_PIXELS // math.prod(features.shape[1:3])))
    elif features.dtype == np.int32:
        size = min(size, max(1, _BATCH_TERMS // features.shape[1]))
    return size


def batch_and_part(features: Any, width: int) -> tuple[int, int]:
    """Return the number of inputs in a batch, and in a part of `outputs`."""
    size = _size(features, width)
    return size, -(-_PART_VALUES // (size * width)) * size


def rehearse(model: nn.Module, features: Any, width: int = 1) -> None:
    """Rehearse the launches of `outputs`: its first and its last batch."""
    size, count = _size(features, width), int(features.shape[0])
    for rows in sorted({min(size, count), count % size} - {0}):
        with contextlib.suppress(UnknownError):
            next(_apply(model, features, rows))


def saved_outputs(model: nn.Module, features: Any, width: int = 1) -> Iterator[np.ndarray]:
    """Yield the `outputs` of a finished run's model. Raises DamagedError when one is not finite."""
    if model not in _compiled:
        _compiled.add(model)
        compile_ahead(lambda: rehearse(model, features, width), Display(quiet=True))
    try:
        yield from outputs(model, features, width, _FEWER)
    except DivergedError as error:
        raise DamagedError(
            f"{error}, or correct the input: a number in it may be too far outside the range of the training split"
        ) from None


def _apply(model: nn.Module, features: Any, size: int) -> Iterator[np.ndarray]:
    """Yield the outputs of each batch."""
    device = default_device()
    model.eval()
    for x, _ in _batches(model, features, size).epoch(0):
        with no_grad():
            y = model(x.to(device) if isinstance(x, CSR) else Tensor(x.to(device)))
        yield y.data.to(torch.float32).cpu().numpy()


def _batches(model: nn.Module, features: Any, size: int) -> Batches | ImageBatches:
    targets = np.zeros(features.shape[0], dtype=np.int64)
    if not isinstance(features, Pictures):
        device = default_device()
        return Batches(features, targets, size, shuffle=False, device=device if launch.is_gpu(device) else None)
    dtype = next(parameter.dtype for parameter in model.parameters())
    return ImageBatches(features, targets, size, shuffle=False, dtype=dtype)
