"""Cross-entropy of a linear layer in several chunks of rows."""

import pytest
import torch
import torch.nn.functional as F

from minidl import ops
from minidl.kernels import linear_cross_entropy as kernels
from minidl.runtime import launch
from minidl.tensors import from_torch


@pytest.fixture
def chunks(monkeypatch):
    """Of three rows."""
    monkeypatch.setattr(kernels, "MOST", 1)
    monkeypatch.setattr(kernels, "LEAST", 3)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_chunks_add_up_and_logits_are_never_all_there(device, dtype, reduction):
    R, K, N = 8, 4, 40
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, device=device).to(dtype) for shape in ((R, K), (N, K), (N,))]
    target = torch.randint(N, (R,), device=device)
    target[2] = -100
    dy = torch.rand((R,) if reduction == "none" else (), device=device).to(dtype)
    doubles = [t.double().clone().requires_grad_() for t in tensors]
    expected = F.cross_entropy(F.linear(*doubles), target, reduction=reduction)
    expected.backward(dy.double())
    ours = [from_torch(t).requires_grad_() for t in tensors]
    sizes = []

    def watcher(kernel, grid, args, meta, go):
        sizes.extend(arg.numel() for arg in args if isinstance(arg, torch.Tensor))
        go()

    with launch.watch(watcher):
        loss = ops.linear_cross_entropy(
            *ours[:2], from_torch(target), linear_bias=ours[2], reduction=reduction, ignore_index=-100
        )
        for again in (True, False):  # what is scaled in place is made again
            for t in ours:
                t.grad = None
            loss.backward(from_torch(dy), retain_graph=again)
    assert max(sizes) < R * N
    within = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(loss.data.double(), expected.detach(), rtol=within, atol=within)
    for one, other in zip(ours, doubles, strict=True):
        torch.testing.assert_close(one.grad.data.double(), other.grad, rtol=2 * within, atol=2 * within)


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_weight_of_more_dimensions_gives_logits_of_more(device, reduction, probabilities):
    torch.manual_seed(0)
    x, w, bias, weight = (torch.randn(*s, device=device).double() for s in ((4, 5), (3, 2, 7, 5), (3, 2, 7), (3,)))
    target = torch.randint(3, (4, 2, 7), device=device)
    target = torch.rand(4, 3, 2, 7, device=device).double() if probabilities else target
    theirs = [t.clone().requires_grad_() for t in (x, w, bias)]
    logits = torch.einsum("rk,n...k->rn...", *theirs[:2]) + theirs[2]
    expected = F.cross_entropy(logits, target, weight.abs(), reduction=reduction, label_smoothing=0.1)
    ours = [from_torch(t.clone()).requires_grad_() for t in (x, w, bias)]
    loss = ops.linear_cross_entropy(
        *ours[:2], from_torch(target), linear_bias=ours[2], weight=from_torch(weight.abs()), reduction=reduction,
        label_smoothing=0.1,
    )  # fmt: skip
    torch.testing.assert_close(loss.data, expected.detach())
    ops.sum(loss).backward()
    expected.sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.data, other.grad)
    shapes = r"input is \[4, 4\] and linear_weight \[3, 2, 7, 5\], expected \[N, in_features\]"
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {shapes}"):
        ops.linear_cross_entropy(ours[0][:, :4], ours[1], from_torch(target))
    for input in (ours[0][0], ops.stack([ours[0], ours[0]])):
        with pytest.raises(ValueError, match="linear_cross_entropy: input is"):
            ops.linear_cross_entropy(input, ours[1], from_torch(target))
    with pytest.raises(ValueError, match=r"linear_bias has shape \[3, 14\], expected \[3, 2, 7\]"):
        ops.linear_cross_entropy(*ours[:2], from_torch(target), linear_bias=ops.reshape(ours[2], 3, 14))
