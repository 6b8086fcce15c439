"""Shapes drawn from a seed."""

import math
from collections import Counter

import pytest

from minidl.tools.tuning import drawn, shapes


def prime(size):
    return size > 1 and all(size % i for i in range(2, math.isqrt(size) + 1))


@pytest.mark.parametrize("kind", drawn.KINDS)
def test_a_row_is_the_same_each_time_and_another_for_another_seed(kind):
    first = [drawn.draw(kind, 3, index) for index in range(40)]
    assert first[17:] == [drawn.draw(kind, 3, index) for index in range(17, 40)]
    assert first != [drawn.draw(kind, 4, index) for index in range(40)]
    assert len(set(map(str, first))) > 20
    assert not any("\n" in str(shape) for shape in first)


@pytest.mark.parametrize("kind", drawn.KINDS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_no_shape_needs_more_than_the_limit(kind, itemsize):
    found = [drawn.draw(kind, 0, index, itemsize) for index in range(300)]
    assert all(0 < drawn.memory(shape, itemsize) <= drawn.LIMIT for shape in found)
    assert max(drawn.memory(shape, itemsize) for shape in found) > drawn.LIMIT / 10
    assert all(shape.valid for shape in found)


def test_memory_by_hand():
    shape = shapes.Conv(2, 3, 5, (7, 7), (3, 3))
    assert shape.out == (5, 5)
    assert drawn.memory(shape, 2) == 2 * 2 * (2 * 3 * 49 + 3 * 5 * 9 + 2 * 5 * 25)
    assert drawn.memory(shapes.Gemm(2, 3, 4), 4) == 2 * 4 * (8 + 12 + 6)


@pytest.mark.parametrize("kind", ["conv1d", "conv3d"])
def test_every_sort_of_sequence_and_volume_is_among_500(kind):
    found = [drawn.draw(kind, 0, index) for index in range(500)]
    assert {shape.group for shape in found} == {"depthwise", "grouped", "1x1", "other"}
    assert 150 < sum(bool(shape.source) for shape in found) < 250
    assert {max(shape.stride) for shape in found} >= {1, 2}
    assert {max(shape.dilation) for shape in found} >= {1, 2}
    if kind == "conv1d":
        assert all(shape.sequence and shape.size[0] == shape.kernel[0] == 1 for shape in found)
        assert any(shape.transposed for shape in found)
    else:
        assert all(len(shape.size) == len(shape.out) == 3 for shape in found)
        assert {shape.kernel for shape in found} > {(3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 1, 1)}


@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
def test_every_sort_of_convolution_is_among_500(kind):
    found = [drawn.draw(kind, 0, index) for index in range(500)]
    groups = Counter(shape.group for shape in found)
    assert set(groups) == {"depthwise", "grouped", "1x1", "other"}
    assert min(groups.values()) >= 10
    assert 150 < sum(bool(shape.source) for shape in found) < 250
    for shape in found:
        assert 1 <= shape.images <= 512
        assert 1 <= max(shape.size) <= 572
        assert all(1 <= step <= 4 for step in shape.stride) or shape.source
    for size in (lambda shape: shape.channels, lambda shape: shape.size[0], lambda shape: shape.outputs):
        assert sum(size(shape) % 2 for shape in found) > 80
        assert sum(prime(size(shape)) for shape in found) > 25
    kernels = {shape.kernel for shape in found}
    assert kernels > {(size, size) for size in (1, 2, 3, 4, 5, 7)}
    assert any(rows == 1 < columns for rows, columns in kernels)
    assert any(columns == 1 < rows for rows, columns in kernels)
    assert {shape.stride[0] for shape in found} >= {1, 2, 3, 4}
    assert {shape.dilation[0] for shape in found} >= {1, 2}
    assert any(shape.outputs == 2 * shape.channels == 2 * shape.groups for shape in found)
    if kind == "conv":
        assert (31, 31) in kernels
        assert any(shape.source.startswith("ViT") for shape in found)
    else:
        assert any(shape.size == (1, 1) for shape in found)
        assert any(shape.ends != (0, 0) for shape in found)


def test_sizes_of_the_other_kinds():
    products = [drawn.draw("gemm", 0, index) for index in range(500)]
    assert {shape.kind for shape in products} == {"AB", "AB^T", "A^TB"}
    assert {shape.group for shape in products} == {"thin", "unaligned", "aligned"}
    assert all(1 <= size <= 50257 for shape in products for size in shape[:3])
    columns = [drawn.draw("softmax", 0, index).columns for index in range(500)]
    assert {50257, 50} <= set(columns)
    assert max(columns) <= 131072
    assert sum(size % 2 for size in columns) > 80
    pools = [drawn.draw("pool", 0, index) for index in range(100)]
    assert {(shape.kernel, shape.stride) for shape in pools} == {(2, 2), (3, 2)}
    assert {shape.what for shape in pools} == {"max pool", "average pool"}
    assert {drawn.draw("reduce", 0, index).what for index in range(50)} == {"sum", "mean", "max"}
