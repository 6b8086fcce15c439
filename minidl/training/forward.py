"""A model applied to a whole split."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from minidl import nn
from minidl.autograd import no_grad
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.data.records import Pictures
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from minidl.training import memory
from minidl.training.errors import DamagedError, DivergedError

BATCH = 1024
_BATCH_PIXELS = 2**20


def outputs(model: nn.Module, features: Any) -> np.ndarray:
    """The model's outputs, float32 [N, K], in evaluation mode; features are scipy CSR, an array [N, F] or
    Pictures.

    Raises DivergedError when one is not finite, and RunError, with a batch size that fits, when memory runs out.
    """
    size = BATCH
    if isinstance(features, Pictures):
        size = min(BATCH, max(1, _BATCH_PIXELS // math.prod(features.shape[1:3])))
    whole = memory.guarded(
        lambda: _apply(model, features, size), min(size, features.shape[0]), lambda n: _apply(model, features, n, 1),
        smaller="at most {} inputs at a time, or --device cpu",
    )  # fmt: skip
    if not np.isfinite(whole).all():
        raise DivergedError("the model's outputs are not finite")
    return whole


def saved_outputs(model: nn.Module, features: Any) -> np.ndarray:
    """`outputs` of a finished run's model. Raises DamagedError when one is not finite."""
    try:
        return outputs(model, features)
    except DivergedError as error:
        raise DamagedError(
            f"{error}, or correct the input: a number in it may be too far outside the range of the training split"
        ) from None


def _apply(model: nn.Module, features: Any, size: int, most: int | None = None) -> np.ndarray:
    """The outputs, or those of the first `most` batches."""
    device = default_device()
    parts = []
    with no_grad():
        model.eval()
        for x, _ in itertools.islice(_batches(model, features, size).epoch(0), most):
            y = model(x.to(device) if isinstance(x, CSR) else Tensor(x.to(device)))
            parts.append(y.data.to(torch.float32).cpu().numpy())
    return np.concatenate(parts) if parts else np.zeros((0, 1), dtype=np.float32)


def _batches(model: nn.Module, features: Any, size: int) -> Batches | ImageBatches:
    targets = np.zeros(features.shape[0], dtype=np.int64)
    if not isinstance(features, Pictures):
        return Batches(features, targets, size, shuffle=False)
    dtype = next(parameter.dtype for parameter in model.parameters())
    return ImageBatches(features, targets, size, shuffle=False, dtype=dtype)
