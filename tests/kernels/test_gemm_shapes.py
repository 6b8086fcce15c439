"""Products of any shape: vectors, operands that begin anywhere, copies, and the choice of tile and shares."""

import itertools
import math
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import gemm
from minidl.kernels.gemm import choice, launches, rows, tiled, vector
from minidl.kernels.gemm.operands import Operand, unit
from minidl.kernels.gemm.problem import Problem
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing import GuardedAllocations, assert_within
from minidl.testing.specs.bounds import rounded
from minidl.testing.specs.linalg import product_error
from minidl.testing.specs.make import SeededMake

TINY = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}


def integers(*shape, dtype=torch.float16, seed=0):
    return SeededMake(seed, dtype, default_device(), kinds=("integers",)).tensor(*shape)


def lying(x, turned=False, gap=0, shift=0):
    """The same matrix in rows `gap` values longer that begin `shift` values later, turned or not, NaN around them."""
    x = x.t() if turned else x
    memory = torch.full((x.shape[0] * (x.shape[1] + gap) + shift + 8,), math.nan, dtype=x.dtype, device=x.device)
    rows_of = memory[shift:][: x.shape[0] * (x.shape[1] + gap)].view(x.shape[0], -1)[:, : x.shape[1]]
    rows_of.copy_(x)
    return rows_of.t() if turned else rows_of


def exact(a, b, dtype):
    return (a.double() @ b.double()).to(dtype)


EXTENTS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 17, 20, 32, 36, 40])


@given(EXTENTS, EXTENTS, EXTENTS, st.booleans(), st.booleans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_rows_of_any_length_that_begin_anywhere(M, N, K, a_turned, b_turned, a_gap, b_gap, shift):
    """By pointers and by copies: whatever extents and strides are multiples of, and with a block ahead or not."""
    a = lying(integers(M, K), a_turned, a_gap, shift)
    b = lying(integers(K, N, seed=1), b_turned, b_gap, shift // 2)
    expected = exact(a, b, torch.float16)
    for rows_of_tile in (16, 64):
        tile = launch.Tile({**TINY, "BLOCK_M": rows_of_tile, "GROUP_M": 2, "PIECES": 1}, 8, 2)
        with launch.force(gemm_pointer=tile):
            for split in (1, 2):
                assert torch.equal(gemm.gemm(a, b, form="pointer", split=split), expected)
    assert torch.equal(gemm.gemm(a, b, form="copied"), expected)


@pytest.mark.parametrize(
    ("turned", "dtype"), [(False, torch.float16), (True, torch.float32), (True, torch.float16), (False, torch.float64)]
)
@pytest.mark.parametrize("column", [False, True])
def test_a_matrix_times_a_vector(column, turned, dtype):
    """A column or a row, with every part of the epilogue, in one share and in more than there are blocks."""
    for M, K, gap in ((1, 1, 0), (5, 33, 3), (36, 16, 0), (20, 129, 8)):
        matrix = lying(integers(M, K, dtype=dtype), turned, gap)
        x = lying(integers(K, 1, dtype=dtype, seed=1), gap=gap)
        a, b = (matrix, x) if column else (x.t(), matrix.t())
        bias = integers(b.shape[1], dtype=dtype, seed=2)
        expected = exact(a, b, dtype)
        for block in ({"BLOCK_M": 1, "BLOCK_K": 16}, {"BLOCK_M": 16, "BLOCK_K": 32}):
            with launch.force(gemm_vector=launch.Tile(block, 4, 2)), GuardedAllocations():
                for split in (1, 3, 100):
                    assert torch.equal(gemm.gemm(a, b, form="vector", split=split), expected)
                    c, z = gemm.gemm(a, b, bias, "relu", form="vector", split=split, preactivation=True)
                    assert torch.equal(z, expected + bias)
                    assert torch.equal(c, z.relu())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    a, x = integers(20, 40), integers(40, 1, seed=1).abs() + 1
    a[3, 7] = bad
    y = gemm.gemm(a, x, form="vector")
    assert y[3].isnan().all() if math.isnan(bad) else y[3].isposinf().all()
    expected = exact(torch.where(a.isfinite(), a, 0), x, y.dtype)
    y[3] = expected[3] = 0
    assert torch.equal(y, expected)
    b = integers(40, 12, seed=2).abs() + 1
    for form in ("pointer", "copied"):
        c = gemm.gemm(a, b, form=form)
        assert not c[3].isfinite().any()
        assert torch.equal(c[:3], exact(a[:3], b, c.dtype))


def aligned_copy(x):
    """The copy that the form "copied" reads."""
    copy = rows.aligned(Operand.of(x)._replace(aligned=False), x.dtype, launch.target())
    return copy.of(x)[:, : x.shape[1]]


def test_vectors_far_apart():
    """Rows 2^31 values apart: only the pages that are touched exist."""
    memory = torch.empty(2**31 + 72, dtype=torch.float16, device=default_device())
    a = memory.as_strided((2, 16), (2**31 + 8, 1))
    a.copy_(integers(2, 16))
    x = integers(16, 1, seed=1)
    assert torch.equal(gemm.gemm(a, x, form="vector"), exact(a, x, a.dtype))
    assert torch.equal(gemm.gemm(x[:2].t(), a, form="vector"), exact(x[:2].t(), a, a.dtype))
    assert torch.equal(aligned_copy(a[:, :5]), a[:, :5])


def test_forms_that_the_operands_do_not_allow():
    a, b = integers(3, 8), integers(8, 4)
    with pytest.raises(ValueError, match="the vector form needs one row or one column, got 3 and 4"):
        gemm.gemm(a, b, form="vector")
    with pytest.raises(ValueError, match="the vector form needs two 2-D operands"):
        gemm.gemm(a[None], b[None], form="vector")
    with pytest.raises(ValueError, match="the tail form is for float16 and bfloat16, got"):
        gemm.gemm(a.float(), b.float(), form="tail")
    for other in (a.double(), integers(3, 16)[:, ::2]):
        with pytest.raises(ValueError, match="the copied form needs two 2-D operands, not float64"):
            gemm.gemm(other, b.to(other.dtype), form="copied")


def test_a_copy_has_rows_that_begin_at_16_bytes():
    for shape, dtype in itertools.product(((1, 1), (3, 8), (37, 13), (5, 1030)), (torch.float16, torch.float32)):
        x = lying(integers(*shape, dtype=dtype), gap=1, shift=3)
        for tile in (None, launch.Tile({"BLOCK_M": 2, "BLOCK_K": 16}, 4, 1)):
            with launch.force(**({"gemm_rows": tile} if tile else {})), GuardedAllocations():
                y = aligned_copy(x)
            assert torch.equal(y, x)
            assert y.stride(0) * y.element_size() % 16 == 0
            filled = y.as_strided((len(y), y.stride(0)), (y.stride(0), 1))
            assert not filled[:, y.shape[1] :].any()


@triton.jit
def inside_kernel(p_y, M, N, tile: tl.constexpr):
    low_m, low_n, m, n = tiled.clamped_tile(tl.program_id(0), M, N, tile)
    p_y += tl.program_id(0) * 4
    tl.store(p_y, low_m)
    tl.store(p_y + 1, low_n)
    tl.store(p_y + 2, m)
    tl.store(p_y + 3, n)


@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("a_turned", [False, True])
def test_blocks_lie_inside_and_each_place_is_stored_once(a_turned, b_turned):
    """Along the rows of b in memory they begin at a multiple of 16 values, and reach less than that beyond; along those
    of a where the tile does."""
    more_m, more_n = 31 * a_turned, 15 * (not b_turned)
    shapes = (8, 16), (40, 16), (64, 96), (104, 24), (16, 136), (46, 54), (16, 53), (16, 48)
    for (M, N), block in itertools.product(shapes, (16, 32)):
        places = torch.zeros(launch.cdiv(M, 32) * launch.cdiv(N, block), 4, dtype=torch.int32, device=default_device())
        tile = tiled.GemmTile(
            BLOCK_M=32,
            BLOCK_N=block,
            BLOCK_K=16,
            ACC=None,
            GROUP_M=2,
            A_TRANSPOSED=a_turned,
            B_TRANSPOSED=b_turned,
            UNIT_N=unit(N),
        )
        launch.run(inside_kernel, (len(places),), places, M, N, tile=tile)
        stored = torch.zeros(M, N)
        for low_m, low_n, m, n in places.tolist():
            assert m + 32 <= max(M + more_m, 32)
            assert n + block <= max(N + more_n, block)
            assert not a_turned or m == low_m
            assert b_turned or n % 16 == 0
            stored[max(low_m, m) : m + 32, max(low_n, n) : n + block] += 1
        assert torch.equal(stored, torch.ones(M, N))


EIGHTS = st.integers(1, 9).map(lambda count: 8 * count)


def in_rounds(processors):
    """A context in which so many programs run at a time."""
    return mock.patch.object(launch, "processors", return_value=processors)


@given(EIGHTS, EIGHTS, EIGHTS, st.booleans(), st.booleans(), st.integers(1, 12), st.sampled_from([None, 1, 2, 3, 99]))
def test_shares_of_the_last_tiles(M, N, K, a_turned, b_turned, processors, split):
    """Whatever number of tiles is left over, none among them; NaN stands around what is read."""
    a, b = lying(integers(M, K), a_turned, gap=8), lying(integers(K, N, seed=1), b_turned, gap=16)
    bias = integers(N, seed=2)
    tile = launch.Tile({**TINY, "BLOCK_N": 32, "GROUP_M": 2, "PIECES": 2, "FLATTEN": 1}, 4, 2)
    with launch.force(gemm=tile), in_rounds(processors), GuardedAllocations():
        c, z = gemm.gemm(a, b, bias, "relu", preactivation=True, form="tail", split=split)
        plain = gemm.gemm(a, b, form="tail", split=split)
    assert torch.equal(z, (a.double() @ b.double() + bias.double()).half())
    assert torch.equal(c, z.relu())
    assert torch.equal(plain, exact(a, b, plain.dtype))


def test_shares_of_the_last_tiles_in_one_more_than_tiles_have():
    """Rows, columns and blocks; the shares of a tile are added in four parts of its rows."""
    a, b = lying(integers(33, 17), gap=7), lying(integers(17, 33, seed=1), gap=7)
    tile = launch.Tile({**TINY, "GROUP_M": 2, "PIECES": 1, "FLATTEN": 1}, 4, 2)
    with (
        launch.force(gemm=tile, gemm_sum=launch.Tile({"BLOCK": 64, "BLOCK_S": 1}, 4, 1)),
        in_rounds(7),
        GuardedAllocations(),
    ):
        c = gemm.gemm(a, b, form="tail", split=2)
    assert torch.equal(c, exact(a, b, c.dtype))


@pytest.mark.parametrize("tile", launch.tiles("gemm", "sm_90", torch.float16), ids=str)
def test_every_tile_has_shares_of_the_last_tiles(tile):
    """Four tiles, three at a time: the last in two shares. Within the bound, and the same each time."""
    M, N, K = 2 * tile["BLOCK_M"] - 8, 2 * tile["BLOCK_N"] - 8, 3 * tile["BLOCK_K"] + 8
    a, b = (SeededMake(seed, torch.float16, default_device()).tensor(*of) for seed, of in enumerate(((M, K), (K, N))))
    with launch.force(gemm=tile), in_rounds(3), GuardedAllocations():
        c = gemm.gemm(a, b, form="tail", split=2)
        assert torch.equal(c, gemm.gemm(a, b, form="tail", split=2))
    a, b = a.double(), b.double()
    error = product_error(a, b, M, N, K, c.dtype)
    assert_within(c, a @ b, rounded(a @ b, error, c.dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_of_a_share(bad):
    a, b = integers(24, 80), integers(80, 40, seed=1).abs() + 1
    a[3, 70] = bad
    tile = launch.Tile({**TINY, "GROUP_M": 2, "PIECES": 1, "FLATTEN": 1}, 4, 2)
    with launch.force(gemm=tile), in_rounds(4):
        c = gemm.gemm(a, b, form="tail", split=3)
    assert c[3].isnan().all() if math.isnan(bad) else c[3].isposinf().all()
    assert torch.equal(c[4:], exact(a[4:], b, c.dtype))
    assert torch.equal(c[:3], exact(a[:3], b, c.dtype))


def chosen(family, shape, split=None, target="sm_90", processors=132):
    return choice.choose(family, torch.float16, "ieee", choice.Shape(*shape), split, target, processors)


SIZES = (1, 7, 16, 40, 85, 210, 1000, 5021, 12544)


@pytest.mark.parametrize("family", ["gemm", "gemm_pointer"])
def test_shares_are_never_empty_and_stages_never_idle(family):
    for M, N, K in itertools.product(SIZES, (1, 24, 300, 4096), (8, 77, 768, 14336)):
        for split in (None, 3, 1000):
            tile, shares, tail = chosen(family, (M, N, K), split)
            blocks = launch.cdiv(K, tile["BLOCK_K"])
            assert (shares - 1) * launch.cdiv(blocks, shares) < blocks
            tiles = launches.tiles_of(M, N, tile)
            if split is None and not tail:
                assert shares == 1 or tiles * shares <= 132
            if family == "gemm":
                assert tile["FLATTEN"] == (tiles * shares > 132)
            assert not tail or (tiles > 132 and shares > 1 and split is None)


@pytest.mark.parametrize(
    ("shape", "most"),
    [((210, 2304, 768), 1), ((7, 1000, 768), 6), ((1796, 1024, 4096), 1), ((16, 1088, 7648), 12)],
)
def test_few_tiles_are_shared_and_many_are_not(shape, most):
    tile, shares, _ = chosen("gemm", shape)
    assert 40 <= launches.tiles_of(*shape[:2], tile) * shares <= 132 or most > 1
    assert shares <= most


@pytest.mark.parametrize(
    ("shape", "pays"),
    [((2740, 5257, 5001), True), ((1796, 1024, 4096), True), ((137, 354, 628), False), ((605, 488, 10), False)],
)
def test_large_operands_are_copied_and_small_ones_are_not(shape, pays):
    M, N, K = shape
    units = unit(K), unit(N), unit(N)
    copied = M * K * (K % 8 > 0) + K * N * (N % 8 > 0) or M * K
    if shape[0] == 1796:
        units = unit(M), 8, 8
    assert choice.copies_pay(torch.float16, "ieee", choice.Shape(M, N, K, 1, units), copied, "sm_90", 132) is pays


def test_the_choice_depends_on_the_shape_alone():
    assert chosen("gemm", (978, 4768, 11120)) == chosen("gemm", (978, 4768, 11120))
    assert chosen("gemm", (978, 4768, 11120)).tail
    alike = choice.choose(
        "gemm", torch.float16, "ieee", choice.Shape(978, 4768, 11120), None, "sm_90", 132, tail=False
    )  # fmt: skip
    assert not alike.tail, "the sums of a row would depend on its place"
    forced = launch.Tile({**TINY, "GROUP_M": 1, "PIECES": 1, "FLATTEN": 0}, 4, 2)
    with launch.force(gemm=forced):
        assert chosen("gemm", (5021, 1000, 2048))[0] is forced
    assert len(launch.tiles_for("gemm", torch.float16, target_="interpreted", M=9, N=9, K=9)) == 1


def test_rules_that_say_or_leave_a_choice():
    """Among them and the first below that does not; sizes are cut to the shape, and equal tiles are one."""
    sizes = {**TINY, "GROUP_M": 8, "PIECES": 1}
    rules = [
        {"or": True, "when": {"M_max": 64}, "tile": {**sizes, "BLOCK_M": 32}},
        {"when": {"N_max": 8}, "tile": sizes},
        {"or": True, "tile": {**sizes, "BLOCK_M": 64}},
        {"tile": {**sizes, "BLOCK_N": 64}},
    ]
    with launch.use_tables(gemm_pointer={"interpreted": rules, "sm_90": rules, "sm_80": rules}):
        for shape, rows_of_tiles in (
            ((64, 8), [32, 16]), ((65, 8), [16]), ((64, 99), [32, 64, 16]), ((99, 99), [64, 16]), ((16, 16), [16]),
        ):  # fmt: skip
            extents = {"M": shape[0], "N": shape[1], "K": 99}
            found = launch.tiles_for("gemm_pointer", torch.float16, floor=16, **extents)
            assert [tile["BLOCK_M"] for tile in found] == rows_of_tiles
            assert launch.tile("gemm_pointer", torch.float16, floor=16, **extents) == found[0]
        assert [t["BLOCK_N"] for t in launch.tiles("gemm_pointer", "sm_90", torch.float16)] == [16, 16, 16, 64]


def test_values_that_are_read_at_once():
    assert Operand(5, 12, (12, 1)).at_once == 4
    assert Operand(5, 12, (14, 1)).at_once == 2
    assert Operand(1, 8, (3, 1)).at_once == 8
    assert Operand(24, 5, (1, 24)).at_once == 8
    assert Operand(24, 5, (2, 48)).at_once == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "suits"),
    [((402, 1, 3490), torch.float16, True), ((1, 99, 256), torch.float32, True), ((402, 1, 255), torch.float16, False),
     ((402, 2, 3490), torch.float16, False), ((402, 1, 3490), torch.float64, False)],
)  # fmt: skip
def test_which_products_are_those_of_a_vector(shape, dtype, suits):
    M, N, K = shape
    problem = Problem(Operand(M, K, (K, 1)), Operand(K, N, (N, 1)), dtype, "ieee")
    assert not vector.suits(problem)
    assert vector.suits(problem._replace(target="sm_90")) is suits
