"""What the forms of a convolution share: the epilogue after the sum, and weights packed for a walk."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import activation
from minidl.kernels.activation import Activation

MAX_POOL = tl.constexpr(1)
AVERAGE_POOL = tl.constexpr(2)
POOLS = {None: 0, "max": 1, "avg": 2}


@dataclass(frozen=True)
class Epilogue:
    """act(scale * sum + bias), then a 2x2 pool; z keeps the value before the activation.

    scale, bias [M] or None; pool None, "max" or "avg"; z like the output, or None.
    """

    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    act: Activation = None
    pool: str | None = None
    z: torch.Tensor | None = None

    @property
    def flags(self) -> dict[str, Any]:
        """The constants that the kernels take."""
        name, slope = activation.parse(self.act)
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_SCALE": self.scale is not None,
            "ACT": activation.CODES[name],
            "SLOPE": slope,
            "SAVE_Z": self.z is not None,
            "POOL": POOLS[self.pool],
        }


@triton.jit
def pool_last(b_x, POOL: tl.constexpr):
    """The last two axes, of size 2 each, pooled: their maximum (NaN if one is NaN) or their mean."""
    b_left, b_right = tl.split(b_x)
    b_0, b_2 = tl.split(b_left)
    b_1, b_3 = tl.split(b_right)
    if POOL == MAX_POOL:
        top = tl.maximum(b_0, b_1, propagate_nan=tl.PropagateNan.ALL)
        bottom = tl.maximum(b_2, b_3, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(top, bottom, propagate_nan=tl.PropagateNan.ALL)
    else:
        return 0.25 * ((b_0 + b_1) + (b_2 + b_3))


@triton.jit
def pool_quads(b_x, POOL: tl.constexpr):
    """Every four rows [4 R, N] pooled to one [R, N]."""
    b_x = tl.reshape(b_x, (b_x.shape[0] // 4, 2, 2, b_x.shape[1]))
    return pool_last(tl.permute(b_x, (0, 3, 1, 2)), POOL)
