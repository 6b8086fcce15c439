"""Layers and models' building blocks, with torch's names where torch has the thing."""

from minidl.nn import init
from minidl.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d
from minidl.nn.float8 import to_float8
from minidl.nn.fold import fold_batch_norms
from minidl.nn.layers import (
    GELU,
    MLP,
    Dropout,
    Flatten,
    Identity,
    LeakyReLU,
    Linear,
    ReLU,
    ReLU6,
    Sequential,
    Sigmoid,
    SiLU,
    SparseLinear,
    Tanh,
)
from minidl.nn.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
)
from minidl.nn.module import Module, Parameter
from minidl.nn.vision import AdaptiveAvgPool2d, AvgPool2d, BatchNorm1d, BatchNorm2d, MaxPool2d

__all__ = [
    "GELU",
    "MLP",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "Dropout",
    "Flatten",
    "HuberLoss",
    "Identity",
    "KLDivLoss",
    "L1Loss",
    "LeakyReLU",
    "Linear",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "NLLLoss",
    "Parameter",
    "ReLU",
    "ReLU6",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "SparseLinear",
    "Tanh",
    "fold_batch_norms",
    "init",
    "to_float8",
]
