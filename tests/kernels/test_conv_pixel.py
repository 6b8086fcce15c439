"""The pixel form: shares of taps and channels, backward phases in one launch, adjacent taps; padded channels."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from minidl.kernels import conv
from minidl.kernels.conv import forms, phase_weights, pixel_back, pixel_choice, pixel_grad_weight, pixel_tiled, plan
from minidl.kernels.conv.geometry import Geometry
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED
from minidl.kernels.conv.rewrites.fill import Fill
from minidl.runtime import launch
from minidl.testing.memory import GuardedAllocations
from tests.kernels.test_conv import Problem, whole

pytestmark = pytest.mark.usefixtures("fresh_plans")

SMALL = launch.Tile({"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}, 4, 2)
# (N, C, M, size, kernel, stride, padding, dilation, groups), as in test_conv.py.
SHAPES = {
    "a rest of channels": (2, 47, 19, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "all inside": (3, 40, 5, (7, 6), (3, 2), (2, 1), (0, 0), (1, 2), 1),
    "a run of taps": (2, 5, 20, (7, 9), (3, 4), (2, 1), (1, 0), (2, 1), 1),
    "one column of outputs": (2, 48, 33, (9, 3), (3, 3), (1, 1), (1, 0), (1, 1), 1),
    "taps and channels as one": (2, 3, 18, (6, 7), (5, 3), (1, 2), (2, 1), (1, 1), 2),
    "more taps than bits": (2, 16, 4, (1, 33), (2, 33), (1, 1), (1, 1), (1, 1), 1),
    "a kernel beyond the image": (2, 16, 8, (2, 3), (5, 5), (1, 1), (3, 3), (1, 1), 1),
}


def forced():
    grad = launch.Tile({**SMALL.sizes, "TAPS": 3}, 4, 2)
    return launch.force(conv=SMALL, conv_flat=SMALL, conv_grad_weight=grad)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_small_tiles_have_every_edge(name, dtype):
    with forced():
        done = Problem(SHAPES[name], dtype=dtype).check("pixel")
    assert {"forward", "epilogue", "preactivation", "grad_input", "grad_weight"} <= set(done)


@pytest.mark.parametrize("name", SHAPES)
def test_shares_of_taps_and_channels(name, monkeypatch):
    """Where tiles are few: as many shares as there are processors, added with the epilogue."""
    monkeypatch.setattr(launch, "processors", lambda: 1000)
    p = Problem(SHAPES[name])
    with forced():
        at = pixel_choice.chosen(p.described())
        y, z = conv.forward(p.x, p.w, p.geometry, p.bias, "relu", preactivation=True, form="pixel")
        whole_ = p.y + p.bias.double()[:, None, None]
        assert torch.equal(z.double(), whole_)
        assert torch.equal(y.double(), whole_.relu())
        assert p.check("pixel")
    terms = p.w[0].numel()
    assert (at.split > 1) == (terms >= 16 * 16)


@pytest.mark.parametrize(
    ("C", "kernel", "first"), [(8, (4, 8), 16), (8, (2, 17), 18), (17, (2, 8), 8), (17, (1, 17), 9)]
)
def test_shares_have_as_many_taps_each(C, kernel, first, monkeypatch):
    """Two of them, also where the second has fewer; a rest of channels is cut like what is before it."""
    monkeypatch.setattr(launch, "processors", lambda: 1000)
    p = Problem((3, C, 5, (kernel[0], kernel[1] - 1), kernel, (1, 1), (0, 1), (1, 1), 1))
    seen = []

    def watcher(kernel, grid, args, meta, go):
        go()
        if kernel.__name__ == "conv_pixel_kernel":
            seen.append(args[4].clone())

    with forced(), launch.watch(watcher):
        y, _ = conv.forward(p.x, p.w, p.geometry, form="pixel")
    assert torch.equal(y.double(), p.y)
    w = torch.stack([p.w.double(), p.w.double()])
    w.flatten(3)[0, :, :, first:] = 0
    w.flatten(3)[1, :, :, :first] = 0
    (shares,) = seen
    for share, part in zip(shares, w, strict=True):
        assert torch.equal(share.double(), F.conv2d(p.x.double(), part, None, *p.how).permute(0, 2, 3, 1).flatten())


def test_taps_of_a_block_of_channels_before_the_next_one(monkeypatch):
    monkeypatch.setattr(pixel_choice, "MANY_CHANNELS", 32)
    p = Problem((1, 32, 5, (3, 4), (2, 2), (1, 1), (0, 1), (1, 1), 1))
    assert pixel_choice.taps_inner(p.described())
    with forced():
        assert p.check("pixel", lambda name: name == "forward")


def test_more_taps_apart_than_bits():
    p = Problem((1, 16, 4, (1, 63), (1, 33), (1, 1), (0, 2), (1, 2), 1))
    with forced():
        assert p.check("pixel", lambda name: name == "forward")


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "padding"), [((3, 3), 1), ((2, 2), 1), ((5, 1), 1), ((1, 1), 1), ((3, 2), 0)])
def test_taps_of_a_tile_of_the_gradient(taps, kernel, padding):
    """Of the last tile some are beyond the kernel, and where all taps are inside, beyond the image."""
    p = Problem((3, 18, 9, (7, 6), kernel, (1, 2), (padding, 0), (1, 1), 1))
    with launch.force(conv_grad_weight=launch.Tile({**SMALL.sizes, "TAPS": taps}, 4, 2)):
        assert min(taps, kernel[0]) == pixel_grad_weight.chosen(p.described(GRAD_WEIGHT)).TAPS
        assert p.check("pixel", lambda name: name == "grad_weight")


@pytest.mark.parametrize("many", [1, 2**31])
def test_shares_of_the_pixels_of_the_gradient(many, monkeypatch):
    """Two of them, counted in 64 bits or 32; the last one is not full."""
    monkeypatch.setattr(pixel_grad_weight, "INT32_LIMIT", many)
    monkeypatch.setattr(launch, "processors", lambda: 4)
    p = Problem((2, 16, 5, (9, 7), (1, 1), (1, 1), (0, 0), (1, 1), 2))
    with forced():
        assert pixel_grad_weight.chosen(p.described(GRAD_WEIGHT)).shares == 2 or not launch.INTERPRETED
        assert p.check("pixel", lambda name: name == "grad_weight")


@pytest.mark.parametrize("channels", [(16, 17), (8, 5)])
@pytest.mark.parametrize(("stride", "dilation"), [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 2), (1, 2))])
def test_weights_are_read_as_they_lie_on_the_way_back(stride, dilation, channels, monkeypatch):
    """Where launches are too short for another one before them: tap by tap, or taps and channels as one."""
    monkeypatch.setattr(pixel_choice, "pays_to_reorder", lambda *_: False)
    abilities = forms.ABILITIES[pixel_tiled]._replace(reorders=lambda *_: False)
    monkeypatch.setitem(forms.ABILITIES, pixel_tiled, abilities)
    monkeypatch.setattr(phase_weights, "conv_reorder_kernel", None)
    p = Problem((1, *channels, (4, 5), (2, 3), stride, (1, 1), dilation, 2), dtype=torch.float16)
    w = p.w.to(memory_format=torch.channels_last)
    with forced():
        assert torch.equal(conv.grad_input(p.dy, w, p.geometry, form="pixel").double(), p.dx)


@pytest.mark.parametrize("M", [8, 9])
def test_weights_are_turned_in_tiles_that_are_full(M):
    """And in one with a single column."""
    p = Problem((1, 4, M, (3, 3), (2, 2), (1, 1), (0, 0), (1, 1), 2))
    with launch.force(conv_reorder=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 4}, 4, 3)):
        assert torch.equal(conv.grad_input(p.dy, p.w, p.geometry, form="pixel").double(), p.dx)


@pytest.mark.parametrize("stride", [(2, 2), (1, 3), (4, 4), (3, 2)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 4), (5, 2)])
@pytest.mark.parametrize("channels", [(16, 24), (5, 3), (40, 17)])
def test_all_walks_back_are_one_launch(stride, kernel, channels):
    """Inputs that no tap reaches get what follows a sum of nothing."""
    C, M = channels
    p = Problem((3, C, M, (9, 7), kernel, stride, (1, 2) if min(kernel) > 1 else (0, 0), (1, 1), 1))
    bias = whole(C, seed=7)
    w = p.w.to(memory_format=torch.channels_last if stride[0] % 2 else torch.contiguous_format)
    problem = p.described(TRANSPOSED, strides=w.stride(), form="pixel")._replace(C=M, M=C)
    assert plan.plan(problem).form is pixel_back
    with forced():
        y, z = conv.transposed(p.dy, w, p.geometry, bias, "relu", preactivation=True, form="pixel")
    expected = p.dx + bias.double()[:, None, None]
    assert torch.equal(z.double(), expected)
    assert torch.equal(y.double(), expected.relu())


@pytest.mark.parametrize(("C", "M", "kernel"), [(104, 7, 5), (128, 7, 5), (72, 11, 4), (64, 9, 5), (40, 3, 7)])
def test_taps_and_channels_as_one_in_few_blocks(C, M, kernel):
    """Of 104->7 a GPU read other pixels, where the compiler knew how many blocks there are."""
    p = Problem((2, C, M, (kernel + 2, kernel + 6), (kernel, kernel), (1, 1), (0, 0), (1, 1), 1), dtype=torch.float16)
    assert {"forward", "grad_input", "grad_weight"} <= set(p.check("pixel"))


@pytest.mark.parametrize("M", [72, 96])
def test_channels_that_fill_no_block_where_rows_of_taps_are_inside(M):
    """A single phase would merge two taps into one with twice the channels."""
    tile = launch.Tile({"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64}, 4, 2)
    p = Problem((2, 32, M, (6, 8), (3, 2), (2, 1), (1, 1), (1, 1), 1))
    with launch.force(conv=tile):
        assert torch.equal(conv.grad_input(p.dy, p.w, p.geometry, form="pixel"), p.dx.to(p.w.dtype))


def test_what_the_one_launch_leaves_to_single_walks():
    for change, why in (({"stride": 5}, "16 phases"), ({"dilation": 2}, "a dilation"), ({"stride": 1}, "of 1")):
        axis = Geometry.of((40, 40), (3, 3), (2, 2), ((0, 0), (0, 0)), (1, 1)).h._replace(**change)
        problem = Problem(SHAPES["all inside"]).described(TRANSPOSED)._replace(geometry=Geometry(axis, axis))
        assert why in pixel_back.able(problem)


def test_numbers_that_32_bits_do_not_count(monkeypatch):
    monkeypatch.setattr(pixel_choice, "INT32_LIMIT", 1)
    monkeypatch.setattr(pixel_grad_weight, "INT32_LIMIT", 1)
    monkeypatch.setattr(pixel_tiled, "INT32_LIMIT", 1)
    for name in SHAPES:
        with forced():
            assert {"forward", "grad_weight"} <= set(Problem(SHAPES[name]).check("pixel"))


def test_what_is_wide_counts_places_beside_the_image():
    p = Problem((1, 16, 16, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1)).described()
    assert not pixel_choice.wide(p)
    huge = 2**31 // (4 * 4 * 16)
    assert pixel_choice.wide(p._replace(N=huge))
    assert not pixel_choice.wide(p._replace(N=huge // 2))


# --- channels filled

FILLED = {
    "channels": (3, 21, 6, (6, 5), (3, 2), (1, 2), (1, 1), (1, 1), 1),
    "many channels": (2, 61, 33, (4, 5), (2, 3), (1, 1), (0, 1), (1, 1), 1),
    "groups": (3, 8, 8, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 16),
    "groups of different sizes": (2, 4, 10, (6, 5), (3, 3), (2, 1), (1, 1), (1, 1), 6),
    "groups, then channels": (2, 7, 5, (6, 5), (2, 2), (1, 1), (0, 0), (1, 2), 3),
}


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_filled_channels_give_the_same(name, dtype):
    done = Problem(FILLED[name], dtype=dtype).check("fill")
    assert {"forward", "epilogue", "preactivation", "grad_weight"} <= set(done)
    assert "grad_input" in done or name == "channels"  # of few channels of the output's gradient


@pytest.mark.parametrize("name", FILLED)
def test_filling_writes_nothing_beside_its_copies(name):
    p = Problem(FILLED[name])
    with GuardedAllocations() as guards:
        p.check("fill")
    guards.check()


def test_what_is_filled():
    def wider(direction=FORWARD, target="sm_90", **more):
        p = Problem((2, 21, 13, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1), dtype=torch.float16).described()
        geometry = p.geometry._replace(groups=more.pop("groups", 1))
        others = Fill().others(p._replace(direction=direction, target=target, geometry=geometry, **more))
        return others and others[0]

    assert (wider().C, wider().M) == (24, 13)
    assert wider(C=63).C == 64
    assert (wider(GRAD_WEIGHT, M=21).C, wider(GRAD_WEIGHT, M=21).M) == (24, 24)
    assert (wider(groups=32, C=4, M=4).groups, wider(groups=32, C=4, M=4).C) == (2, 64)
    for change in ({"C": 3}, {"C": 24}, {"groups": 7, "C": 16, "M": 16}, {"groups": 4, "C": 64, "M": 64}):
        assert not wider(**change)
    assert not wider(target="interpreted")
    assert not wider(dtype=torch.float64)
    assert not wider(pool="max")


def test_what_is_not_finite_stays_in_the_groups_made_one():
    """Sixteen groups of four channels are one of 64; a NaN of the first is in none of the second."""
    geometry = Geometry.of((5, 6), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 32)
    x, w = whole(2, 128, 5, 6), whole(128, 4, 3, 3, seed=1)
    before, _ = conv.forward(x, w, geometry, form="fill")
    x[0, 1, 2, 2] = float("nan")
    after, _ = conv.forward(x, w, geometry, form="fill")
    assert torch.equal(after[0, 64:], before[0, 64:])
    assert torch.equal(after[1], before[1])
    assert after[0, :4, 2, 2].isnan().all()


def test_one_share_of_a_gradient_is_written_as_it_is():
    """No sum follows; of several, one does."""
    p = Problem((2, 16, 16, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1), dtype=torch.float16)
    names = []
    with launch.watch(lambda kernel, grid, args, meta, go: (names.append(kernel.__name__), go())):
        assert p.check("pixel", lambda name: name == "grad_weight")
    assert names == ["conv_pixel_grad_weight_kernel"]


def test_tiles_of_sixteen_bits_are_chosen_by_their_rounds():
    """More columns than a tile has take the wide tile where it fills the device, small products the low one."""

    def tile(N, C, M, size):
        geometry = Geometry.of((size, size), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
        problem = Problem(SHAPES["all inside"], dtype=torch.float16).described()._replace(
            geometry=geometry, N=N, C=C, M=M, target="sm_90", processors=132
        )  # fmt: skip
        sizes = pixel_choice.chosen(problem).tile.sizes
        return sizes["BLOCK_M"], sizes["BLOCK_N"]

    assert tile(165, 64, 256, 27) == (128, 256)
    assert tile(39, 256, 256, 14) == (64, 128)
    assert [tile(64, 64, M, 28)[1] for M in (8, 24, 60)] == [16, 32, 64]
    for N, M in itertools.product((1, 7, 300), (1, 70, 700)):
        assert tile(N, 64, M, 9)
