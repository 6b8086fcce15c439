"""What is tried: sizes, flags, warps and stages, the nearest first."""

import pytest

from minidl.runtime import launch
from minidl.runtime.launch import Tile
from minidl.tools.tuning import space

GEMM = Tile({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "PIECES": 2, "FLATTEN": 1}, 8, 4)


@pytest.mark.parametrize("target", ["interpreted", "sm_90", "sm_80"])
def test_every_tile_has_candidates_that_its_kernel_could_take(target):
    for family in launch.families():
        for present in launch.tiles(family, target)[:1]:
            found = space.candidates(family, target, present)
            assert present not in found
            assert found, family
            for tile in found[:50]:
                assert tile.sizes.keys() == present.sizes.keys()
                assert all(size & (size - 1) == 0 for size in tile.sizes.values() if size != 3)
            assert space.distance(found[0], present) <= space.distance(found[-1], present)


@pytest.mark.parametrize("family", sorted(space.PRODUCTS))
def test_no_side_of_a_product_is_beyond_what_tensor_cores_take(family):
    for present in launch.tiles(family, "sm_90"):
        for name, size in present.sizes.items():
            if name.startswith("BLOCK"):
                assert max(space._range(family, name, size, on_cpu=False)) <= 256


def test_the_nearest_come_first_and_all_there_is_varies():
    found = space.candidates("gemm", "sm_90", GEMM)
    first = [tile for tile in found if space.distance(tile, GEMM) == 1]
    assert found[: len(first)] == first
    assert {tile["BLOCK_M"] for tile in found} == {16, 32, 64, 128, 256}
    assert {tile["BLOCK_K"] for tile in found} == {16, 32, 64, 128, 256}
    assert {tile["PIECES"] for tile in found} == {1, 2, 4}
    assert {tile.num_warps for tile in found} == {4, 8}
    assert {tile.num_stages for tile in found} == {2, 3, 4, 5}
    assert all(tile["BLOCK_M"] * tile["BLOCK_N"] <= 128 * 256 for tile in found)


def test_the_interpreter_has_blocks_only():
    for tile in space.candidates("gemm", "interpreted", GEMM):
        assert (tile["PIECES"], tile["FLATTEN"], tile.num_warps, tile.num_stages) == (2, 1, 8, 4)


def test_a_row_stays_in_one_block():
    found = space.candidates("softmax", "sm_90", Tile({"BLOCK_M": 2, "BLOCK_N": 1024}, 8))
    assert {tile["BLOCK_N"] for tile in found} == {1024}
    assert {tile.num_warps for tile in found} == {1, 2, 4, 8, 16, 32}


def test_a_block_of_three_axes_is_measured_by_all_of_them():
    (present, *_) = launch.tiles("gemm_thin", "sm_90")
    found = space.candidates("gemm_thin", "sm_90", present)
    volumes = [tile["BLOCK_M"] * tile["BLOCK_N"] * tile["BLOCK_K"] for tile in found]
    assert max(volumes) == space.LARGEST_BLOCK
    assert min(tile["BLOCK_M"] for tile in found) == 1
    assert {tile.num_stages for tile in found} == {1, 2, 3, 4, 5}


def test_distance():
    assert space.distance(GEMM, GEMM) == 0
    other = Tile({**GEMM.sizes, "BLOCK_M": 32, "FLATTEN": 0}, 4, 3)
    assert space.distance(GEMM, other) == 2 + 1 + 1 + 1
