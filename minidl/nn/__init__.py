"""Layers and models' building blocks, with torch's names where torch has the thing."""

from minidl.nn import init
from minidl.nn.conv import Conv2d
from minidl.nn.layers import (
    GELU,
    MLP,
    Dropout,
    Flatten,
    LeakyReLU,
    Linear,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
    SparseLinear,
    Tanh,
)
from minidl.nn.module import Module, Parameter

__all__ = [
    "GELU",
    "MLP",
    "Conv2d",
    "Dropout",
    "Flatten",
    "LeakyReLU",
    "Linear",
    "Module",
    "Parameter",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SparseLinear",
    "Tanh",
    "init",
]
