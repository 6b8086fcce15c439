"""torch's modes and contexts around minidl: they hold, or are refused or said to do nothing."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import minidl
from minidl import nn, ops
from minidl.tensors import Tensor, default_device

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


X, W = torch.linspace(-2, 2, 16).reshape(4, 4), torch.linspace(-1, 1, 4).reshape(1, 4, 1)
UNDER_AUTOCAST = {
    "linear": lambda f, x, w: f.nn.functional.linear(x + 0, x), "matmul": lambda f, x, w: x @ x,
    "conv1d": lambda f, x, w: f.nn.functional.conv1d(x, w), "einsum": lambda f, x, w: f.einsum("ij,jk->ik", x, x),
    "addmm": lambda f, x, w: x.addmm(x, x), "sum": lambda f, x, w: x.half().sum(), "pow": lambda f, x, w: x.half() ** 2,
    "softmax": lambda f, x, w: (x @ x).softmax(-1), "loss": lambda f, x, w: f.nn.functional.mse_loss(x @ x, x),
    "widest": lambda f, x, w: (x @ x) * x - x.half(), "one type": lambda f, x, w: f.relu(x.half()),
    "float64": lambda f, x, w: x.double() @ x.double(), "cat": lambda f, x, w: f.cat([x @ x, x]),
    "norm": lambda f, x, w: f.nn.functional.layer_norm(x @ x, (4,)), "to": lambda f, x, w: x.to(x @ x),
}  # fmt: skip


# Computed in float32, as torch does on a GPU; on the CPU torch leaves them in float16.
IN_FLOAT32 = {"sum", "pow", "softmax", "norm", "loss"}


class TestAutocast:
    @pytest.mark.parametrize("name", UNDER_AUTOCAST)
    def test_operations_have_torchs_dtypes_and_gradients(self, name):
        def run(f, x, w):
            x.requires_grad_()
            with f.autocast(x.device.type, dtype=torch.float16):
                y = UNDER_AUTOCAST[name](f, x, w)
            y.float().sum().backward()
            return y.dtype, y.detach().float().cpu().numpy(), x.grad.cpu().numpy()

        device = default_device()
        theirs = run(torch, X.clone().to(device), W.to(device))
        ours = run(minidl, Tensor(X.clone().to(device)), Tensor(W.to(device)))
        assert ours[0] == (torch.float32 if name in IN_FLOAT32 else theirs[0])
        for found, expected in zip(ours[1:], theirs[1:], strict=True):
            np.testing.assert_allclose(found, expected, rtol=4e-3, atol=4e-3)

    def test_layers_take_what_products_give(self):
        with torch.autocast(default_device().type, torch.float16):
            y, _ = nn.LSTM(3, 4)(nn.Linear(2, 3)(minidl.ones(5, 2, 2)))
            z = nn.TransformerEncoderLayer(4, 2, 8)(y)
        z.sum().backward()
        with torch.autocast(default_device().type, torch.float16, enabled=False):
            assert nn.Linear(2, 3)(minidl.ones(5, 2)).dtype == torch.float32


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
