"""A model applied to a whole split."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import nn
from minidl.autograd import no_grad
from minidl.csr import CSR
from minidl.data.batches import Batches
from minidl.tensor import Tensor, default_device
from minidl.training.errors import DivergedError

BATCH = 1024


def outputs(model: nn.Module, features: Any) -> np.ndarray:
    """The model's outputs, float32 [N, K], in evaluation mode; features are scipy CSR or an array [N, F].

    Raises DivergedError when one is not finite: no score or answer may come of it.
    """
    device = default_device()
    batches = Batches(features, np.zeros(features.shape[0], dtype=np.int64), BATCH, shuffle=False)
    parts = []
    with no_grad():
        model.eval()
        for x, _ in batches.epoch(0):
            parts.append(model(x.to(device) if isinstance(x, CSR) else Tensor(x.to(device))).data.cpu().numpy())
    whole = np.concatenate(parts) if parts else np.zeros((0, 1), dtype=np.float32)
    if not np.isfinite(whole).all():
        raise DivergedError("the model's outputs are not finite")
    return whole
