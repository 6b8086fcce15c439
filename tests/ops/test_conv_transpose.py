"""What is special to `conv_transpose2d`: laws that hold exactly on whole numbers, forms, scales, memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from minidl import no_grad, ops
from minidl.tensors import Tensor, default_device


def whole(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype).to(default_device())


@st.composite
def calls(draw):
    """(x's shape, weight's shape, settings as torch takes them) of results that are not empty."""
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, stride, dilation = (draw(st.integers(1, 5)), draw(st.integers(1, 5))), draw(pair), draw(pair)
    ends = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    size, padding = draw(st.tuples(*[st.integers(1, 9)] * 2)), draw(st.tuples(*[st.integers(0, 4)] * 2))
    for n, k, s, p, d, e in zip(size, kernel, stride, padding, dilation, ends, strict=True):
        assume((n - 1) * s - 2 * p + d * (k - 1) + e >= 0)
    groups = draw(st.sampled_from([1, 1, 2]))
    C, M = draw(st.sampled_from([1, 3, 16, 32])), draw(st.sampled_from([1, 3, 4, 12, 16]))
    shapes = (draw(st.integers(0, 3)), groups * C, *size), (groups * C, M, *kernel)
    return *shapes, {
        "stride": stride, "padding": padding, "output_padding": ends, "groups": groups, "dilation": dilation,
    }  # fmt: skip


@given(calls(), st.integers(0, 9))
def test_adjoint(call, seed):
    """<conv_transpose(x, w), y> = <x, conv(y, w)> = <w, the gradient of w>, and the gradient of x is conv(y, w)."""
    shape, kernel, how = call
    x, w = Tensor(whole(*shape, seed=seed), True), Tensor(whole(*kernel, seed=seed + 1), True)
    out = ops.conv_transpose2d(x, w, **how)
    y = whole(*out.shape, seed=seed + 2)
    out.backward(Tensor(y))
    back = {name: value for name, value in how.items() if name != "output_padding"}
    if shape[0]:
        # With an output_padding of a stride or more the convolution has more outputs than x has pixels.
        there = F.conv2d(y.double(), w.data.double(), **back)[:, :, : shape[2], : shape[3]]
        assert torch.equal(x.grad.data.double(), there)
    inner = (out.data.double() * y.double()).sum()
    assert inner == (x.data.double() * x.grad.data.double()).sum()
    assert inner == (w.data.double() * w.grad.data.double()).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@given(call=calls(), seed=st.integers(0, 9))
def test_the_same_integers_as_torch(dtype, call, seed):
    shape, kernel, how = call
    assume(shape[0])
    x, w, b = whole(*shape, seed=seed, dtype=dtype), whole(*kernel, seed=seed + 1, dtype=dtype), None
    b = whole(kernel[1] * how["groups"], seed=seed + 2, dtype=dtype)
    got = ops.conv_transpose2d(Tensor(x), Tensor(w), Tensor(b), **how, act="relu").data
    expected = F.conv_transpose2d(x.double(), w.double(), b.double(), **how).relu()
    assert torch.equal(got, expected.to(dtype))


def test_all_weights_one_counts_windows():
    """A 2x2 window at every pixel of a 2x3 image of ones, side by side: every result is 1; one apart: they overlap."""
    x, w = Tensor(torch.ones(1, 1, 2, 3).to(default_device())), Tensor(torch.ones(1, 1, 2, 2).to(default_device()))
    assert torch.equal(ops.conv_transpose2d(x, w, stride=2).data.cpu(), torch.ones(1, 1, 4, 6))
    counts = ops.conv_transpose2d(x, w).data[0, 0].tolist()
    assert counts == [[1, 2, 2, 1], [2, 4, 4, 2], [1, 2, 2, 1]]


def test_it_undoes_the_shape_of_a_convolution():
    x, w = Tensor(whole(2, 3, 11, 8)), Tensor(whole(5, 3, 4, 3))
    y = ops.conv2d(x, w, stride=3, padding=1)
    back = ops.conv_transpose2d(y, w, stride=3, padding=1, output_padding=((11 + 2 - 4) % 3, (8 + 2 - 3) % 3))
    assert back.shape == x.shape


def test_scale_and_wide_bias():
    x, w = Tensor(whole(2, 3, 4, 4, dtype=torch.float16)), Tensor(whole(3, 2, 3, 3, dtype=torch.float16))
    scale, bias = whole(2, seed=4), torch.tensor([70000.0, 1.0]).to(default_device())
    with no_grad():
        got = ops.conv_transpose2d(x, w, Tensor(bias), 2, scale=Tensor(scale), act="tanh").data
        exact = (
            F.conv_transpose2d(x.data.double(), w.data.double(), None, 2) * scale[:, None, None] + bias[:, None, None]
        )
        assert torch.equal(got, exact.tanh().half())
        with pytest.raises(ValueError, match=r"scale has shape \[3\], expected \[2\]"):
            ops.conv_transpose2d(x, w, scale=Tensor(whole(3)))
    w.requires_grad = True
    with pytest.raises(ValueError, match="a scale is for inference"):
        ops.conv_transpose2d(x, w, scale=Tensor(scale))


def test_memory_is_channels_last():
    x, w = whole(2, 16, 5, 6), Tensor(whole(16, 8, 3, 3))
    y = ops.conv_transpose2d(Tensor(x), w).data
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ops.conv_transpose2d(Tensor(x.to(memory_format=torch.channels_last)), w).data, y)


def test_no_channels():
    x, w, b = Tensor(whole(2, 0, 3, 4)), Tensor(whole(0, 2, 2, 2)), Tensor(whole(2))
    expected = b.data[None, :, None, None].expand(2, 2, 4, 5)
    assert torch.equal(ops.conv_transpose2d(x, w, b).data, expected)


def test_unknown_forms():
    x, w = Tensor(whole(2, 3, 4, 4)), Tensor(whole(3, 5, 3, 3))
    with pytest.raises(ValueError, match="unknown form 'fast'"):
        ops.conv_transpose2d(x, w, form="fast")
