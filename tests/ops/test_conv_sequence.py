"""What is special to `conv1d` and `conv_transpose1d`: causal padding, memory, forms and scales."""

import pytest
import torch
import torch.nn.functional as F

from minidl import no_grad, ops
from minidl.tensors import Tensor, default_device


def whole(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype).to(default_device())


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize(("kernel", "dilation", "stride"), [(4, 1, 1), (3, 4, 1), (2, 3, 2), (1, 1, 1), (5, 7, 1)])
def test_causal_is_padding_before_the_sequence(kernel, dilation, stride, groups):
    x, w = Tensor(whole(2, 8, 11), True), Tensor(whole(8, 8 // groups, kernel, seed=1), True)
    y = ops.conv1d(x, w, None, stride, "causal", dilation, groups)
    a, b = x.data.double().requires_grad_(), w.data.double().requires_grad_()
    expected = F.conv1d(F.pad(a, (dilation * (kernel - 1), 0)), b, None, stride, 0, dilation, groups)
    assert torch.equal(y.data.double(), expected)
    dy = whole(*y.shape, seed=2)
    y.backward(Tensor(dy))
    expected.backward(dy.double())
    assert torch.equal(x.grad.data.double(), a.grad)
    assert torch.equal(w.grad.data.double(), b.grad)


@pytest.mark.parametrize("groups", [1, 16])
def test_no_output_reads_a_later_input(groups):
    x, w = whole(1, 16, 9), Tensor(whole(16, 16 // groups, 3, seed=1))
    before = ops.conv1d(Tensor(x), w, padding="causal", dilation=2, groups=groups).data
    x[..., 5:] = 1e4
    after = ops.conv1d(Tensor(x), w, padding="causal", dilation=2, groups=groups).data
    assert torch.equal(before[..., :5], after[..., :5])
    assert not torch.equal(before[..., 5], after[..., 5])


@pytest.mark.parametrize("op", [ops.conv1d, ops.conv_transpose1d])
@pytest.mark.parametrize("groups", [1, 16])
def test_channels_are_last_in_memory(op, groups):
    """A result lies so, and what lies so is not copied."""
    x, w = whole(2, 9, 16).transpose(1, 2), Tensor(whole(16, 16 // groups, 3, seed=1))
    y = op(Tensor(x), w, groups=groups).data
    assert y.transpose(1, 2).is_contiguous()
    assert torch.equal(op(Tensor(x.contiguous()), w, groups=groups).data, y)
    leaf = Tensor(x, True)
    op(leaf, w, groups=groups).sum().backward()
    assert leaf.grad.data.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("sequences", [1, 5])
@pytest.mark.parametrize(("op", "theirs"), [(ops.conv1d, F.conv1d), (ops.conv_transpose1d, F.conv_transpose1d)])
def test_the_gradient_of_depthwise_weights(sequences, op, theirs):
    """Of few sequences it is that of rows."""
    x, w = Tensor(whole(sequences, 6, 9), True), Tensor(whole(6, 1, 3, seed=1), True)
    y = op(x, w, stride=2, padding=1, groups=6)
    a, b = x.data.double().requires_grad_(), w.data.double().requires_grad_()
    expected = theirs(a, b, stride=2, padding=1, groups=6)
    dy = whole(*y.shape, seed=2)
    y.backward(Tensor(dy))
    expected.backward(dy.double())
    assert torch.equal(w.grad.data.double(), b.grad)
    assert torch.equal(x.grad.data.double(), a.grad)


def test_scale_and_wide_bias():
    x, w = Tensor(whole(2, 3, 9, dtype=torch.float16)), Tensor(whole(4, 3, 3, seed=1, dtype=torch.float16))
    scale, bias = whole(4, seed=4), torch.tensor([70000.0, 1.0, 0.0, -1.0]).to(default_device())
    with no_grad():
        got = ops.conv1d(x, w, Tensor(bias), scale=Tensor(scale), act="tanh").data
    exact = F.conv1d(x.data.double(), w.data.double()) * scale[:, None] + bias[:, None]
    assert torch.equal(got, exact.tanh().half())
    with no_grad(), pytest.raises(ValueError, match=r"conv_transpose1d: scale has shape \[4\], expected \[6\]"):
        ops.conv_transpose1d(x, Tensor(whole(3, 6, 2, dtype=torch.float16)), scale=Tensor(scale))


def test_a_form_on_request():
    x, w = Tensor(whole(2, 32, 9)), Tensor(whole(32, 32, 3))
    expected = F.conv1d(x.data.double(), w.data.double())
    for form in ("pixel", "fft"):
        torch.testing.assert_close(ops.conv1d(x, w, form=form).data.double(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="unknown form 'fast'"):
        ops.conv1d(x, w, form="fast")
