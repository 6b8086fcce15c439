"""A result lies in memory as its operands do, and a gradient as what it is the gradient of."""

import pytest
import torch

from minidl import ops
from minidl.kernels import memory_layout
from minidl.tensors import Tensor, default_device
from minidl.testing.specs import all_specs
from minidl.testing.specs.make import SeededMake

# Views and copies into another order say how their result lies themselves; a product's rows are what it makes, as
# are those of the operations of transformers.
OTHERWISE = {
    "reshape", "flatten", "permute", "transpose", "transposed", "expand", "contiguous", "matmul",
    "scaled_dot_product_attention", "geglu", "rotary", "swiglu",
}  # fmt: skip
# Their gradient is a view, repeated along what was reduced.
REPEATED = {"sum", "mean"}
LAST = torch.channels_last


class Images(SeededMake):
    """Where any shape will do, images."""

    def shape(self, low=0, high=4, smallest=0, largest=12):
        return (2, 16, 5, 6) if high >= 4 else super().shape(low, high, smallest, largest)


def last(t):
    return t.contiguous(memory_format=LAST) if t.dim() == 4 else t


def is_image(t):
    return t.dim() == 4 and min(t.shape) > 1 and t.dtype.is_floating_point


def cases(spec, seeds=40, most=3):
    """Some of the record's cases that have images."""
    found = []
    for seed in range(seeds):
        case = spec.inputs(Images(seed, device=default_device()))
        images = [t for t in case.tensors() if t.dim() == 4]
        if images and all(map(is_image, images)):
            found.append(case.map(last))
        if len(found) == most:
            break
    return found


WITH_IMAGES = [
    pytest.param(spec, id=name) for name, spec in all_specs().items() if name not in OTHERWISE and cases(spec, most=1)
]


def test_most_operations_take_images():
    assert len(WITH_IMAGES) > 35


@pytest.mark.parametrize("spec", WITH_IMAGES)
def test_channels_last_stays_channels_last(spec):
    for case in cases(spec):
        given = case.map(Tensor)
        args = [
            Tensor(arg.data, requires_grad=True) if at in spec.differentiable and isinstance(arg, Tensor) else arg
            for at, arg in enumerate(given.args)
        ]
        found = spec.op(*args, **given.kwargs)
        results = found if isinstance(found, tuple) else (found,)
        for y in results:
            assert not is_image(y.data) or y.data.is_contiguous(memory_format=LAST)
        y = results[0]
        if y.requires_grad:
            y.backward(Tensor(last(torch.ones_like(y.data))))
        for x in args if spec.name not in REPEATED else ():
            if isinstance(x, Tensor) and x.grad is not None and is_image(x.data):
                assert x.grad.data.is_contiguous(memory_format=LAST)


def dense(*shape, dims):
    """A tensor of this shape whose dimensions lie in memory in the order of `dims`."""
    return torch.empty([shape[dim] for dim in dims]).permute(memory_layout.back(dims))


@pytest.mark.parametrize(
    "operands",
    [
        [dense(2, 3, 4, 5, dims=(0, 2, 3, 1)), dense(2, 3, 4, 5, dims=(0, 1, 2, 3))],
        [dense(2, 3, 4, 5, dims=(0, 1, 2, 3)), dense(2, 3, 4, 5, dims=(0, 2, 3, 1))],
        [dense(2, 3, 4, 5, dims=(3, 2, 1, 0)), dense(1, 3, 1, 1, dims=(0, 1, 2, 3))],
        [dense(1, 3, 1, 1, dims=(0, 1, 2, 3)), dense(2, 3, 4, 5, dims=(0, 2, 3, 1))],
        [dense(2, 3, 1, 1, dims=(0, 1, 2, 3)).expand(2, 3, 4, 5), dense(2, 3, 4, 5, dims=(0, 2, 3, 1))],
        [dense(4, 6, dims=(1, 0))[:, ::2], dense(4, 3, dims=(0, 1))],
        [dense(3, 1, dims=(0, 1)), dense(4, dims=(0,))],
        [dense(5, 4, 3, dims=(2, 0, 1))],
    ],
)
def test_operands_in_different_orders_follow_torch(operands):
    y = operands[0] + operands[1] if len(operands) == 2 else -operands[0]
    assert memory_layout.empty(y.shape, operands, y.dtype).stride() == y.stride()


def test_dropout_keeps_the_same_elements_in_any_order():
    x = torch.randn(3, 7, 5, 6, device=default_device())
    kept = [ops.dropout(Tensor(t), 0.4, seed=3).data for t in (x, last(x))]
    assert torch.equal(*kept)
    assert kept[1].is_contiguous(memory_format=LAST)


def test_losses_of_pixels_are_those_of_rows():
    x = torch.randn(3, 7, 5, 6, device=default_device())
    target = torch.randint(0, 7, (3, 5, 6), device=default_device())
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"reduction": "sum", "ignore_index": 2}):
        found = []
        for t in (x, last(x)):
            logits = Tensor(t, requires_grad=True)
            loss = ops.cross_entropy(logits, Tensor(target), **options)
            loss.backward(Tensor(torch.ones_like(loss.data)))
            found.append((loss.data, logits.grad.data))
        assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)
        assert torch.allclose(found[0][1], found[1][1], atol=1e-6)
        assert found[1][1].is_contiguous(memory_format=LAST)
