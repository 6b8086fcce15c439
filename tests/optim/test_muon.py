"""Muon: the iterations within a bound of their arithmetic, steps against their formula and torch's."""

import math

import pytest
import torch

import minidl
from minidl import optim
from minidl.kernels.update import newton
from minidl.tensors import Tensor, default_device
from minidl.testing import assert_not_vacuous, assert_within
from minidl.testing.specs import bounds

A, B, C = 3.4445, -4.775, 2.0315


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        default_device(), dtype
    )


def iterated(x, steps=5, eps=1e-7, u=0.0, given=0.0):
    """The iterations in float64, and how far rounding by u can bring their result away from it, in |.|_F.

    x is off by up to `given` in |.|_F. An error made before an iteration grows at most by the steepest slope of the
    polynomial between the singular values and their negatives. The products of an iteration add up K, r and r terms,
    magnitudes by |.|_F.
    """
    K, r = max(x.shape), min(x.shape)
    size = max(float(x.norm()), eps)
    x = x / size
    error = bounds.gamma(K * r + 4, u) + 2 * given / size
    for _ in range(steps):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        power = B * gram + C * gram @ gram
        moved = power @ x if x.shape[0] <= x.shape[1] else x @ power
        f, s = float(x.norm()), float(torch.linalg.matrix_norm(x, 2)) + error
        e_gram = bounds.gamma(K, u) * f**2
        e_square = 2 * s**2 * e_gram + bounds.gamma(r, u) * float(gram.norm()) ** 2
        e_power = -B * e_gram + C * e_square + 3 * u * (-B + C * s**2) * float(gram.norm())
        e_moved = e_power * s + bounds.gamma(r, u) * float(power.norm()) * f
        slopes = torch.linspace(0, s, 200, dtype=torch.float64)
        steepest = float((A + 3 * B * slopes**2 + 5 * C * slopes**4).abs().max())
        error = steepest * error + e_moved + 3 * u * (float(moved.norm()) + A * f)
        x = A * x + moved
    return x, 1.01 * error  # what is of second order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 3, 20), (2, 20, 3), (1, 17, 17), (2, 70, 33), (1, 0, 4)])
def test_iterations_within_their_bound(shape, dtype):
    x = drawn(*shape, dtype=dtype)
    start = x.double().cpu().clone()
    newton.orthogonalise(x, (A, B, C), 5, 1e-7)
    for got, matrix in zip(x.cpu(), start, strict=True):
        if matrix.numel():
            exact, bound = iterated(matrix, u=bounds.dot_unit(dtype))
            assert_not_vacuous(exact, torch.tensor(bound))
            assert_within(got, exact, bound)
            values = torch.linalg.svdvals(got.double())
            assert float(values.max()) < 1.3


def test_large_matrices_go_one_by_one(monkeypatch):
    """With the bits of a batch of one."""
    monkeypatch.setattr(newton, "LARGE", 100)
    x = drawn(2, 12, 10, dtype=torch.float32)
    apart = x.clone().unbind()
    newton.orthogonalise(x, (A, B, C), 5, 1e-7)
    for together, alone in zip(x, apart, strict=True):
        newton.orthogonalise(alone[None], (A, B, C), 5, 1e-7)
        assert torch.equal(together, alone)


SHAPES = [(8, 20), (20, 8), (8, 20), (1, 3)]


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.1}, {"lr": 0.05, "nesterov": False, "weight_decay": 0.0, "momentum": 0.9, "ns_steps": 3},
     {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}],
    ids=["usual", "plain", "adjusted"],
)  # fmt: skip
def test_steps_of_the_formula_and_of_torch(settings):
    """Exact in float64; torch's are off by their bfloat16: by 0.2 to 1.3 percent of the way, measured."""
    starts = [drawn(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    ours = [Tensor(p.clone(), requires_grad=True) for p in starts]
    theirs = [torch.nn.Parameter(p.cpu().clone()) for p in starts]
    exact, buffers = [p.cpu().clone() for p in starts], [torch.zeros(shape).double() for shape in SHAPES]
    sums, errors, u = [0.0] * len(SHAPES), [0.0] * len(SHAPES), 2.0**-53
    mine, peer = optim.Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    full = mine.param_groups[0]
    for turn in range(4):
        for i, shape in enumerate(SHAPES):
            grad = drawn(*shape, seed=100 * turn + i)
            ours[i].grad, theirs[i].grad = Tensor(grad), grad.cpu()
            buffers[i] += (1 - full["momentum"]) * (grad.cpu() - buffers[i])
            turned = grad.cpu() + full["momentum"] * (buffers[i] - grad.cpu()) if full["nesterov"] else buffers[i]
            # A buffer has three roundings in a turn, of at most what all gradients add up to.
            sums[i] = sums[i] + grad.cpu().abs()
            off = 3 * (turn + 2) * u * sums[i]
            direction, error = iterated(turned, full["ns_steps"], u=u, given=float(off.norm()))
            by_shape = math.sqrt(max(1, shape[0] / shape[1]))
            adjust = 0.2 * math.sqrt(max(shape)) if "adjust_lr_fn" in settings else by_shape
            exact[i] *= 1 - full["lr"] * full["weight_decay"]
            exact[i] -= full["lr"] * adjust * direction
            errors[i] += full["lr"] * adjust * error + 4 * u * float(exact[i].abs().max() + full["lr"] * adjust)
        mine.step()
        peer.step()
    for our, their, value, start, error in zip(ours, theirs, exact, starts, errors, strict=True):
        way = float((value - start.cpu()).abs().max())
        assert error < 1e-9 * way
        assert_within(our.data, value, error)
        assert float((their.detach() - value).abs().max()) <= 0.03 * way
    # A state goes to torch and back.
    peer.load_state_dict(mine.state_dict())
    again = optim.Muon(ours)
    again.load_state_dict(peer.state_dict())
    assert again.param_groups[0]["lr"] == settings["lr"]
    assert again.param_groups[0]["ns_steps"] == full["ns_steps"]
    for param, buffer, total in zip(ours, buffers, sums, strict=True):
        assert_within(again.state[param]["momentum_buffer"], buffer, 3 * 4 * u * total)


def test_steps_in_float16_with_a_captured_step():
    """Weights of 16 bits have masters; a gradient that is not finite changes nothing; the rate is in memory."""
    start = drawn(6, 9, dtype=torch.float16)
    weight = Tensor(start.clone(), requires_grad=True)
    optimizer = optim.Muon([weight], lr=0.5, weight_decay=0.0, loss_scale=64.0)

    @minidl.capture
    def step(x):
        optimizer.zero_grad()
        (weight * x).sum().backward(optimizer.loss_scale.to(torch.float16))
        optimizer.step()

    x = drawn(6, 9, seed=3, dtype=torch.float16)
    for _ in range(5):
        step(Tensor(x))
        optimizer.lr *= 0.5
    # Each step goes the same way, by the buffer of all gradients; weights are float32 until they are read.
    wide, u = x.cpu().double(), 2.0**-24
    direction, bound = iterated(wide, u=bounds.dot_unit(torch.float16), given=3 * 6 * u * float(wide.norm()))
    exact = start.cpu().double() - 0.96875 * direction
    error = 0.96875 * bound + 5 * 2 * u * (start.cpu().double().abs() + direction.abs())
    assert_within(weight.data, exact, bounds.rounded(exact, error, torch.float16))
    before = weight.data.clone()
    step(Tensor(x * math.inf))
    assert torch.equal(weight.data, before)
    assert optimizer.skipped == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.Muon([Tensor(torch.zeros(3), requires_grad=True)]), r"shape \[3\], expected matrices"),
        (lambda p: optim.Muon(p, ns_steps=100), "ns_steps is 100"),
        (lambda p: optim.Muon(p, ns_coefficients=(1, 2)), "expected three numbers"),
        (lambda p: optim.Muon(p, adjust_lr_fn="keller"), "adjust_lr_fn is 'keller', expected 'original'"),
        (lambda p: optim.Muon([{"params": p[:1], "eps": 0.1}, {"params": p[1:]}]), "groups differ in ns_coefficients"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make([Tensor(drawn(2, 2), requires_grad=True) for _ in range(2)])
