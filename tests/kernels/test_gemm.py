"""What is special to matrix products: forms, transpositions, shares of K, precision, large addresses."""

import itertools
import math

import pytest
import torch

from minidl.kernels import activation, gemm
from minidl.kernels.gemm import parts, thin
from minidl.kernels.gemm.operands import Operand
from minidl.kernels.gemm.problem import Problem
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.testing import GuardedAllocations, assert_within
from minidl.testing.specs.activation import apply
from minidl.testing.specs.linalg import product_error
from minidl.testing.specs.make import SeededMake
from tests.launches import replace_run

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


@pytest.fixture
def kernels(monkeypatch):
    """Names of the kernels launched during the test."""
    names = []
    run = launch.run

    def spy(kernel, *args, **meta):
        names.append(kernel.__name__)
        run(kernel, *args, **meta)

    replace_run(monkeypatch, spy)
    return names


def matrix(*shape, dtype=torch.float32, seed=0, kinds=("normal",)):
    return SeededMake(seed, dtype, default_device(), kinds=kinds).tensor(*shape)


def integers(*shape, dtype=torch.float32, seed=0):
    return matrix(*shape, dtype=dtype, seed=seed, kinds=("integers",))


def stored(x, transposed):
    """The same matrix, lying in memory as its transpose."""
    return x.t().contiguous().t() if transposed else x


def assert_product(c, a, b, split=1):
    """c is a @ b within the bound; adding up the shares is part of it."""
    a, b = a.double().cpu(), b.double().cpu()
    error = product_error(a, b, a.shape[-2], b.shape[-1], a.shape[-1], c.dtype)
    error = error + split * 2.0**-24 * (a.abs() @ b.abs())
    exact = a @ b
    assert_within(c, exact, error + torch.finfo(c.dtype).eps * exact.abs() + torch.finfo(c.dtype).tiny)


FORMS = ["tma", "pointer", "parts", "thin"]


# Boxes have no float64, and parts are those of float32.
FORMS_OF_DTYPES = [
    (form, d)
    for form in FORMS
    for d in DTYPES
    if (form, d) != ("tma", torch.float64) and (form != "parts" or d == torch.float32)
]


@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize(("form", "dtype"), FORMS_OF_DTYPES, ids=str)
def test_the_four_transpositions(dtype, transposed, form):
    """Extents one off and on the tile, so that every side has a tail in some case."""
    for M, N, K in ((16, 16, 16), (40, 24, 72), (8, 136, 64)):
        a = stored(matrix(M, K, dtype=dtype), transposed[0])
        b = stored(matrix(K, N, dtype=dtype, seed=1), transposed[1])
        assert_product(gemm.gemm(a, b, form=form), a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_extents_and_strides(dtype, kernels):
    a = matrix(34, 66, dtype=dtype)[::2, ::2]
    b = matrix(1, 33, dtype=dtype, seed=1).expand(19, 33).t()
    assert_product(gemm.gemm(a, b), a, b)
    # A GPU copies float32 operands that do not lie along K: the copy has boxes.
    copied = dtype == torch.float32 and not launch.INTERPRETED
    assert [name for name in kernels if name != "along_k_kernel"] == ["gemm_pointer_kernel"]
    assert ("along_k_kernel" in kernels) is copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_aligned_matrices_go_through_boxes(dtype, kernels):
    a, b = matrix(24, 40, dtype=dtype), stored(matrix(40, 24, dtype=dtype), True)
    gemm.gemm(a, b)
    assert kernels == ["gemm_tma_kernel"]


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:, 1:-7],
        lambda a: torch.cat([a, a[:, :1]], 1)[:, :-1],
        lambda a: a[:, ::2],
        lambda a: a.double(),
    ],
    ids=["base not aligned", "rows not aligned", "no axis contiguous", "float64"],
)
def test_other_matrices_go_through_pointers(change, kernels):
    # float16: a GPU copies float32 operands that do not lie along K, which makes boxes of them.
    a = change(matrix(24, 40, dtype=torch.float16))
    b = matrix(a.shape[1], 16, dtype=a.dtype)
    assert_product(gemm.gemm(a, b), a, b)
    assert kernels == ["gemm_pointer_kernel"]
    with pytest.raises(ValueError, match="the tma form needs"):
        gemm.gemm(a, b, form="tma")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("split", [2, 3, 5, 100])
def test_shares_of_k(split, form):
    """Also more shares than blocks of K, and a last share that is shorter."""
    tile = launch.Tile({**launch.tiles(gemm.FAMILIES[form])[0].sizes, **SMALL}, 4, 2)
    with launch.force(**{gemm.FAMILIES[form]: tile}):
        for K in (8, 72, 112):
            a, b = integers(20, K), integers(K, 24, seed=1)
            c, z = gemm.gemm(a, b, matrix(24), "gelu", form=form, split=split, preactivation=True)
            assert torch.equal(z, (a.double() @ b.double() + matrix(24).double()).float())
            assert torch.equal(gemm.gemm(a, b, form=form, split=split), (a.double() @ b.double()).float())
            assert_within(c, apply(z.double(), "gelu"), 1e-6 * z.double().abs())
            real = matrix(20, K), matrix(K, 24, seed=1)
            assert_product(gemm.gemm(*real, form=form, split=split), *real, split=split)


@pytest.mark.parametrize("shares", [1, 2, 7, 16, 17, 61, 131])
@pytest.mark.parametrize("at_a_time", [1, 4, 16])
def test_shares_are_added_in_several_rows(shares, at_a_time):
    """Also rows that are not full, and values past the end of a block."""
    partial = integers(shares, 83)
    tile = launch.Tile({"BLOCK": 32, "BLOCK_S": at_a_time}, 4, 1)
    for dtype in (torch.float32, torch.float64):
        with launch.force(gemm_sum=tile), GuardedAllocations():
            total = gemm.sum_shares(partial.to(dtype), dtype)
        assert torch.equal(total, partial.to(dtype).sum(0))


def test_many_shares_of_few_values_are_added_several_at_a_time():
    few, many, large = (
        launch.tile("gemm_sum", torch.float16, target_="sm_90", S=s, total=t)["BLOCK_S"]
        for s, t in ((15, 100), (16, 32768), (131, 32769))
    )
    assert (few, many, large) == (1, 16, 1)


SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}


@pytest.mark.parametrize("form", [*FORMS, "vector", "tail"])
def test_four_blocks_are_two_and_two(form, monkeypatch):
    """In two shares: of 2^24 + 0 and 1 + 1 nothing is lost, of 2^24 + 0 + 1 and 1 the ones are."""
    monkeypatch.setattr(launch, "processors", lambda: 8)  # more than there are tiles: the tail has them all
    sizes = {**launch.tiles(gemm.FAMILIES[form])[0].sizes, **SMALL}
    if form == "vector":
        del sizes["BLOCK_N"]
    tiles = {gemm.FAMILIES[form]: launch.Tile(sizes, 4, 2), "gemm_sum": launch.Tile({"BLOCK": 64, "BLOCK_S": 1}, 4, 1)}
    dtype = torch.float16 if form == "tail" else torch.float32
    a = torch.zeros(20, 64, dtype=dtype, device=default_device())
    b = torch.ones(64, 1 if form == "vector" else 24, dtype=dtype, device=default_device())
    a[:, 0] = b[0] = 2.0**12
    a[:, 32] = a[:, 48] = 1
    with launch.force(**tiles), GuardedAllocations():
        c = gemm.gemm(a, b, form=form, split=2, wide=True)
    assert (c == 2.0**24 + 2).all()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "thin"])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_every_tile_position_is_visited_once(form, group):
    """Several groups of tile rows, the last one short."""
    tile = launch.Tile({**launch.tiles(gemm.FAMILIES[form])[0].sizes, **SMALL}, 4, 2)
    tile = launch.Tile({**tile.sizes, "GROUP_M": group}, 4, 2)
    a, b = integers(104, 24), integers(24, 72, seed=1)
    with launch.force(**{gemm.FAMILIES[form]: tile}), GuardedAllocations():
        c = gemm.gemm(a, b, form=form)
    assert torch.equal(c, (a.double() @ b.double()).float())


def test_batches():
    a, b = integers(5, 17, 33), integers(5, 33, 9, seed=1)
    assert torch.equal(gemm.gemm(a, b), (a.double() @ b.double()).float())
    expanded = integers(1, 17, 33).expand(5, 17, 33)
    assert torch.equal(gemm.gemm(expanded, b), (expanded.double() @ b.double()).float())
    assert torch.equal(gemm.gemm(a, b, split=2), gemm.gemm(a, b))
    bias = integers(9, seed=2)
    c, z = gemm.gemm(a, b, bias, "relu", preactivation=True)
    exact = (a.double() @ b.double() + bias.double()).float()
    assert torch.equal(z, exact)
    assert torch.equal(c, exact.relu())


def test_batches_of_whole_tiles():
    a, b = integers(3, 32, 24), integers(3, 24, 32, seed=1)
    tile = launch.Tile({**launch.tiles("gemm_pointer")[0].sizes, **SMALL}, 4, 2)
    with launch.force(gemm_pointer=tile):
        assert torch.equal(gemm.gemm(a, b), (a.double() @ b.double()).float())


@pytest.mark.parametrize("form", [None, "pointer", "tma", "thin"])
def test_a_product_is_added_in_place_to_a_wide_one(form):
    device = default_device()
    for M, N, K in ((40, 3, 4), (1, 64, 33), (130, 72, 16)):
        if form == "tma" and N % 8:
            continue
        a, b = torch.randn(M, K, device=device).half(), torch.randn(K, N, device=device).half()
        total = torch.randn(M, N, device=device)
        exact = total.double() + a.double() @ b.double()
        # What it is added to is a product with 1.
        sides = torch.cat([a, total], 1).double(), torch.cat([b, torch.eye(N, device=device)]).double()
        a = a if form != "tma" else torch.nn.functional.pad(a, (0, -K % 8))
        b = b if form != "tma" else torch.nn.functional.pad(b, (0, 0, 0, -K % 8))
        assert gemm.gemm(a, b, onto=total, form=form) is total
        assert_within(total, exact, product_error(*sides, M, N, K + 8, torch.float16))


@pytest.mark.parametrize("turned", [False, True])
def test_where_two_blocks_lie_a_product_is_added_once(turned):
    """The last rows and columns are in blocks that end where the result ends and begin in those before."""
    tile = launch.Tile({**launch.tiles("gemm")[0].sizes, **SMALL, "BLOCK_N": 32}, 4, 2)
    a, b = integers(40, 16, dtype=torch.float16), stored(integers(16, 48, dtype=torch.float16, seed=1), turned)
    total = integers(40, 48, seed=2)
    expected = (total.double() + a.double() @ b.double()).float()
    with launch.force(gemm=tile):
        gemm.gemm(a, b, onto=total, form="tma")
    assert torch.equal(total, expected)


@pytest.mark.parametrize("act", [None, *activation.NAMES, ("leaky_relu", 0.3)], ids=str)
def test_epilogue(act):
    a, b, bias = matrix(17, 24), matrix(24, 33, seed=1), matrix(33, seed=2)
    z_exact = a.double() @ b.double() + bias.double()
    for form in ("pointer", None):
        c, z = gemm.gemm(a, b, bias, act, preactivation=True, form=form)
        assert_within(z, z_exact, 1e-5)
        # In the float32 of the accumulator, not of z: both round, one does not follow from the other.
        assert_within(c, apply(z_exact, act), 1.2e-5)
        assert torch.equal(gemm.gemm(a, b, bias, act, form=form), c)


@pytest.mark.parametrize("form", [None, "thin"])
@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_empty_and_single(shape, form):
    M, K, N = shape
    a, b, bias = integers(M, K), integers(K, N, seed=1), integers(N, seed=2)
    with GuardedAllocations():
        c = gemm.gemm(a, b, bias, "relu", form=form)
    assert torch.equal(c, torch.relu(a @ b + bias))
    assert gemm.gemm(matrix(2, M, K), matrix(2, K, N)).shape == (2, M, N)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_beyond_k_is_read(form):
    """NaN lies around and between the rows of both operands; one read of it would spread over the result."""
    guards = GuardedAllocations()
    a = guards.guard(matrix(20, 28)[:, :20])
    b = guards.guard(matrix(20, 44)[:, :36])
    assert (a.stride(0), b.stride(0)) == (28, 44)
    with guards:
        c = gemm.gemm(a, b, form=form)
    assert_product(c, a, b)


@pytest.mark.parametrize(
    ("form", "precision"), [(form, "tf32x3") for form in FORMS] + [("tma", "ieee"), ("pointer", "ieee")]
)
def test_float32_keeps_24_bits(precision, form):
    """One product of two odd 12-bit integers needs 24 bits; tf32 keeps 11 of each factor."""
    a = 2.0 * torch.arange(1024, 2048, 8, device=default_device()).float().view(-1, 1) + 1
    b = a[:64].t() - 2 * 511
    a, b = (torch.nn.functional.pad(x, p) for x, p in ((a, (0, 3)), (b, (0, 0, 0, 3))))
    c = gemm.gemm(a, b, precision=precision, form=form)
    assert torch.equal(c.double(), a.double() @ b.double())


@pytest.mark.gpu
def test_tf32_is_what_it_says():
    """The sentinel above sees single tf32, so it would see it used where it was not asked for."""
    a = 2.0 * torch.arange(1024, 2048, 8, device="cuda").float().view(-1, 1) + 1
    a = torch.nn.functional.pad(a, (0, 3))
    c = gemm.gemm(a, a.t().contiguous(), precision="tf32", form="tma")
    assert not torch.equal(c.double(), a.double() @ a.double().t())


@pytest.mark.parametrize("form", ["tma", "pointer", "thin"])
def test_addresses_beyond_two_to_the_31(form):
    """Rows 2^31 elements apart: only the pages that are touched exist."""
    far = 2**31 + 8
    memory = torch.empty(far + 64, dtype=torch.float16, device=default_device())
    a = memory.as_strided((2, 16), (far, 1))
    a.copy_(integers(2, 16, dtype=torch.float16))
    b = integers(16, 8, dtype=torch.float16, seed=1)
    expected = (a.double() @ b.double()).half()
    assert torch.equal(gemm.gemm(a, b, form=form), expected)
    tall = gemm.gemm(a.t(), integers(2, 8, dtype=torch.float16), form=form)
    assert torch.equal(tall, (a.double().t() @ integers(2, 8).double()).half())


@pytest.mark.parametrize("form", ["pointer", "thin"])
def test_a_step_along_k_beyond_two_to_the_31(form):
    """Columns so far apart that a block of them spans 2^31 elements."""
    columns, far = 2 * 512 + 16, 2**22
    memory = torch.empty(columns * far, dtype=torch.float16, device=default_device())
    a = memory.as_strided((2, columns), (1, far))
    a.copy_(integers(2, columns, dtype=torch.float16))
    b = integers(columns, 8, dtype=torch.float16, seed=1)
    sizes = {**launch.tiles(gemm.FAMILIES[form])[0].sizes, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 512}
    if form == "thin":
        sizes |= {"BLOCK_M": 2, "BLOCK_N": 8}
    with launch.force(**{gemm.FAMILIES[form]: launch.Tile(sizes, 4, 1)}):
        assert torch.equal(gemm.gemm(a, b, form=form), (a.double() @ b.double()).half())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("M", [31, 32, 33])
def test_one_row_more_than_tiles_have(form, M):
    sizes = {**launch.tiles(gemm.FAMILIES[form])[0].sizes, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}
    a, b = integers(M, 24), integers(24, 32, seed=1)
    with launch.force(**{gemm.FAMILIES[form]: launch.Tile(sizes, 4, 2)}):
        assert torch.equal(gemm.gemm(a, b, form=form), (a.double() @ b.double()).float())


@pytest.mark.parametrize(("rows", "K"), [(17, 32), (20, 33)])
def test_parts_of_one_value_more_than_blocks_have(rows, K):
    """More rows and columns of both operands, or more of K; rows in memory begin at 16 bytes."""
    sizes = launch.tiles("gemm_parts")[0].sizes
    cut = launch.Tile({"BLOCK_M": 16, "BLOCK_K": 16}, 1, 1)
    a, b = stored(integers(rows, K), K % 4 != 0), stored(integers(K, rows, seed=1), K % 4 == 0)
    with launch.force(gemm_parts=launch.Tile({**sizes, **SMALL}, 4, 2), gemm_cut=cut), GuardedAllocations():
        assert torch.equal(gemm.gemm(a, b, form="parts"), (a.double() @ b.double()).float())


@pytest.mark.parametrize("form", FORMS)
def test_runs_are_bitwise_equal(form):
    a, b = matrix(48, 200), matrix(200, 40, seed=1)
    first = gemm.gemm(a, b, form=form, split=4)
    assert torch.equal(first, gemm.gemm(a, b, form=form, split=4))


CUTS = [
    launch.Tile({"BLOCK_M": 16, "BLOCK_K": 32}, 4, 1),
    launch.Tile({"BLOCK_M": 2, "BLOCK_K": 8}, 1, 1),
    launch.Tile({"BLOCK_M": 1, "BLOCK_K": 4}, 1, 1),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("tile", CUTS, ids=str)
def test_copies_along_k(tile, whole):
    """To the nearest tf32, ties away from zero; what is not finite stays, and nothing finite becomes infinite.

    A row has 11 values, or 12, which fill three of the smallest tiles."""
    step = 2.0**-10
    below = 1 + step / 2 - 2.0**-23
    largest, cut = torch.finfo(torch.float32).max, (2 - step) * 2.0**127
    given = [1.0, below, 1 + step / 2, -1 - step / 2, 0.0, 2.0**-130, largest, -largest, math.inf, -math.inf, math.nan]
    near = [1.0, 1.0, 1 + step, -1 - step, 0.0, 2.0**-130, cut, -cut, math.inf, -math.inf, math.nan]
    if whole:
        given, near = [*given, 2.0], [*near, 2.0]
    x = torch.tensor([given] * 3, device=default_device()).t().contiguous().t()
    with launch.force(gemm_cut=tile):
        rounded, copied = (
            parts.along_k(Operand.of(x), nearest, launch.target()).of(x)[:, : x.shape[1]] for nearest in (True, False)
        )
    assert rounded.stride(1) == 1
    expected = torch.tensor([near] * 3, device=default_device())
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(copied, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("family", "tile"),
    [("gemm_cut", tile) for tile in [*CUTS[:2], *launch.tiles("gemm_cut")]]
    + [("gemm_parts", tile) for tile in launch.tiles("gemm_parts")],
    ids=str,
)
def test_parts_of_float32(family, tile):
    """Whole numbers of 11 bits have no second part; others have, and the product the accuracy of float32."""
    rows = 150 if family == "gemm_parts" or tile["BLOCK_M"] > 2 else 37
    with launch.force(**{family: tile}), GuardedAllocations():
        a, b = integers(rows, 100), integers(100, 136, seed=1)
        assert torch.equal(gemm.gemm(a, b, form="parts"), (a.double() @ b.double()).float())
        a, b = matrix(40, 260), stored(matrix(260, 24, seed=1), True)
        assert_product(gemm.gemm(a, b, form="parts"), a, b)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_has_no_parts(bad, where, kernels):
    """An infinity times the zero of another number's second part would be NaN."""
    pair = [matrix(24, 40), matrix(40, 16, seed=1)]
    pair[where][3, 5] = bad
    c = gemm.gemm(*pair, form="parts")
    exact = pair[0].double() @ pair[1].double()
    assert torch.equal(c.isnan(), exact.isnan())
    assert torch.equal(c.isposinf(), exact.isposinf())
    finite = exact.isfinite()
    assert torch.equal(c.isfinite(), finite)
    assert_within(c[finite], exact[finite], 1e-5)
    assert kernels == ["parts_kernel", "parts_kernel", "gemm_parts_kernel", "gemm_tma_kernel"]


@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (65, 70)])
def test_what_lies_past_the_end_is_not_taken_for_numbers(shape):
    """Or a finite product would be computed twice."""
    wild = torch.zeros(1, dtype=torch.int32, device=default_device())
    x = matrix(*shape)
    parts.cut(Operand.of(x), launch.target()).of(x, wild)
    assert wild.item() == 0


def test_the_largest_numbers_have_parts():
    """Rounded to 11 bits the largest number would be infinite."""
    a = torch.full((8, 16), torch.finfo(torch.float32).max, device=default_device())
    b = torch.zeros(16, 8, device=default_device())
    b[0] = 0.5
    assert_within(gemm.gemm(a, b, form="parts"), a.double() @ b.double(), 2.0**-22 * 2.0**127)


@pytest.mark.gpu
def test_large_float32_products_go_in_parts(kernels):
    a = matrix(gemm.LEAST_PARTS, gemm.LEAST_PARTS)
    assert_product(gemm.gemm(a, a), a, a)
    assert "gemm_parts_kernel" in kernels
    kernels.clear()
    gemm.gemm(a[:-8], a)
    gemm.gemm(a, a, precision="tf32")
    assert "gemm_parts_kernel" not in kernels


# Every tile of the thin form, once per size: float64 has one of its own, and runs with all the same.
THIN_TILES = list(
    {
        tuple(tile.sizes.items()): tile
        for name in (["interpreted", "sm_90", "sm_80"] if launch.INTERPRETED else [launch.target()])
        for tile in launch.tiles("gemm_thin", name)
    }.values()
)


@pytest.mark.parametrize(
    ("tile", "dtype"),
    [
        (tile, dtype)
        for i, tile in enumerate(THIN_TILES)
        for j, dtype in enumerate(DTYPES)
        if not launch.INTERPRETED or j == i % len(DTYPES)
    ],
    ids=str,
)
def test_every_tile_of_the_thin_form(tile, dtype):
    """Extents of one, below, on and beyond a block; primes; K of several blocks; both memories of both operands."""
    with launch.force(gemm_thin=tile), GuardedAllocations():
        for M, N, K in ((1, 1, 1), (35, 4, 131), (16, 37, 4), (4, 13, 521), (5, 2, 7)):
            a, b = stored(integers(M, K, dtype=dtype), M < K), stored(integers(K, N, dtype=dtype, seed=1), N < K)
            bias = integers(N, dtype=dtype, seed=2)
            exact = a.double() @ b.double()
            assert torch.equal(gemm.gemm(a, b, form="thin"), exact.to(dtype))
            c, z = gemm.gemm(a, b, bias, "relu", form="thin", preactivation=True)
            assert torch.equal(z, (exact + bias.double()).to(dtype))
            assert torch.equal(c, (exact + bias.double()).relu().to(dtype))
            real = stored(matrix(M, K, dtype=dtype), N < K), stored(matrix(K, N, dtype=dtype, seed=1), M < K)
            assert_product(gemm.gemm(*real, form="thin"), *real)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[1:, 2:],
        lambda x: x[::3, 1::2],
        lambda x: x.t()[3:, ::2].t(),
        lambda x: x[:, :1].expand(-1, 9),
        lambda x: x[:1].expand(7, -1),
    ],
    ids=["offset", "steps", "turned", "one column", "one row"],
)
def test_thin_operands_of_any_strides(change, dtype):
    """NaN lies around and between what is read of them."""
    guards = GuardedAllocations()
    a = guards.guard(change(matrix(14, 23, dtype=dtype)))
    b = guards.guard(change(matrix(13, 23, dtype=dtype, seed=1)).t())
    with guards:
        c = gemm.gemm(a, b, form="thin")
    assert_product(c, a, b)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_goes_where_float64_says(bad, where):
    """Zeros stand beyond the last row, column and number of K: an infinity there would be NaN in the whole block."""
    pair = [matrix(19, 21), matrix(21, 5, seed=1)]
    pair[where][4, 3] = bad
    pair[1 - where][3, 4] = 0.0
    c = gemm.gemm(*pair, form="thin")
    exact = pair[0].double() @ pair[1].double()
    assert 0 < exact.isnan().sum() < exact.numel()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf, torch.isfinite):
        assert torch.equal(kind(c), kind(exact))
    finite = exact.isfinite()
    assert_within(c[finite], exact[finite], 1e-5)


@pytest.mark.parametrize(
    ("M", "N", "K", "dtype", "chosen"),
    [
        (1024, 4, 128, torch.float32, True),
        (1024, 128, 4, torch.float32, True),
        (4, 128, 1024, torch.float32, True),
        (1024, 16, 128, torch.float32, True),
        (1024, 17, 128, torch.float32, False),
        (1024, 15, 128, torch.float16, False),
        (512, 15, 128, torch.float16, True),
        (1024, 16, 128, torch.float16, False),
        (15, 64, 64, torch.bfloat16, True),
        (1024, 4, 128, torch.float64, False),
        (16, 512, 512, torch.float32, True),
        (16, 512, 513, torch.float32, False),
    ],
)
def test_which_products_are_thin(M, N, K, dtype, chosen):
    problem = Problem(Operand(M, K, (K, 1)), Operand(K, N, (N, 1)), dtype, "ieee", target="sm_90")
    assert thin.suits(problem) is chosen
    assert not thin.suits(problem._replace(batch=1))
    assert not thin.suits(problem._replace(target="interpreted"))


@pytest.mark.parametrize(
    ("target", "grids"), [("sm_90", [(128, 1), (256, 1), (16, 1)]), ("sm_80", [(128, 1), (128, 1), (16, 1)])]
)
def test_a_thin_layer_and_its_gradients_are_a_launch_each(target, grids, monkeypatch):
    """Recorded as where kernels are compiled: no copies, and no shares of K to add up."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    x, weight, bias, dy = (torch.empty(shape) for shape in ((1024, 128), (4, 128), (4,), (1024, 4)))
    launched = []
    with launch.record(lambda kernel, *rest: launched.append((kernel.__name__, *rest)), target):
        for pair in ((x, weight.t(), bias), (dy, weight), (dy.t(), x)):
            gemm.gemm(*pair)
    assert [name for name, *_ in launched] == ["gemm_thin_kernel"] * 3
    assert [grid for _, grid, *_ in launched] == grids


@pytest.mark.gpu
def test_small_products_of_thin_operands_are_thin(kernels):
    x, weight = matrix(1024, 128), matrix(4, 128, seed=1)
    assert_product(gemm.gemm(x, weight.t()), x, weight.t())
    assert kernels == ["gemm_thin_kernel"]
    kernels.clear()
    gemm.gemm(x, matrix(128, 24))
    assert "gemm_thin_kernel" not in kernels


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda: (matrix(2, 3), matrix(4, 5)), ValueError, r"\[2, 3\] and \[4, 5\] do not match: a has 3 columns"),
        (lambda: (matrix(2, 2, 3), matrix(3, 3, 5)), ValueError, "batch sizes must be equal"),
        (lambda: (matrix(3), matrix(3)), ValueError, "expected two matrices or two batches"),
        (lambda: (matrix(2, 3), matrix(3, 4), matrix(3)), ValueError, r"bias has shape \[3\], expected \[4\]"),
        (lambda: (matrix(2, 3), matrix(3, 4), matrix(8)[::2]), ValueError, "contiguous"),
        (lambda: (matrix(2, 3), matrix(3, 4).half()), TypeError, r"a is torch.float32 and b is torch.float16"),
        (lambda: (matrix(2, 3).int(), matrix(3, 4).int()), TypeError, "expected a floating type"),
        (lambda: (matrix(2, 3), matrix(3, 4), None, "swish"), ValueError, "unknown activation 'swish'"),
    ],
    ids=["inner", "batch", "rank", "bias length", "bias strides", "dtypes", "integers", "activation"],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        gemm.gemm(*arguments())


def test_forms_that_cannot_be():
    half = matrix(16, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"the parts form is for float32 in tf32x3, got torch\.float16"):
        gemm.gemm(half, half, form="parts")
    with pytest.raises(ValueError, match=r"for float32 in tf32x3, got torch\.float32 in ieee"):
        gemm.gemm(half.float(), half.float(), form="parts", precision="ieee")
    with pytest.raises(ValueError, match="the thin form needs two 2-D operands"):
        gemm.gemm(matrix(2, 4, 4), matrix(2, 4, 4), form="thin")
    with pytest.raises(ValueError, match="unknown form 'fast'; expected one of tma, parts, pointer, thin"):
        gemm.gemm(half, half, form="fast")
    with pytest.raises(ValueError, match="the parts form needs two 2-D operands"):
        gemm.gemm(matrix(2, 16, 16), matrix(2, 16, 16), form="parts")


@pytest.mark.skipif(not launch.INTERPRETED, reason="bfloat16 is computed on a GPU")
def test_bfloat16_is_refused_by_the_interpreter():
    with pytest.raises(TypeError, match="bfloat16 is not supported on the CPU"):
        gemm.gemm(matrix(16, 16).bfloat16(), matrix(16, 16).bfloat16())
