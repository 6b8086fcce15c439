"""The sum in a fixed tree: against the same additions by numpy, bit for bit, and whoever adds which nodes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import tree
from minidl.runtime import launch
from minidl.tensors import default_device

DTYPES = [torch.float16, torch.float32, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


def added(rows):
    """The root of the tree of rows: halves of a power of two."""
    if len(rows) == 1:
        return rows[0]
    half = tree.leaves(len(rows)) // 2
    return added(rows[:half]) + added(rows[half:])


def drawn(count, n, dtype, seed):
    values = np.random.default_rng(seed).normal(size=(count, n))
    values[:, 0] = -0.0  # adding a zero would show
    return torch.from_numpy(values).to(dtype).to(default_device())


@given(count=st.integers(1, 64), n=st.integers(1, 70), dtype=st.sampled_from(DTYPES), weighted=st.booleans())
def test_the_order_is_that_of_the_tree(count, n, dtype, weighted):
    x, wide = drawn(count, n, dtype, count), launch.acc_torch(dtype)
    weight = torch.rand(count, dtype=torch.float64).to(x.device) if weighted else None
    leaves = x.to(wide) if weight is None else x.to(wide) * weight.to(wide)[:, None]
    expected = added(list(leaves.cpu())).to(dtype)
    found = tree.sum_rows(x, range(count), tree.leaves(count), weight).cpu()
    assert torch.equal(found, expected)
    assert torch.equal(torch.signbit(found), torch.signbit(expected))


@given(count=st.integers(1, 64), data=st.data(), dtype=st.sampled_from(DTYPES))
def test_nodes_are_added_by_anyone(count, data, dtype):
    """Runs of rows are summed to nodes, cut into segments, and these summed: as at once."""
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=5)) if count > 1 else [])
    n, segment = data.draw(st.integers(1, 40)), 16
    x = drawn(count, n, dtype, 1)
    starts, nodes, wide = [], [], launch.acc_torch(dtype)
    for first, end in zip([0, *cuts], [*cuts, count], strict=True):
        for start, size in tree.nodes(first, end, count):
            rows = x[start : min(start + size, end)]
            node = torch.zeros(3, 2, segment, dtype=wide, device=x.device)
            tree.sum_rows(rows, range(len(rows)), size, None, node[:, 1])
            assert not node[:, 0].any()
            starts.append(start)
            nodes.append(node[:, 1].reshape(-1)[:n])
    y = torch.empty(n, dtype=dtype, device=x.device)
    found = tree.sum_rows(torch.stack(nodes), starts, tree.leaves(count), y=y)
    whole = tree.sum_rows(x, range(count), tree.leaves(count))
    assert torch.equal(found, whole)
    assert torch.equal(torch.signbit(found), torch.signbit(whole))


def test_programs_have_each_their_own_values():
    """Segments end within a program's values."""
    x = drawn(5, 35, torch.float32, 0)
    y = torch.full((7, 2, 5), 3.0, device=x.device)
    expected = added(list(x.cpu()))
    with launch.force(elementwise=launch.Tile({"BLOCK_N": 16})):
        assert torch.equal(tree.sum_rows(x, range(5), 8).cpu(), expected)
        tree.sum_rows(x, range(5), 8, None, y[:, 1])
    assert torch.equal(y[:, 1].reshape(-1).cpu(), expected)
    assert y[:, 0].eq(3).all()


def test_other_rows_are_refused():
    with pytest.raises(ValueError, match="expected 1 to 64"):
        tree.sum_rows(torch.zeros(65, 2), range(65), 65)
    with pytest.raises(TypeError, match="expected a floating type"):
        tree.sum_rows(torch.zeros(2, 2).long(), range(2), 2)
