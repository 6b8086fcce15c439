"""Losses of unaligned labels against torch's: strides, lengths, labels in every form, and what is refused or NaN."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import minidl
from minidl import nn, ops
from minidl.autograd import grad
from minidl.kernels import ctc as kernels
from minidl.runtime import launch
from minidl.tensors import Tensor
from minidl.testing import GuardedAllocations

STEPS, COUNTS = (9, 4, 0, 9), (3, 3, 0, 0)


def log_probs(T, N, C, device="cpu", dtype=torch.float64):
    x = torch.randn(T, N, C, generator=torch.Generator().manual_seed(T + C), dtype=torch.float64)
    return x.log_softmax(-1).to(device, dtype)


def labels(N, S, C):
    return torch.randint(1, C, (N, S), generator=torch.Generator().manual_seed(S))


def both(x, targets, steps, counts, **options):
    """Losses and gradients of minidl and torch."""
    mine, theirs = Tensor(x, requires_grad=True), x.detach().cpu().clone().requires_grad_()
    loss = ops.ctc_loss(mine, Tensor(targets), steps, counts, **options)
    expected = F.ctc_loss(theirs, targets.cpu(), steps, counts, **options)
    dy = torch.arange(1.0, expected.numel() + 1, dtype=x.dtype).view(expected.shape)
    loss.backward(Tensor(dy.to(x.device)))
    expected.backward(dy)
    return (loss.data.cpu(), mine.grad.data.cpu()), (expected.detach(), theirs.grad)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("blank", [0, 2, 5])
def test_log_probs_in_any_memory_order(reduction, zero_infinity, blank, device):
    """One sequence has a repeated label and too few steps, one no steps, one no labels."""
    targets = torch.tensor([[1, 1, 3], [4, 4, 4], [1, 1, 1], [1, 1, 1]], device=device)
    x = log_probs(9, 4, 6, device)
    for order in itertools.permutations(range(3)):
        inverse = [order.index(d) for d in range(3)]
        with GuardedAllocations() as guards:
            strided = guards.guard(x.permute(order).contiguous()).permute(inverse)
            options = {"reduction": reduction, "zero_infinity": zero_infinity, "blank": blank}
            got, expected = both(strided, targets, STEPS, COUNTS, **options)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert math.isinf(float(got[0].max())) == (not zero_infinity)


@pytest.mark.parametrize("S", [63, 64, 127, 200])
def test_many_labels(S, device):
    """As many positions as a block has, or one more; one sequence has just the steps that it needs."""
    targets = labels(2, S, 30).to(device)
    repeats = int((targets[0, 1:] == targets[0, :-1]).sum())
    steps = (S + repeats, S + 40)
    got, expected = both(log_probs(max(steps), 2, 30, device), targets, steps, (S, S - 1))
    assert got[0].isfinite()
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_tiles_take_their_positions_and_classes(device):
    with launch.force(elementwise_tile=launch.Tile({"BLOCK_M": 4, "BLOCK_N": 8})):
        got, expected = both(log_probs(14, 2, 21, device), labels(2, 10, 21).to(device), (14, 13), (10, 8))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_many_steps_are_closer_than_torch():
    """Magnitudes of paths do not grow with the steps, as torch's do."""
    x, targets = log_probs(1000, 1, 50), labels(1, 100, 50)
    exact = both(x, targets, (1000,), (100,))[1][1]
    mine, theirs = ((dx - exact).abs().max() for _, dx in both(x.float(), targets, (1000,), (100,)))
    assert 20 * mine < theirs


def test_nothing_beyond_the_lengths_is_read(device):
    x, targets = log_probs(9, 2, 6, device), labels(2, 4, 6).to(device)
    expected = both(x, targets, (5, 7), (2, 3))[0]
    x[5:, 0], x[7:, 1] = math.nan, math.inf
    targets[0, 2:], targets[1, 3:] = 2**40, -1
    loss, dx = both(x, targets, (5, 7), (2, 3))[0]
    assert torch.equal(loss, expected[0])
    assert torch.equal(dx, expected[1])
    assert not dx[5:, 0].any()


def test_classes_that_no_label_has_are_not_read(device):
    x, targets = log_probs(4, 1, 6, device), torch.tensor([[1, 2]], device=device)
    expected = both(x, targets, (4,), (2,))[0]
    x[:, :, 4] = math.nan
    loss, dx = both(x, targets, (4,), (2,))[0]
    assert torch.equal(loss, expected[0])
    assert dx[:, :, 4].isnan().all()
    assert torch.equal(dx[:, :, :4], expected[1][:, :, :4])


def test_a_probability_of_zero_has_a_gradient(device):
    """torch's is NaN there: its paths contain the factor, and it divides by it."""
    x = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.5, 0.0, 0.5]], device=device).log()
    near = x.clamp(min=-80.0)
    targets = torch.tensor([1, 2], device=device)
    (loss, dx), (expected, _) = both(x, targets, (3,), (2,))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(dx, both(near, targets, (3,), (2,))[1][1])


@pytest.mark.parametrize("lengths", [tuple, list, torch.tensor, lambda n: Tensor(torch.tensor(n, dtype=torch.int32))])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_labels_and_lengths_in_every_form(lengths, dtype, device):
    x, targets = log_probs(9, 3, 6, device), labels(3, 4, 6)
    steps, counts = (9, 8, 7), (4, 0, 2)
    expected = F.ctc_loss(x.cpu(), targets, steps, counts)
    joined = torch.cat([row[:n] for row, n in zip(targets, counts, strict=True)])
    wide = torch.full((3, 8), 200)
    wide[:, ::2] = targets
    for form in (targets, joined, wide[:, ::2], targets.t().contiguous().t()):
        loss = ops.ctc_loss(Tensor(x), Tensor(form.to(device, dtype)), lengths(steps), lengths(counts))
        torch.testing.assert_close(loss.data.cpu(), expected)


def test_the_module_and_one_sequence(device):
    x, targets = log_probs(9, 1, 6, device), torch.tensor([5, 2, 2], device=device)
    expected = F.ctc_loss(x[:, 0].cpu(), targets.cpu(), (9,), (3,), blank=1, reduction="none")
    loss = nn.CTCLoss(blank=1, reduction="none")(Tensor(x[:, 0]), Tensor(targets), (9,), (3,))
    assert loss.shape == expected.shape == ()
    torch.testing.assert_close(loss.data.cpu(), expected)
    assert repr(nn.CTCLoss()) == "CTCLoss(blank=0, reduction='mean', zero_infinity=False)"
    scalars = nn.functional.ctc_loss(Tensor(x[:, 0]), Tensor(targets[None]), torch.tensor(9), torch.tensor(3), 1)
    torch.testing.assert_close(scalars.data.cpu(), expected / 3)


@pytest.mark.parametrize("label", [-1, 0, 6])
def test_a_kernel_reads_nothing_for_such_a_label(label, device):
    """Its own sequence is NaN in every step; what is beside log_probs in memory is not read."""
    x, targets = log_probs(9, 2, 6, device), torch.tensor([[1, 2], [label, 3]], device=device)
    lengths = torch.tensor([[9, 9], [2, 2], [0, 2]], device=device)
    with GuardedAllocations() as guards:
        options = 0, "none", False
        loss, paths = kernels.ctc_loss(guards.guard(x), targets, lengths, 2, *options, save=True)
        dx = kernels.ctc_loss_grad(torch.ones_like(loss), x, targets, lengths, paths, *options)
    assert loss.isnan().tolist() == [False, True]
    assert dx[:, 1].isnan().all()
    assert not dx[:, 0].isnan().any()


@pytest.mark.parametrize("label", [-1, 0, 6])
def test_a_label_that_is_no_class_or_blank(label, device):
    """Refused, or on a GPU NaN for its sequence alone; tensors around would be read otherwise."""
    targets = torch.tensor([[1, 2], [label, 3]], device=device)
    refused = pytest.raises(IndexError, match=f"targets holds {label}, expected classes from 0 to 5 but 0")
    with refused if launch.ON_CPU else contextlib.nullcontext():
        loss = ops.ctc_loss(Tensor(log_probs(9, 2, 6, device)), Tensor(targets), (9, 9), (2, 2), reduction="none")
        assert loss.data.isnan().tolist() == [False, True]


def test_no_paths_are_saved_without_a_gradient(monkeypatch, device):
    saved = []
    monkeypatch.setattr(launch, "run", lambda kernel, grid, *args, **meta: saved.append(args[3]))
    x, targets = log_probs(9, 1, 6, device), Tensor(labels(1, 2, 6).to(device))
    for wanted in (True, False):
        ops.ctc_loss(Tensor(x, requires_grad=wanted), targets, (9,), (2,), reduction="none")
    assert [paths is None for paths in saved] == [False, True]


def test_second_derivatives_are_refused(device):
    x = Tensor(log_probs(9, 1, 6, device), requires_grad=True)
    loss = ops.ctc_loss(x, Tensor(labels(1, 2, 6).to(device)), (9,), (2,))
    with pytest.raises(RuntimeError, match="CTCLoss"):
        grad(loss, x, create_graph=True)


def test_targets_on_another_device(device):
    x = minidl.from_torch(log_probs(9, 1, 6, device))
    with pytest.raises(ValueError, match=r"log_probs is on .* and targets on meta; move one"):
        ops.ctc_loss(x, Tensor(labels(1, 2, 6).to("meta")), (9,), (2,))


REFUSED = [
    (ValueError, r"log_probs has shape \[5, 0, 4\], expected \[T, N, C\]", {"shape": (5, 0, 4)}),
    (ValueError, r"log_probs has shape \[4\], expected", {"shape": (4,)}),
    (ValueError, "blank is 4, expected a class from 0 to 3", {"blank": 4}),
    (ValueError, "blank is -1, expected a class from 0 to 3", {"blank": -1}),
    (ValueError, "unknown reduction 'batchmean'", {"reduction": "batchmean"}),
    (ValueError, r"targets has shape \[3, 2\], expected \[2, S\] or \[3\]", {"targets": (3, 2), "counts": (2, 1)}),
    (ValueError, r"targets has shape \[4\], expected \[2, S\] or \[3\]", {"targets": (4,), "counts": (2, 1)}),
    (ValueError, r"targets has shape \[\], expected \[2, S\] or \[0\]", {"targets": (), "counts": (0, 0)}),
    (ValueError, r"input_lengths is \[6, 4\], expected 2 numbers from 0 to 5", {"steps": (6, 4)}),
    (ValueError, r"input_lengths is \[5\], expected 2 numbers from 0 to 5", {"steps": (5,)}),
    (ValueError, r"target_lengths is \[3, 4\], expected 2 numbers from 0 to 3", {"counts": torch.tensor([3, 4])}),
    (ValueError, r"target_lengths is \[-1, 3\], expected 2 numbers from 0 to 3", {"counts": (-1, 3)}),
    (TypeError, "input_lengths is 4.5, expected a whole number", {"steps": (5, 4.5)}),
    (TypeError, "log_probs has dtype torch.int64, expected a floating type", {"dtype": torch.int64}),
]


@pytest.mark.parametrize(("error", "message", "change"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_what_does_not_fit_is_refused(error, message, change, device):
    call = {"shape": (5, 2, 4), "targets": (2, 3), "steps": (5, 4), "counts": (3, 2), "dtype": torch.float32} | change
    x, targets = (torch.ones(call.pop(name), device=device) for name in ("shape", "targets"))
    x = Tensor(x.to(call.pop("dtype")))
    with pytest.raises(error, match=message):
        ops.ctc_loss(x, Tensor(targets.long()), call.pop("steps"), call.pop("counts"), **call)
