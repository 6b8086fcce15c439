"""The contribution of each term of a text to a label, in a network whose first layer is sparse.

With h = x W + b before the first activation and g the gradient of a label's logit with respect to h, term j contributes
x_j (W_j . g), the gradient times the input. A network of piecewise linear activations is linear near h: these values
and a rest, the contribution of the biases, add up to the logit. The rest also contains all that is not linear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minidl import ops
from minidl.data.batches import csr_from_scipy
from minidl.ops.activation import activated
from minidl.tensors import Tensor, default_device

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


def logits(model: Any, features: csr_matrix) -> tuple[Tensor, Tensor]:
    """Return (h, logits) of a `TextMLP` in evaluation mode: [N, hidden], a leaf, and [N, classes]."""
    first, *rest = model.eval()
    x = csr_from_scipy(features).to(default_device())
    h = Tensor(ops.sparse_linear(x, first.weight, first.bias).data).requires_grad_()
    y = activated(h, first.act)
    for layer in rest:
        y = layer(y)
    return h, y


def values(model: Any, features: csr_matrix, outputs: tuple[Tensor, Tensor], classes: np.ndarray) -> np.ndarray:
    """Return the contribution of each entry of the features [N, columns] to logit classes[row]: float64 [entries].

    `outputs` is the result of `logits` for the features; it can be reused.
    """
    h, y = outputs
    seed = torch.zeros(y.shape, dtype=y.dtype)
    seed[torch.arange(len(classes)), torch.from_numpy(classes)] = 1.0
    h.grad = None
    y.backward(Tensor(seed.to(y.device)), retain_graph=True)
    slopes, weight = _array(h.grad), next(iter(model)).weight
    rows = _array(weight.data[torch.from_numpy(features.indices.astype(np.int64)).to(weight.device)])
    sizes: Any = np.diff(features.indptr)
    return features.data.astype(np.float64) * (rows * np.repeat(slopes, sizes, axis=0)).sum(1)


def _array(tensor: Any) -> np.ndarray:
    raw = tensor.data if isinstance(tensor, Tensor) else tensor
    return raw.to(torch.float64).cpu().numpy()
