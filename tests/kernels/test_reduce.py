"""Shares of a long reduction, ties and NaN across them, columns in one launch, layouts without a copy, norms beyond the
range of squares."""

import functools

import pytest
import torch

from minidl.kernels import reduce
from minidl.kernels.reduce import positions
from minidl.runtime import launch
from minidl.testing.specs import bounds

TILES = {
    "reduce_rows": launch.Tile({"BLOCK_K": 2, "BLOCK_R": 16}),
    "reduce_columns": launch.Tile({"BLOCK_K": 4, "BLOCK_R": 8}),
}


@pytest.fixture
def many_shares(monkeypatch):
    """Small tiles on a device of 50 multiprocessors: every long reduction is shared out."""
    monkeypatch.setattr(launch, "processors", functools.cache(lambda: 50))
    with launch.force(**TILES):
        yield


def grids(function, target=None):
    """Grids of the launches of a call, with the tiles of `target` (default: those in use)."""
    found = []
    with launch.record(lambda kernel, grid, args, meta: found.append(grid), target or launch.target()):
        function()
    return found


@pytest.mark.usefixtures("many_shares")
@pytest.mark.parametrize("dims", [0, 1, None])
def test_a_long_reduction_is_shared_out_and_joined(dims, device):
    x = torch.randint(-3, 4, (37, 301), device=device).float()
    x = x.t() if dims == 0 else x
    assert max(grid[1] for grid in grids(lambda: reduce.sum(x, dims))) > 1
    assert torch.equal(reduce.sum(x, dims), torch.sum(x, dim=dims))
    assert torch.equal(reduce.amax(x, dims), torch.amax(x, dim=() if dims is None else dims))
    assert torch.equal(reduce.argmax(x, dims).cpu(), torch.argmax(x.cpu(), dim=dims))
    torch.testing.assert_close(reduce.mean(x, dims), torch.mean(x, dim=dims))
    torch.testing.assert_close(reduce.norm(x, dims), torch.linalg.vector_norm(x, dim=dims))


@pytest.mark.usefixtures("many_shares")
def test_the_first_of_equal_maxima_is_found_across_shares(device):
    x = torch.zeros(2, 500, device=device)
    x[0, 400], x[0, 499], x[1, 130], x[1, 131] = 5, 5, 7, 7
    assert reduce.argmax(x, 1).tolist() == [400, 130]
    assert reduce.argmax(torch.full((2, 500), -torch.inf, device=device), 1).tolist() == [0, 0]


def test_a_block_of_more_rows_than_shares_finds_the_position_of_the_only_row(device, monkeypatch):
    """Rows that are not there have none: nothing is read behind those of the shares."""
    monkeypatch.setattr(launch, "processors", functools.cache(lambda: 1))
    x = torch.zeros(500, device=device)
    x[300] = 1
    with launch.force(reduce_rows=launch.Tile({"BLOCK_K": 16, "BLOCK_R": 16})):
        assert [grid[1] for grid in grids(lambda: reduce.argmax(x))] == [8, 1]
        assert reduce.argmax(x).item() == 300


@pytest.mark.usefixtures("many_shares")
@pytest.mark.parametrize("many", [2**31, 8])
def test_the_first_nan_wins_across_shares(many, device, monkeypatch):
    monkeypatch.setattr(positions, "MANY", many)
    x = torch.zeros(2, 500, device=device)
    x[0, 20], x[0, 300], x[0, 400], x[1, 10] = torch.inf, torch.nan, torch.nan, torch.inf
    assert reduce.argmax(x, 1).tolist() == [300, 10]
    assert reduce.amax(x, 1).isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_result_depends_on_the_run(dtype, device, many_shares):
    x = torch.randn(3, 4001, dtype=dtype, device=device)
    assert torch.equal(reduce.sum(x, 1), reduce.sum(x, 1))


@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
@pytest.mark.parametrize(
    ("rows", "columns", "launches"),
    [(1024, 4, 1), (256, 128, 1), (1024, 128, 1), (1024, 256, 1), (4096, 64, 1), (2**16, 64, 2), (2**13, 256, 2)],
)
def test_columns_of_little_take_one_launch(target, rows, columns, launches):
    x = torch.empty(rows, columns)
    assert len(grids(lambda: reduce.sum(x, 0), target)) == launches


@pytest.mark.parametrize(
    ("rows", "columns"), [(1024, 4), (1024, 128), (256, 128), (1000, 13), (4096, 20), (3001, 5), (2, 3)]
)
def test_columns_in_strips(rows, columns, device, monkeypatch):
    """With the tall blocks that GPUs have, also where rows or columns do not fill them."""
    monkeypatch.setattr(launch, "processors", functools.cache(lambda: 132))
    whole = torch.randint(-3, 4, (rows, columns), device=device).float()
    x = torch.randn(rows, columns, device=device)
    with launch.force(reduce_columns=launch.Tile({"BLOCK_K": 8, "BLOCK_R": 1024}, 16)):
        assert grids(lambda: reduce.sum(x, 0)) == [(-(-columns // 8), 1)]
        got, again, exact = reduce.sum(x, 0), reduce.sum(x, 0), reduce.sum(whole, 0)
        depth = reduce.depth(columns, rows, torch.float32)
    assert torch.equal(exact, whole.sum(0))
    assert torch.equal(got, again)
    x = x.double()
    assert ((got - x.sum(0)).abs() <= bounds.gamma(depth, 2.0**-24) * x.abs().sum(0)).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_integers_and_bools_are_summed_in_int64(dtype, device):
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (7, 300), device=device).to(dtype)
    for dims in (None, 0, 1):
        assert torch.equal(reduce.sum(x, dims), torch.sum(x, dim=dims))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_no_integer_maximum_is_raised_by_what_is_not_there(dtype, device):
    x = -torch.randint(1, 100, (3, 13, 5), device=device).to(dtype)
    for dims in (0, 1, 2, None):
        assert torch.equal(reduce.amax(x, dims), torch.amax(x, dim=() if dims is None else dims))


BOXES = [
    launch.Tile({"BLOCK_K": 64, "BLOCK_R": 4}),
    launch.Tile({"BLOCK_K": 32, "BLOCK_R": 1}),
    launch.Tile({"BLOCK_K": 4, "BLOCK_R": 16}),
]


@pytest.mark.parametrize("tile", BOXES, ids=str)
@pytest.mark.parametrize("processors", [1, 50])
@pytest.mark.parametrize(
    "shape",
    [(5, 9, 8), (3, 70, 16), (7, 2, 33), (2, 34, 41), (1, 101, 24), (9, 65, 1), (9, 3, 2), (6, 1, 72)],
)
def test_the_middle_axis(tile, processors, shape, device, monkeypatch):
    """Boxes of outer, reduced and inner indices that fit or not, in one launch or shared out, of views as well."""
    monkeypatch.setattr(launch, "processors", functools.cache(lambda: processors))
    memory = torch.randint(-9, 10, (shape[0] + 1, shape[1] + 1, shape[2] + 8), device=device)
    outer, middle, inner = shape
    for dtype, op, exact in (
        (torch.float16, reduce.sum, torch.sum), (torch.int32, reduce.sum, torch.sum),
        (torch.float32, reduce.amax, torch.amax),
        (torch.float16, reduce.argmax, lambda x, dim: torch.argmax(x.cpu(), dim).to(x.device)),
    ):  # fmt: skip
        whole = memory.to(dtype)
        part = whole[:outer, :middle, :inner]
        gaps = whole[1:, 1:, 8:], whole[:outer, 1:, 3 : inner + 3], part[:, ::2], part[:, :, ::3]
        views = part.contiguous(), *gaps, part[:1].expand(shape), part.transpose(0, 2)
        # Integers are read as floats are, and where a maximum is as what it is.
        for x in views[::3] if dtype == torch.int32 or op is reduce.argmax else views:
            with launch.force(reduce_columns=tile, reduce_rows=tile):
                assert torch.equal(op(x, 1), exact(x, 1))


@pytest.mark.parametrize("tile", BOXES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_column(tile, value, device, monkeypatch):
    monkeypatch.setattr(launch, "processors", functools.cache(lambda: 50))
    x = -torch.rand(3, 77, 24, device=device).half()
    x[1, 40, 7] = value
    x[2, :, 3] = -torch.inf
    with launch.force(reduce_columns=tile, reduce_rows=tile):
        torch.testing.assert_close(reduce.amax(x, 1), torch.amax(x, 1), equal_nan=True)
        torch.testing.assert_close(reduce.sum(x, 1), torch.sum(x.float(), 1).half(), equal_nan=True)


@pytest.mark.parametrize("dims", [1, (1,), (0, 2)])
def test_nothing_but_ones_to_reduce_is_a_copy(dims, device):
    x = torch.randn(1, 7, 1, device=device) if dims == (0, 2) else torch.randn(4, 3, 5, device=device)[:, 1:2].mT
    x = x if dims == (0, 2) else x.permute(0, 2, 1)
    for function, same in ((reduce.sum, torch.sum), (reduce.mean, torch.mean), (reduce.amax, torch.amax)):
        assert grids(lambda function=function: function(x, dims)) == []
        assert torch.equal(function(x, dims), same(x, dims))
        assert torch.equal(function(x, dims, True), same(x, dims, keepdim=True))
    assert torch.equal(reduce.norm(x, dims), x.abs().reshape(same(x, dims).shape))
    assert torch.equal(reduce.sum(x > 0, dims), (x > 0).sum(dims))
    if dims == 1:
        assert torch.equal(reduce.argmax(x, 1), torch.zeros(4, 5, dtype=torch.int64, device=device))


def test_the_position_of_an_integer_maximum(device):
    x = torch.tensor([[3, 9, 9], [-5, -7, -5]], device=device)
    assert reduce.argmax(x, 1).tolist() == [1, 0]
    assert reduce.amax(x, 0).tolist() == [3, 9, 9]


@pytest.mark.parametrize(
    ("x", "dims", "copies"),
    [
        (torch.empty(4, 3, 5, 6), (0, 2, 3), False),
        (torch.empty(4, 5, 6, 3).permute(0, 3, 1, 2), (0, 2, 3), False),
        (torch.empty(4, 6)[:, ::2], 1, False),
        (torch.empty(2, 3, 2, 3, 2, 3), (0, 2, 4), True),
    ],
)
def test_two_levels_of_strides_need_no_copy(x, dims, copies):
    read = []
    with launch.record(lambda kernel, grid, args, meta: read.append(args[0]), launch.target()):
        reduce.sum(x, dims)
    assert (read[0].data_ptr() != x.data_ptr()) == copies


@pytest.mark.parametrize("value", [1e30, 1e-30])
def test_squares_beyond_the_range_of_float32(value, device):
    x = torch.full((100,), value, device=device)
    assert reduce.norm(x).item() == pytest.approx(10 * value, rel=1e-6)


@pytest.mark.parametrize("dims", [None, 0, 1])
def test_nothing_to_reduce(dims, device):
    x = torch.empty(0, 3, device=device)
    torch.testing.assert_close(reduce.sum(x, dims), torch.sum(x, dim=dims))
    torch.testing.assert_close(reduce.mean(x, dims), torch.mean(x, dim=dims), equal_nan=True)
    if dims == 1:
        assert reduce.amax(x, dims).shape == (0,)
        assert reduce.argmax(x, dims).shape == (0,)
    else:
        with pytest.raises(ValueError, match="argmax: no maximum along dims"):
            reduce.argmax(x, dims)


@pytest.mark.parametrize("shape", [(3, 1), (4, 3, 5), (1,), (), (4, 1, 1), (5,)])
def test_sum_to_undoes_a_broadcast(shape, device):
    x = torch.randint(-3, 4, (4, 3, 5), device=device).float()
    assert torch.equal(reduce.sum_to(x, shape), x.sum_to_size(shape))


def test_rows_are_summed_into_another_dtype(device):
    x = torch.ones(3000, 5, device=device)
    assert reduce.sum_rows(x, torch.float16).tolist() == [3000] * 5


def test_depth_is_never_above_what_any_order_needs():
    for K, R in ((1, 0), (1, 1), (3, 2), (5, 40), (1, 2**22), (1024, 4096)):
        assert 0 <= reduce.depth(K, R, torch.float32) <= max(R - 1, 0)
    assert reduce.depth(1, 2**22, torch.float32) < 2**14


def test_addresses_beyond_2_31(device):
    far = torch.empty(2**31, dtype=torch.float16, device=device).as_strided((2, 2), (2**31 - 2, 1))
    far.copy_(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    assert reduce.sum(far, 0).tolist() == [4, 7]
    assert reduce.argmax(far, 0).tolist() == [1, 1]
