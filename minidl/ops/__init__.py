"""Differentiable operations on Tensors, one module a subject. Importing this attaches operators and methods to Tensor.

A new operation goes into the `__all__` of its module; the rest follows (see `registry`). Read `binary` and
`elementwise` for the form of an operation, then `reduce`, `shape` and `linalg`; the modules `*_grad` write gradients
in operations for `create_graph`.
"""

from __future__ import annotations

from torch.utils.data._utils.collate import default_collate_fn_map

from minidl.common import suggestions
from minidl.ops import (
    activation,
    attention,
    bags,
    batchnorm,
    bitwise,
    compare,
    composed,
    conditional,
    conv,
    conv_grad,  # noqa: F401 (gives convolutions their recorded gradients)
    conv_sequence,
    conv_transpose,
    conv_volume,
    ctc,
    elementwise,
    extrema,
    grid,
    indexing,
    join,
    linalg,
    linear_loss,
    lookup,
    loss,
    margins,
    patches,
    pool,
    pool_volume,
    powers,
    rearrange,
    reduce,
    resample,
    row_norm,
    scatter_gather,
    shape,
    sorting,
    sparse,
    statistics,
    transformer,
    unary,
    variance,
)
from minidl.ops import float8 as float8
from minidl.ops.activation import *
from minidl.ops.arguments import checked
from minidl.ops.attention import *
from minidl.ops.bags import *
from minidl.ops.batchnorm import *
from minidl.ops.bitwise import *
from minidl.ops.compare import *
from minidl.ops.composed import *
from minidl.ops.conditional import *
from minidl.ops.contraction import einsum
from minidl.ops.conv import *
from minidl.ops.conv_sequence import *
from minidl.ops.conv_transpose import *
from minidl.ops.conv_volume import *
from minidl.ops.ctc import *
from minidl.ops.elementwise import *
from minidl.ops.extrema import *
from minidl.ops.grid import *
from minidl.ops.indexing import *
from minidl.ops.join import *
from minidl.ops.linalg import *
from minidl.ops.linear_loss import *
from minidl.ops.lookup import *
from minidl.ops.loss import *
from minidl.ops.margins import *
from minidl.ops.patches import *
from minidl.ops.pool import *
from minidl.ops.pool_volume import *
from minidl.ops.powers import *
from minidl.ops.random import dropout, dropout1d, dropout2d, dropout3d, multinomial, rand, randn
from minidl.ops.rearrange import *
from minidl.ops.reduce import *
from minidl.ops.registry import register
from minidl.ops.replays import replayed
from minidl.ops.resample import *
from minidl.ops.row_norm import *
from minidl.ops.scatter_gather import *
from minidl.ops.shape import *
from minidl.ops.sorting import *
from minidl.ops.sparse import *
from minidl.ops.statistics import *
from minidl.ops.transformer import *
from minidl.ops.unary import *
from minidl.ops.variance import *
from minidl.tensors import Tensor

# In the form that type checkers understand.
__all__ = ["dropout", "dropout1d", "dropout2d", "dropout3d", "einsum", "multinomial", "rand", "randn"]
__all__ += activation.__all__
__all__ += attention.__all__
__all__ += bags.__all__
__all__ += batchnorm.__all__
__all__ += bitwise.__all__
__all__ += compare.__all__
__all__ += composed.__all__
__all__ += conditional.__all__
__all__ += conv.__all__
__all__ += conv_sequence.__all__
__all__ += conv_transpose.__all__
__all__ += conv_volume.__all__
__all__ += ctc.__all__
__all__ += elementwise.__all__
__all__ += extrema.__all__
__all__ += grid.__all__
__all__ += indexing.__all__
__all__ += join.__all__
__all__ += linalg.__all__
__all__ += linear_loss.__all__
__all__ += lookup.__all__
__all__ += loss.__all__
__all__ += margins.__all__
__all__ += patches.__all__
__all__ += pool.__all__
__all__ += pool_volume.__all__
__all__ += powers.__all__
__all__ += rearrange.__all__
__all__ += reduce.__all__
__all__ += resample.__all__
__all__ += row_norm.__all__
__all__ += scatter_gather.__all__
__all__ += shape.__all__
__all__ += sorting.__all__
__all__ += sparse.__all__
__all__ += statistics.__all__
__all__ += transformer.__all__
__all__ += unary.__all__
__all__ += variance.__all__

# Whose operations are replayed: those that may be fused with others, and those that read values. (Others view or draw.)
_FUSED = activation, batchnorm, composed, conditional, conv, conv_sequence, conv_transpose, conv_volume, elementwise
_READERS = extrema, linalg, loss, pool, pool_volume, powers, reduce, row_norm, unary, variance
_FUNCTIONS = {name: checked(globals()[name]) for name in __all__}
_FUNCTIONS |= {
    name: replayed(_FUNCTIONS[name], module in _FUSED) for module in _FUSED + _READERS for name in module.__all__
}
globals().update(_FUNCTIONS)
register(_FUNCTIONS)


def _batch(tensors: list[Tensor], *, collate_fn_map: object = None) -> Tensor:
    """Return the batch that torch's DataLoader makes of a dataset's Tensors."""
    return join.stack(tensors)


default_collate_fn_map[Tensor] = _batch


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.ops", name, __all__)
