"""Gradients of gradients: against torch in float64, and against differences of first gradients."""

import math

import numpy as np
import pytest
import torch

import minidl
from minidl import Tensor, nn, ops
from minidl.autograd import Function, grad
from minidl.tensors import default_device

F = torch.nn.functional


def drawn(*shape, seed=0, positive=False):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return values.abs() + 0.5 if positive else values


def _add_rms_norm(f, x, residual, weight):
    """The product of both results, so that each has a gradient."""
    if not hasattr(f, "add_rms_norm"):
        return f.rms_norm(x + residual, (4,), weight, 1e-3) * (x + residual)
    normed, total = f.add_rms_norm(x, residual, 4, weight, 1e-3)
    return normed * total


def case(name, function, *inputs, **names):
    return pytest.param(function, inputs, id=name)


LABELS = torch.tensor([2, 0, 3])
MASK = torch.tensor([[True, False, True, True]])
# Each is written once, for torch.nn.functional and minidl.ops; `t` is torch or minidl.
X, Y, ROW, POSITIVE = drawn(3, 4), drawn(3, 4, seed=1), drawn(4), drawn(3, 4, positive=True)
COS, SIN = ANGLES = drawn(3, 2), drawn(3, 2, seed=1)
IMAGE, KERNEL = drawn(2, 3, 5, 5), drawn(4, 3, 3, 3)
CASES = [
    case("add", lambda t, f, a, b: (a + b) * (a + 2), X, ROW),
    case("sub", lambda t, f, a, b: (a - b) * (3 - b), X, ROW),
    case("mul", lambda t, f, a, b: a * b * 0.5, X, ROW),
    case("div", lambda t, f, a, b: a / b + 1 / b + b / 3, X, POSITIVE),
    case("pow", lambda t, f, a, b: a**b + a**3 + 2**b + a**0.5 + a**-1, POSITIVE, Y),
    case("pow of 0", lambda t, f, a: a**1 + a**2 + a**3 + a**0, torch.zeros(2, dtype=torch.float64)),
    case("exp", lambda t, f, a: t.exp(a), X),
    case("log", lambda t, f, a: t.log(a), POSITIVE),
    case("sqrt", lambda t, f, a: t.sqrt(a), POSITIVE),
    case("abs", lambda t, f, a: t.abs(a) * a, X),
    case("reciprocal", lambda t, f, a: t.reciprocal(a), POSITIVE),
    case("curves", lambda t, f, a: t.sin(a) * t.cos(a) + t.expm1(a) * t.erf(a) + t.floor(a) * a, X),
    case("logarithms", lambda t, f, a: t.log1p(a) * t.log2(a), POSITIVE),
    case("rsqrt", lambda t, f, a: t.rsqrt(a) * a.sin(), POSITIVE),
    case("remainders", lambda t, f, a, b: t.fmod(a, b) * (a % b) * t.div(a, b, rounding_mode="floor"), 9 * X, POSITIVE),
    case("norms", lambda t, f, a: a.norm(3, 1) + a.norm(0.5) + (a * 0).norm(4), X),
    case("diagonals", lambda t, f, a: t.einsum("ii->i", a[:, :3]) * a.roll(1, 0).diagonal() ** 2, X),
    case("scatter", lambda t, f, a, b: a.scatter_add(1, placed(t, LABELS[:, None]), b) ** 2
         * a.scatter(1, placed(t, LABELS[:, None]), b) ** 2, X, drawn(3, 1)),
    case("products", lambda t, f, a: a.prod(1) * a.prod(), X),
    case("maximum", lambda t, f, a, b: t.maximum(a, b) * t.minimum(a, b) * a, X, Y),
    case("where", lambda t, f, a, b: t.where(a > b, a * a, b * b * b), X, ROW),
    case("clamp", lambda t, f, a: t.clamp(a, -0.5, 0.5) * a, X),
    case("sum and mean", lambda t, f, a: a.sum(0).mean() * a.mean(1).square(), X),
    case("norm", lambda t, f, a: a.norm() + a.norm(2, 1) + a.norm(1) + a.norm(math.inf), X),
    case("var", lambda t, f, a: a.var(1) * a.std(1), X),
    case("max", lambda t, f, a: a.max(1)[0] * a.topk(2, 0)[0].sum() * a.amax() * a.min(0)[0].sum(), X),
    case("cumsum", lambda t, f, a: a.cumsum(1) ** 2, X),
    case("reshape", lambda t, f, a: a.reshape(2, 6) ** 3, X),
    case("transpose", lambda t, f, a: a.T.transpose(0, 1).permute(1, 0) ** 3, X),
    case("expand", lambda t, f, a: a.expand(3, 4) ** 3, ROW),
    case("cat", lambda t, f, a, b: t.cat([a, b], 1) ** 3 * t.stack([a, b], 1).reshape(3, 8), X, Y),
    case("split", lambda t, f, a: a.split([1, 3], 1)[1] ** 3, X),
    case("slices", lambda t, f, a: a[1:, ::2] ** 3 + a[0, 1] ** 2, X),
    case("tensors as indices", lambda t, f, a: a[[0, 2, 0]] ** 3, X),
    case("gather", lambda t, f, a: a.gather(1, placed(t, LABELS[:, None])) ** 3, X),
    case("flip and clone", lambda t, f, a: a.flip(0).clone().contiguous() ** 3, X),
    case("matmul", lambda t, f, a, b: (a @ b) * (b @ a).sum(), X, drawn(4, 3)),
    case("bmm", lambda t, f, a, b: (a @ b) ** 2, drawn(2, 3, 4), drawn(4, 2)),
    case("linear", lambda t, f, a, w, b: f.linear(a, w, b) ** 2, X, drawn(2, 4), drawn(2)),
    case("embedding", lambda t, f, w: f.embedding(placed(t, LABELS), w, padding_idx=3) ** 3, drawn(4, 3)),
    *(
        case(name, lambda t, f, a, name=name, how=how: getattr(f, name)(a, **how) * a, 2 * X)
        for name, how in {
            "relu": {}, "leaky_relu": {"negative_slope": 0.2}, "sigmoid": {}, "tanh": {}, "relu6": {}, "silu": {},
            "gelu": {}, "softplus": {"beta": 2.0}, "elu": {"alpha": 0.7}, "hardtanh": {},
            "softmax": {"dim": 1}, "log_softmax": {"dim": 0},
        }.items()
    ),
    case("swiglu", lambda t, f, a: (f.silu(a[:, :2]) * a[:, 2:] if t is torch else f.swiglu(a)) ** 2, X),
    case("rotary", lambda t, f, a: (f.rotary(a, *(placed(t, each) for each in ANGLES)) if t is minidl else torch.cat(
        [a[:, :2] * COS - a[:, 2:] * SIN, a[:, 2:] * COS + a[:, :2] * SIN], 1)) ** 3, X),
    case("geglu", lambda t, f, a: (f.gelu(a[:, :2]) * a[:, 2:] if t is torch else f.geglu(a)) ** 2, X),
    case("prelu", lambda t, f, a, w: f.prelu(a, w) ** 2, X, drawn(4)),
    case("cross_entropy", lambda t, f, a: f.cross_entropy(
        a * a, placed(t, torch.tensor([2, -100, 3])), placed(t, ROW.abs()), label_smoothing=0.1), X),
    case("cross_entropy of each", lambda t, f, a: f.cross_entropy(a, placed(t, LABELS), reduction="none") ** 2, X),
    case("cross_entropy of shares", lambda t, f, a, b: f.cross_entropy(a, f.softmax(b, 1)), X, Y),
    case("nll_loss", lambda t, f, a: f.nll_loss(f.log_softmax(a, 1), placed(t, LABELS)), X),
    case("mse_loss", lambda t, f, a, b: f.mse_loss(a, b) * f.mse_loss(a, b, reduction="sum"), X, Y),
    case("l1_loss", lambda t, f, a, b: f.l1_loss(a, b) * f.smooth_l1_loss(a, b) * f.huber_loss(a, b), X, Y),
    case("bce", lambda t, f, a: f.binary_cross_entropy(f.sigmoid(a), placed(t, POSITIVE.clamp(0, 1)), reduction="none")
         * f.binary_cross_entropy_with_logits(a, placed(t, POSITIVE.clamp(0, 1)), pos_weight=placed(t, POSITIVE)), X),
    case("kl_div", lambda t, f, a: f.kl_div(a, placed(t, POSITIVE), reduction="batchmean") ** 2, X),
    case("conv2d", lambda t, f, x, w, b: f.conv2d(x, w, b, 2, 1) ** 2, IMAGE, KERNEL, drawn(4)),
    case("conv2d of groups", lambda t, f, x, w: f.conv2d(x, w, None, 1, 1, 2, 3) ** 2, IMAGE, drawn(6, 1, 3, 3)),
    case("conv_transpose2d", lambda t, f, x, w, b: f.conv_transpose2d(x, w, b, 2, 1, 1) ** 2, IMAGE, drawn(3, 2, 3, 3),
         drawn(2)),
    case("conv1d", lambda t, f, x, w: f.conv1d(x, w, None, 2, 1) ** 2, drawn(2, 3, 7), drawn(4, 3, 3)),
    case("conv_transpose1d", lambda t, f, x, w: f.conv_transpose1d(x, w, None, 2) ** 2, drawn(2, 3, 4), drawn(3, 1, 3)),
    case("pools", lambda t, f, x: f.max_pool2d(x, 3, 2, 1) ** 2 * f.avg_pool2d(x, 3, 2, 1), IMAGE),
    case("pools of volumes", lambda t, f, x: f.max_pool3d(x, 2, 1) ** 2 * f.avg_pool3d(x, 2, 1), drawn(2, 2, 3, 3, 4)),
    case("adaptive maxima", lambda t, f, x: f.adaptive_max_pool2d(x, (2, 3)) ** 2, IMAGE),
    case("bicubic", lambda t, f, x: f.interpolate(x, size=(7, 3), mode="bicubic") ** 2, IMAGE),
    case("interpolate", lambda t, f, x: f.interpolate(x, scale_factor=2, mode="bilinear") ** 2, IMAGE),
    case("pad", lambda t, f, x: f.pad(x, (1, 1, 2, 0), "reflect") ** 2, IMAGE),
    case("layer_norm", lambda t, f, x, w, b: f.layer_norm(x, (4,), w, b) ** 2, X, ROW, drawn(4, seed=3)),
    case("rms_norm", lambda t, f, x, w: f.rms_norm(x, (4,), w) ** 2, X, ROW),
    case("add_rms_norm", lambda t, f, x, w: _add_rms_norm(f, x, x * x, w), X, ROW),
    case("group_norm", lambda t, f, x, w, b: f.group_norm(x, 2, w, b) ** 2, drawn(2, 4, 2, 3), ROW, drawn(4, seed=3)),
    case("instance_norm", lambda t, f, x: f.instance_norm(x) ** 3, IMAGE),
    case("batch_norm", lambda t, f, x, w, b: f.batch_norm(x, None, None, w, b, True) ** 2, IMAGE, drawn(3),
         drawn(3, seed=1)),
    case("batch_norm in evaluation", lambda t, f, x, w: f.batch_norm(
        x, placed(t, drawn(3)), placed(t, drawn(3, positive=True)), w) ** 2, IMAGE, drawn(3)),
]  # fmt: skip


def placed(t, data):
    return Tensor(data.to(default_device())) if t is minidl else data


def gradients(t, f, function, inputs, directions, of):
    """First gradients, and those of their products with the directions; all as torch tensors."""
    if t is minidl:
        given = [Tensor(x.to(default_device(), copy=True), True) for x in inputs]
    else:
        given = [x.clone().requires_grad_() for x in inputs]
    y = function(t, f, *given)
    ones = placed(t, torch.ones(y.shape, dtype=torch.float64))
    first = of(y, given, ones, create_graph=True, allow_unused=True)
    total = sum((g * placed(t, d)).sum() for g, d in zip(first, directions, strict=True) if g is not None)
    second = of(total, given, allow_unused=True) if total.requires_grad else [None] * len(given)
    zeros = [torch.zeros_like(x) for x in inputs]
    return [
        [z if g is None else torch.as_tensor(g.detach().cpu().numpy()) for g, z in zip(grads, zeros, strict=True)]
        for grads in (first, second)
    ]


def slope(function, inputs, directions, step):
    """The products of plain first gradients with the directions, `step` away along them."""
    given = [Tensor((x + step * d).to(default_device()), True) for x, d in zip(inputs, directions, strict=True)]
    y = function(minidl, ops, *given)
    found = grad(y, given, placed(minidl, torch.ones(y.shape, dtype=torch.float64)), allow_unused=True)
    return sum(float((g.data.cpu() * d).sum()) for g, d in zip(found, directions, strict=True) if g is not None)


@pytest.mark.parametrize(("function", "inputs"), CASES)
def test_is_torchs_and_the_difference_of_first_gradients(function, inputs):
    directions = [drawn(*x.shape, seed=9) for x in inputs]
    ours = gradients(minidl, ops, function, inputs, directions, grad)
    theirs = gradients(torch, BOTH, function, inputs, directions, torch.autograd.grad)
    for mine, other in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    curve = sum(float((g * d).sum()) for g, d in zip(ours[1], directions, strict=True))
    before, after = (slope(function, inputs, directions, step) for step in (-1e-5, 1e-5))
    if all(bool(x.any()) for x in inputs):
        assert curve == pytest.approx((after - before) / 2e-5, rel=1e-4, abs=1e-4 * abs(after))


class _Both:
    """torch's functional names, and those that only torch itself has."""

    def __getattr__(self, name):
        return getattr(F, name, None) or getattr(torch, name)


BOTH = _Both()


def leaf(*values):
    return Tensor(torch.tensor(values, dtype=torch.float64, device=default_device()), True)


def network():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(18, 1, bias=False)).double()
    for i, p in enumerate(net.parameters()):
        p.data = drawn(*p.shape, seed=i).to(p.data.device)
    return net


def test_gradients_of_parameters_are_recorded_and_add_up():
    x = leaf(1.0, 2.0)
    (x**3).sum().backward(create_graph=True)
    first = x.grad
    (x**3).sum().backward(create_graph=True)
    assert x.grad.tolist() == [6, 24]
    (total,) = grad((x.grad * first.detach()).sum(), x)
    assert total.tolist() == [2 * 6 * 1 * 3, 2 * 12 * 12]
    x.grad = None
    (x * x).sum().backward()
    assert x.grad.grad_fn is None


def test_two_parameters_given_the_same_gradient_have_it_apart():
    a, b = leaf(1.0), leaf(2.0)
    (a + b).backward(create_graph=True)
    with minidl.no_grad():
        a.grad.mul_(5)
    assert b.grad.tolist() == [1]


def test_of_third_order():
    x = leaf(2.0)
    y = ops.tanh(x) + x**4
    for _ in range(3):
        (y,) = grad(y, x, create_graph=True)
    t = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    z = torch.tanh(t) + t**4
    for _ in range(3):
        (z,) = torch.autograd.grad(z, t, create_graph=True)
    torch.testing.assert_close(y.data.cpu(), z.detach())


def test_of_a_convolution_of_third_order():
    x, w = (Tensor(t.to(default_device()), True) for t in (IMAGE[:1, :, :3, :3].clone(), KERNEL))
    u, v = x.data.cpu().clone().requires_grad_(), w.data.cpu().clone().requires_grad_()
    found = []
    for f, of, a, b in ((ops, grad, x, w), (F, torch.autograd.grad, u, v)):
        y = of((f.conv2d(a, b, None, 1, 1) ** 2).sum(), [a, b], create_graph=True)
        for _ in range(2):
            y = of((y[0] ** 2).sum() + (y[1] ** 2).sum(), [a, b], create_graph=True)
        found.append([torch.as_tensor(t.detach().cpu().numpy()) for t in y])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_of_converted_values():
    x = Tensor(torch.tensor([1.0, 2.0], dtype=torch.float16, device=default_device()), True)
    (found,) = grad((x.float() ** 3).sum(), x, create_graph=True)
    assert (found.dtype, found.tolist()) == (torch.float16, [3, 12])
    assert grad(found.sum(), x)[0].tolist() == [6, 12]


def test_only_what_leads_to_the_inputs_is_gone_through():
    x, table = leaf(1.0, 2.0), leaf(1.0, 2.0)
    y = (x * x + ops.mish(table)).sum()  # mish has no second derivative
    assert grad(y, x, create_graph=True)[0].tolist() == [2, 4]


def test_what_has_none_is_refused_by_name_and_changes_nothing():
    x = leaf(1.0, 2.0)
    for call in (
        lambda: ops.mish(x).sum().backward(create_graph=True),
        lambda: grad(ops.mish(x).sum(), x, create_graph=True),
    ):
        with pytest.raises(RuntimeError, match="a second derivative of mish, which minidl does not have; use relu"):
            call()
    volume = Tensor(drawn(1, 1, 2, 2, 2).to(default_device()), True)
    y = ops.conv3d(volume, Tensor(drawn(1, 1, 1, 1, 1).to(default_device()))) * volume
    with pytest.raises(RuntimeError, match=r"second derivative of Conv3d \(.*test_second.py:\d+\), which minidl does"):
        y.sum().backward(create_graph=True)
    assert (x.grad, volume.grad) == (None, None)


def test_an_activation_that_a_convolution_took_in():
    net = network()
    x = Tensor(drawn(2, 1, 5, 5).to(default_device()), True)
    (found,) = grad(net(x).sum(), x, create_graph=True)
    found.square().sum().backward()
    apart = network()
    with minidl.fusion(False):
        (other,) = grad(apart(x).sum(), x, create_graph=True)
        other.square().sum().backward()
    for name in ("0.weight", "3.weight"):
        p, q = (dict(each.named_parameters())[name].grad for each in (net, apart))
        np.testing.assert_allclose(p.data.cpu(), q.data.cpu(), rtol=1e-12)
    smooth = nn.Sequential(nn.Conv2d(1, 2, 3), nn.SiLU()).double().to(default_device())
    with pytest.raises(RuntimeError, match=r"Conv2d with fused silu.*minidl\.fusion\(False\)"):
        grad(smooth(x).sum(), x, create_graph=True)


class Cube(Function):
    """As a torch user writes it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return ops.pow(x, 3)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * (ops.square(x) * 3)


class Plain(Cube):
    """Its way back is made of torch tensors."""

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy.data * x.data


def test_a_function_of_the_users():
    x = leaf(2.0)
    (found,) = grad(Cube.apply(x), x, create_graph=True)
    assert grad(found, x)[0].tolist() == [12]
    with pytest.raises(RuntimeError, match="its backward returned a Tensor, whose gradient is not recorded"):
        grad(Plain.apply(x), x, create_graph=True)


def test_hooks_see_what_is_recorded_and_may_not_change_it():
    x, seen = leaf(2.0), []
    y = x * x
    y.register_hook(lambda g: seen.append(g.tolist()))
    grad(y * 3, x, create_graph=True)
    assert seen == [[3]]
    y.register_hook(lambda g: g * 2)
    with pytest.raises(RuntimeError, match=r"a hook changed a gradient that create_graph=True records; remove\(\) it"):
        grad(y * 3, x, create_graph=True)


def test_gradients_between_are_kept_and_looked_through():
    x = leaf(0.0)
    y = x * x
    y.retain_grad()
    (y * y).backward(create_graph=True)
    assert grad(y.grad.sum(), x)[0].tolist() == [0]
    with (
        minidl.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match=r"Sqrt .* its gradient of input 0 has NaN"),
    ):
        grad(ops.sqrt(x * x) * x, x, create_graph=True)


def test_by_a_result_that_nothing_before_is_wanted_of():
    x = leaf(1.0, 2.0)
    y = x * 2
    (found,) = grad((y**2).sum(), y, create_graph=True)
    np.testing.assert_allclose(found.data.cpu(), [4, 8])


def test_a_constant_over_the_values_of_a_variable_is_no_variable():
    x = leaf(1.0, 2.0, 3.0)
    (g,) = grad((x * x.data * x).sum(), x, create_graph=True)
    (found,) = grad((g * g).sum(), x)
    np.testing.assert_allclose(found.data.cpu(), [8, 64, 216])


def test_a_tensor_that_a_function_keeps_as_an_attribute():
    class Squared(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return x * x

        @staticmethod
        def backward(ctx, dy):
            return ops.mul(dy, ctx.x) * 2

    x = leaf(1.0, 2.0)
    (g,) = grad(Squared.apply(x).sum(), x, create_graph=True)
    (found,) = grad((g * x).sum(), x)
    np.testing.assert_allclose(found.data.cpu(), [4, 8])


def test_a_tensor_saved_and_changed_is_refused():
    x = leaf(2.0)
    b = Tensor(torch.ones(1, dtype=torch.float64, device=default_device()))
    y = x * b
    b.add_(1)
    with pytest.raises(RuntimeError, match=r"saved tensor 1 .* was changed in place"):
        grad(y, x, create_graph=True)


def test_two_tensors_over_one_data_are_not_taken_for_one_another():
    a, b = leaf(2.0), leaf(3.0)
    b.data = a.data
    with pytest.raises(RuntimeError, match=r"two tensors over one `data`; clone\(\) one of them"):
        grad(a * b, a, create_graph=True)
