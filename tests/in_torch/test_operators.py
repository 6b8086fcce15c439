"""Each operator of minidl.torch: torch's check of its registration, torch's function in float64, and gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import minidl.torch as mt
from minidl.runtime import launch
from minidl.tensors import default_device
from minidl.torch import registry
from minidl.torch.scaling import _scaled_sum

_DEVICE = default_device()


def _randn(*shape, last=False):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(_DEVICE)
    if last:
        values = values.movedim(1, -1).contiguous().movedim(-1, 1)
    return values


def _conv_norm(x, w, gamma, beta, added):
    from minidl.torch.conv_norm import conv_norm

    settings = [1, 1], [1, 1, 1, 1], [1, 1], [0, 0], 1, False
    return conv_norm(x, w, None, added, gamma, beta, None, None, None, 0.1, 1e-5, *settings, "relu", 0.0)[0]


def _scaled(x, scale, added):
    return _scaled_sum(x, scale, torch.arange(x.shape[0], dtype=x.dtype, device=x.device), added, 2)


_ROWS, _OFFSETS = torch.tensor([4, 0, 2, 4, 4, 1], device=_DEVICE), torch.tensor([0, 2, 2], device=_DEVICE)
_CLASSES = torch.tensor([1, 0, 2], device=_DEVICE)
# name: (ours, torch's, tensors)
CASES = {
    "conv1d": (
        lambda x, w, b: mt.conv1d(x, w, b, stride=2, padding=1, act="tanh"),
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1).tanh(),
        lambda: (_randn(2, 3, 7), _randn(4, 3, 3), _randn(4)),
    ),
    "conv1d depthwise": (
        lambda x, w: mt.conv1d(x, w, padding="same", groups=3),
        lambda x, w: F.conv1d(x, w, padding="same", groups=3),
        lambda: (_randn(2, 3, 7), _randn(3, 1, 3)),
    ),
    "conv2d": (
        lambda x, w, b: mt.conv2d(x, w, b, (2, 1), (1, 0), act="sigmoid"),
        lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 0)).sigmoid(),
        lambda: (_randn(2, 4, 5, 6), _randn(3, 4, 3, 2), _randn(3)),
    ),
    "conv2d channels last, gelu": (
        lambda x, w: mt.conv2d(x, w, groups=2, act="gelu"),
        lambda x, w: F.gelu(F.conv2d(x, w, groups=2)),
        lambda: (_randn(2, 4, 5, 3, last=True), _randn(2, 2, 3, 3, last=True)),
    ),
    "conv2d with a sum": (
        lambda x, w, r: mt.conv2d(x, w, padding=1, act="relu", added=r),
        lambda x, w, r: F.relu(F.conv2d(x, w, padding=1) + r),
        lambda: (_randn(2, 3, 4, 4), _randn(3, 3, 3, 3), _randn(2, 3, 4, 4)),
    ),
    "conv3d": (
        lambda x, w, b: mt.conv3d(x, w, b, padding=(1, 0, 1)),
        lambda x, w, b: F.conv3d(x, w, b, padding=(1, 0, 1)),
        lambda: (_randn(1, 2, 3, 4, 3), _randn(2, 2, 2, 2, 3), _randn(2)),
    ),
    "conv_transpose1d": (
        lambda x, w, b: mt.conv_transpose1d(x, w, b, stride=2, output_padding=1),
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, output_padding=1),
        lambda: (_randn(2, 3, 4), _randn(3, 2, 3), _randn(2)),
    ),
    "conv_transpose2d": (
        lambda x, w, b: mt.conv_transpose2d(x, w, b, stride=2, padding=1, act="relu"),
        lambda x, w, b: F.relu(F.conv_transpose2d(x, w, b, stride=2, padding=1)),
        lambda: (_randn(2, 3, 3, 4), _randn(3, 2, 4, 4), _randn(2)),
    ),
    "conv_transpose3d": (
        lambda x, w, b: mt.conv_transpose3d(x, w, b, stride=2, padding=1, output_padding=(1, 0, 0), act="relu"),
        lambda x, w, b: F.relu(F.conv_transpose3d(x, w, b, stride=2, padding=1, output_padding=(1, 0, 0))),
        lambda: (_randn(1, 3, 3, 2, 3), _randn(3, 2, 3, 3, 2), _randn(2)),
    ),
    "batch norm": (
        lambda x, w, b: mt.batch_norm(x, None, None, w, b, training=True, act="silu"),
        lambda x, w, b: F.silu(F.batch_norm(x, None, None, w, b, training=True)),
        lambda: (_randn(3, 4, 3, 2), _randn(4), _randn(4)),
    ),
    "batch norm with a sum": (
        lambda x, w, b, r: mt.batch_norm(x, None, None, w, b, training=True, act="relu", added=r),
        lambda x, w, b, r: F.relu(F.batch_norm(x, None, None, w, b, training=True) + r),
        lambda: (_randn(3, 4, 5), _randn(4), _randn(4), _randn(3, 4, 5)),
    ),
    "batch norm, inference": (
        lambda x, w, b, r: mt.batch_norm(x, _randn(4), _randn(4).abs(), w, b, act="relu", added=r),
        lambda x, w, b, r: F.relu(F.batch_norm(x, _randn(4), _randn(4).abs(), w, b) + r),
        lambda: (_randn(3, 4), _randn(4), _randn(4), _randn(3, 4)),
    ),
    "conv norm": (
        _conv_norm,
        lambda x, w, g, b, r: F.relu(F.batch_norm(F.conv2d(x, w, padding=1), None, None, g, b, training=True) + r),
        lambda: (_randn(2, 3, 4, 4), _randn(3, 3, 3, 3), _randn(3), _randn(3), _randn(2, 3, 4, 4)),
    ),
    "max pool": (
        lambda x: mt.max_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda: (_randn(2, 3, 5, 6),),
    ),
    "max pool apart, rounded up": (
        lambda x: mt.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda: (_randn(3, 5, 5),),
    ),
    "avg pool": (
        lambda x: mt.avg_pool2d(x, 2, 1, 1, count_include_pad=False),
        # On the CPU: torch's CUDA gradient of channels-last images with padding is wrong (pytorch issue 188344).
        lambda x: F.avg_pool2d(x.cpu(), 2, 1, 1, count_include_pad=False).to(x.device),
        lambda: (_randn(2, 3, 4, 4, last=True),),
    ),
    "adaptive avg pool": (
        lambda x: mt.adaptive_avg_pool2d(x, (2, None)),
        lambda x: F.adaptive_avg_pool2d(x, (2, None)),
        lambda: (_randn(2, 3, 5, 4),),
    ),
    "max pool of volumes": (
        lambda x: mt.max_pool3d(x, (2, 3, 2), (1, 2, 2), 1, dilation=(2, 1, 1), ceil_mode=True),
        lambda x: F.max_pool3d(x, (2, 3, 2), (1, 2, 2), 1, dilation=(2, 1, 1), ceil_mode=True),
        lambda: (_randn(2, 3, 4, 5, 3),),
    ),
    "avg pool of volumes": (
        lambda x: mt.avg_pool3d(x, (2, 3, 2), 2, 1, True, count_include_pad=False),
        lambda x: F.avg_pool3d(x.cpu(), (2, 3, 2), 2, 1, True, count_include_pad=False).to(x.device),
        lambda: (_randn(3, 4, 5, 3),),
    ),
    "avg pool of volumes, another divisor": (
        lambda x: mt.avg_pool3d(x, 2, divisor_override=3),
        lambda x: F.avg_pool3d(x, 2, divisor_override=3),
        lambda: (_randn(2, 3, 4, 5, 3, last=True),),
    ),
    "adaptive avg pool of volumes": (
        lambda x: mt.adaptive_avg_pool3d(x, (2, None, 1)),
        lambda x: F.adaptive_avg_pool3d(x, (2, None, 1)),
        lambda: (_randn(2, 3, 5, 4, 3),),
    ),
    "bilinear": (
        lambda x: mt.interpolate(x, scale_factor=(1.7, 2), mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=(1.7, 2), mode="bilinear"),
        lambda: (_randn(2, 3, 4, 5),),
    ),
    "bicubic, shrunk": (
        lambda x: mt.interpolate(x, size=(3, 7), mode="bicubic", align_corners=True),
        lambda x: F.interpolate(x, size=(3, 7), mode="bicubic", align_corners=True),
        lambda: (_randn(2, 3, 4, 5, last=True),),
    ),
    "trilinear": (
        lambda x: mt.interpolate(x, scale_factor=1.5, mode="trilinear"),
        lambda x: F.interpolate(x, scale_factor=1.5, mode="trilinear"),
        lambda: (_randn(2, 3, 4, 3, 2),),
    ),
    "nearest and area of sequences": (
        lambda x: mt.interpolate(mt.interpolate(x, 7), scale_factor=0.6, mode="area"),
        lambda x: F.interpolate(F.interpolate(x, 7), scale_factor=0.6, mode="area"),
        lambda: (_randn(2, 3, 4),),
    ),
    "attention": (
        lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4, enable_gqa=True),
        lambda: (_randn(2, 4, 5, 3), _randn(2, 2, 5, 3), _randn(2, 2, 5, 4)),
    ),
    "attention with a mask": (
        lambda q, k, v, m: mt.scaled_dot_product_attention(q, k.transpose(1, 2), v, m),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k.transpose(1, 2), v, m),
        lambda: (_randn(2, 3, 5, 4), _randn(2, 6, 3, 4), _randn(3, 6, 2), _randn(3, 1, 6)),
    ),
    "linear": (
        lambda x, w, b: mt.linear(x, w, b, act="relu"),
        lambda x, w, b: F.relu(F.linear(x, w, b)),
        lambda: (_randn(2, 3, 4), _randn(5, 4), _randn(5)),
    ),
    "linear, gelu": (
        lambda x, w: mt.linear(x, w, act="gelu"),
        lambda x, w: F.gelu(F.linear(x, w)),
        lambda: (_randn(3, 4), _randn(5, 4)),
    ),
    "bias act": (
        lambda x, b: mt.bias_act(x, b, ("leaky_relu", 0.2)),
        lambda x, b: F.leaky_relu(x + b, 0.2),
        lambda: (_randn(3, 2, 5), _randn(5)),
    ),
    "scaled sum": (
        lambda x, scale, added: _scaled_sum(x, scale, None, added, 1),
        lambda x, scale, added: x * scale[:, None, None] + added,
        lambda: (_randn(3, 4, 2, 2, last=True), _randn(4), _randn(3, 4, 2, 2)),
    ),
    "scaled sum of rows and examples": (
        _scaled,
        lambda x, scale, added: x * scale * torch.arange(x.shape[0], device=x.device)[:, None, None] + added,
        lambda: (_randn(2, 3, 4), _randn(4), _randn(2, 3, 4)),
    ),
    "softmax": (lambda x: mt.softmax(x, 1), lambda x: F.softmax(x, 1), lambda: (_randn(2, 4, 3),)),
    "log softmax": (
        lambda x: mt.log_softmax(x, 1),
        lambda x: F.log_softmax(x, 1),
        lambda: (_randn(2, 4, 3, 2, last=True),),
    ),
    "cross entropy": (
        lambda x: mt.cross_entropy(x, _CLASSES, label_smoothing=0.1),
        lambda x: F.cross_entropy(x, _CLASSES, label_smoothing=0.1),
        lambda: (_randn(3, 4),),
    ),
    "cross entropy of each": (
        lambda x: mt.cross_entropy(x, _CLASSES, reduction="none", ignore_index=0),
        lambda x: F.cross_entropy(x, _CLASSES, reduction="none", ignore_index=0),
        lambda: (_randn(3, 4),),
    ),
    "linear cross entropy": (
        lambda x, w, b: mt.linear_cross_entropy(x, w, _CLASSES, linear_bias=b, label_smoothing=0.1),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), _CLASSES, label_smoothing=0.1),
        lambda: (_randn(3, 5), _randn(4, 5), _randn(4)),
    ),
    "linear cross entropy of each": (
        lambda x, w: mt.linear_cross_entropy(x, w, _CLASSES, reduction="none", ignore_index=0),
        lambda x, w: F.cross_entropy(F.linear(x, w), _CLASSES, reduction="none", ignore_index=0),
        lambda: (_randn(3, 5), _randn(4, 5)),
    ),
    "embedding bag": (
        lambda w: mt.embedding_bag(_ROWS, w, _OFFSETS),
        lambda w: F.embedding_bag(_ROWS, w, _OFFSETS),
        lambda: (_randn(5, 3),),
    ),
    "embedding bag with factors": (
        lambda w: mt.embedding_bag(_ROWS.view(3, 2), w, mode="sum", per_sample_weights=_randn(3, 2)),
        lambda w: F.embedding_bag(_ROWS.view(3, 2), w, mode="sum", per_sample_weights=_randn(3, 2)),
        lambda: (_randn(5, 3),),
    ),
    "layer norm": (
        lambda x, w, b: mt.layer_norm(x, (3, 2), w, b),
        lambda x, w, b: F.layer_norm(x, (3, 2), w, b),
        lambda: (_randn(4, 3, 2), _randn(3, 2), _randn(3, 2)),
    ),
    "rms norm": (
        lambda x, w: mt.rms_norm(x, 5, w),
        lambda x, w: F.rms_norm(x, (5,), w),
        lambda: (_randn(4, 5), _randn(5)),
    ),
    "group norm": (
        lambda x, w, b: mt.group_norm(x, 2, w, b),
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda: (_randn(2, 4, 3, 2, last=True), _randn(4), _randn(4)),
    ),
}  # fmt: skip


# Those that have each operator once or twice: a check takes up to a second.
CHECKED = (
    "conv2d with a sum", "conv_transpose2d", "batch norm", "batch norm, inference", "conv norm",
    "max pool", "avg pool", "adaptive avg pool", "linear", "linear, gelu", "softmax", "cross entropy",
    "linear cross entropy", "linear cross entropy of each", "embedding bag", "rms norm", "group norm", "scaled sum",
    "bicubic, shrunk", "attention with a mask",
)  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def _leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def test_results_and_gradients_are_torchs(case):
    ours, torchs, tensors = case
    ours_in, torchs_in = _leaves(tensors()), _leaves(tensors())
    y, expected = ours(*ours_in), torchs(*torchs_in)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    dy = _randn(*y.shape) if y.dim() else torch.tensor(1.5, dtype=torch.float64, device=_DEVICE)
    y.backward(dy)
    expected.backward(dy)
    for one, other in zip(ours_in, torchs_in, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(ours(*tensors()), expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CHECKED)
def test_gradients_are_those_of_differences(name):
    ours, _, tensors = CASES[name]
    leaves = list(_leaves(tensors()))
    assert torch.autograd.gradcheck(ours, leaves, atol=1e-5, nondet_tol=0.0, fast_mode=True)


# Those with second derivatives.
TWICE = (
    "conv1d", "conv1d depthwise", "conv2d channels last, gelu", "conv2d with a sum", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "batch norm", "batch norm with a sum", "batch norm, inference", "conv norm",
    "linear", "linear, gelu", "bias act", "avg pool", "adaptive avg pool", "avg pool of volumes", "bicubic, shrunk",
    "trilinear",
)  # fmt: skip


def _second_derivatives(function, tensors):
    leaves = _leaves(tensors)
    firsts = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in firsts), leaves)


@pytest.mark.parametrize("name", ["conv1d", "conv_transpose2d", "batch norm", "batch norm with a sum", "bias act"])
def test_second_derivatives_are_those_of_differences(name):
    ours, _, tensors = CASES[name]
    leaves = _leaves(tensors())
    assert torch.autograd.gradgradcheck(ours, leaves, atol=1e-5, nondet_tol=0.0, fast_mode=True)


def test_levels_of_torch_func_record_each_their_gradient():
    x, w = _randn(1, 2, 5, 4), _randn(2, 2, 3, 2)

    def penalty(convolution):
        def slope(w):
            return torch.func.grad_and_value(lambda x: convolution(x, w).sin().sum())(x)

        value = torch.func.grad(lambda w: slope(w)[1])(w)
        return value, torch.func.grad(lambda w: slope(w)[0].square().sum())(w)

    for one, other in zip(penalty(mt.conv2d), penalty(F.conv2d), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_attention_drops_by_torchs_generator_and_takes_lengths():
    q, k, v = _randn(2, 2, 5, 4), _randn(2, 2, 6, 4), _randn(2, 2, 6, 4)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(mt.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    lengths = torch.tensor([6, 2], device=_DEVICE)
    y = mt.scaled_dot_product_attention(q, k, v, lengths=lengths)
    torch.testing.assert_close(y[1], F.scaled_dot_product_attention(q[1], k[1, :, :2], v[1, :, :2]))
    with pytest.raises(ValueError, match="enable_gqa"):
        mt.scaled_dot_product_attention(torch.cat([q, q], 1), k, v)
    with torch.autocast(_DEVICE.type, torch.float16):
        half = mt.scaled_dot_product_attention(q.float(), k.half(), v.float(), torch.zeros(5, 6, device=_DEVICE))
    assert half.dtype == torch.float16
    mapped = torch.vmap(mt.scaled_dot_product_attention)(*(torch.stack([t, t]) for t in (q, k, v)))
    torch.testing.assert_close(mapped[1], F.scaled_dot_product_attention(q, k, v))


def test_convolutions_have_third_derivatives():
    def third(convolution):
        x, w = _leaves((_randn(1, 2, 4, 3), _randn(2, 2, 2, 2)))
        (first,) = torch.autograd.grad(convolution(x, w).pow(4).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.square().sum(), (x, w))

    for one, other in zip(third(mt.conv2d), third(F.conv2d), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted({*CHECKED, *TWICE}))
def test_second_derivatives_are_torchs_or_refused(name):
    """Zero without a recorded gradient: a gradient computed with the result does not count as a constant."""
    ours, torchs, tensors = CASES[name]
    if name in TWICE:
        pairs = zip(_second_derivatives(ours, tensors()), _second_derivatives(torchs, tensors()), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        return
    leaves = _leaves(tensors())
    firsts = torch.autograd.grad(ours(*leaves).sum(), leaves, create_graph=True)
    if any(each.requires_grad for each in firsts):
        with pytest.raises(NotImplementedError, match="restore"):
            sum(each.square().sum() for each in firsts).backward()
    else:
        leaves = _leaves(tensors())
        firsts = torch.autograd.grad(torchs(*leaves).sum(), leaves, create_graph=True)
        recorded = [each.square().sum() for each in firsts if each.requires_grad]
        second = torch.autograd.grad(sum(recorded), leaves, allow_unused=True) if recorded else ()
        assert all(each is None or not each.any() for each in second)
    with pytest.raises(NotImplementedError, match="restore"):
        _second_derivatives(ours, tensors())


class _Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the arguments of minidl's operators."""

    def __init__(self):
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "minidl":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CHECKED)
def test_torch_finds_each_operator_registered_as_it_should_be(name):
    """Schema, shapes and strides of results of no values, the gradient, and the operator under torch.compile."""
    ours, _, tensors = CASES[name]
    with _Calls() as calls:
        y = ours(*_leaves(tensors()))
        y.sum().backward()
    assert calls.calls
    seen = set()
    for op, args in calls.calls:
        if op in seen:
            continue
        seen.add(op)
        arguments = [
            a.detach().requires_grad_(a.is_floating_point() and "backward" not in str(op))
            if isinstance(a, torch.Tensor)
            else a
            for a in args
        ]
        torch.library.opcheck(op, tuple(arguments), rtol=1e-8, atol=1e-8)


def test_torch_finds_the_fold_registered_as_it_should_be():
    x, mean, var, bias = _randn(2, 3, 4, 4), _randn(3), _randn(3).abs(), _randn(3)
    arguments = x, mean, var, bias, None, bias, 1e-5
    torch.library.opcheck(torch.ops.minidl.fold_batch_norm.default, arguments, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_without_sums_has_the_order_that_is_promised(order):
    """Of the tensor added before an activation alone, for a gradient of the result in another order."""
    x = _randn(2, 3, 4, 5).contiguous(memory_format=order)
    dy = _randn(2, 3, 4, 5).movedim(3, 1).contiguous().movedim(1, 3)
    arguments = dy, x, _randn(3), _randn(3).abs(), None, None, x.abs(), False, "relu", 0.0, [False, False, False, True]
    torch.library.opcheck(torch.ops.minidl.batch_norm_backward.default, arguments, rtol=1e-8, atol=1e-8)


def test_every_operator_is_checked():
    called = set()
    for name in CHECKED:
        ours, _, tensors = CASES[name]
        with _Calls() as calls:
            ours(*_leaves(tensors())).sum().backward()
        called |= {str(op).split(".")[1] for op, _ in calls.calls}
    assert called | {"fold_batch_norm"} == set(registry.NAMES)


def test_bags_refuse_what_is_not_built():
    w = _randn(5, 3)
    for options in ({"mode": "max"}, {"padding_idx": 0}, {"sparse": True}):
        with pytest.raises(ValueError, match=str(next(iter(options)))):
            mt.embedding_bag(_ROWS, w, _OFFSETS, **options)


@pytest.mark.parametrize(("rows", "offsets"), [(4, [0, 2, 2]), (5, [0, 2, 9]), (5, [-9, 2, 2])])
def test_bags_read_nothing_outside(rows, offsets):
    """An error in the interpreter; on a GPU NaN for invalid rows, where torch's assertion ends the program."""
    w, offsets = _randn(5, 3)[:rows].requires_grad_(), torch.tensor(offsets, device=_DEVICE)
    if launch.INTERPRETED:
        with pytest.raises(IndexError, match=r"holds (4|9|-9)"):
            mt.embedding_bag(_ROWS, w, offsets)
        return
    y = mt.embedding_bag(_ROWS, w, offsets, mode="sum")
    if rows == 5:
        places = [*offsets.clamp(0, 6).tolist(), 6]
        expected = [w.detach()[_ROWS[a:b]].sum(0) for a, b in itertools.pairwise(places)]
        torch.testing.assert_close(y.detach(), torch.stack(expected))
    else:
        assert y.isnan().all(1).tolist() == [True, False, True]  # rows 4, 0; none; 2, 4, 4, 1
    y.nan_to_num().sum().backward()


@pytest.mark.skipif(not launch.INTERPRETED, reason="looking would wait for the GPU")
def test_bags_begin_at_0_and_follow_one_another():
    w = _randn(5, 3)
    for offsets, message in (([2, 4], "begins with 2"), ([0, 4, 2], "2 after 4"), ([[0, 2]], r"has shape \[1, 2\]")):
        with pytest.raises(ValueError, match=message):
            mt.embedding_bag(_ROWS, w, torch.tensor(offsets))


def test_a_row_behind_all_bags_has_no_gradient():
    w = _randn(5, 3).requires_grad_()
    offsets = torch.tensor([0, 2], device=_DEVICE)
    mt.embedding_bag(_ROWS, w, offsets, mode="sum", include_last_offset=True).sum().backward()
    assert w.grad[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_what_watches_torch_sees_operators():
    x = _randn(2, 3)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    mt.softmax(x, 1)
    assert not seen
    with Seen():
        mt.softmax(x, 1)
    assert seen[0] is torch.ops.minidl.softmax.default
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        mt.softmax(x, 1)
    assert any(event.key == "minidl::softmax" for event in profile.key_averages())

    class Tagged(torch.Tensor):
        pass

    assert type(mt.softmax(x.as_subclass(Tagged), 1)) is Tagged


def test_a_view_that_negates_is_read_as_its_numbers():
    x = torch.complex(_randn(3, 5), _randn(3, 5)).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(mt.softmax(x, 1), F.softmax(x, 1))


def test_gradients_in_batches():
    x, dys = _randn(3, 5).requires_grad_(), _randn(2, 3, 5)
    gradients, expected = (
        torch.autograd.grad(y, x, dys, is_grads_batched=True)[0] for y in (mt.softmax(x, 1), F.softmax(x, 1))
    )
    torch.testing.assert_close(gradients, expected)
