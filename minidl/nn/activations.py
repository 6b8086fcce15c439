"""Activations as modules, with torch's arguments: each calls the function of its name in `minidl.ops`."""

from __future__ import annotations

import torch

from minidl import ops
from minidl.nn.layers import OperationLayer
from minidl.nn.module import Module, Parameter
from minidl.tensors import Tensor, device_of


class _InPlace(OperationLayer):
    """The base of activations with `inplace`, which also writes the result to the input."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, input: Tensor) -> Tensor:
        return type(self)._op(input, *[getattr(self, name) for name in self._shown], self.inplace)

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown + (", " if shown else "") + "inplace=True" if self.inplace else shown


class ReLU(_InPlace):
    """max(x, 0)."""

    _op = staticmethod(ops.relu)


class LeakyReLU(_InPlace):
    """x where it is above 0, else negative_slope * x."""

    _op, _shown = staticmethod(ops.leaky_relu), ("negative_slope",)

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.negative_slope = negative_slope


class ELU(_InPlace):
    """x where it is above 0, else alpha (exp(x) - 1)."""

    _op, _shown = staticmethod(ops.elu), ("alpha",)

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.alpha = alpha


class CELU(_InPlace):
    """x where it is above 0, else alpha (exp(x / alpha) - 1)."""

    _op, _shown = staticmethod(ops.celu), ("alpha",)

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.alpha = alpha


class SELU(_InPlace):
    """1.0507 ELU(x) with an alpha of 1.6733, see `ops.selu`."""

    _op = staticmethod(ops.selu)


class Threshold(_InPlace):
    """x where it is above `threshold`, else `value`."""

    _op, _shown = staticmethod(ops.threshold), ("threshold", "value")

    def __init__(self, threshold: float, value: float, inplace: bool = False) -> None:
        super().__init__(inplace)
        self.threshold, self.value = threshold, value


class SiLU(_InPlace):
    """x * sigmoid(x)."""

    _op = staticmethod(ops.silu)


class Mish(_InPlace):
    """x * tanh(softplus(x))."""

    _op = staticmethod(ops.mish)


class Hardswish(_InPlace):
    """x * min(max(x + 3, 0), 6) / 6."""

    _op = staticmethod(ops.hardswish)


class Hardsigmoid(_InPlace):
    """min(max(x + 3, 0), 6) / 6."""

    _op = staticmethod(ops.hardsigmoid)


class Hardtanh(_InPlace):
    """x limited to [min_val, max_val]."""

    _op, _shown = staticmethod(ops.hardtanh), ("min_val", "max_val")

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> None:
        super().__init__(inplace)
        if min_val >= max_val:
            raise ValueError(f"Hardtanh: min_val is {min_val}, expected less than max_val, {max_val}")
        self.min_val, self.max_val = min_val, max_val


class ReLU6(Hardtanh):
    """min(max(x, 0), 6)."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__(0.0, 6.0, inplace)

    def forward(self, input: Tensor) -> Tensor:
        # What can be fused, unless the limits were changed.
        usual = (self.min_val, self.max_val) == (0.0, 6.0)
        return ops.relu6(input, self.inplace) if usual else super().forward(input)

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""


class Sigmoid(OperationLayer):
    """1 / (1 + exp(-x))."""

    _op = staticmethod(ops.sigmoid)


class Tanh(OperationLayer):
    """tanh(x)."""

    _op = staticmethod(ops.tanh)


class Softsign(OperationLayer):
    """x / (1 + |x|)."""

    _op = staticmethod(ops.softsign)


class Tanhshrink(OperationLayer):
    """x - tanh(x)."""

    _op = staticmethod(ops.tanhshrink)


class Hardshrink(OperationLayer):
    """x where |x| is above lambd, else 0."""

    _op, _shown = staticmethod(ops.hardshrink), ("lambd",)

    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__()
        self.lambd = lambd


class Softshrink(Hardshrink):
    """x moved by lambd towards 0, at most to 0."""

    _op = staticmethod(ops.softshrink)


class GLU(OperationLayer):
    """a sigmoid(b) of the two halves a and b along `dim`."""

    _op, _shown = staticmethod(ops.glu), ("dim",)

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim


class GELU(OperationLayer):
    """Gaussian error linear unit; approximate "none" or "tanh"."""

    _op, _shown = staticmethod(ops.gelu), ("approximate",)

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate


class Softplus(OperationLayer):
    """log(1 + exp(beta x)) / beta."""

    _op, _shown = staticmethod(ops.softplus), ("beta", "threshold")

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        super().__init__()
        self.beta, self.threshold = beta, threshold


class LogSigmoid(OperationLayer):
    """log(sigmoid(x)), accurate for small sigmoids and for those near 1."""

    _op = staticmethod(ops.logsigmoid)


class PReLU(Module):
    """x where it is above 0, else weight * x; `weight` [num_parameters] is one number, or one for each channel."""

    def __init__(
        self,
        num_parameters: int = 1,
        init: float = 0.25,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = Parameter(torch.full((num_parameters,), init, device=device_of(device), dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        return ops.prelu(input, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={len(self.weight)}"


class Softmax(OperationLayer):
    """exp(x) over its sum along `dim`, which must be named for more than two dimensions."""

    _op, _shown = staticmethod(ops.softmax), ("dim",)

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim


class LogSoftmax(Softmax):
    """The logarithm of `Softmax`."""

    _op = staticmethod(ops.log_softmax)


class Softmin(Softmax):
    """`Softmax` of -x."""

    _op = staticmethod(ops.softmin)
