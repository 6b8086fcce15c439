"""Layers: each holds parameters and calls one operation."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from minidl import ops
from minidl.kernels import activation, check
from minidl.kernels.activation import Activation
from minidl.nn import init
from minidl.nn.containers import Listed
from minidl.nn.module import Module, Parameter
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, device_of

Device = torch.device | str | None


def _empty(*shape: int, device: Device, dtype: torch.dtype | None) -> Parameter:
    return Parameter(torch.empty(shape, device=device_of(device), dtype=dtype or torch.get_default_dtype()))


def _act_repr(act: Activation) -> str:
    return "" if act is None else f", act={act!r}"


class OperationLayer(Module):
    """The base of layers that call an operation, `_op`, with the input and the attributes in `_arguments` (default:
    those that `repr` shows)."""

    _op: Callable[..., Any]
    _arguments: tuple[str, ...] = ()

    def forward(self, input: Tensor) -> Any:
        return type(self)._op(input, *[getattr(self, name) for name in self._arguments or self._shown])


class Linear(Module):
    """act(x weight^T + bias): weight [out, in] and bias [out], named and initialised as torch's.

    Shapes: [..., in] -> [..., out]. `act` is fused into the product.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, act: Activation = None,
    ) -> None:  # fmt: skip
        super().__init__()
        activation.parse(act)
        self.in_features = check.integer(type(self).__name__, "in_features", in_features, 0)
        self.out_features = check.integer(type(self).__name__, "out_features", out_features, 0)
        self.act = act
        self.weight = _empty(out_features, in_features, device=device, dtype=dtype)
        init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        self.register_parameter("bias", None)
        if bias:
            self.bias = _empty(out_features, device=device, dtype=dtype)
            bound = 1.0 / math.sqrt(max(1, in_features))
            init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, self.act)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{_act_repr(self.act)}"


class SparseLinear(Module):
    """act(x @ weight + bias) for a sparse x. Only the weight rows that x uses are read and get gradients.

    Shapes: CSR [batch, in] -> [batch, out]. weight [in, out] (as torch's EmbeddingBag has it), bias [out].
    Weights start normally distributed with standard deviation `std`; the default suits rows of norm 1, as in TF-IDF.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, act: Activation = None, std: float = 0.1,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        activation.parse(act)
        self.in_features = check.integer(type(self).__name__, "in_features", in_features, 0)
        self.out_features = check.integer(type(self).__name__, "out_features", out_features, 0)
        self.act = act
        self.weight = _empty(in_features, out_features, device=device, dtype=dtype)
        init.normal_(self.weight, 0.0, std)
        self.register_parameter("bias", None)
        if bias:
            self.bias = _empty(out_features, device=device, dtype=dtype)
            init.zeros_(self.bias)

    def forward(self, x: CSR) -> Tensor:
        return ops.sparse_linear(x, self.weight, self.bias, self.act)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{_act_repr(self.act)}"


class Dropout(Module):
    """Zero each value with probability p in training, and scale the others by 1 / (1 - p)."""

    _shown = ("p",)

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"{type(self).__name__}: p is {p}, expected a probability between 0 and 1")
        self.p, self.inplace = p, inplace

    def forward(self, input: Tensor) -> Tensor:
        return ops.dropout(input, self.p, self.training, self.inplace)


class Flatten(OperationLayer):
    """Merge the dimensions from start_dim to end_dim (inclusive) into one."""

    _op, _arguments = staticmethod(ops.flatten), ("start_dim", "end_dim")

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim


class Unflatten(OperationLayer):
    """Split the dimension `dim` into several of the sizes unflattened_size."""

    _op, _shown = staticmethod(ops.unflatten), ("dim", "unflattened_size")

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        super().__init__()
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)


class PairwiseDistance(Module):
    """The p-norms of differences of vectors, see `ops.pairwise_distance`."""

    _shown = ("norm", "eps", "keepdim")

    def __init__(self, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> None:
        super().__init__()
        self.norm, self.eps, self.keepdim = p, eps, keepdim

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return ops.pairwise_distance(x1, x2, self.norm, self.eps, self.keepdim)


class CosineSimilarity(Module):
    """The cosines of the angles between vectors along `dim`, see `ops.cosine_similarity`."""

    _shown = ("dim", "eps")

    def __init__(self, dim: int = 1, eps: float = 1e-8) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return ops.cosine_similarity(x1, x2, self.dim, self.eps)


class Identity(Module):
    """Return the input. Arguments are ignored, as in torch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        return input


class Sequential(Listed):
    """Modules applied one after another; named "0", "1", ... as in torch, or by the keys of one OrderedDict.

    Raises TypeError, with the name, for anything that is no Module.
    """

    def __init__(self, *modules: Module | OrderedDict[str, Module]) -> None:
        super().__init__()
        if len(modules) != 1 or not isinstance(modules[0], OrderedDict):
            self.extend(modules)
            return
        for name, module in modules[0].items():
            self.add_module(name, module)

    def forward(self, input: Any) -> Any:
        for module in self:
            input = module(input)
        return input

    def _part(self, modules: dict[str, Module]) -> Module:
        return Sequential(OrderedDict(modules))


class MLP(Sequential):
    """A multilayer perceptron: in_features, any number of hidden layers with `act` and dropout, out_features.

    Shapes: [..., in] -> [..., out]; with sparse=True the first layer takes a CSR [batch, in].
    The last layer has no activation: losses take logits.
    """

    def __init__(
        self, in_features: int, hidden: Sequence[int], out_features: int, act: Activation = "relu",
        dropout: float = 0.0, sparse: bool = False, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        sizes = [in_features, *hidden, out_features]
        if min(sizes) < 1:
            raise ValueError(f"MLP: layer sizes must be 1 or more, got {sizes}")
        layers: list[Module] = []
        for index, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            last = index == len(sizes) - 2
            layer = SparseLinear if sparse and index == 0 else Linear
            layers.append(layer(fan_in, fan_out, act=None if last else act, device=device, dtype=dtype))
            if dropout > 0 and not last:
                layers.append(Dropout(dropout))
        super().__init__(*layers)
