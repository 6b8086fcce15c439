"""The depthwise form: all backward phases in one launch, weights in place and reordered, non-finite values, rests."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from minidl.kernels import conv
from minidl.kernels.conv import depthwise_grad_weight, narrow, narrow_grad_weight
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.runtime import launch
from minidl.testing.memory import GuardedAllocations
from tests.kernels.transposed import whole
from tests.launches import replace_run

BOTH = pytest.mark.parametrize("direct", [True, False], ids=["as they lie", "in order"])
numbers = st.tuples(st.integers(1, 5), st.integers(1, 5))


class Drawn:
    """A convolution of C to M channels in each group, padded by `ends` more behind, with its float64 reference."""

    def __init__(self, N, groups, C, M, size, kernel, stride, padding, dilation, ends=(0, 0), dtype=torch.float32):
        self.geometry = Geometry.of(
            size, kernel, stride, tuple((p, p + end) for p, end in zip(padding, ends, strict=True)), dilation, groups
        )
        self.x, self.w = whole(N, groups * C, *size, dtype=dtype), whole(groups * M, C, *kernel, seed=1, dtype=dtype)
        self.dy = whole(N, groups * M, self.geometry.h.output, self.geometry.w.output, seed=2, dtype=dtype)
        (top, left), (below, right) = padding, (p + end for p, end in zip(padding, ends, strict=True))
        x, w = F.pad(self.x.double(), (left, right, top, below)).requires_grad_(), self.w.double().requires_grad_()
        y = F.conv2d(x, w, None, stride, 0, dilation, groups)
        dx, self.dw = torch.autograd.grad(y, (x, w), self.dy.double())
        self.y, self.dx = y.detach(), dx[:, :, top : top + size[0], left : left + size[1]]

    def check(self):
        forward, _ = conv.forward(self.x, self.w, self.geometry, form="depthwise")
        assert torch.equal(forward.double(), self.y)
        for memory in (torch.contiguous_format, torch.channels_last):
            dx = conv.grad_input(self.dy, self.w.to(memory_format=memory), self.geometry, form="depthwise")
            assert torch.equal(dx.double(), self.dx)
        assert torch.equal(conv.grad_weight(self.x, self.dy, self.geometry, form="depthwise").double(), self.dw)


@pytest.fixture
def setting(monkeypatch):
    """Sets constants of the cut, or of another module, for a test."""

    def set_(of=narrow, **names):
        for name, value in names.items():
            monkeypatch.setattr(of, name, value)
        launch.forget()

    yield set_
    launch.forget()


def sizes_of(kernel, padding, dilation, more):
    """Of an image that holds the kernel, and so many pixels more."""
    each = zip(kernel, padding, dilation, more, strict=True)
    return tuple(max(1, d * (k - 1) + 1 - 2 * p) + extra for k, p, d, extra in each)


@BOTH
@given(
    N=st.integers(1, 3), groups=st.sampled_from([2, 3, 8, 20]),
    channels=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (4, 1)]), kernel=numbers, stride=numbers,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)), dilation=numbers, more=numbers,
    ends=st.tuples(st.integers(0, 1), st.integers(0, 1)), dtype=st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
def test_any_shape(direct, N, groups, channels, kernel, stride, padding, dilation, more, ends, dtype):
    """Strides and dilations with a common divisor, phases without taps, kernels smaller than the stride."""
    size = sizes_of(kernel, padding, dilation, more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow, "DIRECT", 2**60 if direct else 0)
        launch.forget()
        Drawn(N, groups, *channels, size, kernel, stride, padding, dilation, ends, dtype).check()
    launch.forget()


@BOTH
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_no_images(direct, kernel, setting):
    setting(DIRECT=2**60 if direct else 0)
    geometry = Geometry.of((5, 5), kernel, (1, 1), ((0, 0), (0, 0)), (1, 1), 4)
    w = whole(4, 1, *kernel)
    assert conv.forward(whole(0, 4, 5, 5), w, geometry, form="depthwise")[0].numel() == 0
    assert (
        conv.grad_input(whole(0, 4, geometry.h.output, geometry.w.output), w, geometry, form="depthwise").numel() == 0
    )


@BOTH
@pytest.mark.parametrize(
    ("stride", "dilation"), [((2, 2), (1, 1)), ((3, 2), (1, 2)), ((4, 3), (2, 3)), ((2, 4), (3, 1))]
)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_walks_back_take_nothing_of_taps_that_they_do_not_have(stride, dilation, bad, direct, setting):
    """One launch has the taps of the longest phase: non-finite values affect only pixels that read them."""
    setting(DIRECT=2**60 if direct else 0)
    geometry = Geometry.of((17, 19), (3, 3), stride, ((1, 1), (2, 2)), dilation, 5)
    dy = whole(2, 5, geometry.h.output, geometry.w.output)
    dy[1, 3, 2, 1] = bad
    got = conv.grad_input(dy, torch.ones(5, 1, 3, 3, device=dy.device), geometry, form="depthwise")
    at = torch.zeros_like(dy, dtype=torch.float64)
    at[1, 3, 2, 1] = 1
    reached = conv.grad_input(at, torch.ones(5, 1, 3, 3, device=dy.device, dtype=at.dtype), geometry, form="pixel")
    assert torch.equal(got.isfinite(), reached == 0)
    w = torch.ones(5, 1, 3, 3, device=dy.device)
    w[2, 0, 2, 1] = bad
    got = conv.grad_input(torch.ones_like(dy), w, geometry, form="depthwise")
    h, v = ((torch.arange(n, device=dy.device) + p - r * d) % s == 0 for n, p, r, d, s in zip(
        (17, 19), (1, 2), (2, 1), dilation, stride, strict=True
    ))  # fmt: skip
    taken = torch.zeros_like(got, dtype=torch.bool)
    taken[:, 2] = h[:, None] & v[None, :]
    assert not (~got.isfinite() & ~taken).any()
    assert (~got.isfinite()).any()


@pytest.mark.parametrize("direct", [True, False])
def test_all_walks_back_are_one_launch(direct, setting, monkeypatch):
    setting(DIRECT=2**60 if direct else 0)
    names, run = [], launch.run
    replace_run(monkeypatch, lambda kernel, *args, **meta: (names.append(kernel.__name__), run(kernel, *args, **meta)))
    p = Drawn(2, 6, 1, 1, (9, 9), (3, 3), (2, 2), (1, 1), (1, 1))
    assert torch.equal(conv.grad_input(p.dy, p.w, p.geometry, form="depthwise").double(), p.dx)
    assert names == ["conv_spread_kernel"] * (not direct) + ["conv_depthwise_kernel"]


@pytest.mark.parametrize(
    ("size", "kernel", "padding", "stride"),
    [
        ((9, 3), (31, 3), (15, 1), (1, 1)), ((2, 7), (13, 9), (6, 4), (2, 1)), ((1, 1), (3, 5), (1, 4), (1, 3)),
        ((30, 4), (19, 1), (0, 0), (1, 1)),
    ],
)  # fmt: skip
def test_many_rows_of_taps_and_taps_that_find_nothing(size, kernel, padding, stride):
    Drawn(2, 5, 1, 1, size, kernel, stride, padding, (1, 1), dtype=torch.float16).check()


@given(
    size=st.integers(1, 9), kernel=st.integers(1, 9), stride=st.integers(1, 4), padding=st.integers(0, 9),
    dilation=st.integers(1, 4),
)  # fmt: skip
def test_taps_that_find_an_input_are_left(size, kernel, stride, padding, dilation):
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    assume(room >= 0)
    axis = Axis(size, kernel, room // stride + 1, stride, padding, dilation)
    first, left = narrow.cropped(axis)
    inside = axis.inside()
    assert left.padding >= 0 < left.kernel <= kernel - first
    assert left.inside() == inside[first : first + left.kernel]
    assert sum(left.inside()) == sum(inside)
    assert left.kernel == 1 or inside[first + left.kernel - 1]


@pytest.mark.parametrize("most", [1, 2, 4, 8])
@pytest.mark.parametrize("JH", [1, 3, 7])
def test_rows_of_the_gradient(most, JH):
    """A tile is no larger than the rows that there are, and a divisor of them where one is near."""

    def rows_of(QH, most, JH):
        axis = Axis(QH, JH, QH, 1, JH // 2, 1)
        return narrow_grad_weight.rows_of(axis, axis, QH, most, 1, (JH, JH))

    for QH in range(1, 40):
        assert 1 <= rows_of(QH, most, JH) <= min(QH, most)
    assert rows_of(14, 8, 7) == 7
    assert rows_of(16, 8, 3) == 8


@pytest.mark.parametrize("size", [(11, 9), (7, 16), (1, 30)])
@pytest.mark.parametrize(("C", "M"), [(1, 1), (1, 2), (3, 1)])
def test_rows_that_are_left_over(size, C, M):
    p = Drawn(3, 7, C, M, size, (3, 3), (1, 1), (1, 1), (1, 1), dtype=torch.float16)
    p.check()


def small_parts():
    """Of the weight gradient, in blocks of four channels: seven leave one less than a block, five one."""
    sizes = {
        "BLOCK_R": 2, "BLOCK_W": 1, "BLOCK_P": 4, "BLOCK_C": 4, "SUMS": 4, "PER_PROCESSOR": 1, "OUTPUTS": 16,
    }  # fmt: skip
    return launch.force(conv_depthwise_grad_weight=launch.Tile(sizes))


@pytest.mark.parametrize(
    ("N", "groups", "rows", "size", "kernel", "stride", "padding", "dilation"),
    [
        # Rows of x that the taps do not meet in order; more padding than the first rows of taps and of outputs reach.
        (1, 7, 2, (15, 4), (3, 3), (3, 1), (1, 1), (2, 1)),
        (5, 7, 2, (2, 4), (5, 1), (3, 1), (7, 0), (1, 1)),
        # Taps apart down and across; more rows of outputs, apart, than of taps.
        (2, 5, 2, (7, 9), (3, 3), (1, 1), (1, 1), (2, 2)),
        (2, 7, 3, (9, 4), (3, 3), (2, 1), (1, 1), (1, 1)),
        # Of two rows of taps that are apart only the second finds an input.
        (2, 7, 2, (2, 4), (2, 1), (3, 1), (5, 0), (6, 1)),
    ],
)
def test_the_weight_gradient_in_parts_of_taps_and_many_shares(
    N, groups, rows, size, kernel, stride, padding, dilation, setting
):
    """Rows and columns of taps that are no multiple of a part's, more shares than are added at a time."""
    setting(depthwise_grad_weight, MOST_SHARES=2)
    setting(narrow_grad_weight, MOST_ROWS=2, rows_of=lambda *_: rows)
    setting(launch, processors=lambda: 40)
    p = Drawn(N, groups, 1, 1, size, kernel, stride, padding, dilation)
    with small_parts(), GuardedAllocations():
        assert torch.equal(conv.grad_weight(p.x, p.dy, p.geometry, form="depthwise").double(), p.dw)


def test_rows_of_taps_that_find_no_input_take_nothing(setting):
    """Of an output's gradient that is not finite, either: they have no tiles, of whole rows or of the rest."""
    setting(narrow_grad_weight, MOST_ROWS=1, rows_of=lambda *_: 2)
    geometry = Geometry.of((3, 4), (7, 1), (1, 1), ((3, 3), (0, 0)), (1, 1), 7)
    with small_parts():
        dw = conv.grad_weight(
            whole(2, 7, 3, 4), torch.full_like(whole(2, 7, 3, 4), torch.nan), geometry, form="depthwise"
        )
    assert not dw[:, :, [0, 6]].any()
    assert dw[:, :, 1:6].isnan().all()
