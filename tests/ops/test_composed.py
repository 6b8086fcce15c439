"""Functions made of other operations, and second names, beside torch's in float64: values, gradients, errors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minidl
from minidl import ops
from minidl.ops import composed
from minidl.tensors import Tensor, default_device
from tests.ops.test_against_torch import both, numbers

CASES = {
    "frac": lambda m, x: m.frac(x * 3),
    "degrees": lambda m, x: (m.deg2rad(x), m.rad2deg(x)),
    "addcmul": lambda m, x: m.addcmul(x, x.exp(), x[:1], value=-0.5),
    "addcdiv": lambda m, x: x.addcdiv(x, x.abs() + 1, value=2),
    "logaddexp": lambda m, x: (m.logaddexp(x, x.flip(0)), m.logaddexp(x * 1000, x[0] * 900), x.logaddexp(x)),
    "xlogy": lambda m, x: (m.xlogy(x, x.abs() + 0.1), m.xlogy(x * (x > 0), x.abs() + 0.2)),
    "logit": lambda m, x: (m.logit(x.sigmoid()), m.logit(x.sigmoid(), 0.2)),
    "nan_to_num": lambda m, x: (
        m.nan_to_num(x / (x > 0)), m.nan_to_num(m.log(x), 7.0, 8.0, -9.0), m.nan_to_num(x - math.inf),
    ),
    "celu": lambda m, x: (m.nn.functional.celu(x, 0.75), m.celu(x, -2)),
    "selu": lambda m, x: m.selu(x),
    "glu": lambda m, x: (m.nn.functional.glu(x), m.nn.functional.glu(x, 0)),
    "softsign": lambda m, x: m.nn.functional.softsign(x),
    "shrink": lambda m, x: (
        m.nn.functional.tanhshrink(x), m.nn.functional.hardshrink(x, 0.8), m.nn.functional.softshrink(x, 0.3),
    ),
    "threshold": lambda m, x: m.nn.functional.threshold(x, 0.1, 20),
    "inner": lambda m, x: (m.inner(x, x[0]), x.inner(x[1, 2]), m.inner(x, x.sum())),
    "baddbmm": lambda m, x: m.baddbmm(x[:, :, :5], x, x.transpose(1, 2), beta=0.3, alpha=2),
    "baddbmm alone": lambda m, x: m.baddbmm(x[:, :, :5] * 0 + math.nan, x, x.transpose(1, 2), beta=0),
    "kron": lambda m, x: (m.kron(x[0], x[1, :2]), m.kron(x[0, 0], x[:2]), x.kron(x[0, 0])),
    "diag": lambda m, x: (m.diag(x[0, 0]), m.diag(x[0, 0], 2), m.diag(x[0, 0], -1), m.diag(x[0]), x[0].diag(-2)),
    "flips": lambda m, x: (m.fliplr(x), m.flipud(x)),
    "rot90": lambda m, x: tuple(m.rot90(x, k, dims) for k in range(-1, 5) for dims in ((0, 1), (2, 0))),
    "repeats": lambda m, x: (
        m.repeat_interleave(x, (x.detach()[:, 0, 0] * 2).abs().long(), 0),
        m.repeat_interleave(x, 3), x.repeat_interleave(2, 1), m.repeat_interleave(x, 0, -1)),
    "names": lambda m, x: (
        m.absolute(x), m.negative(x), m.multiply(x, 2), m.subtract(x, x, alpha=2),
        m.divide(x, 3, rounding_mode="floor"), m.true_divide(x, 4), m.concat([x, x]), m.concatenate([x, x], 1),
        m.greater(x, 0), m.greater_equal(x, 0),
        m.less(x, 0), m.less_equal(x, 0), m.not_equal(x, x), m.vdot(x[0, 0], x[0, 1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name):
    both(CASES[name], numbers(4, 5, 6))


def test_every_function_has_a_case():
    code = " ".join(name for function in CASES.values() for name in _names(function.__code__))
    assert [name for name in composed.__all__ if name not in code.split()] == []


def _names(code):
    inner = [name for constant in code.co_consts if hasattr(constant, "co_names") for name in _names(constant)]
    return [*code.co_names, *inner]


SPECIAL = st.sampled_from([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -2.5, 1e308, -1e308, 5e-324, 0.5, 800.0])


@given(a=st.lists(SPECIAL, min_size=1, max_size=6), b=st.lists(SPECIAL, min_size=1, max_size=6))
def test_special_values_as_torch(a, b):
    x, y = (torch.tensor(values[: min(len(a), len(b))], dtype=torch.float64) for values in (a, b))
    ours, other = Tensor(x.to(default_device())), Tensor(y.to(default_device()))
    f = torch.nn.functional
    for name in ("logaddexp", "xlogy"):
        expected, got = getattr(torch, name)(x, y), getattr(ops, name)(ours, other).data.cpu()
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0, equal_nan=True)
    for name in ("frac", "logit", "selu", "nan_to_num"):
        if name == "frac" and not x.isfinite().all():
            continue  # torch has 0 for infinities on one machine and NaN on another
        expected, got = getattr(torch, name)(x), getattr(ops, name)(ours).data.cpu()
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14 * (name == "selu"), equal_nan=True)
    for name in ("celu", "hardshrink", "softshrink"):
        expected, got = getattr(f, name)(x), getattr(ops, name)(ours).data.cpu()
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14 * (name == "celu"), equal_nan=True)
    torch.testing.assert_close(
        ops.threshold(ours, 0.5, 3).data.cpu(), f.threshold(x, 0.5, 3), rtol=0, atol=0, equal_nan=True
    )


def test_the_gradient_of_xlogy_at_zero():
    both(lambda m, x, y: m.xlogy(x * 0, y.abs() + 0.1), numbers(5), numbers(5))
    x = Tensor(torch.zeros(2, dtype=torch.float64, device=default_device()), requires_grad=True)
    ops.xlogy(x, Tensor(torch.tensor([3.0, 0.5], dtype=torch.float64, device=default_device()))).sum().backward()
    torch.testing.assert_close(x.grad.data.cpu(), torch.tensor([3.0, 0.5], dtype=torch.float64).log())


def test_large_numbers_stay_finite():
    half = torch.tensor([1000.0], dtype=torch.float16)
    h = Tensor(half.to(default_device()))
    for name, arguments, value in (("addcmul", (half, half), 1e-3), ("addcdiv", (half, half / 8e6), 1e-4)):
        ours = getattr(ops, name)(h, *(Tensor(t.to(default_device())) for t in arguments), value=value)
        torch.testing.assert_close(ours.data.cpu(), getattr(torch, name)(half, *arguments, value=value))
    assert ops.celu(h, 0.01).tolist() == [1000]
    big = Tensor(torch.full((1, 1, 1), 300.0, dtype=torch.float16, device=default_device()))
    assert ops.baddbmm(big, big, big, alpha=0.01).data.isfinite().all()
    assert ops.celu(Tensor(torch.tensor([3e38], device=default_device())), 0.1).data.isfinite().all()


def test_corners():
    empty = Tensor(torch.zeros(2, 0, device=default_device()))
    assert ops.inner(empty, Tensor(torch.zeros(3, 0, device=default_device()))).tolist() == [[0] * 3] * 2
    nan = Tensor(torch.tensor([math.nan, math.inf], device=default_device()))
    assert ops.nan_to_num(nan, math.inf, 5.0).tolist() == [math.inf, 5]
    assert ops.nan_to_num(nan, 0.0, -math.inf, -5.0).tolist() == [0, -math.inf]
    truths = Tensor(torch.tensor([[True, False]], device=default_device()))
    assert [ops.rot90(truths, k).dtype for k in range(5)] == [torch.bool] * 5
    counts = torch.tensor([0, 2, 5])
    x, target = numbers(3), Tensor(counts.to(default_device()))
    ours = ops.poisson_nll_loss(Tensor(x.to(default_device())), target, full=True)
    torch.testing.assert_close(ours.data.cpu(), torch.nn.functional.poisson_nll_loss(x, counts, full=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_stay(dtype):
    x = Tensor(numbers(6).to(dtype).to(default_device()))
    for name in ("frac", "deg2rad", "selu", "glu", "softsign", "nan_to_num", "hardshrink", "diag"):
        assert getattr(ops, name)(x).dtype == dtype, name


def test_in_place():
    x = Tensor(numbers(5).to(default_device()))
    expected = torch.nn.functional.selu(x.data)
    assert ops.selu(x, inplace=True) is x
    torch.testing.assert_close(x.data, expected)


def test_integers():
    n = Tensor(torch.tensor([3, -4]).to(default_device()))
    assert minidl.nan_to_num(n).tolist() == [3, -4]
    assert minidl.multiply(n, 2).tolist() == [6, -8]
    assert minidl.repeat_interleave(n, 2).tolist() == [3, 3, -4, -4]
    assert minidl.diag(n).tolist() == [[3, 0], [0, -4]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: ops.celu(x, 0), ValueError, "celu: alpha is 0"),
        (lambda x: ops.glu(x[:, :3]), ValueError, r"glu: input has shape \[2, 3\], expected an even size"),
        (lambda x: ops.softshrink(x, -1), ValueError, "softshrink: lambd is -1, expected at least 0"),
        (lambda x: ops.inner(x, x[:, :3]), ValueError, r"inner: input has shape \[2, 4\].* last sizes differ"),
        (lambda x: ops.diag(x[None]), ValueError, "expected a vector or a matrix"),
        (lambda x: ops.rot90(x, 1, (0, -2)), ValueError, "rot90: dims are .* expected two different dimensions"),
        (lambda x: ops.repeat_interleave(x, -1), ValueError, "repeats is -1, expected at least 0"),
        (lambda x: ops.repeat_interleave(x, 1.5), TypeError, "repeats is of type float, expected an int"),
        (lambda x: ops.repeat_interleave(x, x, 1), ValueError, r"repeats is torch.float64 \[2, 4\], expected \[4\]"),
        (lambda x: ops.repeat_interleave(x, 2, 5), IndexError, "dim 5 is out of range"),
        (lambda x: ops.repeat_interleave(x, x[:1, :1] * 0 + 2.7), ValueError, "repeats is torch.float64"),
        (lambda x: ops.rot90(x, 1, (0, 1, 1)), ValueError, "rot90: dims are"),
        (lambda x: ops.fliplr(x[0]), IndexError, "flip: .*dimension"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(Tensor(numbers(2, 4).to(default_device())))


def signs(*shape):
    return torch.where(numbers(*shape) > 0, 1.0, -1.0).double()


LOSSES = {
    "pairwise_distance": (lambda f, a, b: f.pairwise_distance(a, b), (4, 6), (4, 6)),
    "pairwise_distance, p": (lambda f, a, b: f.pairwise_distance(a, b, 1.5, 0.1, True), (4, 6), (1, 6)),
    "triplet_margin_loss": (lambda f, a, b, c: f.triplet_margin_loss(a, b, c), *[(5, 6)] * 3),
    "triplet, swapped": (
        lambda f, a, b, c: f.triplet_margin_loss(a, b, c, 0.5, 1, 0.01, True, reduction="none"), *[(5, 6)] * 3,
    ),
    "triplet, of one's own": (
        lambda f, a, b, c: f.triplet_margin_with_distance_loss(
            a, b, c, distance_function=lambda x, y: (x - y).square().sum(-1), margin=2.0, reduction="sum"
        ), *[(5, 6)] * 3,
    ),
    "gaussian_nll_loss": (lambda f, a, b, c: f.gaussian_nll_loss(a, b, c.square() + 0.1), *[(5, 6)] * 3),
    "gaussian_nll_loss, full": (
        lambda f, a, b, c: f.gaussian_nll_loss(a, b, c.square() * 1e-3, True, 1e-3, reduction="none"),
        (5, 6), (5, 6), (5, 1),
    ),
    "gaussian_nll_loss, rows": (lambda f, a, b, c: f.gaussian_nll_loss(a, b, c.exp()), (5, 6), (5, 6), (5,)),
    "poisson_nll_loss": (lambda f, a, b: f.poisson_nll_loss(a, b.exp()), (5, 6), (5, 6)),
    "poisson_nll_loss, full": (
        lambda f, a, b: f.poisson_nll_loss(a.exp(), b.exp() * 2, False, True, reduction="sum"), (5, 6), (5, 6),
    ),
}  # fmt: skip
SIGNED = {
    "margin_ranking_loss": lambda f, a, b, t: f.margin_ranking_loss(a, b, t, 0.3),
    "hinge_embedding_loss": lambda f, a, b, t: f.hinge_embedding_loss(a, t, 0.7, reduction="none"),
    "soft_margin_loss": lambda f, a, b, t: f.soft_margin_loss(a * 8, t),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_as_torch(name):
    function, *shapes = LOSSES[name]
    both(lambda m, *x: function(m.nn.functional, *x), *(numbers(*shape) for shape in shapes), tolerance=1e-9)


@pytest.mark.parametrize("name", SIGNED)
def test_losses_of_signs_as_torch(name):
    target = signs(5, 6)

    def function(m, a, b):
        return SIGNED[name](m.nn.functional, a, b, target if m is torch else Tensor(target.to(default_device())))

    both(function, numbers(5, 6), numbers(5, 6), tolerance=1e-9)


def test_cosine_embedding_loss_as_torch():
    target = signs(7)

    def function(m, a, b):
        t = target if m is torch else Tensor(target.to(default_device()))
        f = m.nn.functional
        return f.cosine_embedding_loss(a, b, t, 0.1), f.cosine_embedding_loss(a[0], b[0], t[0], reduction="none")

    both(function, numbers(7, 4), numbers(7, 4), tolerance=1e-9)


LAYERS = {
    "CELU": ((0.5,), 1), "SELU": ((), 1), "GLU": ((1,), 1), "Threshold": ((0.2, -3.0), 1), "Softsign": ((), 1),
    "Tanhshrink": ((), 1), "Hardshrink": ((0.7,), 1), "Softshrink": ((0.2,), 1), "Softmin": ((1,), 1),
    "PairwiseDistance": ((1.0, 0.01, True), 2), "TripletMarginLoss": ((0.8, 1.0, 1e-3, True), 3),
    "SoftMarginLoss": ((), 2), "PoissonNLLLoss": ((True, False), 2), "MarginRankingLoss": ((0.1, None, None, "sum"), 3),
    "HingeEmbeddingLoss": ((0.4, None, None, "none"), 2), "CosineEmbeddingLoss": ((0.1,), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_as_torch(name):
    arguments, count = LAYERS[name]
    signed = ("Margin" in name and "Triplet" not in name) or "Embedding" in name
    x = [numbers(4, 6) for _ in range(count)]
    if signed:
        x[-1] = signs(4) if name == "CosineEmbeddingLoss" else signs(4, 6)
    theirs, ours = getattr(torch.nn, name)(*arguments), getattr(minidl.nn, name)(*arguments)
    result = ours(*(Tensor(each.to(default_device())) for each in x))
    torch.testing.assert_close(result.data.cpu(), theirs(*x), rtol=1e-9, atol=1e-9)
    assert vars(ours).keys() >= {key for key in vars(theirs) if not key.startswith("_")} - {"training"}


def test_layers_with_options_by_name():
    a, b, c = (numbers(4, 6) for _ in range(3))
    ours = [Tensor(each.to(default_device())) for each in (a, b, c.exp())]
    expected = torch.nn.GaussianNLLLoss(full=True, eps=1e-3)(a, b, c.exp())
    torch.testing.assert_close(minidl.nn.GaussianNLLLoss(full=True, eps=1e-3)(*ours).data.cpu(), expected)
    with_distance = minidl.nn.TripletMarginWithDistanceLoss(distance_function=lambda x, y: (x - y).abs().amax(-1))
    expected = torch.nn.TripletMarginWithDistanceLoss(distance_function=lambda x, y: (x - y).abs().amax(-1))
    torch.testing.assert_close(with_distance(*ours).data.cpu(), expected(a, b, c.exp()))


@pytest.mark.parametrize("p", [0.5, 1, 2, 3, math.inf])
def test_cdist_as_torch(p):
    both(lambda m, a, b: m.cdist(a, b, p), numbers(2, 5, 3), numbers(2, 4, 3), tolerance=1e-9)
    x = Tensor(numbers(3, 4).to(default_device()), requires_grad=True)
    ops.cdist(x, x, p).sum().backward()
    assert x.grad.data.isfinite().all()
    assert ops.cdist(x, x[:0]).shape == (3, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.triplet_margin_loss(x, x, x, margin=0), "margin is 0, expected a number above 0"),
        (lambda x: ops.soft_margin_loss(x, x, reduction="all"), "soft_margin_loss: reduction is 'all'"),
        (lambda x: ops.cdist(x, x[:, :1]), r"cdist: x1 has shape \[2, 4\] and x2 \[2, 1\]"),
        (lambda x: ops.cdist(x[0], x), r"cdist: x1 has shape \[4\]"),
        (lambda x: ops.cdist(x, x, -1), "cdist: p is -1, expected at least 0"),
        (lambda x: ops.margin_ranking_loss(x, x, x[0]), "margin_ranking_loss: got 2, 2 and 1 dimensions"),
        (lambda x: ops.triplet_margin_loss(x, x, x[0]), "triplet_margin_loss: got 2, 2 and 1 dimensions"),
        (lambda x: ops.gaussian_nll_loss(x, x, -1.0), "var has a number below 0"),
        (lambda x: ops.gaussian_nll_loss(x, x, x[0] * 0), r"var has shape \[4\], input \[2, 4\]"),
        (lambda x: ops.cosine_embedding_loss(x, x, x), r"target has shape \[2, 4\], expected \[2\]"),
    ],
)
def test_refusals_of_losses(call, message):
    with pytest.raises(ValueError, match=message):
        call(Tensor(numbers(2, 4).to(default_device())))
