"""Class activation maps: how much each position of a picture contributes to the predicted class.

    map[n, h, w] = sum_k weight[c_n, k] features[n, k, h, w]

for networks that end in global average pooling and a linear layer: the mean of a map, plus the layer's bias, is the
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


def feature_extractor(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the layers before the global average pooling; None for a network without it."""
    if isinstance(model, models.DenseNet):
        features = model.features
        return lambda x: ops.relu(features(x))
    if isinstance(model, models.SmallCNN | models.ResNet | models.MobileNetV2):
        return model.features
    return None


def maps(model: nn.Module, pictures: Pictures, classes: np.ndarray) -> np.ndarray | None:
    """Return the map of a class for each picture, float32 [N, h, w]. `classes` int64 [N].

    Returns None for a network without global average pooling, and for maps of a single position.
    """
    extract = feature_extractor(model)
    if extract is None or not len(pictures):
        return None
    weight = last_layer(model)[1].weight
    batch = ImageBatches(pictures, classes, len(pictures), shuffle=False, dtype=weight.dtype)
    x, _ = next(batch.epoch(0))
    model.eval()
    with no_grad():
        features = extract(Tensor(x))
        rows = weight.data[torch.from_numpy(classes).to(default_device())]
        y = ops.sum(features * Tensor(rows.reshape(*rows.shape, 1, 1)), 1)
    values = y.data.to(torch.float32).cpu().numpy()
    return values if values[0].size > 1 else None
