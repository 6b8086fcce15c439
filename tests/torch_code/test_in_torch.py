"""torch's own samples of arguments through the operators of `minidl.torch`: results and gradients are torch's."""

import itertools

import pytest
import torch
from torch.utils import _pytree

import minidl.torch as mt
from tests.torch_code.names import databases

SAMPLES, ELEMENTS = 8, 800  # of a function, and of a sample
REFUSALS = (ValueError, TypeError, IndexError, NotImplementedError)
NAMES = (
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "avg_pool2d", "avg_pool3d", "batch_norm", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cross_entropy", "embedding_bag",
    "group_norm", "interpolate", "layer_norm", "linear", "linear_cross_entropy", "log_softmax", "max_pool2d",
    "max_pool3d", "rms_norm", "scaled_dot_product_attention", "softmax",
)  # fmt: skip


def _tensors(sample):
    leaves = _pytree.tree_leaves([sample.input, sample.args, sample.kwargs])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _made(function, sample):
    """The result, and the gradients of all that wants one; of a copy of the sample, as running statistics change."""
    copy = sample.transform(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
    )
    wanted = [t for t in _tensors(copy) if t.requires_grad]
    y = function(copy.input, *copy.args, **copy.kwargs)
    grads = torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True) if y.requires_grad else ()
    return y, grads


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", NAMES)
def test_samples(name, device):
    info = next((info for info in databases()[0] if info.name in (name, f"nn.functional.{name}")), None)
    if info is None:
        pytest.skip(f"torch {torch.__version__} has no samples of {name}")
    ours = getattr(mt, name)
    if name == "embedding_bag":
        ours = lambda weight, index, **options: mt.embedding_bag(index, weight, **options)  # noqa: E731
    every = info.sample_inputs(str(device), torch.float64, requires_grad=True)
    small = (
        sample
        for sample in every
        if sum(t.numel() for t in _tensors(sample)) <= ELEMENTS
        and not sample.kwargs.get("return_indices")
        and not sample.kwargs.get("dropout_p")
    )
    passed = 0
    refused = []
    for sample in itertools.islice(small, 24 if name == "embedding_bag" else SAMPLES):
        expected = _made(info, sample)
        try:
            found = _made(ours, sample)
        except REFUSALS as error:
            refused.append(str(error))
            continue
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
        passed += 1
    assert passed >= 2, refused
