"""Attention in small blocks, its dropout by place, and what it does not read."""

import itertools

import pytest
import torch

from minidl import ops
from minidl.kernels import attention
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device

SMALL = {"BLOCK_M": 16, "BLOCK_N": 32}
FAMILIES = [f"{name}_{size}" for name in ("attention", "attention_grad") for size in attention.HEAD_FAMILIES]


def random(*shape, seed=0, dtype=torch.float32):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(default_device(), dtype)


def small_blocks():
    return launch.force(**{family: launch.Tile(SMALL) for family in FAMILIES})


def expected(q, k, v, seen, weights=lambda p: p):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
    p = torch.where(seen.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    return weights(p) @ v


@pytest.mark.parametrize(("L", "S"), [(1, 1), (47, 65), (65, 47), (96, 96), (33, 1)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (20, -1), (40, 3), (70, 70), (-1, 33)])
def test_ranges_of_blocks(L, S, window):
    """Blocks that all rows see, that some see and that none sees, in every order."""
    q, k, v, dy = (random(2, 2, n, 8, seed=i) for i, n in enumerate((L, S, S, L)))
    i, j = torch.arange(L, device=q.device).view(-1, 1), torch.arange(S, device=q.device)
    seen = torch.ones(2, 1, L, S, dtype=torch.bool, device=q.device)
    seen &= (j >= i - window[0]) if window[0] >= 0 else True
    seen &= (j <= i + window[1]) if window[1] >= 0 else True
    lengths = torch.tensor([S, S // 2], device=q.device)
    seen = seen & (j < lengths.view(-1, 1, 1, 1))
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    y = expected(*theirs, seen)
    y.backward(dy.double())
    mine = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    with small_blocks():
        result = ops.scaled_dot_product_attention(*mine, window=window, lengths=Tensor(lengths))
        result.backward(Tensor(dy))
    torch.testing.assert_close(result.data.double(), y, rtol=1e-4, atol=1e-4)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad.data.double(), b.grad.nan_to_num(), rtol=1e-4, atol=1e-4)


def kept(shape, p, key, blocks):
    """The factors of weights [batch, heads, L, S]: of attention with one query in a row's place and values one-hot."""
    B, H, L, S = shape
    zeros = torch.zeros(B, H, L, 16, device=default_device())
    factors = []
    for first in range(0, S, 16):  # 16 keys at a time have a value each
        v = torch.zeros(B, H, S, 16, device=zeros.device)
        width = min(16, S - first)
        v[:, :, first : first + width, :width] = torch.eye(width, device=zeros.device)
        with blocks():
            options = attention.Options(1.0, p=p)
            y = attention.attention(zeros, torch.zeros(B, H, S, 16, device=zeros.device), v, None, None, options, key).y
        factors.append(y[..., :width] * S)
    return torch.cat(factors, -1)


def test_dropout_depends_on_the_place_alone():
    """Not on blocks; a fraction p is 0, the others 1 / (1 - p); gradients drop the same."""
    key = attention.dropout_key(3, 5, default_device())
    shape = (2, 2, 40, 70)
    factors = kept(shape, 0.25, key, small_blocks)
    large = kept(shape, 0.25, key, launch.force)
    torch.testing.assert_close(factors, large)
    dropped = factors.abs() < 1e-5
    torch.testing.assert_close(factors[~dropped], torch.full_like(factors[~dropped], 4 / 3))
    assert 0.23 < dropped.float().mean() < 0.27
    other = kept(shape, 0.25, attention.dropout_key(3, 6, default_device()), small_blocks)
    assert ((other.abs() < 1e-5) != dropped).any()
    q, k, v, dy = (random(*shape[:2], n, 16, seed=i) for i, n in enumerate((40, 70, 70, 40)))
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    everything = torch.ones(shape, dtype=torch.bool, device=q.device)
    y = expected(*theirs, everything, lambda p: p * factors.double())
    y.backward(dy.double())
    options = attention.Options(0.25, p=0.25)
    with small_blocks():
        saved = attention.attention(q, k, v, None, None, options, key)
        grads = attention.attention_grad(dy, q, k, v, None, None, saved, options)
    torch.testing.assert_close(saved.y.double(), y, rtol=1e-4, atol=1e-4)
    for grad, x in zip(grads, theirs, strict=False):
        torch.testing.assert_close(grad.double(), x.grad, rtol=1e-4, atol=1e-4)


def test_a_shard_of_a_batch_drops_what_the_whole_does():
    key = attention.dropout_key(1, 0, default_device())
    q, k, v = (random(4, 2, 20, 8, seed=seed) for seed in range(3))
    options = attention.Options(0.3, p=0.5)
    whole = attention.attention(q, k, v, None, None, options, key).y
    half = attention.attention(q[2:], k[2:], v[2:], None, None, options, key, first=2 * 2 * 20).y
    assert torch.equal(whole[2:], half)


def test_all_dropped():
    q = Tensor(random(2, 3, 5, 4), requires_grad=True)
    y = ops.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
    assert not y.data.any()
    y.sum().backward()
    assert not q.grad.data.any()


def test_values_behind_lengths_are_not_read():
    q, k, v = (random(2, 2, 50, 8, seed=seed) for seed in range(3))
    lengths = torch.tensor([0, 37], device=q.device)
    leaves = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    with small_blocks():
        clean = ops.scaled_dot_product_attention(*leaves, lengths=Tensor(lengths))
        clean.sum().backward()
        for x in (k, v):
            x[0], x[1, :, 37:] = float("nan"), float("inf")
        dirty = [Tensor(x, requires_grad=True) for x in (q, k, v)]
        result = ops.scaled_dot_product_attention(*dirty, lengths=Tensor(lengths))
        result.sum().backward()
    assert torch.equal(clean.data, result.data)
    assert not result.data[0].any()
    for a, b in zip(leaves, dirty, strict=True):
        assert torch.equal(a.grad.data, b.grad.data)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_as_in_torch(bad):
    """In one query, key or value: the rows that it reaches, and no others."""
    for which, seen in itertools.product(range(3), (None, "causal")):
        x = [random(1, 1, 40, 8, seed=seed) for seed in range(3)]
        x[which][0, 0, 20, 3] = bad
        with small_blocks():
            y = ops.scaled_dot_product_attention(*map(Tensor, x), is_causal=seen == "causal").data
        # On a GPU torch adds the mask, and an infinite score of a key that a row does not see makes it NaN.
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(t.double().cpu() for t in x), is_causal=seen == "causal"
        )  # fmt: skip
        y = y.cpu()
        # A weight of 0 times a value that is not finite: a block that no row of it sees is not read.
        rows = slice(0, 16) if seen and which == 2 else slice(0, 0)
        assert torch.equal(y.isfinite()[..., rows.stop :, :], exact.isfinite()[..., rows.stop :, :])
        assert y[..., rows, :].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_and_lengths_in_any_memory_order(dtype):
    """A transposed mask of bools; lengths with a step, and one for all items: they are read by their strides."""
    q, k, v, dy = (random(3, 2, 20, 8, seed=seed, dtype=dtype) for seed in range(4))
    mask = (random(20, 20, seed=4) > -1).t()
    steps = torch.tensor([20, 0, 7, 0, 13, 0], device=q.device)[::2]
    for lengths in (steps, torch.tensor(11, device=q.device)):
        seen = mask & (torch.arange(20, device=q.device) < lengths.expand(3).view(3, 1, 1, 1))
        theirs = [x.clone().double().requires_grad_() for x in (q, k, v)]
        y = expected(*theirs, seen)
        y.backward(dy.double())
        mine = [Tensor(x, requires_grad=True) for x in (q, k, v)]
        result = ops.scaled_dot_product_attention(*mine, Tensor(mask), lengths=Tensor(lengths))
        result.backward(Tensor(dy))
        torch.testing.assert_close(result.data.double(), y, rtol=1e-4, atol=1e-4)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.grad.data.double(), b.grad.nan_to_num(), rtol=1e-4, atol=1e-4)


def test_memory_order_is_kept():
    """Heads beside one another in a row, as a projection leaves them: the result needs no copy to join them."""
    q = random(2, 30, 3, 8).transpose(1, 2)
    leaf = Tensor(q, requires_grad=True)
    y = ops.scaled_dot_product_attention(leaf, leaf, leaf)
    assert y.data.transpose(1, 2).is_contiguous()
    y.backward(Tensor(random(2, 3, 30, 8)))
    contiguous = Tensor(q.contiguous(), requires_grad=True)
    again = ops.scaled_dot_product_attention(contiguous, contiguous, contiguous)
    assert torch.equal(y.data, again.data)


def test_bits_are_the_same_in_every_run():
    x = [random(2, 4, 60, 16, seed=seed, dtype=torch.float16) for seed in range(3)]

    def step():
        leaves = [Tensor(t, requires_grad=True) for t in x]
        y = ops.scaled_dot_product_attention(*leaves, is_causal=True)
        y.backward(Tensor(torch.ones_like(y.data)))
        return [y.data, *(leaf.grad.data for leaf in leaves)]

    assert all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True))


def test_broadcast_as_in_torch():
    """A mask of keys alone, one head of keys for all, and leading dimensions that one tensor lacks."""
    q, k, v = random(2, 3, 4, 9, 8), random(3, 1, 7, 8, seed=1), random(3, 1, 7, 5, seed=2)
    mask = random(3, 1, 1, 7, seed=3)
    leaf = Tensor(mask, requires_grad=True)
    y = ops.scaled_dot_product_attention(*map(Tensor, (q, k, v)), leaf)
    y.sum().backward()
    theirs = mask.double().requires_grad_()
    p = (q.double() @ k.double().mT / 8**0.5 + theirs).softmax(-1)
    exact = p @ v.double()
    exact.sum().backward()
    torch.testing.assert_close(y.data.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad.data.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_second_derivative_is_refused_by_name():
    from minidl.autograd import grad

    q = Tensor(random(1, 2, 4, 8), requires_grad=True)
    y = ops.scaled_dot_product_attention(q, q, q)
    with pytest.raises(RuntimeError, match="Attention"):
        grad(y.sum(), [q], create_graph=True)
