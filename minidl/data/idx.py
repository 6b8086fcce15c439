"""The IDX format of MNIST: four bytes of magic, a big-endian size per dimension, then the values.

    bytes 0 and 1   0
    byte 2          type of the values: 8 for unsigned bytes, the only one that is read here
    byte 3          number of dimensions D
    4 D bytes       sizes

Source: LeCun, Cortes and Burges, The MNIST database of handwritten digits, "File formats".
"""

from __future__ import annotations

import math
import struct

import numpy as np

from minidl.data.records import DataError

_UNSIGNED_BYTES = 8


def parse_idx(content: bytes, dimensions: int, source: str) -> np.ndarray:
    """uint8 array of the given number of dimensions. Raises DataError, naming `source`, for anything else."""
    head = 4 + 4 * dimensions
    if len(content) < head:
        raise DataError(f"{source} is truncated: it has {len(content)} bytes, an IDX header has {head}")
    zero, kind, rank = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind != _UNSIGNED_BYTES or rank != dimensions:
        raise DataError(
            f"{source} is not an IDX file of unsigned bytes in {dimensions} dimensions: its magic number is "
            f"{content[:4].hex()}, expected {_UNSIGNED_BYTES << 8 | dimensions:08x}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    expected = head + math.prod(shape)
    if len(content) != expected:
        what = "is truncated" if len(content) < expected else "has more than its values"
        raise DataError(
            f"{source} {what}: {' x '.join(map(str, shape))} bytes with the header are {expected}, it has "
            f"{len(content)}"
        )
    try:
        return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)
    except ValueError:  # a size of 0 beside others that numpy cannot multiply
        raise DataError(f"{source} has sizes that no array can have: {' x '.join(map(str, shape))}") from None
