"""Patches of images and bags of rows, made of lookups and sums, beside torch's: values, gradients, errors."""

import math

import pytest
import torch

from minidl import nn, ops
from minidl.tensors import Tensor, default_device
from tests.ops.test_against_torch import both, numbers

WINDOWS = [
    ((5, 6), {"kernel_size": 2}), ((7, 5), {"kernel_size": (3, 2), "stride": (2, 1)}), ((1, 1), {"kernel_size": 1}),
    ((6, 7), {"kernel_size": (2, 3), "dilation": (3, 2), "padding": (1, 2)}),
    ((11, 3), {"kernel_size": (4, 1), "stride": 5, "padding": (3, 0)}),
    ((4, 4), {"kernel_size": 2, "stride": 3, "padding": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("size", "how"), WINDOWS)
@pytest.mark.parametrize("batch", [(2, 3), (3,), (0, 2), (1, 1)])
def test_patches(size, how, batch):
    x = numbers(*batch, *size)
    both(lambda m, x: m.nn.functional.unfold(x, **how), x)
    both(lambda m, x: m.nn.functional.fold(x, size, **how), numbers(*torch.nn.functional.unfold(x, **how).shape))


def test_patches_of_strided_and_strange_images():
    x = numbers(3, 4, 8, 10)
    both(lambda m, x: m.nn.functional.unfold(x.transpose(0, 1)[:, :, ::2, 1::3], 2, padding=1), x)
    x[0, 0, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 1e308])
    both(lambda m, x: m.nn.functional.unfold(x, 3), x)
    columns = torch.nn.functional.unfold(x, 3)
    both(lambda m, y: m.nn.functional.fold(y, (8, 10), 3), columns)


def test_the_sums_of_patches_are_added_in_float32():
    columns = numbers(1, 60, 60).abs().half()
    ours = ops.fold(Tensor(columns.to(default_device())), (1, 119), (1, 60)).data.cpu()
    exact = torch.nn.functional.fold(columns.double(), (1, 119), (1, 60))
    torch.testing.assert_close(ours.double(), exact, rtol=2.0**-11 * 1.01, atol=0)


def test_layers_of_patches():
    x = Tensor(numbers(2, 3, 6, 6).to(default_device()))
    columns = nn.Unfold((2, 3), padding=1, stride=2)(x)
    theirs = torch.nn.Unfold((2, 3), padding=1, stride=2)(x.data.cpu())
    assert torch.equal(columns.data.cpu(), theirs)
    folded = nn.Fold((6, 6), (2, 3), padding=1, stride=2)
    torch.testing.assert_close(
        folded(columns).data.cpu(), torch.nn.Fold((6, 6), (2, 3), padding=1, stride=2)(theirs), rtol=0, atol=1e-15
    )
    assert repr(folded) == "Fold(output_size=(6, 6), kernel_size=(2, 3), dilation=1, padding=1, stride=2)"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: ops.unfold(x, 9), ValueError, r"unfold: an image of \[4, 5\] .* has no window of \[9, 9\]"),
        (lambda x: ops.unfold(x, 0), ValueError, "unfold: kernel_size"),
        (lambda x: ops.unfold(x, 2, padding=-1), ValueError, "unfold: padding"),
        (lambda x: ops.unfold(x[0, 0], 2), ValueError, r"unfold: input has shape \[4, 5\], expected \[N, C, H, W\]"),
        (lambda x: ops.unfold(x.long(), 2), TypeError, "unfold: input has dtype torch.int64"),
        (lambda x: ops.fold(x, (4, 5), 2), ValueError, r"fold: input has shape .* expected \[N, C x 4, 12\]"),
        (lambda x: ops.fold(x[0], (4, 5), 2), ValueError, r"fold: input has shape \[2, 4, 5\], expected"),
        (lambda x: ops.fold(x[0], (2, 2), 3), ValueError, r"fold: an image of \[2, 2\] .* has no window of \[3, 3\]"),
        (lambda x: ops.fold(x[0], 0, 1), ValueError, "fold: output_size"),
    ],
)
def test_patches_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call(Tensor(numbers(1, 2, 4, 5).to(default_device())))


INDEX, OFFSETS = torch.tensor([4, 1, 1, 0, 6, 4, 4, 2]), torch.tensor([0, 3, 3, 7])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    "how",
    [
        {}, {"padding_idx": 4}, {"padding_idx": -3},
        {"include_last_offset": True, "offsets": torch.tensor([0, 3, 3, 8])},
        {"offsets": torch.tensor([0])},
        {"offsets": torch.tensor([0, 8], dtype=torch.int32)},
    ],
)  # fmt: skip
def test_bags(mode, how):
    offsets = how.get("offsets", OFFSETS)
    options = {"mode": mode, **{key: value for key, value in how.items() if key != "offsets"}}
    both(
        lambda m, i, w, o: m.nn.functional.embedding_bag(i, w, o, **options), INDEX.to(offsets.dtype), numbers(7, 5),
        offsets,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shape", [(4, 2), (1, 8), (0, 4)])
def test_bags_of_equal_sizes(mode, shape):
    index = INDEX[: shape[0] * shape[1]].reshape(shape)
    both(lambda m, i, w: m.nn.functional.embedding_bag(i, w, mode=mode), index, numbers(7, 1))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_nothing(mode):
    weight = Tensor(numbers(7, 2).to(default_device()), requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64, device=default_device())
    bags = ops.embedding_bag(Tensor(nothing.reshape(3, 0)), weight, mode=mode)
    assert bags.tolist() == [[0.0, 0.0]] * 3
    bags.sum().backward()
    assert not weight.grad.data.any()
    assert ops.embedding_bag(Tensor(nothing), weight, Tensor(nothing), mode=mode).shape == (0, 2)


def test_bags_with_factors():
    def of(m, i, w, o, f):
        return m.nn.functional.embedding_bag(i, w, o, mode="sum", per_sample_weights=f, padding_idx=1)

    both(of, INDEX, numbers(7, 5), OFFSETS, numbers(8))
    both(lambda m, i, w, f: of(m, i, w, None, f), INDEX.reshape(2, 4), numbers(7, 5), numbers(2, 4))


def test_equal_maxima_and_infinities():
    weight = torch.tensor([[1.0, -math.inf], [1.0, -math.inf], [math.nan, 5.0], [2.0, math.inf]], dtype=torch.float64)
    index, offsets = torch.tensor([0, 1, 0, 2, 3, 3, 3]), torch.tensor([0, 3, 4, 4])
    for mode in ("max", "sum", "mean"):
        both(lambda m, i, w, o: m.nn.functional.embedding_bag(i, w, o, mode=mode), index, weight, offsets)  # noqa: B023


def test_long_bags_in_float16():
    weight = torch.full((3, 2), 100.0, dtype=torch.float16)
    index = Tensor(torch.zeros(1, 5000, dtype=torch.int64, device=default_device()))
    assert ops.embedding_bag(index, Tensor(weight.to(default_device()))).tolist() == [[100.0, 100.0]]


def test_a_layer_of_bags():
    torch.manual_seed(0)
    theirs = torch.nn.EmbeddingBag(7, 5, padding_idx=2, mode="max", include_last_offset=True)
    ours = nn.EmbeddingBag(7, 5, padding_idx=2, mode="max", include_last_offset=True)
    assert not ours.weight.data[2].any()
    ours.load_state_dict(theirs.state_dict())
    i, o = (Tensor(t.to(default_device())) for t in (INDEX[:7], OFFSETS))
    torch.testing.assert_close(ours(i, o).data.cpu(), theirs(INDEX[:7], OFFSETS).detach(), rtol=0, atol=0)
    frozen = nn.EmbeddingBag.from_pretrained(ours.weight, mode="sum")
    assert (frozen.mode, frozen.weight.requires_grad) == ("sum", False)
    assert repr(frozen) == "EmbeddingBag(num_embeddings=7, embedding_dim=5, mode='sum', padding_idx=None)"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((INDEX,), {}, r"input has shape \[8\], expected \[bags, N\], or \[L\] with offsets"),
        ((INDEX.reshape(2, 4), OFFSETS), {}, "a bag in each row; leave offsets out"),
        ((INDEX, OFFSETS), {"mode": "min"}, "mode is 'min', expected 'sum', 'mean' or 'max'"),
        ((INDEX, OFFSETS.double()), {}, r"offsets is torch.float64 \[4\], expected \[bags\] integers"),
        ((INDEX, OFFSETS[:0]), {"include_last_offset": True}, r"offsets is torch.int64 \[0\], expected"),
        ((INDEX, OFFSETS + 1), {}, r"offsets are \[1, 4, 4, 8\], expected a rise from 0 to at most 8"),
        ((INDEX, OFFSETS), {"include_last_offset": True}, "expected a rise from 0"),
        ((INDEX, OFFSETS.flip(0)), {}, "expected a rise from 0"),
        ((INDEX, OFFSETS * 2), {}, "expected a rise from 0 to at most 8"),
        ((INDEX, OFFSETS), {"padding_idx": 7}, "padding_idx is 7, expected a row of the 7"),
        ((INDEX, OFFSETS), {"max_norm": 1.0}, "max_norm is not supported"),
        ((INDEX, OFFSETS), {"per_sample_weights": torch.ones(8).double()}, "per_sample_weights needs mode='sum'"),
    ],
)
def test_bags_refuse(arguments, options, message):
    def ours(value):
        return Tensor(value.to(default_device())) if isinstance(value, torch.Tensor) else value

    index, *offsets = map(ours, arguments)
    with pytest.raises(ValueError, match=message):
        ops.embedding_bag(index, ours(numbers(7, 5)), *offsets, **{key: ours(v) for key, v in options.items()})
