"""The moving average: against its formula in float64, for every dtype, and what it refuses."""

import pytest
import torch

from minidl.kernels import launch
from minidl.kernels.average import average_
from minidl.tensor import default_device

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 13), (70_000,)])
@pytest.mark.parametrize("weight", [0.0, 0.001, 0.5, 1.0])
def test_it_moves_by_a_share(dtype, shape, weight):
    average, value = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    expected = average.double() + weight * (value.double() - average.double())
    version = average._version
    assert average_(average, value, weight) is average
    assert average._version > version
    # The weight is float32; three roundings in the type computed in, one to the type stored.
    eps = torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps
    assert torch.allclose(average.double(), expected, rtol=4 * eps, atol=4 * eps)


def test_a_value_of_other_strides_is_read_in_order():
    average, value = numbers(5, 3), numbers(3, 5, seed=1).t()
    expected = value.clone()
    assert torch.allclose(average_(average, value, 1.0), expected, atol=1e-6)


def test_channels_last_memory_is_taken_as_it_is():
    average = numbers(4, 3, 5, 2).to(memory_format=torch.channels_last)
    value = numbers(4, 3, 5, 2, seed=1)
    expected, address = (average + value) / 2, average.data_ptr()
    assert torch.allclose(average_(average, value, 0.5), expected, atol=1e-6)
    assert average.data_ptr() == address


@pytest.mark.parametrize(
    ("average", "value", "weight", "error", "message"),
    [
        (torch.zeros(3), torch.zeros(4), 0.5, ValueError, r"average has shape \[3\]"),
        (torch.zeros(2, 3).t(), torch.zeros(3, 2), 0.5, ValueError, "an average in contiguous or channels-last memory"),
        (torch.zeros(3), torch.zeros(3), 1.5, ValueError, "weight is 1.5, expected a share from 0 to 1"),
        (torch.zeros(3), torch.zeros(3).double(), 0.5, TypeError, "average is torch.float32 and value is"),
        (torch.zeros(3).long(), torch.zeros(3).long(), 0.5, TypeError, "expected a floating type"),
    ],
)
def test_bad_arguments(average, value, weight, error, message):
    with pytest.raises(error, match=message):
        average_(average, value, weight)
