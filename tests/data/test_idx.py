"""The IDX parser: whole files, and every way one can be damaged."""

import contextlib
import gzip
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.data import DataError
from minidl.data.download import gunzip
from minidl.data.images import parse_idx


def idx(array, magic=None):
    head = struct.pack(">I", 0x0800 | array.ndim) if magic is None else magic
    return head + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def numbers(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_what_was_written_is_read(shape):
    array = numbers(*shape)
    assert np.array_equal(parse_idx(idx(array), len(shape), "f"), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "f is truncated: it has 0 bytes, an IDX header has 16"),
        (b"\0\0\x08\x03\0\0\0\x02", "f is truncated: it has 8 bytes, an IDX header has 16"),
        (idx(numbers(2, 3, 4))[:-1], "f is truncated: 2 x 3 x 4 bytes with the header are 40, it has 39"),
        (idx(numbers(2, 3, 4)) + b"x", "f has more than its values: 2 x 3 x 4 bytes with the header are 40, it has 41"),
        (idx(numbers(2, 3, 4), b"\0\0\x0d\x03"), "its magic number is 00000d03, expected 00000803"),
        (idx(numbers(2, 3, 4), b"\0\1\x08\x03"), "its magic number is 00010803"),
        (idx(numbers(200)), "its magic number is 00000801, expected 00000803"),
        (b"\x89PNG" + bytes(40), "f is not an IDX file of unsigned bytes in 3 dimensions"),
        (struct.pack(">4I", 0x0803, 2**32 - 1, 2**32 - 1, 2**32 - 1), "is truncated"),
        (struct.pack(">4I", 0x0803, 0, 2**32 - 1, 2**32 - 1), "sizes that no array can have: 0 x 4294967295"),
    ],
)
def test_a_damaged_file_is_told(content, message):
    with pytest.raises(DataError) as caught:
        parse_idx(content, 3, "f")
    assert message in str(caught.value)


@given(st.binary(max_size=60), st.integers(1, 3))
def test_any_bytes_are_read_or_refused(content, dimensions):
    with contextlib.suppress(DataError):
        parse_idx(content, dimensions, "f")


def test_gzip_is_unpacked_with_a_limit():
    packed = gzip.compress(bytes(1000))
    assert gunzip(packed, 1000) == bytes(1000)
    with pytest.raises(DataError, match="unpacks to more than 999 bytes"):
        gunzip(packed, 999)
    for broken in (packed[:-5], b"no gzip", packed[:12] + b"\xff\xff" + packed[14:]):
        with pytest.raises(DataError, match="not a complete gzip file"):
            gunzip(broken, 1000)
