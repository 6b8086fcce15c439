"""Tensors of more than 2^31 elements in every kernel family that can hold them on one card.

Most rows are zero, and a few hold small integers: the first, the one that crosses element 2^31, and the last. What the
operation gives for these rows among all must be, to the bit, what it gives for them alone; and other rows must be as
for zeros. A 32-bit offset that wraps reads a row of zeros, or writes where zeros must be. In the interpreter the same
comparisons run at a size that a processor takes.
"""

import pytest
import torch

from minidl import ops
from minidl.optim import SGD, Adam
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from minidl.testing.specs.random import philox

FAR = 2**13 if launch.INTERPRETED else 2**31
pytestmark = [] if launch.INTERPRETED else [pytest.mark.large]


@pytest.fixture(autouse=True)
def _release():
    yield
    if not launch.INTERPRETED:
        torch.cuda.empty_cache()


def integers(*shape, seed=0, dtype=torch.float16):
    """Integers of -2 to 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype).to(default_device())


class Sparse:
    """A tensor [N, *shape] of more than FAR elements: integers in `rows`, zeros elsewhere."""

    def __init__(self, *shape, seed=0, dtype=torch.float16, channels_last=False, rows=None):
        size = torch.Size(shape).numel()
        self.count = FAR // size + 3 if rows is None else rows
        self.rows = [0, min(FAR // size, self.count - 2), self.count - 1]
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.whole = torch.empty((self.count, *shape), dtype=dtype, device=default_device(), memory_format=layout)
        self.whole.zero_()
        self.few = integers(len(self.rows), *shape, seed=seed, dtype=dtype).to(memory_format=layout)
        self.whole[self.rows] = self.few


def run(op, x, dy, weights):
    """Result and gradients of an operation, for all rows or the few."""
    x, weights = Tensor(x, requires_grad=True), [Tensor(w, requires_grad=True) for w in weights]
    y = op(x, *weights)
    y.backward(Tensor(dy))
    return y.data, x.grad.data, [w.grad.data for w in weights]


def nonzeros(x):
    """How many elements are not 0, counted in parts: at once torch would need ten times the memory."""
    return sum(int((part != 0).sum()) for part in x.split(max(1, x.shape[0] // 64)))


def check(op, x, *weights):
    """All rows against the few alone, forward and backward; weights' gradients are sums over rows."""
    probe = op(Tensor(x.few), *map(Tensor, weights)).data
    layout = x.whole.ndim == 4 and not x.whole.is_contiguous()
    dy = Sparse(*probe.shape[1:], seed=1, dtype=probe.dtype, rows=x.count, channels_last=layout)
    dy.whole.zero_()
    dy.whole[x.rows] = dy.few
    y, dx, dweights = run(op, x.whole, dy.whole, weights)
    few_y, few_dx, few_dweights = run(op, x.few, dy.few, weights)
    for all_rows, few in ((y, few_y), (dx, few_dx)):
        assert torch.equal(all_rows[x.rows], few)
        assert few.count_nonzero() > 0
    assert nonzeros(y) == nonzeros(few_y)
    assert nonzeros(dx) == nonzeros(few_dx)
    for all_rows, few in zip(dweights, few_dweights, strict=True):
        assert torch.equal(all_rows, few)


def test_elementwise():
    check(ops.relu, Sparse(1000))


def test_elementwise_of_two_shapes():
    x, b = Sparse(1000), integers(1000, seed=2)
    check(ops.mul, x, b)


def test_bias_and_activation():
    check(lambda x, b: ops.bias_act(x, b, "relu"), Sparse(1000), -abs(integers(1000, seed=2)))


CONVOLUTIONS = {
    "1 to 4, 5x5": ((1, 28, 28), (4, 1, 5, 5), {}),
    "3 to 16, 7x7 by twos": ((3, 20, 20), (16, 3, 7, 7), {"stride": 2, "padding": 3}),
    "12 to 24, 7x7": ((12, 14, 14), (24, 12, 7, 7), {}),
    "32 to 32, 3x3": ((32, 16, 16), (32, 32, 3, 3), {"padding": 1}),
    "64 to 64, 3x3": ((64, 8, 8), (64, 64, 3, 3), {"padding": 1}),
    "64 to 16, 1x1": ((64, 8, 8), (16, 64, 1, 1), {}),
    "groups of 2": ((8, 12, 12), (8, 2, 3, 3), {"padding": 1, "groups": 4}),
}


@pytest.mark.parametrize(("size", "filters", "settings"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolution(size, filters, settings):
    x = Sparse(*size, channels_last=True)
    check(lambda x, w: ops.conv2d(x, w, **settings), x, integers(*filters, seed=2))


def test_convolution_of_rows_that_are_not_channels_last():
    check(lambda x, w: ops.conv2d(x, w, padding=1), Sparse(8, 12, 12), integers(8, 8, 3, 3, seed=2))


@pytest.mark.parametrize(("channels", "out"), [(64, 32), (16, 1)])
def test_transposed_convolution(channels, out):
    x = Sparse(channels, 8, 8, channels_last=True)
    check(lambda x, w: ops.conv_transpose2d(x, w, stride=2, padding=1), x, integers(channels, out, 4, 4, seed=2))


@pytest.mark.parametrize(("k", "n"), [(512, 64), (64, 10)])
def test_matrix_product(k, n):
    check(ops.matmul, Sparse(k), integers(k, n, seed=2))


def test_linear():
    x = Sparse(256)
    check(lambda x, w, b: ops.linear(x, w, b, "relu"), x, integers(32, 256, seed=2), -abs(integers(32, seed=3)))


@pytest.mark.parametrize("pool", [ops.max_pool2d, ops.avg_pool2d], ids=["max", "average"])
def test_pools(pool):
    check(lambda x: pool(x, 2), Sparse(8, 10, 10, channels_last=True))


def test_adaptive_pool():
    check(lambda x: ops.adaptive_avg_pool2d(x, 1), Sparse(8, 10, 10, channels_last=True))


@pytest.mark.parametrize("dim", [0, 1])
def test_sums(dim):
    x = Sparse(1000)
    check(lambda x: ops.sum(x, 1), x) if dim else None
    whole, few = (ops.sum(Tensor(part), dim).data for part in (x.whole, x.few))
    assert torch.equal(whole[x.rows] if dim else whole, few)


def test_maxima():
    x = Sparse(1000)
    x.whole[x.rows[1], 77] = 100
    assert ops.amax(Tensor(x.whole)).item() == 100
    assert ops.argmax(Tensor(x.whole)).item() == x.rows[1] * 1000 + 77
    assert ops.amax(Tensor(x.whole), 1).data[x.rows[1]].item() == 100
    assert ops.argmax(Tensor(x.whole), 1).data[x.rows[1]].item() == 77
    assert ops.argmax(Tensor(x.whole), 0).data[77].item() == x.rows[1]


def test_norm():
    x = Sparse(1000)
    assert ops.norm(Tensor(x.whole)).item() == ops.norm(Tensor(x.few)).item()


@pytest.mark.parametrize("op", [ops.softmax, ops.log_softmax], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("size", [1000, 70_000])
def test_softmax_of_many_rows(op, size):
    size = min(size, FAR // 4)
    x = Sparse(size)
    y = op(Tensor(x.whole)).data
    assert torch.equal(y[x.rows], op(Tensor(x.few)).data)
    others = op(Tensor(torch.zeros_like(x.few[:1]))).data
    assert torch.equal(y[1:3], others.expand(2, size))
    del y
    leaf, few = (Tensor(part, requires_grad=True) for part in (x.whole, x.few))
    op(leaf).backward(Tensor(x.whole))
    op(few).backward(Tensor(x.few))
    assert torch.equal(leaf.grad.data[x.rows], few.grad.data)


def test_softmax_of_one_long_row():
    x = torch.zeros(1, FAR + 5, dtype=torch.float16, device=default_device())
    x[0, -3:] = torch.tensor([10.0, 11.0, 5.0])
    y = ops.log_softmax(Tensor(x)).data
    exact = torch.logaddexp(
        torch.tensor([10.0, 11.0, 5.0], dtype=torch.float64).logsumexp(0), torch.tensor(FAR + 2.0).double().log()
    )
    expected = torch.cat([torch.zeros(1), torch.tensor([10.0, 11.0, 5.0])]).double() - exact
    got = torch.cat([y[0, FAR // 2].reshape(1), y[0, -3:]]).double().cpu()
    assert torch.allclose(got, expected, rtol=2**-10, atol=0)


@pytest.mark.parametrize("classes", [100, 70_000])
def test_cross_entropy(classes):
    classes = min(classes, FAR // 4)
    x = Sparse(classes)
    target = torch.full((x.count,), classes - 1, device=default_device())
    leaf, few = (Tensor(part, requires_grad=True) for part in (x.whole, x.few))
    loss = ops.cross_entropy(leaf, Tensor(target), reduction="sum")
    alone = ops.cross_entropy(few, Tensor(target[:3]), reduction="sum")
    loss.backward()
    alone.backward()
    assert torch.equal(leaf.grad.data[x.rows], few.grad.data)
    each = ops.cross_entropy(Tensor(x.whole), Tensor(target), reduction="none").data
    assert torch.equal(each[x.rows], ops.cross_entropy(Tensor(x.few), Tensor(target[:3]), reduction="none").data)


@pytest.mark.parametrize("loss", [ops.mse_loss, ops.binary_cross_entropy_with_logits])
def test_losses(loss):
    x = Sparse(1000)
    zeros = torch.zeros_like(x.whole)
    leaf, few = (Tensor(part, requires_grad=True) for part in (x.whole, x.few))
    loss(leaf, Tensor(zeros), reduction="sum").backward()
    loss(few, Tensor(zeros[:3]), reduction="sum").backward()
    assert torch.equal(leaf.grad.data[x.rows], few.grad.data)


@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm(channels_last):
    """Every channel is half 1 and half -1, so that the mean is 0 and the variance 1 whatever the order of sums."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    count = FAR // 512 + 2
    x = torch.ones(count, 8, 8, 8, dtype=torch.float16, device=default_device()).to(memory_format=layout)
    x[::2] = -1
    mean, var = torch.zeros(8, device=default_device()), torch.ones(8, device=default_device())
    leaf = Tensor(x, requires_grad=True)
    y = ops.batch_norm(leaf, Tensor(mean), Tensor(var), training=True, eps=1e-12, momentum=1.0)
    assert torch.equal(y.data, x)
    assert mean.abs().max().item() == 0
    assert abs(var.double() - x.numel() / 8 / (x.numel() / 8 - 1)).max().item() < 1e-6
    # dy = x is taken away whole by the variance's part of the gradient.
    y.backward(Tensor(x))
    assert leaf.grad.data.abs().max().item() == 0
    y = ops.batch_norm(Tensor(x), Tensor(mean), Tensor(torch.ones_like(mean)), eps=1e-12)
    assert torch.equal(y.data, x)


def test_dropout():
    x = torch.ones(FAR + 4000, dtype=torch.float16, device=default_device())
    leaf = Tensor(x, requires_grad=True)
    y = ops.dropout(leaf, 0.5, seed=3)
    y.backward(Tensor(x))
    assert torch.equal(leaf.grad.data, y.data)
    assert set(y.data[-4000:].unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(y.data[-4000:], y.data[:4000])


def test_random_numbers():
    got = ops.rand(FAR + 4000, seed=5).data[-4000:].cpu()
    words = philox(1000, 5, 0, first=FAR // 4).flatten()
    assert torch.equal(got.double(), (words >> 8).double() * 2.0**-24)


@pytest.mark.parametrize(
    "make", [lambda p: SGD(p, lr=0.5, momentum=0.5), lambda p: Adam(p, lr=0.5)], ids=["sgd", "adam"]
)
def test_updates(make):
    def step(values):
        weight = Tensor(values.clone(), requires_grad=True)
        optimizer = make([weight])
        for _ in range(2):
            optimizer.zero_grad()
            weight.grad = Tensor(values)
            optimizer.step()
        return weight.data

    values = torch.zeros(FAR + 1000, device=default_device())
    values[-1000:] = integers(1000, dtype=torch.float32)
    whole = step(values)
    assert torch.equal(whole[-1000:], step(values[-1000:].clone()))
    assert nonzeros(whole[:-1000]) == 0


def test_sparse_products():
    """A weight of more than FAR elements, of which a batch touches some rows, the last among them."""
    features = FAR // 64 + 3
    weight = Sparse(64, rows=features)
    columns = torch.tensor([0, features - 1, weight.rows[1], features - 1], dtype=torch.int32)
    crow, values = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float16)
    x = CSR.from_torch(crow, columns, values, (2, features)).to(default_device())
    got = ops.sparse_linear(x, Tensor(weight.whole)).data
    first, middle, last = weight.few
    assert torch.equal(got, torch.stack([first + 2 * last, middle + last]))


def test_copies():
    x = Sparse(1000)
    turned = ops.contiguous(ops.permute(Tensor(x.whole), 1, 0)).data
    assert torch.equal(turned.t()[x.rows], x.few)
    assert nonzeros(turned) == nonzeros(x.few)
    joined = ops.cat([Tensor(x.few), Tensor(x.whole)]).data
    assert torch.equal(joined[3:][x.rows], x.few)
