"""What a matrix product or convolution does to a block of sums before it stores the block: scale, bias, activation."""

from typing import NamedTuple

from minidl.kernels import activation


class Epilogue(NamedTuple):
    """Constants of an epilogue. A kernel adds a bias and multiplies by a scale if their pointers are not None.

    ACT, SLOPE  the activation and its parameter, of `activation.parse`
    SAVE_Z      0, or what `p_z` has: SAVED, ADDED or STATISTICS
    POOL        0, or the 2x2 pool after the activation
    """

    ACT: int = activation.NONE
    SLOPE: float = 0.0
    SAVE_Z: int = 0
    POOL: int = 0
