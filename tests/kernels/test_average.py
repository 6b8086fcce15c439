"""The moving average: against its formula in float64, for every dtype, and what it refuses."""

import pytest
import torch

from minidl.kernels.average import Averages
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
    Averages([average], [value])(share(weight))
    # Three roundings in the type computed in, one to the type stored.
    eps = torch.finfo(dtype).eps
    assert torch.allclose(average.double(), expected, rtol=4 * eps, atol=4 * eps)


def test_parts_of_memory_that_begin_anywhere():
    """Addresses that no 16 bytes divide, and neighbours that stay as they are."""
    memory, value = torch.zeros(70, device=default_device()), numbers(61)
    average = memory[3:64]
    Averages([average], [value])(share(1.0))
    assert torch.equal(average, value)
    assert not memory[:3].any()
    assert not memory[64:].any()


@pytest.mark.parametrize("half", [False, True])
def test_all_averages_of_a_model_at_once(half):
    """Whatever the sizes; those of smaller dtypes are kept in float32."""
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
    with pytest.raises(ValueError, match="contiguous or channels-last, on one device"):
        Averages([torch.zeros(2, 3).t()], [torch.zeros(2, 3).t()])
    with pytest.raises(TypeError, match="expected a floating type"):
        Averages([torch.zeros(3)], [torch.zeros(3).long()])
