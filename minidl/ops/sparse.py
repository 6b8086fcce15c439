"""Sparse times dense as the first layer of a text model: `sparse_linear`."""

from __future__ import annotations

from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import activation, bias_act, sparse
from minidl.kernels.activation import Activation
from minidl.sparse.csr import CSR
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor

__all__ = ["sparse_linear"]


class SparseLinear(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, x: CSR, act: Activation) -> torch.Tensor:
        name, _ = activation.parse(act)
        ctx.x, ctx.act, ctx.from_output, ctx.shape = x, act, name in activation.FROM_OUTPUT, tuple(weight.shape)
        if ctx.from_output or not any(ctx.needs):
            y = sparse.csr_matmul(x.crow, x.col, x.val, x.order, weight, bias, act)
            ctx.save(None if name is None else y)
            return y
        y, z = sparse.csr_matmul(x.crow, x.col, x.val, x.order, weight, bias, act, preactivation=True)
        ctx.save(z)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (saved,) = ctx.saved
        want_weight, want_bias, *_ = ctx.needs
        # Without an activation the gradient needs only dy: the second operand is not read.
        dz, db = bias_act.bias_act_grad(
            dy, dy if saved is None else saved, None, ctx.act, ctx.from_output, want_x=want_weight, want_bias=want_bias
        )
        if dz is None:
            return None, db, None, None
        x = ctx.x
        values = sparse.csr_matmul(x.t_crow, x.t_col, x.t_val, x.t_order, dz)
        return RowGrad(x.rows, values, ctx.shape), db, None, None


def sparse_linear(x: CSR, weight: Tensor, bias: Tensor | None = None, act: Activation = None) -> Tensor:
    """Return act(x @ weight + bias) for a sparse x, in one kernel.

    Shapes: x [B, V], weight [V, H], bias [H] -> [B, H], in weight's dtype. The gradient of `weight` holds only the
    rows for which x has values; x gets no gradient.
    act: None, "relu", ("leaky_relu", slope), "sigmoid", "tanh", "gelu", "gelu_tanh", "silu" or "relu6".
    Raises ValueError for shapes that do not fit or an unknown activation, TypeError when x is not a CSR or for
    different dtypes.
    """
    if not isinstance(x, CSR):
        raise TypeError(f"sparse_linear: x is a {type(x).__name__}, expected a CSR; use linear for dense input")
    if weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            f"sparse_linear: x has shape {list(x.shape)}, weight {list(weight.shape)}; expected x [B, V], weight [V, H]"
        )
    if bias is not None and list(bias.shape) != [weight.shape[1]]:
        raise ValueError(f"sparse_linear: bias has shape {list(bias.shape)}, expected [{weight.shape[1]}]")
    return SparseLinear.apply(weight, bias, x, act)
