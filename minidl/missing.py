"""What names that are not there are answered with: the nearest name, or what stands in for torch's."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# What torch has and minidl has not, and the nearest thing. A name that ends in * stands for all that begin so.
INSTEAD = {
    "ASGD": "SGD, and a mean of the weights",
    "Adadelta": "RMSprop",
    "Adafactor": "AdamW",
    "Adamax": "Adam",
    "AdaptiveLogSoftmaxWithLoss": "CrossEntropyLoss",
    "AlphaDropout": "Dropout",
    "AvgPool3d": "AvgPool2d of each slice",
    "Bilinear": "Linear of the products of both inputs",
    "CELU": "ELU",
    "CircularPad*": "ops.pad with mode='circular'",
    "ConstantPad*": "ConstantPad2d, or ops.pad",
    "ConvTranspose3d": "Upsample of each slice and Conv3d",
    "DataParallel": "minidl train --devices",
    "Dropout1d": "Dropout2d of x.unsqueeze(3)",
    "Dropout3d": "Dropout2d of x.flatten(3)",
    "EmbeddingBag": "SparseLinear, whose input is a CSR, or Embedding and a sum",
    "FeatureAlphaDropout": "Dropout2d",
    "Fold": "ConvTranspose2d",
    "GRU*": "Conv1d with padding='causal': there are no recurrent layers",
    "GaussianNLLLoss": "MSELoss",
    "LBFGS": "SGD with momentum",
    "LSTM*": "Conv1d with padding='causal': there are no recurrent layers",
    "Lazy*": "the layer without Lazy, with its number of inputs",
    "LocalResponseNorm": "GroupNorm",
    "MaxPool3d": "MaxPool2d of each slice",
    "MultiLabelSoftMarginLoss": "BCEWithLogitsLoss",
    "MultiheadAttention": "Linear, matmul and softmax",
    "NAdam": "Adam",
    "ParameterDict": "ModuleDict, or attributes",
    "ParameterList": "ModuleList, or attributes",
    "RAdam": "Adam",
    "RNN*": "Conv1d with padding='causal': there are no recurrent layers",
    "ReflectionPad*": "ReflectionPad2d, or ops.pad with mode='reflect'",
    "ReplicationPad*": "ReplicationPad2d, or ops.pad with mode='replicate'",
    "Rprop": "RMSprop",
    "ZeroPad*": "ZeroPad2d, or ops.pad",
    "SELU": "ELU",
    "SoftMarginLoss": "BCEWithLogitsLoss",
    "Softmax2d": "Softmax(dim=1)",
    "SparseAdam": "Adam(lazy=True)",
    "Transformer*": "Linear, LayerNorm, matmul and softmax",
    "functional": "grad with create_graph=True",
    "gradcheck": "minidl.check_grads",
    "gradgradcheck": "minidl.check_grads of a function that calls grad with create_graph=True",
    "Unfold": "Conv2d",
    "Softmin": "Softmax of -x",
    "UpsamplingBilinear2d": "Upsample(mode='bilinear', align_corners=True)",
    "UpsamplingNearest2d": "Upsample",
}


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of the names that is most like `name`, if any is; large letters and small are alike."""
    alike = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), alike, 1, 0.7)
    return alike[found[0]] if found else None


def attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """The error for a name that a module of minidl has not."""
    if name.startswith("_"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    stands = next((v for k, v in INSTEAD.items() if name == k or (k[-1] == "*" and name.startswith(k[:-1]))), None)
    near = nearest(name, names)
    if stands is not None:
        end = f"; the nearest thing is {stands}"
    elif near is not None:
        end = f"; did you mean {near}?"
    else:
        end = f"; see dir({module})"
    return AttributeError(f"{module} has no {name}{end}")


def argument(called: str, function: Callable[..., Any], given: Mapping[str, Any]) -> TypeError | None:
    """The error for an argument of a name that the function does not take, if one is given."""
    parameters = inspect.signature(function).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return None
    known = [n for n, p in parameters.items() if n != "self" and p.kind != p.VAR_POSITIONAL]
    for name in given:
        if name not in known:
            near = nearest(name, known)
            end = f"did you mean {near}?" if near else f"it takes {', '.join(known) or 'none'}"
            return TypeError(f"{called}: there is no argument {name!r}; {end}")
    return None
