"""torch's modes and contexts around minidl: they hold, or are refused or said to do nothing."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import minidl
from minidl import nn, ops
from minidl.tensors import default_device

MAKERS = {
    "zeros": lambda kit: kit.zeros(2), "ones": lambda kit: kit.ones(2), "full": lambda kit: kit.full((2,), 1.0),
    "rand": lambda kit: kit.rand(2), "randn": lambda kit: kit.randn(2), "tensor": lambda kit: kit.tensor([1.0]),
    "arange": lambda kit: kit.arange(0, 1, 0.5), "linspace": lambda kit: kit.linspace(0, 1, 3),
    "eye": lambda kit: kit.eye(2), "empty": lambda kit: kit.empty(2), "as_tensor": lambda kit: kit.as_tensor([1.0]),
    "Linear": lambda kit: kit.nn.Linear(2, 2).weight, "Conv2d": lambda kit: kit.nn.Conv2d(1, 1, 1).bias,
    "LayerNorm": lambda kit: kit.nn.LayerNorm(2).weight, "Embedding": lambda kit: kit.nn.Embedding(2, 2).weight,
    "BatchNorm1d": lambda kit: kit.nn.BatchNorm1d(2).running_mean, "PReLU": lambda kit: kit.nn.PReLU().weight,
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_the_default_dtype_and_device_are_torchs(name):
    minidl.set_default_dtype(torch.float64)
    try:
        assert MAKERS[name](minidl).dtype == MAKERS[name](torch).dtype == torch.float64
        assert (minidl.tensor([1, 2]) / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert MAKERS[name](minidl).dtype == torch.float32
    if name not in ("arange", "linspace"):
        with torch.device("meta"):
            assert MAKERS[name](minidl).device == MAKERS[name](torch).device == torch.device("meta")
    assert MAKERS[name](minidl).device == default_device()


@pytest.mark.parametrize(
    "anomaly", [torch.autograd.set_detect_anomaly, torch.autograd.detect_anomaly, minidl.autograd.detect_anomaly]
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_looking_for_nan(anomaly):
    def walk():
        x = minidl.zeros(2, requires_grad=True)
        (ops.sqrt(x) * 0).sum().backward()

    with anomaly(True), pytest.raises(RuntimeError, match="its gradient of input 0 has NaN"):
        walk()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        walk()
    walk()


PRODUCTS = {
    "linear": lambda x: nn.Linear(4, 4)(x + 0), "matmul": lambda x: x @ x,
    "conv1d": lambda x: ops.conv1d(x, minidl.ones(1, 4, 1)), "einsum": lambda x: ops.einsum("ij,jk->ik", x, x),
    "addmm": lambda x: x.addmm(x, x),
}  # fmt: skip


class TestAutocast:
    @pytest.mark.parametrize("name", PRODUCTS)
    def test_is_refused_where_it_would_convert(self, name):
        x = minidl.ones(4, 4)
        with torch.autocast(x.device.type, torch.float16):
            with pytest.raises(RuntimeError, match=rf"{name}: got torch.float32 under torch.autocast"):
                PRODUCTS[name](x)
            with torch.autocast(x.device.type, enabled=False):
                PRODUCTS[name](x)

    def test_is_not_where_it_would_not(self):
        with torch.autocast(default_device().type, torch.float16):
            for dtype in (torch.float16, torch.float64):
                x = minidl.ones(4, 4, dtype=dtype)
                assert (x @ x).dtype == dtype
            assert (minidl.ones(2) + 1).dtype == torch.float32


class TestSavedTensors:
    def test_hooks_are_refused(self):
        layer, x = nn.Linear(2, 2), minidl.ones(1, 2)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t):
            with pytest.raises(RuntimeError, match="saved_tensors_hooks do not see the tensors that minidl saves"):
                layer(x)
            with minidl.no_grad():
                layer(x)

    def test_what_saves_memory_in_torch_says_that_it_does_not(self):
        layer, x = nn.Linear(2, 2), minidl.ones(1, 2)
        with pytest.warns(UserWarning, match=r"torch.utils.checkpoint saves no memory here"):
            y = checkpoint(layer, x, use_reentrant=False)
        y.sum().backward()
        assert layer.bias.grad.tolist() == [1, 1]
        with torch.autograd.graph.save_on_cpu(), pytest.warns(UserWarning, match=r"graph saves no memory"):
            layer(x)


def test_a_function_call_with_other_parameters_is_refused():
    layer, x = nn.Linear(2, 2, bias=False), minidl.ones(1, 2)
    for weight in (minidl.ones(2, 2), torch.ones(2, 2)):
        with pytest.raises(TypeError, match="is not an instance of torch"):
            torch.func.functional_call(layer, {"weight": weight}, (x,))


def test_a_seed_is_torchs_too():
    """A loader shuffles by torch's generator."""

    def order(seed):
        generator = minidl.manual_seed(seed)
        assert generator is torch.default_generator
        numbers = minidl.rand(2).tolist()
        return numbers, [int(x) for x in DataLoader(range(50), shuffle=True)], torch.rand(2).tolist()

    assert order(3) == order(np.int64(3)) != order(4)
    with pytest.raises(ValueError, match="seed is -1"):
        minidl.manual_seed(-1)
