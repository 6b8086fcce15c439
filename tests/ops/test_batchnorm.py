"""What is special to `batch_norm`: running statistics that are views of other tensors."""

import math

import pytest
import torch

import minidl
from minidl import ops
from minidl.tensors import Tensor, default_device


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(default_device())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_may_be_columns_of_a_matrix(momentum):
    x = numbers(3, 5, 4, 2)
    table = numbers(5, 3, seed=1).abs()
    before = table.clone()
    mean, var = table[:, 0].clone(), table[:, 2].clone()
    for running_mean, running_var in ((table[:, 0], table[:, 2]), (mean, var)):
        count = Tensor(torch.zeros((), dtype=torch.int64, device=x.device))
        ops.batch_norm(
            Tensor(x), Tensor(running_mean), Tensor(running_var), training=True, momentum=momentum,
            num_batches_tracked=count,
        )  # fmt: skip
        assert count.item() == 1
    assert not torch.equal(mean, before[:, 0])
    assert torch.equal(table, torch.stack((mean, before[:, 1], var), 1))


def test_an_eps_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="eps is nan, expected 0 or more"):
        ops.batch_norm(Tensor(numbers(3, 5)), None, None, training=True, eps=math.nan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.batch_norm(x, None, None, training=True, eps="a"), "batch_norm: eps is 'a', expected a number"),
        (lambda x: ops.batch_norm(x, None, None, training=True, momentum="a"), "batch_norm: momentum is 'a', expected"),
        (lambda x: ops.batch_norm(x, None, None, training=True, act=["elu", 0.5]), "expected None, a name, or a name"),
        (
            lambda x: ops.batch_norm(x, None, None, training=True, act=("elu", "0.5")),
            "expected None, a name, or a name",
        ),
        (lambda x: ops.conv1d(x[None], minidl.ones(1, 2, 3), act=["elu", 0.5]), "expected None, a name, or a name"),
        (lambda x: ops.layer_norm(x, 4, eps="a"), "layer_norm: eps is 'a', expected a number"),
        (lambda x: ops.rms_norm(x, 4, eps=[1]), "rms_norm: eps is .1., expected a number"),
        (lambda x: ops.group_norm(x, 2, eps="a"), "group_norm: eps is 'a', expected a number"),
    ],
)
def test_settings_of_other_types_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call(minidl.ones(2, 4))
