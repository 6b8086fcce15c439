"""Whole training steps compute nothing in torch: only memory is allocated, viewed, copied and filled there.

A dispatch mode sees every ATen operation of a step, in the interpreter as on a GPU, and fails at the first that is not
on the list below. NumPy is not imported by what takes part in a step.
"""

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minidl
from minidl import models, nn, ops, optim
from minidl.distributed.parallel import DataParallel
from minidl.distributed.parts import Shards
from minidl.kernels import images
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from minidl.training.loop.adversaries import Adversaries

ALLOCATION = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh",
}  # fmt: skip
FILLING = {
    "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "fill_",
    "zero_", "scalar_tensor",
}  # fmt: skip
VIEWS = {
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
COPIES = {
    "clone", "copy_", "_to_copy", "cat", "stack", "index_copy_", "index_put_", "index_select", "_foreach_copy_",
}  # fmt: skip
DTYPES = {"promote_types", "result_type"}  # of which dtype a result is; they read no element
STORAGE = ALLOCATION | FILLING | VIEWS | COPIES | DTYPES


class StorageOnly(TorchDispatchMode):
    """Fails at an ATen operation that is not one of storage, and counts those that are."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.split("::")[1] not in STORAGE or not name.startswith("aten::"):
            raise AssertionError(f"{func} computes outside Triton")
        if name == "aten::index_put_" and ((kwargs or {}).get("accumulate") or args[3:4] == (True,)):
            raise AssertionError(f"{func} adds outside Triton")
        self.seen.add(name)
        return func(*args, **(kwargs or {}))


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device())


def classes(count, of):
    return Tensor((torch.arange(count) % of).to(default_device()))


def sparse_batch(rows=12, columns=40, per_row=5):
    generator = torch.Generator().manual_seed(0)
    col = torch.cat([torch.randperm(columns, generator=generator)[:per_row].sort().values for _ in range(rows)])
    crow = torch.arange(0, rows * per_row + 1, per_row)
    return CSR.from_torch(crow, col, torch.rand(rows * per_row), (rows, columns)).to(default_device())


def steps(model, optimizer, loss_of, count=3):
    """The losses of a few steps, each one computed with storage operations alone."""
    losses = []
    mode = StorageOnly()
    with mode:
        for _ in range(count):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert mode.seen, "no operation of torch was seen at all: the mode is not at work"
    return [loss.item() for loss in losses]


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adamw, clipped": lambda p: optim.AdamW(p, lr=0.01, max_norm=1.0),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01, weight_decay=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "muon": lambda p: optim.Muon([each for each in p if each.ndim == 2], lr=0.05),
    "adam, lazy": lambda p: optim.Adam(p, lr=0.01, lazy=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_classifier(name):
    minidl.manual_seed(0)
    model = nn.MLP(20, [16], 4, act="gelu")
    x, labels = Tensor(numbers(24, 20)), classes(24, 4)
    losses = steps(model, OPTIMIZERS[name](model.parameters()), lambda m: ops.cross_entropy(m(x), labels), count=4)
    assert losses[-1] < losses[0]


def test_lbfgs(monkeypatch):
    """Its iterations read numbers, by which they choose the next."""
    monkeypatch.setitem(globals(), "STORAGE", {*STORAGE, "_local_scalar_dense"})
    minidl.manual_seed(0)
    model, x = nn.MLP(5, [4], 1, act="tanh"), Tensor(numbers(8, 5))
    optimizer = optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = ops.mse_loss(model(x), x[:, :1])
        loss.backward()
        return loss

    with StorageOnly() as mode:
        losses = [optimizer.step(closure).detach() for _ in range(2)]
    assert mode.seen
    assert losses[1].item() < losses[0].item()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_a_step_by_shards(norm):
    """With statistics of batches, which are joined as gradients are, or as they are used."""
    minidl.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16, act="relu"), norm(16), nn.Dropout(0.1), nn.Linear(16, 4))
    x, labels = Tensor(numbers(24, 20)), classes(24, 4)
    parallel = DataParallel(model, Shards(5))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with StorageOnly():
        for _ in range(4):
            losses.append(parallel(lambda x, y: ops.cross_entropy(model(x), y), x, labels).detach())
            optimizer.step()
    assert losses[-1].item() < losses[0].item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_text_classifier(name):
    minidl.manual_seed(0)
    model = nn.Sequential(nn.SparseLinear(40, 16, act="relu"), nn.Dropout(0.1), nn.Linear(16, 4))
    x, labels = sparse_batch(), classes(12, 4)
    losses = steps(model, OPTIMIZERS[name](model.parameters()), lambda m: ops.cross_entropy(m(x), labels), count=4)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("act", ["relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "relu6"])
def test_regression(act):
    minidl.manual_seed(0)
    model = nn.MLP(7, [16], 1, act=act)
    x, y = Tensor(numbers(10, 7)), Tensor(numbers(10, 1, seed=1))
    losses = steps(model, optim.Adam(model.parameters(), lr=0.01), lambda m: ops.mse_loss(m(x), y))
    assert losses[-1] < losses[0]


def test_float16_with_masters():
    minidl.manual_seed(0)
    model = nn.MLP(16, [16], 2, dtype=torch.float16)
    x, labels = Tensor(numbers(8, 16).half()), classes(8, 2)
    steps(model, optim.AdamW(model.parameters(), lr=0.01), lambda m: ops.cross_entropy(m(x), labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_image_classifier(dtype):
    """From bytes on the device to the update: pictures are chosen, moved and standardised by a kernel as well."""
    minidl.manual_seed(0)
    model = models.SmallCNN(1, (8, 8), 4, dtype=dtype)
    scale = 1024.0 if dtype == torch.float16 else None
    optimizer = optim.AdamW(model.parameters(), lr=0.01, loss_scale=scale)
    device = default_device()
    pixels = torch.randint(0, 256, (12, 8, 8, 1), dtype=torch.uint8).to(device)
    index, moves = torch.arange(12, device=device), torch.ones(12, 3, dtype=torch.int32, device=device)
    mean, std = torch.full((1,), 128.0, device=device), torch.full((1,), 64.0, device=device)
    labels = classes(12, 4)
    mode = StorageOnly()
    losses = []
    with mode:
        for _ in range(3):
            x = Tensor(images.pick(pixels, index, moves, mean, std, dtype))
            loss = ops.cross_entropy(model(x).to(torch.float32), labels)
            loss.backward(optimizer.loss_scale)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert losses[-1].item() < losses[0].item()


def test_gan():
    """From bytes on the device to the moving average and its statistics: noise is made by a kernel as well."""
    minidl.manual_seed(0)
    settings = {"latent": 6, "channels": 1, "size": [8, 8], "width": 4, "layers": 2, "kernel": 4}
    networks = Adversaries(settings, batch_size=6, lr=0.01, seed=0)
    device = default_device()
    pixels = torch.randint(0, 256, (12, 8, 8, 1), dtype=torch.uint8).to(device)
    index, middle = torch.arange(6, device=device), torch.full((1,), 127.5, device=device)
    before = [tensor.clone() for tensor in networks.weights().values()]
    mode = StorageOnly()
    with mode:
        for _ in range(2):
            networks.step(Tensor(images.pick(pixels, index, None, middle, middle, torch.float32)))
        networks.calibrate()
    assert mode.seen
    changed = [not torch.equal(a, b) for a, b in zip(before, networks.weights().values(), strict=True)]
    assert all(changed), [name for name, moved in zip(networks.weights(), changed, strict=True) if not moved]


@pytest.mark.parametrize("autocast", [False, True])
def test_norms_of_weights_hooks_and_autocast(autocast):
    minidl.manual_seed(0)
    norms, newer = nn.utils, nn.utils.parametrizations
    model = nn.Sequential(
        norms.spectral_norm(nn.Conv2d(1, 4, 3)), nn.ReLU(), newer.spectral_norm(nn.Conv2d(4, 4, 3)), nn.Flatten(),
        norms.weight_norm(nn.Linear(64, 8)), nn.Tanh(), newer.weight_norm(nn.Linear(8, 4)),
    )  # fmt: skip
    x, labels, shapes = Tensor(numbers(8, 1, 8, 8)), classes(8, 4), []
    model[2].register_full_backward_hook(lambda module, inputs, outputs: shapes.append(outputs[0].shape))

    def loss_of(model):
        with torch.autocast(default_device().type, torch.float16, enabled=autocast):
            return ops.cross_entropy(model(x), labels)

    losses = steps(model, optim.Adam(model.parameters(), lr=0.01), loss_of, count=4)
    assert losses[-1] < losses[0]
    assert len(shapes) == 4


def every_operation(x, labels):
    """One use of most operations on a matrix, added up."""
    a = (x * 2 - x / 3 + 1) * x.sigmoid() - (-x).tanh()
    b = ops.where(x > 0, a, x * 0.1) + ops.maximum(x, a) + ops.clamp(a, -1.0, 1.0)
    c = (b * b + 1).sqrt() + (b.abs() + 1).log() + (b * 0.1).exp() + x.square() + (x.abs() + 0.5) ** 1.5
    d = c.softmax(-1) + c.log_softmax(0) + ops.relu(c.T).T + ops.silu(c) + ops.gelu(c) + ops.leaky_relu(c)
    e = ops.cat([d, d[:, 1:]], 1)[::2].unsqueeze(0).expand(2, -1, -1).reshape(-1).contiguous().clone()
    targets = Tensor(torch.ones(d.shape, device=d.device))
    return (
        e.mean()
        + d.sum(0).norm()
        + d.amax(1).sum()
        + d.max()
        + (d @ d.T).mean()
        + ops.binary_cross_entropy_with_logits(d, targets)
        + ops.cross_entropy(d, labels, label_smoothing=0.1)
        + ops.dropout(d, 0.3).sum()
    )


def layers_and_losses(x, labels):
    """One use of what networks beside those of the commands are made of, on a matrix, added up."""
    y = ops.layer_norm(x, 6, x[0], x[1]) + ops.rms_norm(x, 6, x[2]) + ops.embedding(labels, x)
    images = ops.group_norm(y.reshape(1, 4, 3, 3), 2, y[0, :4], y[1, :4])
    images = images + ops.instance_norm(y.reshape(1, 4, 3, 3))
    images = ops.interpolate(ops.pad(images, [1, 1, 1, 1], "reflect"), scale_factor=2, mode="bilinear")
    images = ops.adaptive_max_pool2d(ops.pixel_shuffle(ops.dropout2d(images, 0.1), 2), 5)
    z = ops.elu(ops.mish(ops.hardswish(images))) + ops.softplus(images, 1.0, 5.0) + ops.hardtanh(images)
    p, target = ops.sigmoid(y), Tensor(torch.full((6, 6), 0.25, device=y.device))
    return (
        z.sum()
        + ops.prelu(y, x[0, :1]).sum()
        + ops.nll_loss(ops.log_softmax(y), labels)
        + ops.ctc_loss(ops.log_softmax(y), labels[:2] * 0 + 1, (6,), (2,))
        + ops.cross_entropy(y, p)
        + ops.l1_loss(y, target)
        + ops.smooth_l1_loss(y, target)
        + ops.huber_loss(y, target)
        + ops.binary_cross_entropy(p, target)
        + ops.kl_div(ops.log_softmax(y), target, reduction="batchmean")
    )


@pytest.mark.parametrize("compute_all", [every_operation, layers_and_losses])
def test_every_operation_and_its_gradient(compute_all):
    x, labels = Tensor(numbers(6, 6), requires_grad=True), classes(6, 6)
    with StorageOnly():
        loss = compute_all(x, labels)
        loss.backward()
        nn.utils.clip_grad_norm_([x], 1.0)
    assert x.grad.data.isfinite().all()


class StorageAndIndices(StorageOnly):
    """Lets torch compute with integers, too: where the rows are that a kernel reads."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in STORAGE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (*args[:1], result) if isinstance(t, torch.Tensor)]
        if func is not torch.ops.aten.index.Tensor and any(t.dtype.is_floating_point for t in tensors):
            raise AssertionError(f"{func} computes outside Triton")
        return result


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_pixels_at_positions_of_a_grid(padding):
    x, grid = (Tensor(numbers(*shape), requires_grad=True) for shape in ((1, 2, 4, 5), (1, 3, 3, 2)))
    with StorageAndIndices():
        ops.grid_sample(x, grid, "bilinear", padding).sum().backward()
    with pytest.raises(AssertionError, match="computes outside Triton"), StorageAndIndices():
        x.data.abs()


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1, lambda x: x.sum(), lambda x: x > 0, lambda x: x @ x, torch.relu, lambda x: x.mul_(2),
        torch.rand_like, lambda x: x.index_put_((torch.zeros(2, dtype=torch.int64),), x, accumulate=True),
    ],
    ids=["add", "sum", "compare", "product", "relu", "in place", "random", "add by index"],
)  # fmt: skip
def test_the_mode_finds_arithmetic(compute):
    x = torch.ones(2, 2, device=default_device())
    with pytest.raises(AssertionError, match="outside Triton"), StorageOnly():
        compute(x)


@pytest.mark.parametrize("store", [torch.clone, torch.zeros_like, lambda x: x.t()[0], lambda x: x.double()])
def test_the_mode_allows_storage(store):
    x = torch.ones(2, 2, device=default_device())
    with StorageOnly() as mode:
        store(x)
    assert mode.seen


PACKAGE = Path(minidl.__file__).parent
STEP = sorted(
    path
    for name in (
        "runtime", "kernels", "sparse", "ops", "nn", "models", "optim", "autograd", "tensors", "random.py",
        "compilation/capture.py",
    )
    for path in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"))
)  # fmt: skip
# What other libraries do arithmetic with.
OTHERS = {"numpy", "scipy", "sklearn", "cupy", "jax", "numba"}


def imported(tree):
    """Names of the modules that a source imports, anywhere in it, and of those it imports by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


@pytest.mark.parametrize("path", STEP, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_library_takes_part(path):
    found = {name.split(".")[0] for name in imported(ast.parse(path.read_text(encoding="utf-8")))}
    assert not found & OTHERS


@pytest.mark.parametrize(
    "code",
    [
        "import numpy",
        "def f():\n    from numpy.linalg import norm",
        "importlib.import_module('numpy')",
        "__import__('scipy.sparse')",
    ],
)
def test_the_scan_finds(code):
    assert {name.split(".")[0] for name in imported(ast.parse(code))} & OTHERS


@pytest.mark.gpu
def test_kernels_are_compiled_here():
    assert not launch.INTERPRETED


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_recurrent_layers(name):
    layer = getattr(nn, name)(3, 5, num_layers=2, bidirectional=True).to(default_device())
    x = Tensor(numbers(4, 2, 3), requires_grad=True)
    layer(x)
    with StorageOnly() as mode:
        y, _ = layer(x)
        y.sum().backward()
    assert mode.seen
