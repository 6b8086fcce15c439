"""The moving average: against its formula in float64, for every dtype, and what it refuses."""

import pytest
import torch

from minidl.kernels.average import Averages, average_
from minidl.runtime import launch
from minidl.tensors import default_device

DTYPES = [torch.float32, torch.float16, torch.float64] + ([] if launch.INTERPRETED else [torch.bfloat16])


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device(), dtype)


def share(weight):
    return torch.tensor(weight, dtype=torch.float64, device=default_device())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 13), (70_000,)])
@pytest.mark.parametrize("weight", [0.0, 0.001, 0.5, 1.0])
def test_it_moves_by_a_share(dtype, shape, weight):
    average, value = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    expected = average.double() + weight * (value.double() - average.double())
    version = average._version
    assert average_(average, value, share(weight)) is average
    assert average._version > version
    # Three roundings in the type computed in, one to the type stored.
    eps = torch.finfo(dtype).eps
    assert torch.allclose(average.double(), expected, rtol=4 * eps, atol=4 * eps)


def test_a_value_of_other_strides_is_read_in_order():
    average, value = numbers(5, 3), numbers(3, 5, seed=1).t()
    expected = value.clone()
    assert torch.allclose(average_(average, value, share(1.0)), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("average", "value", "weight", "error", "message"),
    [
        (torch.zeros(3), torch.zeros(4), 0.5, ValueError, r"average has shape \[3\]"),
        (torch.zeros(2, 3).t(), torch.zeros(3, 2), 0.5, ValueError, "an average that is contiguous or channels-last"),
        (torch.zeros(3), torch.zeros(3), [0.5, 0.5], ValueError, r"weight has shape \[2\]"),
        (torch.zeros(3), torch.zeros(3).double(), 0.5, TypeError, "average is torch.float32 and value is"),
        (torch.zeros(3).long(), torch.zeros(3).long(), 0.5, TypeError, "expected a floating type"),
    ],
)
def test_bad_arguments(average, value, weight, error, message):
    with pytest.raises(error, match=message):
        average_(average, value, torch.tensor(weight))


def test_both_in_channels_last():
    average, value = numbers(3, 4, 5, 2).to(memory_format=torch.channels_last), numbers(3, 4, 5, 2, seed=1)
    expected = average.lerp(value, 0.25)
    assert torch.allclose(average_(average, value, share(0.25)), expected, atol=1e-6)


@pytest.mark.parametrize("half", [False, True])
def test_all_averages_of_a_model_at_once(half):
    """As one by one, whatever the sizes; those of smaller dtypes are kept in float32."""
    shapes = [(70_001,), (3, 5), (), (0,), (4, 3, 2, 2)]
    values = [numbers(*shape, dtype=torch.float16 if half else torch.float32, seed=i) for i, shape in enumerate(shapes)]
    values[-1] = values[-1].to(memory_format=torch.channels_last)
    values.append(numbers(9, dtype=torch.float32, seed=9))
    averages = [torch.ones_like(value, dtype=torch.float32) for value in values]
    versions = [average._version for average in averages]
    Averages(averages, values)(share(0.125))
    for average, value, version in zip(averages, values, versions, strict=True):
        assert torch.equal(average, 1 + 0.125 * (value.float() - 1))
        assert average._version > version


def test_averages_of_other_tensors_are_refused():
    with pytest.raises(ValueError, match=r"an average has shape \[3\] and strides \(1,\) on"):
        Averages([torch.zeros(3)], [torch.zeros(4)])
    with pytest.raises(TypeError, match="expected a floating type"):
        Averages([torch.zeros(3)], [torch.zeros(3).long()])
