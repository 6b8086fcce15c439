"""The rows for images: convolution and its gradients, pooling, batch norm, whole networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from minidl import models, no_grad, ops, optim
from minidl.bench import peers
from minidl.bench.measure import Work, floor_ms, input_sets
from minidl.kernels import conv, launch
from minidl.kernels.conv.geometry import Geometry
from minidl.specs.bounds import dot_unit, gamma, rounded
from minidl.tensor import Tensor

DEVICE = "cuda"
LAST = torch.channels_last
# name: (N, C, M, size, kernel, padding)
LAYERS = {
    "1->12 7x7 72x72": (10000, 1, 12, 72, 7, 0),
    "12->24 7x7 33x33": (10000, 12, 24, 33, 7, 0),
    "1->32 5x5 28x28": (10000, 1, 32, 28, 5, 0),
    "32->64 5x5 12x12": (10000, 32, 64, 12, 5, 0),
    "3x3 64@56": (128, 64, 64, 56, 3, 1),
    "3x3 128@28": (128, 128, 128, 28, 3, 1),
    "3x3 256@14": (128, 256, 256, 14, 3, 1),
    "3x3 512@7": (128, 512, 512, 7, 3, 1),
    "3x3 256@56": (64, 256, 256, 56, 3, 1),
}
RELU_INCLUDED = ("1->12 7x7 72x72", "12->24 7x7 33x33", "1->32 5x5 28x28")


def rows() -> Iterator[tuple[str, Callable[[], Work]]]:
    """Every row's name, and the function that makes its inputs."""
    torch.backends.cudnn.benchmark = True
    for name in LAYERS:
        yield f"conv {name}", lambda n=name: _forward(n)
    for name, (_, _, _, _, kernel, _) in LAYERS.items():
        if kernel == 3:
            yield f"conv {name} gradient of the input", lambda n=name: _grad_input(n)
    for name in LAYERS:
        yield f"conv {name} gradient of the weight", lambda n=name: _grad_weight(n)
    for kind in ("max", "average"):
        yield f"{kind} pool 2x2 forward+backward 10000x32x24x24", lambda k=kind: _pool(k)
    yield "batch norm + relu training forward+backward 1000x64x32x32", _batch_norm
    yield "cnn inference 10000 images", _cnn_inference
    yield "cnn training step batch 512 tf32", _cnn_training


class Layer:
    """Inputs of one convolution in float16, channels-last; `sets` of them, to exceed the L2 cache."""

    def __init__(self, name: str) -> None:
        self.name = name
        N, C, M, size, kernel, padding = LAYERS[name]
        self.padding = [padding, padding]
        self.geometry = Geometry.of((size, size), (kernel, kernel), (1, 1), ((padding, padding),) * 2, (1, 1))
        out = self.geometry.h.output
        self.terms = C * kernel * kernel
        self.elements = N * C * size * size, N * M * out * out
        self.flop = 2.0 * N * M * out * out * self.terms
        sets = input_sets(2 * sum(self.elements))

        def images(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.float16).to(memory_format=LAST)

        self.x = [images(N, C, size, size) for _ in range(sets)]
        self.dy = [images(N, M, out, out) for _ in range(sets)]
        self.w = (torch.randn(M, C, kernel, kernel, device=DEVICE) / self.terms**0.5).half().to(memory_format=LAST)
        self.bias = torch.randn(M, device=DEVICE).half()

    def floor(self) -> float:
        return floor_ms(2.0 * sum(self.elements), self.flop)

    def backward(self, x: torch.Tensor, dy: torch.Tensor, wanted: list[bool]) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten.convolution_backward(
            dy, x, self.w, None, [1, 1], self.padding, [1, 1], False, [0, 0], 1, wanted
        )

    def exact(self, first: int, last: int, relu: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of some images in float64, and the sums of the magnitudes of their terms."""
        x, w, b = self.x[0][first:last].double(), self.w.double(), self.bias.double()
        if not relu:
            b = torch.zeros_like(b)
        y = F.conv2d(x, w, b, padding=self.padding)
        total = F.conv2d(x.abs(), w.abs(), b.abs(), padding=self.padding)
        return (y.relu() if relu else y), total


def _within(got: torch.Tensor, exact: torch.Tensor, total: torch.Tensor, terms: int) -> bool:
    # A block; the blocks (16 terms or more) of a sum or of one of a hundred shares of it; the shares and folded bands.
    steps = terms / 16 if terms < 2**16 else terms / 1600 + 6000
    error = gamma(192 + 2 * steps, dot_unit(got.dtype)) * total
    return bool(((got.double() - exact).abs() <= rounded(exact, error, got.dtype)).all())


def _forward(name: str) -> Work:
    layer = Layer(name)
    relu = name in RELU_INCLUDED

    def ours(x: torch.Tensor) -> torch.Tensor:
        if relu:
            return conv.forward(x, layer.w, layer.geometry, layer.bias, "relu")[0]
        return conv.forward(x, layer.w, layer.geometry)[0]

    plain = layer.w.contiguous()
    contiguous = [x.contiguous() for x in layer.x]

    def judge(y: torch.Tensor, relu: bool = False) -> bool:
        chunks = range(0, len(y), 500)
        return all(_within(y[i : i + 500], *layer.exact(i, i + 500, relu), layer.terms) for i in chunks)

    return Work(
        f"conv {name}" + (", bias and ReLU included in ours" if relu else ""), "float16",
        [lambda x=x: ours(x) for x in layer.x],
        {
            "cuDNN, channels last": [lambda x=x: F.conv2d(x, layer.w, padding=layer.padding) for x in layer.x],
            "cuDNN, contiguous": [lambda x=x: F.conv2d(x, plain, padding=layer.padding) for x in contiguous],
        },
        layer.floor(), lambda: judge(ours(layer.x[0]), relu),
        others=lambda: peers.conv2d(layer.x, layer.w, layer.padding), judge=judge,
    )  # fmt: skip


def _grad_input(name: str) -> Work:
    layer = Layer(name)

    def check() -> bool:
        got = conv.grad_input(layer.dy[0], layer.w, layer.geometry)[:32]
        how = {"padding": layer.padding}
        exact = F.conv_transpose2d(layer.dy[0][:32].double(), layer.w.double(), **how)
        total = F.conv_transpose2d(layer.dy[0][:32].double().abs(), layer.w.double().abs(), **how)
        return _within(got, exact, total, layer.terms * layer.w.shape[0] // layer.w.shape[1])

    return Work(
        f"conv {name} gradient of the input", "float16",
        [lambda dy=dy: conv.grad_input(dy, layer.w, layer.geometry) for dy in layer.dy],
        {
            "cuDNN, channels last": [
                lambda x=x, dy=dy: layer.backward(x, dy, [True, False, False])
                for x, dy in zip(layer.x, layer.dy, strict=True)
            ]
        },
        layer.floor(), check,
    )  # fmt: skip


def _grad_weight(name: str) -> Work:
    layer = Layer(name)
    pairs = list(zip(layer.x, layer.dy, strict=True))

    def check() -> bool:
        x, dy = pairs[0]
        got = conv.grad_weight(x, dy, layer.geometry)
        exact, total = torch.zeros_like(layer.w.double()), torch.zeros_like(layer.w.double())
        for i in range(0, len(x), 500):
            part = x[i : i + 500].double(), dy[i : i + 500].double()
            exact += _weight_gradient(layer, *part)
            total += _weight_gradient(layer, part[0].abs(), part[1].abs())
        return _within(got, exact, total, dy.numel() // dy.shape[1])

    return Work(
        f"conv {name} gradient of the weight", "float16",
        [lambda x=x, dy=dy: conv.grad_weight(x, dy, layer.geometry) for x, dy in pairs],
        {"cuDNN, channels last": [lambda x=x, dy=dy: layer.backward(x, dy, [False, True, False]) for x, dy in pairs]},
        layer.floor(), check,
    )  # fmt: skip


def _weight_gradient(layer: Layer, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return torch.nn.grad.conv2d_weight(x, layer.w.shape, dy, padding=layer.padding)


def _pool(kind: str) -> Work:
    shape = (10000, 32, 24, 24)
    x = torch.randn(*shape, device=DEVICE).half().to(memory_format=LAST)
    dy = torch.randn(10000, 32, 12, 12, device=DEVICE).half().to(memory_format=LAST)
    ours_op = {"max": ops.max_pool2d, "average": ops.avg_pool2d}[kind]
    theirs_op = {"max": F.max_pool2d, "average": F.avg_pool2d}[kind]
    leaf, torch_leaf = Tensor(x, requires_grad=True), x.clone().requires_grad_()

    def ours() -> tuple[Tensor, Tensor]:
        leaf.grad = None
        y = ours_op(leaf, 2)
        y.backward(Tensor(dy))
        return y, leaf.grad

    def both(x: torch.Tensor) -> object:
        y = theirs_op(x, 2)
        return y, torch.autograd.grad(y, x, dy)[0]

    compiled_forward = torch.compile(lambda x: theirs_op(x, 2), dynamic=False)

    def compiled() -> object:
        y = compiled_forward(torch_leaf)
        return y, torch.autograd.grad(y, torch_leaf, dy)[0]

    def check() -> bool:
        y, dx = ours()
        exact_x = x.double().requires_grad_()
        exact = theirs_op(exact_x, 2)
        (exact_dx,) = torch.autograd.grad(exact, exact_x, dy.double())
        unit = 2.0**-10
        return bool(((y.data.double() - exact).abs() <= unit * exact.abs() + 1e-6).all()) and bool(
            ((dx.data.double() - exact_dx).abs() <= unit * exact_dx.abs() + 1e-6).all()
        )

    return Work(
        f"{kind} pool 2x2 forward+backward 10000x32x24x24", "float16", [ours],
        {"torch": [lambda: both(torch_leaf)], "torch.compile": [compiled]},
        floor_ms(2.0 * 2 * (x.numel() + dy.numel())), check,
    )  # fmt: skip


def _batch_norm() -> Work:
    shape = (1000, 64, 32, 32)
    x = torch.randn(*shape, device=DEVICE).half().to(memory_format=LAST)
    dy = torch.randn(*shape, device=DEVICE).half().to(memory_format=LAST)
    weight, bias = (torch.rand(64, device=DEVICE).half() + 0.5 for _ in range(2))
    mean, var = torch.zeros(64, device=DEVICE).half(), torch.ones(64, device=DEVICE).half()
    leaves = [Tensor(t, requires_grad=True) for t in (x, weight, bias)]
    buffers = [Tensor(t.clone()) for t in (mean, var)]

    def ours() -> tuple[Tensor, ...]:
        for leaf in leaves:
            leaf.grad = None
        y = ops.batch_norm(leaves[0], *buffers, *leaves[1:], training=True, act="relu")
        y.backward(Tensor(dy))
        return y, *(leaf.grad for leaf in leaves)

    theirs = [t.clone().requires_grad_() for t in (x, weight, bias)]

    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(x, mean, var, w, b, training=True))

    compiled = torch.compile(forward, dynamic=False)

    def both(function: Callable[..., torch.Tensor]) -> object:
        return torch.autograd.grad(function(*theirs), theirs, dy)

    def judge(results: tuple[torch.Tensor, ...]) -> bool:
        y, *grads = results
        exact = [t.double().requires_grad_() for t in (x, weight, bias)]
        exact_y = F.relu(F.batch_norm(exact[0], None, None, *exact[1:], training=True))
        exact_grads = torch.autograd.grad(exact_y, exact, dy.double())
        # float16 results of order 1 and 30; values within a rounding of relu's corner may fall on either side.
        close = ((y.double() - exact_y).abs() <= 2.0**-10 * exact_y.abs() + 2.0**-12).all()
        for got, wanted in zip(grads, exact_grads, strict=True):
            off = (got.double() - wanted).norm() / wanted.norm()
            close = close and off <= 2.0**-9
        return bool(close)

    return Work(
        "batch norm + relu training forward+backward 1000x64x32x32", "float16", [ours],
        {"torch": [lambda: both(forward)], "torch.compile": [lambda: both(compiled)]},
        floor_ms(2.0 * 5 * x.numel()), lambda: judge(tuple(t.data for t in ours())),
        others=lambda: peers.batch_norm_relu(x, weight, bias, dy), judge=judge,
    )  # fmt: skip


class _TorchECE408(torch.nn.Module):
    """The ECE 408 network in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = torch.nn.Conv2d(1, 32, 5), torch.nn.Conv2d(32, 64, 5)
        self.fc1, self.fc2 = torch.nn.Linear(1024, 128), torch.nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(F.relu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def _ece408(dtype: torch.dtype) -> tuple[models.ECE408, _TorchECE408]:
    """Both networks with the same weights."""
    theirs = _TorchECE408().to(DEVICE, dtype).to(memory_format=LAST)
    ours = models.ECE408().to(DEVICE, dtype)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        with no_grad():
            mine.data.copy_(other.detach())
    return ours, theirs


def _cnn_inference() -> Work:
    dtype = torch.float16
    ours, theirs = _ece408(dtype)
    ours.eval()
    theirs.eval()
    x = torch.rand(10000, 1, 28, 28, device=DEVICE, dtype=dtype).to(memory_format=LAST)

    def mine() -> Tensor:
        with no_grad():
            return ops.argmax(ours(Tensor(x)), 1)

    @torch.no_grad()
    def eager() -> torch.Tensor:
        return theirs(x).argmax(1)

    compiled_model = torch.compile(theirs, dynamic=False, mode="max-autotune-no-cudagraphs")

    @torch.no_grad()
    def compiled() -> torch.Tensor:
        return compiled_model(x).argmax(1)

    def check() -> bool:
        with no_grad(), torch.no_grad():
            got = ours(Tensor(x)).data.double()
            exact = _ece408_double(theirs, x)
        return bool((got - exact).norm() <= 2.0**-8 * exact.norm())

    moved = 2.0 * (x.numel() + 10000 * (24 * 24 * 32 // 4 + 8 * 8 * 64 // 4 + 128 + 10))
    flop = 2.0 * 10000 * (24 * 24 * 32 * 25 + 8 * 8 * 64 * 800 + 1024 * 128 + 1280)
    return Work(
        "cnn inference 10000 images (ECE 408 network, argmax included)", "float16", [mine],
        {"torch": [eager], "torch.compile": [compiled]}, floor_ms(moved, flop), check, whole_step=True,
    )  # fmt: skip


def _ece408_double(model: _TorchECE408, x: torch.Tensor) -> torch.Tensor:
    exact = _TorchECE408().to(DEVICE, torch.float64)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return exact(x.double())


def _cnn_training() -> Work:
    ours, theirs = _ece408(torch.float32)
    x = torch.rand(512, 1, 28, 28, device=DEVICE).to(memory_format=LAST)
    labels = torch.randint(10, (512,), device=DEVICE)
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    adam = optim.Adam(ours.parameters(), lr=1e-3)
    fused = torch.optim.Adam(theirs.parameters(), lr=1e-3, fused=True, capturable=True)

    def mine() -> Tensor:

        before = launch.float32_precision()
        launch.set_float32_precision("tf32")
        adam.zero_grad()
        value = ops.cross_entropy(ours(Tensor(x)), Tensor(labels))
        value.backward()
        adam.step()
        launch.set_float32_precision(before)
        return value

    def step() -> torch.Tensor:
        fused.zero_grad(set_to_none=True)
        value = F.cross_entropy(theirs(x), labels)
        value.backward()
        fused.step()
        return value

    def check() -> bool:
        for mine_, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine_.data.copy_(other.detach())
        a, b = float(mine()), float(step().detach())
        return abs(a - b) <= 2.0**-9 * abs(b)

    flop = 3 * 2.0 * 512 * (24 * 24 * 32 * 25 + 8 * 8 * 64 * 800 + 1024 * 128 + 1280)
    return Work(
        "cnn training step batch 512", "tf32", [mine], {"torch, fused Adam": [step]},
        floor_ms(3 * 4.0 * 512 * (24 * 24 * 32 + 8 * 8 * 64), flop, "tf32"), check, whole_step=True,
    )  # fmt: skip
