"""What is special to sparse products: rows of any lengths, entries that are not there, large addresses."""

from dataclasses import replace

import pytest
import torch

from minidl.kernels import activation, sparse
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.tensors import default_device
from minidl.testing import GuardedAllocations, assert_within
from minidl.testing.specs import bounds
from minidl.testing.specs.make import lay_out

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


def tiles():
    """Every tile of every target here; the device's own on a GPU."""
    names = launch.table("sparse") if launch.INTERPRETED else [launch.target()]
    return {str(tile): tile for name in names for tile in launch.tiles("sparse", name)}


def batch(counts, V, dtype=torch.float32, seed=0, integers=False):
    """A CSR whose rows have the given numbers of entries, columns drawn with repetition."""
    generator = torch.Generator().manual_seed(seed)
    crow = torch.tensor([0, *counts]).cumsum(0)
    nnz = int(crow[-1])
    col = torch.randint(0, max(V, 1), (nnz,), generator=generator)
    val = torch.randint(-3, 4, (nnz,), generator=generator) if integers else torch.randn(nnz, generator=generator)
    return CSR.from_torch(crow, col, val.to(dtype), (len(counts), V)).to(default_device())


def values(*shape, dtype=torch.float32, seed=1, integers=False):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-3, 4, shape, generator=generator) if integers else torch.randn(shape, generator=generator)
    return made.to(dtype).to(default_device())


def product(x, dense, *rest, **kwargs):
    return sparse.csr_matmul(x.crow, x.col, x.val, x.order, dense, *rest, **kwargs)


def transposed(x, dense):
    return sparse.csr_matmul(x.t_crow, x.t_col, x.t_val, x.t_order, dense)


def matrix(x):
    return x.astype(torch.float64).to("cpu").to_dense()


def exact(x, dense):
    return matrix(x) @ dense.double().cpu()


def assert_product(y, x, dense):
    """y is x @ dense within the bound of a sum in any order."""
    longest = int((x.crow[1:] - x.crow[:-1]).max())
    assert_within(y, *known(matrix(x), magnitudes(x), dense, longest, y.dtype))


def magnitudes(x):
    """The matrix of absolute values: those of values stored twice are added."""
    return matrix(replace(x, val=x.val.abs()))


def known(left, left_abs, dense, longest, dtype):
    """left @ dense and the bound of sums with at most `longest` terms."""
    result = left @ dense.double().cpu()
    error = bounds.gamma(longest + 2, bounds.acc_unit(dtype)) * (left_abs @ dense.double().abs().cpu())
    return result, bounds.rounded(result, error, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_gradient(dtype):
    x = batch([5, 0, 1, 33, 64, 2, 7], 50, dtype)
    dense, dy = values(50, 37, dtype=dtype), values(7, 37, dtype=dtype, seed=2)
    assert_product(product(x, dense), x, dense)
    g = transposed(x, dy)
    rows = x.rows.long().cpu()
    longest = int((x.t_crow[1:] - x.t_crow[:-1]).max())
    result, bound = known(matrix(x).t()[rows], magnitudes(x).t()[rows], dy, longest, dtype)
    assert g.shape == (len(x.rows), 37)
    assert_within(g, result, bound)


@pytest.mark.parametrize("tile", tiles())
@pytest.mark.parametrize(
    "counts",
    [[200, 150, 90, 70] + [3] * 40 + [1] * 100 + [0] * 5, [1] * 33, [65] * 17, [0] * 4, [300], [2, 0, 1] * 11],
    ids=["falling", "ones", "all long", "none", "one row", "all short"],
)
def test_every_tile_on_rows_of_any_length(counts, tile):
    """Long rows and short ones, in one launch or only one of the two kinds."""
    x = batch(counts, 40, integers=True)
    dense = values(40, 19, integers=True)
    with launch.force(sparse=tiles()[tile]), GuardedAllocations():
        y, g = product(x, dense), transposed(x, y_like(x))
    assert torch.equal(y.cpu().double(), exact(x, dense))
    assert torch.equal(g.cpu().double(), matrix(x).t()[x.rows.long().cpu()] @ y_like(x).double().cpu())


def test_more_long_rows_than_a_tile_has():
    x = batch([80, 70, 66, 65, 65, 2], 20, integers=True)
    dense = values(20, 5, integers=True)
    sizes = {"BLOCK_N": 8, "BLOCK_M_LONG": 2, "BLOCK_J_LONG": 16, "BLOCK_M": 4, "BLOCK_J": 4}
    with launch.force(sparse=launch.Tile(sizes, 4, 1)), GuardedAllocations():
        assert torch.equal(product(x, dense).cpu().double(), exact(x, dense))


def test_long_rows_are_added_as_such_also_in_a_tile_that_is_not_full():
    """In lanes of BLOCK_J_LONG entries, which gives other bits than those of short rows."""
    x = batch([200] * 4, 300)
    less = CSR.from_torch(x.crow[:4], x.col[:600], x.val[:600], (3, 300))
    dense = values(300, 8)
    sizes = {"BLOCK_N": 8, "BLOCK_M_LONG": 2, "BLOCK_J_LONG": 16, "BLOCK_M": 4, "BLOCK_J": 2}
    with launch.force(sparse=launch.Tile(sizes, 4, 1)):
        assert torch.equal(product(less, dense), product(x, dense)[:3])


def y_like(x):
    return values(x.shape[0], 19, integers=True, seed=3)


def test_order_only_decides_who_works_together():
    x = batch([3, 80, 0, 1, 130, 2] * 4, 30, integers=True)
    dense = values(30, 8, integers=True)
    y = product(x, dense)
    for order in (torch.arange(24), torch.arange(23, -1, -1), torch.randperm(24)):
        again = sparse.csr_matmul(x.crow, x.col, x.val, order.to(x.order), dense)
        assert torch.equal(again, y)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("tile", tiles())
def test_rows_that_are_not_named_are_not_multiplied(tile, bad):
    """Row 0 of dense is what a lane without an entry would read."""
    x = batch([9, 1, 3, 0, 70, 2], 40)
    x = CSR.from_torch(x.crow, x.col.clamp(min=1), x.val, x.shape)
    dense = values(40, 5)
    dense[0] = bad
    unnamed = torch.tensor([v for v in range(40) if v not in x.rows.tolist()])
    dense[unnamed] = bad
    with launch.force(sparse=tiles()[tile]):
        y = product(x, dense)
    clean = dense.clone()
    clean[unnamed] = 0.0
    assert_product(y, x, clean)


def test_named_rows_are_multiplied():
    """A stored 0 times infinity is NaN, as in the dense product."""
    crow, col = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    x = CSR.from_torch(crow, col, torch.tensor([0.0, 2.0]), (2, 2)).to(default_device())
    dense = torch.tensor([[1.0, 3.0], [float("inf"), 4.0]], device=default_device())
    y = product(x, dense).cpu()
    assert y[0, 0].isnan()
    assert y.flatten()[1:].tolist() == [0.0, 2.0, 6.0]


@pytest.mark.parametrize("tile", tiles())
@pytest.mark.parametrize("room", [(0, 1), (1, 0), (700, 3), (64 * 200, 2000)])
def test_room_for_more_changes_no_bit(tile, room):
    """Neither of rows that are long nor of short ones, nor of the gradient's; rows that are not there are 0."""
    x = batch([200, 0, 90, 70] + [3] * 30 + [1] * 50, 60)
    padded = x.pad(x.nnz + room[0], len(x.rows) + room[1])
    dense, dy = values(60, 19), values(84, 19, seed=2)
    with launch.force(sparse=tiles()[tile]), GuardedAllocations():
        assert torch.equal(product(padded, dense), product(x, dense))
        expected, g = transposed(x, dy), transposed(padded, dy)
    assert torch.equal(g[: len(x.rows)], expected)
    assert g[len(x.rows) :].eq(0).all()


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "padded", "step", "offset"])
def test_layouts(layout):
    x = batch([4, 0, 90, 2, 1], 30, integers=True)
    dense = lay_out(values(30, 12, integers=True), layout)
    assert torch.equal(product(x, dense).cpu().double(), exact(x, dense))
    row = values(1, 12, integers=True).expand(30, 12)
    assert torch.equal(product(x, row).cpu().double(), exact(x, row))


@pytest.mark.parametrize("act", [None, *activation.NAMES, ("leaky_relu", 0.3)], ids=str)
def test_epilogue(act):
    x = batch([3, 0, 70, 1], 20)
    dense, bias = values(20, 9), values(9, seed=4)
    y, z = product(x, dense, bias, act, preactivation=True)
    z_exact = exact(x, dense) + bias.double().cpu()
    assert_within(z, z_exact, 1e-4)
    assert torch.equal(product(x, dense, bias, act), y)
    # A row without entries is act(bias).
    assert torch.equal(z[1], bias)
    if act is None:
        assert torch.equal(y, z)
    elif act == "relu":
        assert torch.equal(y, z.clamp(min=0))


@pytest.mark.parametrize(
    ("counts", "V", "H"),
    [([], 5, 4), ([0, 0], 5, 4), ([0, 0], 0, 4), ([2, 1], 3, 0), ([1], 1, 1), ([3, 2], 2, 1)],
    ids=["no rows", "no entries", "no columns", "no width", "one", "narrow"],
)
def test_empty_and_single(counts, V, H):
    x = batch(counts, V, integers=True)
    dense = values(V, H, integers=True)
    with GuardedAllocations():
        y = product(x, dense, values(H, seed=5, integers=True), "relu")
    assert torch.equal(
        y.cpu().double(), (exact(x, dense) + values(H, seed=5, integers=True).double().cpu()).clamp(min=0)
    )
    assert transposed(x, values(len(counts), H)).shape == (len(x.rows), H)


def test_two_runs_are_bitwise_equal():
    x = batch([300, 2, 70] + [1] * 30, 60)
    dense = values(60, 40)
    assert torch.equal(product(x, dense), product(x, dense))
    assert torch.equal(transposed(x, values(33, 40)), transposed(x, values(33, 40)))


def test_addresses_beyond_two_to_the_31():
    """Rows of dense 2^31 elements apart: only the pages that are touched exist."""
    far = 2**31 + 8
    memory = torch.empty(far + 64, dtype=torch.float16, device=default_device())
    dense = memory.as_strided((2, 16), (far, 1))
    dense.copy_(values(2, 16, dtype=torch.float16, integers=True))
    x = batch([2, 70], 2, torch.float16, integers=True)
    assert torch.equal(product(x, dense).cpu().double(), exact(x, dense))


def test_refusals():
    x, dense = batch([1, 2], 4), values(4, 3)
    with pytest.raises(ValueError, match=r"crow is torch.int64 of shape \[3\], expected a vector of int32"):
        sparse.csr_matmul(x.crow.long(), x.col, x.val, x.order, dense)
    with pytest.raises(ValueError, match="expected B \\+ 1, nnz, nnz and B"):
        sparse.csr_matmul(x.crow, x.col, x.val[1:], x.order, dense)
    with pytest.raises(ValueError, match=r"dense has shape \[4\], expected \[V, H\]"):
        product(x, dense[:, 0])
    with pytest.raises(ValueError, match=r"bias has shape \[4\], expected \[3\]"):
        product(x, dense, values(4))
    with pytest.raises(TypeError, match=r"val is torch\.float32 and dense"):
        product(x, dense.half())
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        product(x, dense, None, "swish")


@pytest.mark.skipif(not launch.INTERPRETED, reason="bfloat16 is computed on a GPU")
def test_bfloat16_is_refused_by_the_interpreter():
    with pytest.raises(TypeError, match="bfloat16 is not supported on the CPU"):
        product(batch([1, 2], 4, torch.bfloat16), values(4, 3, dtype=torch.bfloat16))
