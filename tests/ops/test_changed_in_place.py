"""Where torch lets what an operation read or made be changed in place before the way back, so does minidl."""

import pytest
import torch
import torch.nn.functional as torch_functional

import minidl
from minidl.nn import functional
from minidl.tensors import default_device


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of(m, values, requires_grad=False):
    """The values as a tensor of torch or of minidl."""
    values = values.clone() if m is torch else minidl.tensor(values).to(default_device())
    return values.requires_grad_(requires_grad)


CLASSES, SHARES, FACTORS = torch.tensor([0, 3, 1]), numbers(3, 4, seed=1).softmax(1), numbers(3, 4, seed=2)
WEIGHT, BIAS, KERNEL = numbers(5, 4, seed=3), numbers(5, seed=4), numbers(2, 3, 3, 3, seed=5)
IMAGE, ROWS = (2, 3, 6, 6), (3, 4)

# A function of torch or minidl, its functional, and x of ROWS; of an image where its name says so.
LOSSES = {
    f"{name} {reduction}": lambda m, f, x, name=name, target=target, reduction=reduction, more=more: getattr(f, name)(
        x, of(m, target), reduction=reduction, **more
    )
    for name, target, more in [
        ("cross_entropy", CLASSES, {}), ("cross_entropy", SHARES, {}), ("nll_loss", CLASSES, {}),
        ("mse_loss", SHARES, {}), ("huber_loss", SHARES, {}), ("smooth_l1_loss", SHARES, {}), ("kl_div", SHARES, {}),
        ("binary_cross_entropy_with_logits", SHARES, {}),
    ]
    for reduction in ("mean", "sum", "none")
    if (name, reduction) != ("kl_div", "mean")  # of which torch warns
}  # fmt: skip
FUNCTIONAL = {
    name: lambda m, f, x, name=name: getattr(f, name)(x)
    for name in (
        "relu", "sigmoid", "tanh", "gelu", "silu", "elu", "leaky_relu", "relu6", "hardtanh", "softplus", "mish",
        "hardswish", "normalize",
    )
}  # fmt: skip
METHODS = {
    f"x.{name}": lambda m, f, x, name=name: getattr(x, name)()
    for name in (
        "exp", "sin", "square", "abs", "neg", "reciprocal", "erf", "floor", "sum", "mean", "amax", "min", "prod",
        "norm", "std", "tril", "clone",
    )
}  # fmt: skip
WITH_ANOTHER = {
    f"{name} {how}": lambda m, f, x, name=name, how=how: (
        getattr(m, name)(of(m, FACTORS), x)
        if how == "before"
        else getattr(m, name)(x, of(m, FACTORS, how == "learned"))
    )
    for name in ("add", "sub", "mul", "div", "maximum", "fmod", "remainder")
    for how in ("fixed", "before", "learned")
}
PRODUCTS = {
    f"{name} {how}": lambda m, f, x, product=product, how=how: product(m, f, x, lambda t: of(m, t, how == "learned"))
    for name, product in {
        "linear": lambda m, f, x, w: f.linear(x, w(WEIGHT), w(BIAS)),
        "linear of three": lambda m, f, x, w: f.linear(x.reshape(1, 3, 4) * 1, w(WEIGHT)),
        "matmul": lambda m, f, x, w: x @ w(WEIGHT.T.contiguous()),
        "a vector": lambda m, f, x, w: x @ w(WEIGHT[0].clone()),
        "bmm": lambda m, f, x, w: m.bmm((x * 1).reshape(1, 3, 4), w(FACTORS.reshape(1, 4, 3))),
        "einsum": lambda m, f, x, w: m.einsum("ij,kj->ik", x, w(WEIGHT)),
        "image: conv2d": lambda m, f, x, w: f.conv2d(x, w(KERNEL)),
    }.items()
    for how in ("fixed", "learned")
}
OTHERS = {
    "softmax": lambda m, f, x: f.softmax(x, -1), "log_softmax": lambda m, f, x: f.log_softmax(x, -1),
    "layer_norm": lambda m, f, x: f.layer_norm(x, (4,)), "dropout": lambda m, f, x: f.dropout(x, 0.0),
    "image: max_pool2d": lambda m, f, x: f.max_pool2d(x, 2), "image: avg_pool2d": lambda m, f, x: f.avg_pool2d(x, 2),
    "image: batch_norm": lambda m, f, x: f.batch_norm(x, None, None, training=True),
    "square": lambda m, f, x: x**2, "cube": lambda m, f, x: x**3, "clamp": lambda m, f, x: x.clamp(-0.5, 0.5),
    "divided": lambda m, f, x: x / 3, "index": lambda m, f, x: x[of(m, torch.tensor([0, 0, 2]))],
    "cat": lambda m, f, x: m.cat([x, x]), "max": lambda m, f, x: x.max(1)[0], "cumsum": lambda m, f, x: x.cumsum(1),
    "where": lambda m, f, x: m.where(of(m, FACTORS > 0), x, of(m, FACTORS)),
    "masked_fill": lambda m, f, x: x.masked_fill(of(m, FACTORS > 0), 0.0), "to": lambda m, f, x: x.double(),
}  # fmt: skip
OPERATIONS = LOSSES | FUNCTIONAL | METHODS | WITH_ANOTHER | PRODUCTS | OTHERS


def after(m, f, name, changed, in_place=True):
    """The result and the gradient of x, where what the operation made or read was changed before the way back."""
    x = of(m, numbers(*(IMAGE if name.startswith("image") else ROWS)), True)
    read = x * 1
    made = OPERATIONS[name](m, f, read)
    if changed == "what it made":
        if in_place:
            made /= 4
            made += 1
        else:
            made = made / 4 + 1
        made = made * made
    else:
        made = made * 1
        if in_place:
            read *= 0.5
    made.sum().backward()
    return tuple((t if m is torch else t.data.cpu()) for t in (made.detach(), x.grad))


def tried(*case):
    """What `after` returns, or why it is refused."""
    try:
        return after(*case), ""
    except RuntimeError as error:
        return None, str(error)


@pytest.mark.parametrize("changed", ["what it made", "what it read"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_torchs(name, changed):
    """Where torch refuses, minidl does or has the gradient of the values as they were."""
    expected, refused = tried(torch, torch_functional, name, changed)
    found, why = tried(minidl, functional, name, changed)
    if refused:
        assert "modified by an inplace operation" in refused
        expected = after(torch, torch_functional, name, changed, in_place=False)
    if why:
        assert refused, why
        assert "was changed in place" in why or "shares memory" in why
        return
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    strict = ("relu", "sigmoid", "tanh", "softmax", "x.exp", "x.amax", "mse_loss mean", "mul learned", "linear learned")
    assert not refused or name not in strict
