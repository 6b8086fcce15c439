"""What is made of other operations, or of integers, beside torch's in float64: values, types, shapes and gradients."""

import math

import numpy as np
import pytest
import torch

import minidl
from minidl import ops
from minidl.tensors import Tensor, default_device

WIDE = torch.float64
GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape):
    return torch.randn(shape, dtype=WIDE, generator=GENERATOR)


def both(function, *tensors, tolerance=1e-11):
    """Asserts that function(torch, ...) and function(minidl, ...) agree, and their gradients."""
    theirs = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    ours = [Tensor(t.to(default_device()), t.is_floating_point()) for t in tensors]
    results = function(torch, *theirs), function(minidl, *ours)
    a, b = (result if isinstance(result, tuple) else (result,) for result in results)
    close = {"atol": tolerance, "rtol": tolerance, "equal_nan": True}
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(y.data.cpu(), x.detach(), **close)
        if x.requires_grad:
            dy = numbers(*x.shape)
            x.backward(dy, retain_graph=True)
            y.backward(Tensor(dy.to(default_device())), retain_graph=True)
    for x, y in zip(theirs, ours, strict=True):
        if x.grad is not None:
            torch.testing.assert_close(y.grad.data.cpu(), x.grad, **close)


CASES = {
    "products": lambda m, x: (x.prod(), m.prod(x, 1), x.prod(-1, keepdim=True), (x * (x > 0)).prod(2), x[:0].prod(0)),
    "lerp": lambda m, x: m.lerp(x, x.exp(), 0.3),
    "addmm": lambda m, x: m.addmm(x[0], x[1], x[:3, 0, :].T @ x[0, :3], beta=0.5, alpha=2),
    "roll": lambda m, x: (m.roll(x, 3), x.roll((1, -2), (0, 2))),
    "meshgrid": lambda m, x: m.meshgrid(x[0, 0], x[0, :, 0], indexing="xy"),
    "stacks": lambda m, x: (m.hstack([x[0], x[1]]), m.vstack([x[0, 0], x[1, 1]]), m.tile(x, (2, 1))),
    "log10": lambda m, x: m.log10(x.square()),
    "unflatten": lambda m, x: (x.unflatten(2, (2, -1)), x.swapaxes(0, 1), m.trace(x[0])),
    "spread and mean": lambda m, x: (*m.var_mean(x, 0), *m.std_mean(x, (1, 2), keepdim=True)),
    "counts": lambda m, x: (m.count_nonzero(x > 0, 1), m.logical_xor(x > 0, x > 1), m.isclose(x, x * (1 + 9e-6))),
    "sequences": lambda m, x: (m.max_pool1d(x, 2, 1), m.avg_pool1d(x, 3, 2, 1), m.adaptive_avg_pool1d(x, 4)),
    "diagonal": lambda m, x: m.diagonal(x, 1, -1, 0),
    "cumprod": lambda m, x: (
        m.cumprod(x, 1), x.cumprod(-1), m.cumprod(x * (x > 0), 0), x.sum().cumprod(0), x[:0].cumprod(0),
        m.cumprod(x[:1] * 0 + 1e-200, 1)[:, :1], m.cumprod((x.detach()[:, 0] / (x.detach()[:, 0] > 0.5)), -1),
    ),
    "norms": lambda m, x: tuple(x.norm(p, 1) for p in (3, 0.5, -1.5, 0)),
    "norm of zeros": lambda m, x: ((x * 0).norm(3, -1), (x * (x > 0)).norm(0.5)),
    "var": lambda m, x: m.var(x, 1),
    "var of all": lambda m, x: x.var(),
    "std": lambda m, x: m.std(x, (0, 2), keepdim=True),
    "std, biased": lambda m, x: x.std(1, False),
    "std, corrected": lambda m, x: m.std(x, dim=0, correction=2),
    "std of equals": lambda m, x: (x * 0 + 1).std(-1),
    "split": lambda m, x: m.split(x, 2, 1),
    "split, one part unused": lambda m, x: x.split([1, 3, 2], -1)[::2],
    "chunk": lambda m, x: x.chunk(4, 2),
    "chunk of nothing": lambda m, x: x[:0].chunk(2),
    "sort": lambda m, x: m.sort(x, 1)[0],
    "msort": lambda m, x: (m.msort(x), x.msort(), m.msort(x.sum())),
    "kthvalue": lambda m, x: (
        *m.kthvalue(x, 2), *x.kthvalue(1, 0, True), *m.kthvalue(x, x.shape[1], dim=1), *m.kthvalue(x.sum(), 1),
        *m.kthvalue(x.transpose(0, 1), 2, 0, keepdim=True),
    ),
    "argsort": lambda m, x: m.argsort(x, 0, descending=True),
    "any": lambda m, x: m.any(x > 1, 1),
    "all": lambda m, x: m.all(x),
    "truths": lambda m, x: (x > 0) & ~(x > 1) | (x < -1) ^ (x < -2),
    "logical": lambda m, x: m.logical_or(m.logical_not(x), m.logical_and(x > 1, x)),
    "add, scaled": lambda m, x: m.add(x, x.exp(), alpha=-0.5),
    "sub, scaled": lambda m, x: x.sub(1, alpha=3),
    "limits": lambda m, x: x.clamp(x.square() - 1, x.abs() - 0.25),
    "a lower limit": lambda m, x: m.clamp(x, min=x.square() * math.nan),
    "where of numbers": lambda m, x: m.where(x > 0, 1.0, 0.0),
    "cumsum of a scalar": lambda m, x: x.sum().cumsum(0),
    "tril": lambda m, x: m.tril(x, -1),
    "triu": lambda m, x: x.triu(1),
    "unbind": lambda m, x: x.unbind(1)[1:3],
    "select": lambda m, x: m.select(x, 1, -1),
    "narrow": lambda m, x: x.narrow(2, 1, 3),
    "movedim": lambda m, x: m.movedim(x, 0, -1),
    "nonzero": lambda m, x: m.nonzero(x > 1),
    "masked_select": lambda m, x: m.masked_select(x, x[:1, :, :1] > 0),
    "logsumexp": lambda m, x: m.logsumexp(x * 300, 1),
    "logsumexp of all": lambda m, x: x.logsumexp((0, 1, 2), keepdim=True),
    "clip": lambda m, x: x.clip(-1, 0.5),
    "finite": lambda m, x: m.isfinite(x / (x > 0)) & ~m.isnan(x) | m.isinf(x * math.inf),
    "dot": lambda m, x: m.dot(x[0, 0], x[0, 1]) + m.mv(x[0], x[1, 1]).sum(),
    "like others": lambda m, x: x.view_as(x.movedim(0, 1)).mT + x[:1, :1, :1].expand_as(x.view(5, 6, 4)),
    "a matrix transposed": lambda m, x: x[0].t().type_as(x),
    "transpose of a scalar": lambda m, x: x.sum().transpose(0, -1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name):
    both(CASES[name], numbers(4, 5, 6))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(3, 4), (4, 5)]), ("bij,bjk", [(2, 3, 4), (2, 4, 5)]), ("i,j", [(3,), (4,)]),
        ("ij->ji", [(3, 4)]), ("ij->", [(3, 4)]), ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("ij,ij->", [(3, 4), (3, 4)]), ("ab,bc,cd->ad", [(2, 3), (3, 4), (4, 5)]), ("ij,kl->ik", [(2, 3), (4, 5)]),
        ("bi,bi->b", [(3, 4), (3, 4)]), ("bii->ib", [(2, 3, 3)]), ("...ij,kj...", [(4, 1, 2, 3), (5, 3, 4, 2)]),
        ("ij,ij", [(1, 3), (2, 1)]),
        ("...,...->", [(2, 3), (3,)]), ("ij,jk->ik", [(3, 0), (0, 5)]),
    ],
)  # fmt: skip
def test_einsum(equation, shapes):
    both(lambda m, *tensors: m.einsum(equation, *tensors), *(numbers(*shape) for shape in shapes))


def test_matrices_and_vectors():
    both(lambda m, a, b: m.mm(a, b), numbers(3, 4), numbers(4, 5))
    both(lambda m, a, b: m.bmm(a, b), numbers(2, 3, 4), numbers(2, 4, 5))
    both(lambda m, a, b: m.outer(a, b), numbers(3), numbers(4))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, n: n // 3, lambda m, n: n % 3, lambda m, n: -7 // n, lambda m, n: m.remainder(7, n),
        lambda m, n: n.cumsum(0), lambda m, n: n & 5, lambda m, n: ~n, lambda m, n: n / 2, lambda m, n: n + 0.5,
        lambda m, n: m.div(n, 2, rounding_mode="trunc"), lambda m, n: n.fmod(-3), lambda m, n: m.round(n),
        lambda m, n: n // 2.5, lambda m, n: n + (n > 2), lambda m, n: (n > 2) * 2.5, lambda m, n: (n > 2) + (n > 3),
        lambda m, n: (n > 1) * (n < 4), lambda m, n: n > 2.5, lambda m, n: n.bool(), lambda m, n: n.float().long(),
        lambda m, n: n**3, lambda m, n: 2 ** (n + 5),
        lambda m, n: n.any(()), lambda m, n: n.all([]), lambda m, n: n.reshape(2, 3).any((), True),
        lambda m, n: (n > 2).any(()), lambda m, n: (n + 5).to(m.uint8).any(), lambda m, n: (n + 5).to(m.uint8).all(0),
        lambda m, n: (n + 5).to(m.uint8).any(()), lambda m, n: n[0].any(()),
        lambda m, n: n.masked_fill(n > 1, 9), lambda m, n: n.masked_fill(n > 1, np.int64(9)),
        lambda m, n: n.masked_fill(n > 1, True), lambda m, n: (n > 2).masked_fill(n > 1, 0),
        lambda m, n: (n > 2).masked_fill(n < 1, 1), lambda m, n: (n > 2).masked_fill(n > 1, n[0]),
        lambda m, n: (n > 2).masked_fill_(n > 1, 0), lambda m, n: (n > 2).masked_fill_(n < 0, n[0]),
        lambda m, n: n.int().masked_fill(n > 1, n[1]), lambda m, n: n[2].int().masked_fill(n[2] > 0, n[1]),
        lambda m, n: n[2].float().masked_fill(n[2] > 0, n[1].double()), lambda m, n: m.tril((n > 1).reshape(2, 3)),
        lambda m, n: n.half().masked_fill_(n > 1, n[1].double() / 2),
        lambda m, n: n.clamp(0.5), lambda m, n: m.full((2,), 3), lambda m, n: m.maximum(n, n.float() * 0.5),
    ],
)  # fmt: skip
def test_integers_and_truths_as_torch(function):
    both(function, torch.tensor([-5, -1, 1, 2, 3, 7]))


@pytest.mark.parametrize("margins", [(1, 2), (0, 1, 2, 0), (-1, 2, 1, -1), (0, 0, 0, 0, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_and_truths_get_margins(margins, dtype):
    values = torch.arange(12).reshape(2, 2, 3).to(dtype)
    for value in (None, 1, True, 3.0):
        ours = ops.pad(Tensor(values.to(default_device())), margins, value=value)
        expected = torch.nn.functional.pad(values, margins, value=value)
        assert (ours.dtype, ours.tolist()) == (expected.dtype, expected.tolist())


def test_integers_beside_floats_pass_the_gradient():
    both(lambda m, x, n: x * n + n / (x * x + 1) - (n > 2) * x, numbers(4), torch.tensor([1, 2, 3, 4]))


def test_scatter_as_torch():
    x, src, index = numbers(4, 5), numbers(6, 5), torch.tensor([[0, 1, 2, 0, 3], [3, 1, 0, 0, 0], [2, 0, 1, 3, 3]])
    both(lambda m, x, src, index: x.scatter(0, index[:1], src[:1]), x, src, index)
    both(lambda m, x, index: x.scatter(0, index, 2.5), x, index)
    both(lambda m, x, src, index: m.scatter_add(x, 0, index, src[:3]), x, src, index)
    both(lambda m, x, src, index: x.index_add(1, index[0], src[:4], alpha=0.5), x, src, index)
    both(lambda m, x, index: (x * 1).scatter_(0, index[:1], 1.0).masked_fill_(x > 1, 0.0), x, index)
    ours = Tensor(x.to(default_device()))
    with pytest.raises(
        ValueError, match=r"scatter: index has shape \[3, 5\], which does not fit \[4, 5\] and \[2, 5\]"
    ):
        ours.scatter(0, Tensor(index.to(default_device())), ours[:2])


def test_functions_of_networks_as_torch():
    x, y = numbers(3, 8, 4, 6), numbers(3, 1, 4, 6)
    functions = (
        lambda f, x, y: f.normalize(x), lambda f, x, y: f.normalize(x * 0, 3, -1), lambda f, x, y: f.logsigmoid(x * 30),
        lambda f, x, y: f.cosine_similarity(x, y, 2), lambda f, x, y: f.pixel_unshuffle(x, 2),
        lambda f, x, y: f.softmin(x, 1), lambda f, x, y: f.adaptive_max_pool1d(x[0], 4),
    )  # fmt: skip
    for function in functions:
        both(lambda m, x, y, f=function: f(m.nn.functional, x, y), x, y)


def test_equal_and_close():
    x = Tensor(torch.tensor([1.0, math.inf, -0.0], device=default_device()))
    assert minidl.equal(x, x.clone())
    assert not minidl.equal(x, x[:2])
    assert minidl.allclose(x, x + Tensor(torch.tensor([5e-6, 0, 0], device=default_device())))
    assert not x.allclose(x * -1)
    assert minidl.allclose(x * math.nan, x * math.nan, equal_nan=True)
    assert not minidl.allclose(x * math.nan, x * math.nan)


def test_one_hot():
    classes = torch.tensor([[1, 0], [3, 2]])
    assert torch.equal(ops.one_hot(Tensor(classes)).data, torch.nn.functional.one_hot(classes))
    with pytest.raises(ValueError, match="one_hot: "):
        ops.one_hot(Tensor(classes), 2)


def test_narrow_types_spread_far_from_zero():
    """In float16 the mean of 2000 alone is off by more than the spread."""
    x = torch.tensor([2000.0, 2001.0, 2003.0, 1999.0])
    for name in ("std", "var"):
        ours = getattr(ops, name)(Tensor(x.half().to(default_device())))
        torch.testing.assert_close(ours.data.cpu(), getattr(x, name)().half())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x & 1, "bitwise_and: got torch.float32"),
        (lambda x: x.long().masked_fill(x > 0, 0.5), "masked_fill: 0.5 does not fit a tensor of torch.int64"),
        (lambda x: x.long().masked_fill_(x > 0, np.float32(0.5)), "masked_fill: 0.5 does not fit a tensor of torch.i"),
        (lambda x: x.long().masked_fill(x > 0, x[0, 0]), "does not fit a tensor of torch.int64"),
        (lambda x: x.to(torch.int8).masked_fill(x > 0, 300), "300 is outside the range of torch.int8"),
        (lambda x: (x > 0).masked_fill(x, 1), "the condition has dtype torch.float32, expected torch.bool"),
        (lambda x: ops.pad(x.long(), (1, 1), value=0.5), "pad: value is 0.5, expected a whole number for torch.int64"),
        (lambda x: ops.pad(x.long(), (1, 1), "replicate"), "pad: input has dtype torch.int64"),
        (lambda x: ops.pad(x[:1, :1], (-1, 1), "circular"), "pad: margins -1 and 1 leave nothing of a size of 1"),
        (lambda x: x.split([1, 1]), r"split: sizes \[1, 1\] do not add up to the 3 of dim 0"),
        (lambda x: x.chunk(0), "chunk: chunks is 0"),
        (lambda x: ops.einsum("iij->i", x), "'iij' of 'iij->i' does not name 2 dimensions by letters"),
        (lambda x: ops.einsum("ii->i", x), "einsum: 'i' is 3 and 4"),
        (lambda x: ops.einsum("...,...", x, x.T), "'...' of '...,...' is 3 and 4"),
        (lambda x: x.norm("nuc"), "norm: p is 'nuc', expected a number or 'fro'"),
        (lambda x: x.gather(1, x.long().reshape(4, 3)), "which does not fit"),
        (lambda x: ops.einsum("ij,jk->ik", x, x), "'j' of 'ij,jk->ik' is 4 and 3"),
        (lambda x: x.std(0, True, correction=1), "got both unbiased and correction"),
        (lambda x: x.outer(x), "expected two vectors"),
        (lambda x: x.mm(x[0]), "expected 2 dimensions each"),
        (lambda x: x.long().var(), "var: input has dtype torch.int64"),
        (lambda x: ops.addmm(x, x.unsqueeze(0), x.T), r"addmm: got shapes \[1, .*expected 2 dimensions each"),
    ],
)
def test_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(Tensor(torch.ones(3, 4, device=default_device())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("descending", [False, True])
def test_order(dtype, dim, descending):
    """Of equal elements, both zeros among them, the first comes first; NaN is above infinity."""
    x = (torch.randn(33, 17, generator=GENERATOR) * 3).round().abs().to(dtype)
    if dtype.is_floating_point:
        x = torch.where(torch.rand(x.shape, generator=GENERATOR) < 0.5, -x, x)
        x[1], x[2], x[:, 3], x[0, 0] = math.inf, -0.0, math.nan, -math.inf
    _, expected = torch.sort(x, dim=dim, descending=descending, stable=True)
    values, found = ops.sort(Tensor(x.to(default_device())), dim, descending)
    assert torch.equal(found.data.cpu(), expected)
    torch.testing.assert_close(values.data.cpu(), x.gather(dim, expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x.sum(1.0), "sum: dim is 1.0"),
        (lambda x: x.argmax("a"), "argmax: dim is 'a'"),
        (lambda x: x.topk(2.0), "topk: k is 2.0"),
        (lambda x: x.kthvalue(2.0), "kthvalue: k is 2.0"),
        (lambda x: x.split(1.5), "split: split_size_or_sections is 1.5"),
        (lambda x: x.chunk(None), "chunk: chunks is None"),
        (lambda x: x.roll(0.5, 0), "roll: shifts is 0.5"),
        (lambda x: x.narrow(0, 0.5, 1), "narrow: start is 0.5"),
        (lambda x: x.movedim(0, [1.5]), "movedim: destination is 1.5"),
        (lambda x: x.squeeze({"a": 1}), "squeeze: dim is 'a'"),
        (lambda x: ops.interpolate(x[None], (2.5, 3)), "interpolate: size is 2.5"),
        (lambda x: ops.pixel_shuffle(x, 2.0), "pixel_shuffle: upscale_factor is 2.0"),
        (lambda x: x.reshape(2.5, -1), "reshape: shape is 2.5"),
        (lambda x: x.repeat(1, 1.5, 1), "repeat: repeats is 1.5"),
        (lambda x: x.permute(0, 1, "a"), "permute: dims is 'a'"),
        (lambda x: minidl.zeros(2.5), "zeros: size is 2.5"),
        (lambda x: minidl.randn(2, "a"), "randn: size is 'a'"),
        (lambda x: minidl.nn.Linear(28 * 28 / 2, 10), "Linear: in_features is 392.0"),
        (lambda x: minidl.nn.Conv2d(3, 8 / 2, 3), "Conv2d: out_channels is 4.0"),
        (lambda x: minidl.nn.BatchNorm2d(8 / 2), "BatchNorm2d: num_features is 4.0"),
        (lambda x: minidl.nn.Embedding(10.0, 2), "Embedding: num_embeddings is 10.0"),
        (lambda x: ops.embedding(x.argsort(), x[0], padding_idx=0.5), "embedding: padding_idx is 0.5"),
    ],
)
def test_what_is_no_whole_number_is_refused_by_name(call, said):
    with pytest.raises(TypeError, match=f"^{said}, expected a whole number$"):
        call(Tensor(numbers(2, 3, 4).to(default_device())))


def test_whole_numbers_of_numpy_and_of_tensors_are_taken():
    x = Tensor(numbers(2, 3, 4).to(default_device()))
    for one in (np.int64(1), torch.tensor(1), Tensor(torch.tensor(1))):
        for call in (
            x.sum, x.flip, lambda n: x.topk(n).indices, lambda n: x.split(n, 1)[2],
            lambda n: x.roll(n, n), lambda n: x.movedim(n, 0), lambda n: x.narrow(n, n, n),
        ):  # fmt: skip
            assert torch.equal(call(one).data, call(1).data)


def test_einsum_has_one_form():
    x = Tensor(numbers(2, 3).to(default_device()))
    with pytest.raises(TypeError, match=r"einsum: equation is Tensor, expected text such as 'bij,bjk->bik'"):
        minidl.einsum(x, [0, 1], x, [0, 1])


def test_sizes_below_zero_are_refused():
    for call, said in (
        (lambda: minidl.zeros(2, -1), r"zeros: size is \[2, -1\], expected sizes from 0"),
        (lambda: minidl.randn((-1,)), r"randn: size is \[-1\], expected sizes from 0"),
        (lambda: minidl.nn.Linear(-1, 2), "Linear: in_features is -1, expected 0 or more"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_an_element_beyond_the_last_is_refused():
    with pytest.raises(ValueError, match="kthvalue: k is 4, expected 1 to 3, the size of dim -1"):
        ops.kthvalue(Tensor(numbers(2, 3).to(default_device())), 4)
