"""Modules exported to ONNX give in onnxruntime what they give here, at another batch size too."""

import sys

import numpy as np
import pytest
import torch

import minidl
import minidl.nn.functional as F
from minidl import models, nn, ops

RELATIVE = 1e-5  # of the largest output: sums in another order


class _Mixed(nn.Module):
    """Functions, operators, methods and tensors that are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding="same"), nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.full((4, 1), 0.5))
        self.register_buffer("shift", minidl.ones(4, 1), persistent=False)
        self.steps = minidl.arange(4).reshape(4, 1).to(torch.float32)

    def forward(self, x, y):
        h = F.gelu(self.norm(self.conv(x))) * self.scale + self.steps
        h = ops.softmax((self.shift + h).view(h.shape[0], -1), dim=-1)
        return ops.div(ops.mul(1.0 - h, y), 2.0), h.argmax(1)


class _Floor(nn.Module):
    def forward(self, x):
        return ops.div(x, 0.3, rounding_mode="floor") + ops.div(x, 0.3, rounding_mode="trunc") + x // 2 + x % 2


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self, tokens):
        return self.layers(self.table(tokens)).mean(1)


class _Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def _trained(model, *shape):
    """Return the model after two batches, with running statistics of its own."""
    with minidl.no_grad():
        for _ in range(2):
            model(minidl.randn(*shape))
    return model


CASES = {
    "mlp": lambda: (nn.MLP(4, [8, 8], 3, act=("elu", 0.5), dropout=0.5), minidl.randn(2, 4)),
    "cnn": lambda: (_trained(models.SmallCNN(1, (16, 16), 5, 0.5), 4, 1, 16, 16), minidl.randn(1, 1, 16, 16)),
    "generator": lambda: (_trained(models.Generator(8, 1, (8, 8), 4), 4, 8), minidl.randn(2, 8)),
    "fused_pool": lambda: (models.ECE408(), minidl.randn(2, 1, 28, 28)),
    "encoder": lambda: (_Encoder(), minidl.randint(0, 20, (2, 6))),
    "lstm": lambda: (_Recurrent(nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True)), minidl.randn(2, 4, 3)),
    "gru": lambda: (_Recurrent(nn.GRU(3, 5, batch_first=True)), minidl.randn(2, 4, 3)),
    "rnn": lambda: (_Recurrent(nn.RNN(3, 5, nonlinearity="relu", batch_first=True)), minidl.randn(2, 4, 3)),
    "lstm_alone": lambda: (nn.LSTM(3, 5, batch_first=True), minidl.randn(2, 4, 3)),
    "cell": lambda: (nn.GRUCell(3, 5), minidl.randn(2, 3)),
    "gelu": lambda: (nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU("tanh")), minidl.randn(2, 3)),
    "floor": lambda: (_Floor(), minidl.randn(2, 3)),
    "mixed": lambda: (_Mixed(), (minidl.randn(2, 3, 6), minidl.randn(2, 1))),
}  # fmt: skip


def _session(path):
    return pytest.importorskip("onnxruntime").InferenceSession(path)


@pytest.mark.parametrize("case", CASES)
def test_outputs(case, tmp_path):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    minidl.manual_seed(0)
    model, example = CASES[case]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    minidl.export_onnx(model, example, tmp_path / "model.onnx")
    assert model.training
    assert all(type(x) is nn.Parameter for x in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    session = _session(tmp_path / "model.onnx")
    examples = example if isinstance(example, tuple) else (example,)
    inputs = [ops.cat([x, x, x[:1]]) for x in examples]  # another batch size
    got = session.run(None, {put.name: x.numpy() for put, x in zip(session.get_inputs(), inputs, strict=True)})
    with minidl.no_grad():
        expected = torch.utils._pytree.tree_leaves(model.eval()(*inputs))
    for ours, theirs in zip(expected, got, strict=True):
        ours = ours.numpy()
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= RELATIVE * np.abs(ours).max()


def test_names_and_sizes(tmp_path):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    import onnx

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].weight = nn.Parameter(torch.ones(2, 4))
    path = tmp_path / "model.onnx"
    minidl.export_onnx(model, minidl.randn(2, 3), path)
    assert list(tmp_path.iterdir()) == [path]
    weights = {weight.name: onnx.numpy_helper.to_array(weight) for weight in onnx.load(path).graph.initializer}
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(weights[name], tensor.cpu())
    minidl.export_onnx(model, minidl.randn(2, 5, 3), path, dynamic_dims=(1,))
    session = _session(tmp_path / "model.onnx")
    (put,), (out,) = session.get_inputs(), session.get_outputs()
    assert (put.name, out.name) == ("input", "output")
    assert put.shape[::2] == [2, 3]
    assert isinstance(put.shape[1], str)


def test_shared_parameters_are_written_once(tmp_path):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    import onnx

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    minidl.export_onnx(model, minidl.randn(2, 64), tmp_path / "model.onnx")
    weights = onnx.load(tmp_path / "model.onnx").graph.initializer
    assert sum(np.prod(weight.dims) >= 64 * 64 for weight in weights) == 1


class _Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class _Doubled(minidl.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x


class _OwnOperation(nn.Module):
    def forward(self, x):
        return _Doubled.apply(x)


ERRORS = {
    "no_torch_name": (nn.Sequential(nn.Linear(3, 4), nn.SparseLinear(4, 2)), TypeError, "SparseLinear: torch has no"),
    "own_function": (_OwnOperation(), TypeError, "_Doubled: torch has no such operation"),
    "causal": (nn.Conv1d(5, 5, 2, padding="causal"), RuntimeError, "causal"),
    "branch": (_Branch(), ValueError, "torch cannot trace _Branch: Could not guard"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, tmp_path):
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    model, error, text = ERRORS[case]
    with pytest.raises(error, match=text):
        minidl.export_onnx(model, minidl.randn(2, 5, 3), tmp_path / "model.onnx")
    assert model.training
    assert not list(tmp_path.iterdir())
    assert ops.add(minidl.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]  # operations compute again


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"example": 3}, TypeError, "example is of type int, expected a Tensor"),
        ({"model": len}, TypeError, "model is of type builtin_function_or_method, expected a minidl Module"),
        ({"dynamic_dims": "0"}, TypeError, "dynamic_dims is '0', expected a whole number"),
        ({"dynamic_dims": (-1,)}, ValueError, r"dynamic_dims is \[-1\], expected numbers of 0 or more"),
    ],
)
def test_bad_arguments(change, error, text, tmp_path):
    pytest.importorskip("onnx"), pytest.importorskip("onnxscript")
    call = {"model": nn.Linear(3, 2), "example": minidl.ones(2, 3), "path": tmp_path / "model.onnx"} | change
    with pytest.raises(error, match=text):
        minidl.export_onnx(**call)
    assert not list(tmp_path.iterdir())


def test_without_its_packages(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"export_onnx needs onnx: .*minidl\[onnx\]"):
        minidl.export_onnx(nn.Linear(3, 2), minidl.randn(2, 3), tmp_path / "model.onnx")
