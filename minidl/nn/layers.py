"""Layers: parameters and one call into ops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from minidl import ops
from minidl.csr import CSR
from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.nn import init
from minidl.nn.module import Module, Parameter
from minidl.tensor import Tensor, default_device

Device = torch.device | str | None


def _empty(
    *shape: int, device: Device, dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> Parameter:
    place = device or default_device()
    return Parameter(torch.empty(shape, device=place, dtype=dtype, memory_format=memory_format))


def _act_repr(act: Activation) -> str:
    return "" if act is None else f", act={act!r}"


class Linear(Module):
    """act(x weight^T + bias): weight [out, in] and bias [out], named and initialised as torch's.

    Shapes: [..., in] -> [..., out]. `act` is fused into the product.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        act: Activation = None,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        activation.parse(act)
        self.in_features, self.out_features, self.act = in_features, out_features, act
        self.weight = _empty(out_features, in_features, device=device, dtype=dtype)
        init.kaiming_uniform_(self.weight, a=math.sqrt(5.0))
        self.bias: Parameter | None = None
        if bias:
            self.bias = _empty(out_features, device=device, dtype=dtype)
            bound = 1.0 / math.sqrt(max(1, in_features))
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, self.act)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{_act_repr(self.act)}"


class SparseLinear(Module):
    """act(x weight + bias) for a sparse x: gathers the rows of `weight` that x names, and its gradient has those only.

    Shapes: CSR [batch, in] -> [batch, out]. weight [in, out] (as torch's EmbeddingBag has it), bias [out].
    Rows of x are taken to have length about 1, as TF-IDF has: weights start as normal values of deviation `std`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        act: Activation = None,
        std: float = 0.1,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        activation.parse(act)
        self.in_features, self.out_features, self.act = in_features, out_features, act
        self.weight = _empty(in_features, out_features, device=device, dtype=dtype)
        init.normal_(self.weight, 0.0, std)
        self.bias: Parameter | None = None
        if bias:
            self.bias = _empty(out_features, device=device, dtype=dtype)
            init.zeros_(self.bias)

    def forward(self, x: CSR) -> Tensor:
        return ops.sparse_linear(x, self.weight, self.bias, self.act)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{_act_repr(self.act)}"


class Dropout(Module):
    """Zero each value with probability p in training, and scale the others by 1 / (1 - p)."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: p is {p}, expected a probability between 0 and 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Flatten(Module):
    """Make the dimensions from start_dim to end_dim one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(x, self.start_dim, self.end_dim)


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class LeakyReLU(Module):
    """x where it is positive, negative_slope x elsewhere."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        return ops.leaky_relu(x, self.negative_slope)

    def extra_repr(self) -> str:
        return f"negative_slope={self.negative_slope}"


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x)


class Tanh(Module):
    """tanh(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class GELU(Module):
    """Gaussian error linear unit; approximate "none" or "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SiLU(Module):
    """x sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(x)


class Sequential(Module):
    """Modules applied one after another; named "0", "1", ... as in torch."""

    def __init__(self, *modules: Module) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            setattr(self, str(index), module)

    def forward(self, x: Any) -> Any:
        for module in self.children():
            x = module(x)
        return x

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> Module:
        return list(self._modules.values())[index]

    def __iter__(self) -> Iterator[Module]:
        return self.children()


class MLP(Sequential):
    """A multilayer perceptron: in_features, any number of hidden layers with `act` and dropout, out_features.

    Shapes: [..., in] -> [..., out]; with sparse=True the first layer takes a CSR [batch, in].
    The last layer has no activation: losses take logits.
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        act: Activation = "relu",
        dropout: float = 0.0,
        sparse: bool = False,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for size in (in_features, *hidden, out_features):
            if size < 1:
                raise ValueError(f"MLP: layer sizes must be 1 or more, got {[in_features, *hidden, out_features]}")
        sizes = [in_features, *hidden, out_features]
        layers: list[Module] = []
        for index, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            last = index == len(sizes) - 2
            layer = SparseLinear if sparse and index == 0 else Linear
            layers.append(layer(fan_in, fan_out, act=None if last else act, device=device, dtype=dtype))
            if dropout > 0 and not last:
                layers.append(Dropout(dropout))
        super().__init__(*layers)
