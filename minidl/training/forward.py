"""A model applied to a whole split."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from minidl import nn
from minidl.autograd import no_grad
from minidl.csr import CSR
from minidl.data.batches import Batches
from minidl.data.image_batches import ImageBatches
from minidl.data.records import Pictures
from minidl.tensor import Tensor, default_device
from minidl.training.errors import DivergedError

BATCH = 1024
_BATCH_PIXELS = 2**20


def outputs(model: nn.Module, features: Any) -> np.ndarray:
    """The model's outputs, float32 [N, K], in evaluation mode; features are scipy CSR, an array [N, F] or
    Pictures.

    Raises DivergedError when one is not finite: no score or answer may come of it.
    """
    device = default_device()
    batches = _batches(model, features)
    parts = []
    with no_grad():
        model.eval()
        for x, _ in batches.epoch(0):
            y = model(x.to(device) if isinstance(x, CSR) else Tensor(x.to(device)))
            parts.append(y.data.to(torch.float32).cpu().numpy())
    whole = np.concatenate(parts) if parts else np.zeros((0, 1), dtype=np.float32)
    if not np.isfinite(whole).all():
        raise DivergedError("the model's outputs are not finite")
    return whole


def _batches(model: nn.Module, features: Any) -> Batches | ImageBatches:
    targets = np.zeros(features.shape[0], dtype=np.int64)
    if not isinstance(features, Pictures):
        return Batches(features, targets, BATCH, shuffle=False)
    size = min(BATCH, max(1, _BATCH_PIXELS // math.prod(features.shape[1:3])))
    dtype = next(parameter.dtype for parameter in model.parameters())
    return ImageBatches(features, targets, size, shuffle=False, dtype=dtype)
