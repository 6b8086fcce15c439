"""Load saved weights into a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from minidl import nn
from minidl.errors import damaged
from minidl.tensors import default_device


def load(model: nn.Module, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Load weights that were read from `path` into the model.

    Raises DamagedError for missing or unknown weights, other shapes, and values that are not finite.
    """
    check(model.state_dict(), weights, path)
    model.load_state_dict(weights)


def materialize(model: nn.Module, weights: Mapping[str, torch.Tensor], path: Path) -> nn.Module:
    """Move a model from torch's device "meta" to the default device and load weights. Raises DamagedError as `load`.

    A model made on the default device first draws random values, whose kernels take 0.4 s to load on a GPU.
    """
    check(model.state_dict(), weights, path)
    for tensor in (*model.parameters(), *model.buffers()):
        # empty_like of a "meta" tensor imports sympy, which takes a second.
        shape, strides = tensor.data.shape, tensor.data.stride()
        tensor.data = torch.empty_strided(shape, strides, dtype=tensor.data.dtype, device=default_device())
    model.load_state_dict(weights)
    return model


def check_layers(sizes: Sequence[int], weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise DamagedError unless the weights may belong to a perceptron with layers of these sizes.

    Call it before the model is made, which may be far larger than the file.
    """
    shapes = {tuple(sorted(tensor.shape)) for tensor in weights.values()}
    pairs = list(pairwise(sizes))
    for pair in pairs:
        if len(pairs) > len(weights) or tuple(sorted(pair)) not in shapes:
            raise damaged(path, f"no weight is {pair[0]} x {pair[1]}, which the settings of its run expect")


def check(state: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise DamagedError unless the weights read from `path` have the names and shapes of `state` and are finite."""
    expected = {name: list(tensor.shape) for name, tensor in state.items()}
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            shape, required = shapes.get(name, "missing"), expected.get(name, "nothing of this name")
            raise damaged(path, f"{name} is {shape}, the settings of its run expect {required}")
        # minidl writes no such dtypes, and torch.isfinite does not support all of them.
        if weights[name].is_complex() or weights[name].element_size() == 1:
            dtype, required = (str(tensor.dtype).removeprefix("torch.") for tensor in (weights[name], state[name]))
            raise damaged(path, f"{name} is of {dtype}, the settings of its run expect {required}")
        if not torch.isfinite(weights[name]).all():
            raise damaged(path, f"{name} has values that are not finite: training had diverged")
