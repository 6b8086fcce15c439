"""Class activation maps: where in a picture the network saw the class that it answered.

    map[n, h, w] = sum_k weight[c_n, k] features[n, k, h, w]

for networks that end in the mean over places and a linear layer: the mean of a map, with the layer's bias, is the
class's output. Zhou, Khosla, Lapedriza, Oliva and Torralba, arXiv 1512.04150.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from minidl import models, nn, ops
from minidl.autograd import no_grad
from minidl.data.image_batches import ImageBatches
from minidl.data.records import Pictures
from minidl.tensors import Tensor, default_device
from minidl.training.tasks.images.networks import last_layer


def before_the_mean(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What the mean over places is taken of; None for a network that does not end in one."""
    if isinstance(model, models.DenseNet):
        features = model.features
        return lambda x: ops.relu(features(x))
    if isinstance(model, models.SmallCNN | models.ResNet | models.MobileNetV2):
        return model.features
    return None


def maps(model: nn.Module, pictures: Pictures, classes: np.ndarray) -> np.ndarray | None:
    """float32 [N, h, w]: the map of a class for each picture. `classes` int64 [N].

    None for a network that has none, and for pictures of which a single place is left.
    """
    features = before_the_mean(model)
    if features is None or not len(pictures):
        return None
    weight = last_layer(model)[1].weight
    batch = ImageBatches(pictures, classes, len(pictures), shuffle=False, dtype=weight.dtype)
    x, _ = next(batch.epoch(0))
    model.eval()
    with no_grad():
        found = features(Tensor(x))
        rows = weight.data[torch.from_numpy(classes).to(default_device())]
        y = ops.sum(found * Tensor(rows.reshape(*rows.shape, 1, 1)), 1)
    values = y.data.to(torch.float32).cpu().numpy()
    return values if values[0].size > 1 else None
