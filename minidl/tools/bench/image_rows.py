"""The rows for images: convolution and its gradients, pooling, batch norm, networks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F

from minidl import models, ops, optim
from minidl.autograd import no_grad
from minidl.kernels import conv
from minidl.runtime import launch
from minidl.tensors import Tensor
from minidl.testing.cases.convolutions import BENCHMARK
from minidl.testing.specs.bounds import dot_unit, gamma, holds
from minidl.tools.bench import peers, sides
from minidl.tools.bench.measure import Row, Work, floor_ms, input_sets

DEVICE = "cuda"
LAST = torch.channels_last
# By layer: the goals of the forward pass and of the gradient of the weight.
GOALS = dict(zip(BENCHMARK, (
    (4.3, 2.5), (3.0, 2.0), (1.8, 2.0), (1.1, 1.1), (1.15, 1.2), (1.02, 1.1), (1.05, 1.2), (1.12, 1.0), (1.03, 1.0),
), strict=True))  # fmt: skip
RELU_INCLUDED = tuple(BENCHMARK)[:3]


def rows() -> Iterator[Row]:
    """Yield the rows in order."""
    of_3x3 = [name for name in BENCHMARK if name.startswith("3x3")]
    for name, (goal, _) in GOALS.items():
        yield f"conv {name}", goal, partial(_forward, name)
    for name in of_3x3:
        yield f"conv {name} gradient of the input", 1.05, partial(_gradient, name, "input")
    for name in dict.fromkeys([*of_3x3, *BENCHMARK]):
        yield f"conv {name} gradient of the weight", GOALS[name][1], partial(_gradient, name, "weight")
    for kind in ("max", "average"):
        yield f"{kind} pool 2x2 forward+backward 10000x32x24x24", 1.0, partial(_pool, kind)
    yield "batch norm + relu training forward+backward 1000x64x32x32", 1.2, _batch_norm
    yield "cnn inference 10000 images", 2.3, _cnn_inference
    yield "cnn training step batch 512 tf32", 2.5, _cnn_training


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float16).to(memory_format=LAST)


class Layer:
    """Inputs of one convolution in float16, channels-last; `sets` of them, to exceed the L2 cache."""

    def __init__(self, name: str) -> None:
        N, C, M, size, kernel, padding, *_ = case = BENCHMARK[name]
        self.padding, self.geometry = [padding, padding], case.geometry
        out = self.geometry.h.output
        self.terms = C * kernel * kernel
        self.elements = N * C * size * size, N * M * out * out
        self.flop = 2.0 * N * M * out * out * self.terms
        sets = input_sets(2 * sum(self.elements))
        self.x = [_images(N, C, size, size) for _ in range(sets)]
        self.dy = [_images(N, M, out, out) for _ in range(sets)]
        self.w = (torch.randn(M, C, kernel, kernel, device=DEVICE) / self.terms**0.5).half().to(memory_format=LAST)
        self.bias = torch.randn(M, device=DEVICE).half()

    def floor(self) -> float:
        return floor_ms(2.0 * sum(self.elements), self.flop)

    def backward(self, of: str, x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return torch's gradient of the "input" or of the "weight"."""
        mask = of == "input", of == "weight", False
        how = [1, 1], self.padding, [1, 1], False, [0, 0], 1
        return torch.ops.aten.convolution_backward(dy, x, w, None, *how, mask)[of == "weight"]


def _within(result: torch.Tensor, exact: torch.Tensor, total: torch.Tensor, terms: int) -> bool:
    # A block; the blocks (16 terms or more) of a sum or of one of its hundred shares; the shares and folded bands.
    steps = terms / 16 if terms < 2**16 else terms / 1600 + 6000
    return holds(result, exact, gamma(192 + 2 * steps, dot_unit(result.dtype)) * total)


def _forward(name: str) -> Work:
    layer = Layer(name)
    relu = name in RELU_INCLUDED
    included = (layer.bias, "relu") if relu else ()

    def ours(x: torch.Tensor) -> torch.Tensor:
        return conv.forward(x, layer.w, layer.geometry, *included)[0]

    def judge(y: torch.Tensor, relu: bool = False) -> bool:
        w, b = layer.w.double(), layer.bias.double() * relu
        right = True
        for i in range(0, len(y), 500):
            x = layer.x[0][i : i + 500].double()
            exact = F.conv2d(x, w, b, padding=layer.padding)
            total = F.conv2d(x.abs(), w.abs(), b.abs(), padding=layer.padding)
            right = right and _within(y[i : i + 500], exact.relu() if relu else exact, total, layer.terms)
        return right

    return Work(
        f"conv {name}" + (", bias and ReLU included in ours" if relu else ""), "float16",
        [partial(ours, x) for x in layer.x],
        sides.in_both_orders(partial(F.conv2d, padding=layer.padding), layer.x, layer.w),
        layer.floor(), partial(judge, relu=relu),
        others=lambda: peers.conv2d(layer.x, layer.w, layer.padding), judge_others=judge,
    )  # fmt: skip


def _gradient(name: str, of: str) -> Work:
    layer = Layer(name)
    pairs = list(zip(layer.x, layer.dy, strict=True))

    def ours(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        if of == "input":
            return conv.grad_input(dy, layer.w, layer.geometry)
        return conv.grad_weight(x, dy, layer.geometry)

    def judge(result: torch.Tensor) -> bool:
        x, dy, w = layer.x[0], layer.dy[0], layer.w.double()
        if of == "input":
            x, dy, result, terms = x[:32], dy[:32], result[:32], layer.terms * w.shape[0] // w.shape[1]
        else:
            terms = dy.numel() // dy.shape[1]
        exact, total = torch.zeros_like(result.double()), torch.zeros_like(result.double())
        for i in range(0, len(x), 500):
            part = x[i : i + 500].double(), dy[i : i + 500].double()
            exact += layer.backward(of, *part, w)
            total += layer.backward(of, *(t.abs() for t in part), w.abs())
        return _within(result, exact, total, terms)

    return Work(
        f"conv {name} gradient of the {of}", "float16", [partial(ours, x, dy) for x, dy in pairs],
        {"cuDNN, channels last": [partial(layer.backward, of, x, dy, layer.w) for x, dy in pairs]},
        layer.floor(), judge,
    )  # fmt: skip


def _pool(kind: str) -> Work:
    x, dy = _images(10000, 32, 24, 24), _images(10000, 32, 12, 12)
    name = {"max": "max_pool2d", "average": "avg_pool2d"}[kind]
    leaf, torch_leaf = Tensor(x, requires_grad=True), x.clone().requires_grad_()

    def ours() -> tuple[torch.Tensor, ...]:
        return sides.our_gradients(lambda x: getattr(ops, name)(x, 2), [leaf], dy)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return getattr(F, name)(x, 2)

    def judge(results: tuple[torch.Tensor, ...]) -> bool:
        y, dx = results
        return sides.right(name, y, x, 2) and sides.right(name, dx, x, 2, wrt=(0,), dy=dy)

    return Work(
        f"{kind} pool 2x2 forward+backward 10000x32x24x24", "float16", [ours],
        sides.eager_and_compiled(theirs, call=lambda function: sides.torch_gradients(function, [torch_leaf], dy)),
        floor_ms(2.0 * 2 * (x.numel() + dy.numel())), judge,
    )  # fmt: skip


def _batch_norm() -> Work:
    x, dy = (_images(1000, 64, 32, 32) for _ in range(2))
    weight, bias = (torch.rand(64, device=DEVICE).half() + 0.5 for _ in range(2))
    mean, var = torch.zeros(64, device=DEVICE).half(), torch.ones(64, device=DEVICE).half()
    leaves = [Tensor(t, requires_grad=True) for t in (x, weight, bias)]
    buffers = [Tensor(t.clone()) for t in (mean, var)]

    def ours() -> tuple[torch.Tensor, ...]:
        return sides.our_gradients(
            lambda x, *wb: ops.batch_norm(x, *buffers, *wb, training=True, act="relu"), leaves, dy
        )

    theirs = [t.clone().requires_grad_() for t in (x, weight, bias)]

    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(x, mean, var, w, b, training=True))

    def judge(results: tuple[torch.Tensor, ...]) -> bool:
        y, *grads = results
        exact = [t.double().requires_grad_() for t in (x, weight, bias)]
        exact_y, *exact_grads = sides.torch_gradients(
            lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True)), exact, dy.double()
        )
        # float16 results of order 1 and 30; values within a rounding of relu's corner may fall on either side.
        close = ((y.double() - exact_y).abs() <= 2.0**-10 * exact_y.abs() + 2.0**-12).all()
        for grad, exact_grad in zip(grads, exact_grads, strict=True):
            off = (grad.double() - exact_grad).norm() / exact_grad.norm()
            close = close and off <= 2.0**-9
        return bool(close)

    return Work(
        "batch norm + relu training forward+backward 1000x64x32x32", "float16", [ours],
        sides.eager_and_compiled(forward, call=lambda function: sides.torch_gradients(function, theirs, dy)),
        floor_ms(2.0 * 5 * x.numel()), judge, others=lambda: peers.batch_norm_relu(x, weight, bias, dy),
    )  # fmt: skip


def _ece408(dtype: torch.dtype) -> tuple[models.ECE408, torch.nn.Module]:
    """Return the ECE 408 network of both sides with the same weights."""
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 5), torch.nn.ReLU(), torch.nn.AvgPool2d(2),
        torch.nn.Conv2d(32, 64, 5), torch.nn.ReLU(), torch.nn.AvgPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(1024, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10),
    )  # fmt: skip
    theirs = layers.to(DEVICE, dtype).to(memory_format=LAST)
    ours = models.ECE408().to(DEVICE, dtype)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
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
    def answer(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return model(x).argmax(1)

    def judge(_: Tensor) -> bool:
        """Return whether the logits are right."""
        with no_grad(), torch.no_grad():
            logits = ours(Tensor(x)).data.double()
            exact = copy.deepcopy(theirs).double()(x.double())
        return bool((logits - exact).norm() <= 2.0**-8 * exact.norm())

    moved = 2.0 * (x.numel() + 10000 * (24 * 24 * 32 // 4 + 8 * 8 * 64 // 4 + 128 + 10))
    flop = 2.0 * 10000 * (24 * 24 * 32 * 25 + 8 * 8 * 64 * 800 + 1024 * 128 + 1280)
    return Work(
        "cnn inference 10000 images (ECE 408 network, argmax included)", "float16", [mine],
        sides.eager_and_compiled(theirs, call=answer, mode="max-autotune-no-cudagraphs"), floor_ms(moved, flop), judge,
        whole_step=True,
    )  # fmt: skip


def _cnn_training() -> Work:
    ours, theirs = _ece408(torch.float32)
    x = torch.rand(512, 1, 28, 28, device=DEVICE).to(memory_format=LAST)
    labels = torch.randint(10, (512,), device=DEVICE)
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    adam = optim.Adam(ours.parameters(), lr=1e-3)
    fused = torch.optim.Adam(theirs.parameters(), lr=1e-3, fused=True, capturable=True)

    our_step = sides.training_step(adam, lambda: ops.cross_entropy(ours(Tensor(x)), Tensor(labels)))
    step = sides.training_step(fused, lambda: F.cross_entropy(theirs(x), labels))

    def mine() -> Tensor:
        with launch.in_precision("tf32"):
            return our_step()

    def judge(loss: Tensor) -> bool:
        expected = float(step().detach())
        return abs(float(loss) - expected) <= 2.0**-9 * abs(expected)

    flop = 3 * 2.0 * 512 * (24 * 24 * 32 * 25 + 8 * 8 * 64 * 800 + 1024 * 128 + 1280)
    return Work(
        "cnn training step batch 512", "tf32", [mine], {"torch, fused Adam": [step]},
        floor_ms(3 * 4.0 * 512 * (24 * 24 * 32 + 8 * 8 * 64), flop, "tf32"), judge, whole_step=True,
    )  # fmt: skip
