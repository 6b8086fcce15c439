"""Layers and building blocks of models, under torch's names where torch has them.

Read `module` first, then `layers`, `conv`, `norms` and `losses`; `fold` merges batch norms for inference.
"""

import importlib

from minidl.common import suggestions
from minidl.nn import init
from minidl.nn.activations import (
    ELU,
    GELU,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from minidl.nn.containers import ModuleDict, ModuleList
from minidl.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d
from minidl.nn.float8 import to_float8
from minidl.nn.fold import fold_batch_norms
from minidl.nn.images import (
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    ConstantPad2d,
    Dropout2d,
    Embedding,
    PixelShuffle,
    PixelUnshuffle,
    ReflectionPad2d,
    ReplicationPad2d,
    Upsample,
    ZeroPad2d,
)
from minidl.nn.layers import (
    MLP,
    CosineSimilarity,
    Dropout,
    Flatten,
    Identity,
    Linear,
    Sequential,
    SparseLinear,
    Unflatten,
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
from minidl.nn.norms import GroupNorm, LayerNorm, RMSNorm
from minidl.nn.vision import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    MaxPool1d,
    MaxPool2d,
    SyncBatchNorm,
)

__all__ = [
    "ELU", "GELU", "MLP", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d",
    "AvgPool1d", "AvgPool2d", "BCELoss", "BCEWithLogitsLoss", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d",
    "ConstantPad2d", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "CosineSimilarity",
    "CrossEntropyLoss", "Dropout", "Dropout2d", "Embedding", "Flatten", "GroupNorm", "Hardsigmoid", "Hardswish",
    "Hardtanh", "HuberLoss", "Identity", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "KLDivLoss", "L1Loss",
    "LayerNorm", "LeakyReLU", "Linear", "LogSigmoid", "LogSoftmax", "MSELoss", "MaxPool1d", "MaxPool2d", "Mish",
    "Module", "ModuleDict", "ModuleList", "NLLLoss", "PReLU", "Parameter", "PixelShuffle", "PixelUnshuffle", "RMSNorm",
    "ReLU", "ReLU6", "ReflectionPad2d", "ReplicationPad2d", "Sequential", "SiLU", "Sigmoid", "SmoothL1Loss", "Softmax",
    "Softplus", "SparseLinear", "SyncBatchNorm", "Tanh", "Unflatten", "Upsample", "ZeroPad2d", "fold_batch_norms",
    "init", "to_float8",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in ("functional", "utils"):
        return importlib.import_module(f"minidl.nn.{name}")
    raise suggestions.attribute("minidl.nn", name, __all__)
