"""The rows for a generator of pictures: its transposed convolutions, and the complete generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.utils import fuse_conv_bn_eval

from minidl import nn, ops
from minidl.autograd import no_grad
from minidl.models import Generator
from minidl.runtime import launch
from minidl.tensors import Tensor
from minidl.testing.cases.transposed import BENCHMARK
from minidl.testing.specs.bounds import dot_unit, gamma, holds
from minidl.tools.bench import peers, sides
from minidl.tools.bench.measure import Row, Work, floor_ms, input_sets

DEVICE = "cuda"
LAST = torch.channels_last
IMAGES = BENCHMARK[0].N
GOALS = (1.15, 1.15, 1.1, 6.0)
FIRST = BENCHMARK[0].C
HOW = {"stride": 2, "padding": 2, "output_padding": 1}
# The largest relative error, in the norm, of a generator: the rounding of five layers.
OFF = {"float16": 2.0**-8, "tf32": 2.0**-8, "float32": 2.0**-18}


def rows() -> Iterator[Row]:
    """Yield the rows in order."""
    for (_, C, M, size, *_), goal in zip(BENCHMARK, GOALS, strict=True):
        yield f"transposed 5x5 stride 2 {C}->{M}@{size}", goal, partial(_layer, C, M, size)
    for kind in OFF:
        yield f"dcgan generation {IMAGES} images {kind}", 1.8, partial(_generation, kind)


def _products(C: int, M: int, size: int) -> float:
    """Return the number of products whose input is inside the image, for all images."""
    across = sum(0 <= 2 * i - 2 + r < 2 * size for i in range(size) for r in range(5))
    return float(IMAGES) * C * M * across * across


def _bytes(C: int, M: int, size: int, width: int) -> float:
    return float(width) * (IMAGES * (C * size**2 + M * (2 * size) ** 2) + 25 * C * M)


def _layer(C: int, M: int, size: int) -> Work:
    moved = _bytes(C, M, size, 2)
    terms = C * 9
    w = (torch.randn(C, M, 5, 5, device=DEVICE) / (terms * 25 / 36) ** 0.5).half()
    w_last, bias = w.to(memory_format=LAST), torch.randn(M, device=DEVICE).half()
    xs = [
        torch.randn(IMAGES, C, size, size, device=DEVICE).half().to(memory_format=LAST)
        for _ in range(input_sets(moved))
    ]
    no_bias = torch.zeros_like(bias)
    act = "tanh" if M <= 4 else "relu"

    def ours(x: torch.Tensor) -> torch.Tensor:
        return ops.conv_transpose2d(Tensor(x), Tensor(w_last), Tensor(bias), **HOW, act=act).data

    def judge(y: torch.Tensor, bias: torch.Tensor = no_bias, act: str = "") -> bool:
        right = True
        for first in range(0, IMAGES, 250):
            x = xs[0][first : first + 250]
            exact = F.conv_transpose2d(x.double(), w.double(), bias.double(), **HOW)
            total = F.conv_transpose2d(x.double().abs(), w.double().abs(), bias.double().abs(), **HOW)
            # A block and the blocks of a sum; neither activation is steeper than 1, and tanh adds 16 units.
            error = gamma(192 + terms / 8, dot_unit(x.dtype)) * total + 2.0**-20
            exact = {"tanh": torch.tanh, "relu": torch.relu}.get(act, torch.clone)(exact)
            right = right and holds(y[first : first + 250], exact, error)
        return right

    return Work(
        f"transposed 5x5 stride 2 {C}->{M}@{size}, bias and {act} included in ours", "float16",
        [partial(ours, x) for x in xs],
        sides.in_both_orders(partial(F.conv_transpose2d, **HOW), xs, w),
        floor_ms(moved, 2.0 * _products(C, M, size)), partial(judge, bias=bias, act=act),
        others=lambda: peers.conv_transpose2d(xs, w, **HOW), judge_others=judge,
    )  # fmt: skip


class _TorchGenerator(torch.nn.Module):
    """The generator of 64x64x3 pictures in torch, with minidl's weights and folded batch norms."""

    def __init__(self, ours: Generator) -> None:
        super().__init__()
        self.project = torch.nn.Linear(ours.latent, 16 * FIRST, bias=False)
        self.norm = torch.nn.BatchNorm2d(FIRST)
        layers: list[torch.nn.Module] = []
        for _, C, M, *_ in BENCHMARK:
            layers += [torch.nn.ConvTranspose2d(C, M, 5, **HOW, bias=M == 3), torch.nn.BatchNorm2d(M)]
        self.upward = torch.nn.Sequential(*layers[:-1])
        self.load_state_dict({name: value.data.cpu() for name, value in ours.state_dict().items()}, strict=False)
        self.eval()
        pairs = zip(self.upward[:-1:2], self.upward[1::2], strict=True)
        fused = [fuse_conv_bn_eval(layer, norm, transpose=True) for layer, norm in pairs]
        self.upward = torch.nn.ModuleList([*fused, self.upward[-1]])

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.project(z).view(-1, 4, 4, FIRST).permute(0, 3, 1, 2)
        x = self.norm(x).relu()
        for layer in self.upward[:-1]:
            x = layer(x).relu()
        return self.upward[-1](x).tanh()


def _generation(kind: str) -> Work:
    dtype = torch.float16 if kind == "float16" else torch.float32
    ours = Generator(100, 3, (64, 64), 64, 4, 5)
    exact = _TorchGenerator(ours).to(DEVICE, torch.float64)
    theirs = {
        "channels last": _TorchGenerator(ours).to(DEVICE, dtype).to(memory_format=LAST),
        "contiguous": _TorchGenerator(ours).to(DEVICE, dtype),
    }
    ours = nn.fold_batch_norms(ours.to(DEVICE, dtype).eval())
    z = torch.randn(IMAGES, 100, device=DEVICE, dtype=dtype)
    precision = "tf32" if kind == "tf32" else "tf32x3"

    def mine() -> Tensor:
        with launch.in_precision(precision), no_grad():
            return ours(Tensor(z))

    @torch.no_grad()
    def with_flags(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        return model(z)

    peers = {
        f"{way}, {order}": calls
        for order, model in theirs.items()
        for way, calls in sides.eager_and_compiled(model, call=with_flags, mode="max-autotune-no-cudagraphs").items()
    }

    def judge(pictures: Tensor) -> bool:
        with torch.no_grad():
            expected = torch.cat([exact(z[i : i + 250].double()) for i in range(0, IMAGES, 250)])
        return bool((pictures.data.double() - expected).norm() <= OFF[kind] * expected.norm())

    flop = 2.0 * (IMAGES * 100 * 16 * FIRST + sum(_products(*layer[1:4]) for layer in BENCHMARK))
    width = dtype.itemsize
    moved = sum(_bytes(*layer[1:4], width) for layer in BENCHMARK) + width * 1000.0 * 16 * FIRST
    floor = floor_ms(moved, flop, "tf32x3" if kind == "float32" else kind)
    return Work(f"dcgan generation {IMAGES} images {kind}", kind, [mine], peers, floor, judge, whole_step=True)
