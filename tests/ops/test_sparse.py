"""What is special to `sparse_linear`: the weight's gradient comes as rows, and only what is wanted is computed."""

import math

import pytest
import torch

from minidl import ops, optim
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor, default_device
from minidl.testing import assert_within
from tests.launches import replace_run


def leaf(*shape, seed=0, grad=True):
    data = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Tensor(data.to(default_device()), requires_grad=grad)


@pytest.fixture
def batch():
    crow = torch.tensor([0, 3, 3, 5, 9])
    col = torch.tensor([1, 4, 7, 4, 4, 0, 1, 7, 9])
    return CSR.from_torch(crow, col, torch.arange(1.0, 10.0, dtype=torch.float64), (4, 11)).to(default_device())


def test_the_gradient_of_the_weight_is_rows(batch):
    weight, bias = leaf(11, 6), leaf(6, seed=1)
    y = ops.sparse_linear(batch, weight, bias, "tanh")
    y.backward(Tensor(torch.ones_like(y.data)))
    raw = weight.raw_grad
    assert isinstance(raw, RowGrad)
    assert raw.rows.tolist() == [0, 1, 4, 7, 9]
    assert raw.shape == (11, 6)
    dz = 1 - y.data.cpu() ** 2
    assert_within(weight.grad, batch.to_dense().cpu().t() @ dz, 1e-13)
    assert_within(bias.grad, dz.sum(0), 1e-14)


@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        ((True, True), {"csr_matmul_kernel", "bias_act_grad_kernel"}),
        ((True, False), {"csr_matmul_kernel"}),
        ((False, True), {"bias_act_grad_kernel"}),
    ],
)
def test_only_what_is_wanted_is_computed(batch, wanted, kernels, monkeypatch):
    weight, bias = leaf(11, 6, grad=wanted[0]), leaf(6, seed=1, grad=wanted[1])
    y = ops.sparse_linear(batch, weight, bias, "relu")
    names, run = set(), launch.run

    def spy(kernel, *args, **meta):
        names.add(kernel.__name__)
        run(kernel, *args, **meta)

    replace_run(monkeypatch, spy)
    y.backward(Tensor(torch.ones_like(y.data)))
    assert {name for name in names if name in ("csr_matmul_kernel", "bias_act_grad_kernel")} == kernels
    assert (weight.raw_grad is None, bias.raw_grad is None) == (not wanted[0], not wanted[1])


def test_two_uses_of_a_weight_add_up_densely(batch):
    weight = leaf(11, 6)
    (ops.sparse_linear(batch, weight) + ops.sparse_linear(batch, weight)).backward(
        Tensor(torch.ones(4, 6, dtype=torch.float64, device=default_device()))
    )
    expected = 2 * batch.to_dense().cpu().t() @ torch.ones(4, 6, dtype=torch.float64)
    assert_within(weight.grad, expected, 1e-14 * expected.abs())


def test_words_of_no_document_do_not_matter(batch):
    """Infinite weights of words that the batch does not name change neither output, gradient nor update."""
    weight = leaf(11, 6)
    weight.data[2] = math.inf
    y = ops.sparse_linear(batch, weight)
    assert y.data.isfinite().all()
    y.backward(Tensor(torch.ones_like(y.data)))
    assert weight.grad.data.isfinite().all()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_few_steps_fit_a_small_table(batch, lazy):
    """The layer, its row gradient and the optimizer together; words never seen stay where they were."""
    weight, bias = leaf(11, 2), leaf(2, seed=1)
    start = weight.data.clone()
    wanted = leaf(4, 2, seed=2, grad=False)
    optimizer = optim.Adam([weight, bias], lr=0.05, lazy=lazy)
    losses = []
    for _ in range(60):
        loss = ops.mse_loss(ops.sparse_linear(batch, weight, bias), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.01 * losses[0]
    unseen = torch.tensor([2, 3, 5, 6, 8, 10], device=start.device)
    assert torch.equal(weight.data[unseen], start[unseen])


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w * 2, lambda w: w * w, lambda w: 1 - w, ops.relu, lambda w: w.T.T, lambda w: w[:],
        lambda w: ops.cat([w, w], 1)[:, :6], lambda w: ops.softmax(w, 1), ops.exp,
    ],
)  # fmt: skip
def test_a_weight_may_come_from_other_operations(batch, change):
    weight, dense = leaf(11, 6), leaf(11, 6)
    ops.sum(ops.square(ops.sparse_linear(batch, change(weight)))).backward()
    ops.sum(ops.square(ops.matmul(Tensor(batch.to_dense()), change(dense)))).backward()
    torch.testing.assert_close(weight.grad.data, dense.grad.data, rtol=1e-12, atol=1e-12)


def test_changes_of_the_gradient_in_place_are_kept(batch):
    weight = leaf(11, 6)
    ops.sum(ops.sparse_linear(batch, weight)).backward()
    before = weight.grad.data.clone()
    assert isinstance(weight.raw_grad, RowGrad)
    weight.grad.data.mul_(5)
    assert torch.equal(weight.grad.data, 5 * before)
    assert torch.equal(weight.raw_grad, 5 * before)
    hooked = leaf(11, 6)

    def five_times(gradient):
        gradient.data.mul_(5)

    hooked.register_hook(five_times)
    ops.sum(ops.sparse_linear(batch, hooked)).backward()
    assert torch.equal(hooked.grad.data, 5 * before)
