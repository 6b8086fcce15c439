"""Time layers as a user of torch writes them: contiguous inputs in float32, forward, without gradients.

    python -m benchmarks.layers --drawn 4 --seed 0 --out benchmarks/results/layers-DEVICE.json

Layers and their inputs are drawn from a seed, `--drawn` of each kind, with minidl's modules in place of torch's. A row
is measured launch by launch, and in a CUDA graph; torch runs with `cudnn.benchmark`, in the memory order of the input
and in channels-last (input and weights converted before), and the faster counts. Neither side uses TF32 by default.
Results are first compared with float64. `ratio` is that of launches, `captured_ratio` that of graphs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

import minidl
from minidl import no_grad
from minidl.tools.bench.machine import machine
from minidl.tools.bench.measure import Clock, Launched, Replay, in_turn, make_room
from minidl.tools.first_line import first_line

GOAL = 0.9
MOST = 2**27  # values of an input
OFF = 2.0**-16  # relative error in the norm
WARM = 5  # calls of each side before it is timed
ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Layer(NamedTuple):
    """A drawn layer: the shape of its input, its text, and how a library with torch's names makes it."""

    shape: tuple[int, ...]
    text: str
    make: Callable[[Any], Any]


def images(draw: random.Random, channels: int, dims: int = 2, most: float = MOST) -> tuple[int, ...]:
    """Draw the shape of images with this many channels."""
    side = {1: (128, 1024, 16384, 131072), 2: (14, 28, 56, 112, 224, 512), 3: (8, 16, 32, 64)}[dims]
    size = draw.choice([s for s in side if channels * s**dims <= most] or side[:1])
    batch = int(2 ** draw.uniform(0, min(8.0, max(0.0, math.log2(most / (channels * size**dims))))))
    return (batch, channels, *[size] * dims)


def convolution(draw: random.Random, dims: int, transposed: bool = False) -> Layer:
    """Draw a convolution, of which half are first layers with few channels."""
    channels = draw.choice([1, 3, 3, 8, 32, 64, 128, 256])
    out = draw.choice([8, 16, 24, 32, 64, 64, 128])
    shape = images(draw, channels, dims, MOST * channels / max(channels, out) / 4)
    kernel = draw.choice([1, 3, 3, 3, 5, 7] if dims < 3 else [1, 3, 3, 3])
    stride = draw.choice([1, 1, 2])
    dilation = draw.choice([1, 1, 1, 2]) if shape[-1] > 4 * kernel else 1
    padding = draw.choice([0, kernel // 2])
    name = f"Conv{'Transpose' if transposed else ''}{dims}d"
    text = f"{name}({channels}, {out}, {kernel}, stride={stride}, padding={padding}, dilation={dilation})"
    return Layer(
        shape, text,
        lambda lib: getattr(lib.nn, name)(channels, out, kernel, stride=stride, padding=padding, dilation=dilation),
    )  # fmt: skip


def pool(draw: random.Random, dims: int) -> Layer:
    shape = images(draw, draw.choice([3, 32, 64, 256]), dims)
    kernel = draw.choice([k for k in (2, 2, 3, 3, 5, 7, 11) if k <= shape[-1]])
    stride = draw.choice([1, 2, kernel])
    name = f"{draw.choice(['Max', 'Avg'])}Pool{dims}d"
    return Layer(shape, f"{name}({kernel}, stride={stride})", lambda lib: getattr(lib.nn, name)(kernel, stride=stride))


def norm(draw: random.Random) -> Layer:
    """Draw a norm of images or of rows."""
    kind = draw.choice(["BatchNorm2d", "InstanceNorm2d", "GroupNorm", "LayerNorm", "RMSNorm"])
    channels = draw.choice([32, 64, 128, 256])
    if kind in ("LayerNorm", "RMSNorm"):
        width = draw.choice([64, 256, 768, 1024, 4096])
        rows = int(2 ** draw.uniform(4, math.log2(MOST / width)))
        return Layer((rows, width), f"{kind}({width})", lambda lib: getattr(lib.nn, kind)(width))
    shape = images(draw, channels)
    if kind == "GroupNorm":
        return Layer(shape, f"GroupNorm(8, {channels})", lambda lib: lib.nn.GroupNorm(8, channels))
    training = kind == "BatchNorm2d" and draw.random() < 0.5
    text = f"{kind}({channels}){', training' if training else ''}"
    return Layer(shape, text, lambda lib: getattr(lib.nn, kind)(channels).train(training))


def reduction(draw: random.Random) -> Layer:
    """Draw a reduction of one dimension, or of all."""
    shape = tuple(int(2 ** draw.uniform(4, 9)) for _ in range(3))
    name, dim = draw.choice(["sum", "mean", "amax", "argmax", "logsumexp", "norm"]), draw.choice([0, 1, 2, (0, 1, 2)])
    if name in ("argmax", "logsumexp") and isinstance(dim, tuple):
        dim = 1
    call: Callable[[Any, Any], Any] = lambda lib, x: getattr(lib, name)(x, dim=dim)  # noqa: E731
    if name == "norm":
        call = lambda lib, x: lib.linalg.vector_norm(x, dim=dim)  # noqa: E731
    return Layer(shape, f"{name}(dim={dim})", lambda lib: lambda x: call(lib, x))


def activation(draw: random.Random) -> Layer:
    shape = images(draw, draw.choice([3, 64, 256]))
    name = draw.choice(["GELU", "SiLU", "Tanh", "Sigmoid", "Softplus", "ELU", "Hardswish", "LeakyReLU"])
    return Layer(shape, name, lambda lib: getattr(lib.nn, name)())


def loss(draw: random.Random) -> Layer:
    shape = int(2 ** draw.uniform(4, 14)), int(2 ** draw.uniform(3, 12))
    name = draw.choice(["mse_loss", "smooth_l1_loss", "l1_loss", "log_softmax"])

    def make(lib: Any) -> Callable[[Any], Any]:
        function = getattr(lib.nn.functional, name)
        return (lambda x: function(x, -1)) if name == "log_softmax" else lambda x: function(x, x * 0.5)

    return Layer(shape, name, make)


def chain(draw: random.Random) -> Layer:
    """Draw a convolution, a norm or a pool, and an activation."""
    first = convolution(draw, 2)
    channels = int(first.text.split(",")[1])
    middle = draw.choice(["BatchNorm2d", "InstanceNorm2d", "GroupNorm", "MaxPool2d", "AvgPool2d"])
    last = draw.choice(["ReLU", "GELU", "Tanh", "LeakyReLU"])
    argument = {"GroupNorm": (8, channels), "MaxPool2d": (2,), "AvgPool2d": (2,)}.get(middle, (channels,))

    def make(lib: Any) -> Any:
        return lib.nn.Sequential(first.make(lib), getattr(lib.nn, middle)(*argument), getattr(lib.nn, last)())

    return Layer(first.shape, f"{first.text}, {middle}, {last}", make)


def linear(draw: random.Random) -> Layer:
    rows, inputs, outputs = (int(2 ** draw.uniform(4, 12)) for _ in range(3))
    return Layer((rows, inputs), f"Linear({inputs}, {outputs})", lambda lib: lib.nn.Linear(inputs, outputs))


KINDS: dict[str, Callable[[random.Random], Layer]] = {
    "conv1d": lambda draw: convolution(draw, 1), "conv2d": lambda draw: convolution(draw, 2),
    "conv3d": lambda draw: convolution(draw, 3),
    "transposed": lambda draw: convolution(draw, draw.choice([2, 3]), transposed=True),
    "pool": lambda draw: pool(draw, 2), "pool3d": lambda draw: pool(draw, 3), "norm": norm, "reduction": reduction,
    "activation": activation, "loss": loss, "chain": chain, "linear": linear,
}  # fmt: skip
# Layers of public tasks that were slowest, by their texts here.
FIXED = (
    Layer((8, 64, 2048, 2048), "AvgPool2d(11)", lambda lib: lib.nn.AvgPool2d(11)),
    Layer((64, 64, 512, 512), "BatchNorm2d(64)", lambda lib: lib.nn.BatchNorm2d(64).eval()),
    Layer((16, 3, 64, 64, 64), "Conv3d(3, 64, 3)", lambda lib: lib.nn.Conv3d(3, 64, 3)),
    Layer((256, 3, 224, 224), "Conv2d(3, 96, 11, stride=4)", lambda lib: lib.nn.Conv2d(3, 96, 11, stride=4)),
    Layer(
        (64, 64, 128, 256), "ConvTranspose2d(64, 128, (3, 5))", lambda lib: lib.nn.ConvTranspose2d(64, 128, (3, 5))
    ),
    Layer((16, 64, 131072), "Conv1d(64, 128, 3)", lambda lib: lib.nn.Conv1d(64, 128, 3)),
    Layer(
        (128, 64, 128, 128), "Conv2d(64, 128, 3), InstanceNorm2d",
        lambda lib: lib.nn.Sequential(lib.nn.Conv2d(64, 128, 3), lib.nn.InstanceNorm2d(128)),
    ),
    Layer(
        (128, 8, 128, 128), "Conv2d(8, 64, 3), GroupNorm, GELU",
        lambda lib: lib.nn.Sequential(lib.nn.Conv2d(8, 64, 3), lib.nn.GroupNorm(8, 64), lib.nn.GELU()),
    ),
)  # fmt: skip


def layers(count: int, seed: int) -> list[tuple[str, Layer]]:
    """Return the fixed layers and `count` drawn ones of each kind, with their names."""
    rows = [("fixed", layer) for layer in FIXED]
    rows += [(kind, make(random.Random(f"{seed} {kind} {i}"))) for i in range(count) for kind, make in KINDS.items()]
    return [(f"{kind} {'x'.join(map(str, layer.shape))} {layer.text}", layer) for kind, layer in rows]


def measure(layer: Layer) -> dict[str, Any]:
    """Return the times of a layer, launch by launch and captured."""
    x = torch.rand(layer.shape, device="cuda")
    theirs, ours = layer.make(torch), layer.make(minidl)
    if isinstance(theirs, torch.nn.Module):
        theirs = theirs.to("cuda")
        ours = ours.to("cuda")
        ours.load_state_dict(theirs.state_dict())
    tensor = minidl.tensor(x)

    def our_call() -> Any:
        with no_grad():
            return ours(tensor).data

    sides = {"torch": (theirs, x)}
    if x.dim() in ORDERS and isinstance(theirs, torch.nn.Module):
        order = ORDERS[x.dim()]
        last = layer.make(torch).to("cuda").to(memory_format=order)
        last.load_state_dict(theirs.state_dict())
        sides["torch, channels last"] = last, x.contiguous(memory_format=order)
    calls: dict[str, Callable[[], Any]] = {"ours": our_call}
    calls |= {name: torch.no_grad()(lambda f=f, x=x: f(x)) for name, (f, x) in sides.items()}
    right = _is_right(our_call(), theirs, x)
    for call in calls.values():  # the first calls plan, compile and record, or try algorithms, and would count as one
        for _ in range(WARM):
            call()
    result: dict[str, Any] = {"error_ok": right, "goal": GOAL}
    for prefix, make in (("", Launched), ("captured_", lambda call: Replay(call, False, target_ms=4.0, longest=64))):
        clocks: dict[str, Clock] = {name: make([call]) for name, call in calls.items()}
        times = in_turn(clocks, agree=0.02)
        medians = {name: round(statistics.median(values), 5) for name, values in times.items()}
        ours_ms = medians.pop("ours")
        peer = min(medians, key=lambda name: medians[name])
        result |= {
            f"{prefix}ours_ms": ours_ms, f"{prefix}peer": peer, f"{prefix}peer_ms": medians[peer],
            f"{prefix}ratio": round(medians[peer] / ours_ms, 3),
        }  # fmt: skip
    return result


@torch.no_grad()
def _is_right(y: torch.Tensor, theirs: Any, x: torch.Tensor) -> bool:
    """Return whether y is as close to float64 as float32 sums are; of many images, the first are compared."""
    module = isinstance(theirs, torch.nn.Module)
    batched = module and "BatchNorm" not in repr(theirs)
    few = slice(None, max(1, 2**24 // max(1, x[0].numel()))) if batched else slice(None)
    if module:
        theirs.double()
    expected = theirs(x[few].double())
    if module:
        theirs.float()
    part = y[few] if batched else y
    if not expected.is_floating_point():
        return bool((part == expected).float().mean() > 0.99)
    return bool((part.double() - expected).norm() <= OFF * expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=2, help="layers of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row after this time")
    parser.add_argument("--only", default="", help="measure rows whose names contain this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    console, rows, start = Console(width=160), [], time.perf_counter()
    for name, layer in layers(options.drawn, options.seed):
        if options.only not in name or time.perf_counter() - start > options.seconds:
            continue
        try:
            row = {"name": name, "dtype": "float32", **measure(layer)}
        except Exception as error:  # noqa: BLE001 (a row reports its error)
            row = {"name": name, "dtype": "float32", "error_ok": None, "failed": first_line(error)}
        rows.append(row)
        figures = f"{row.get('ratio', row.get('failed'))} {row.get('captured_ratio', '')} {row['error_ok']}"
        console.print(f"{name}  {figures}", markup=False, highlight=False)
        make_room()
        if options.out:
            command = f"python -m benchmarks.layers --drawn {options.drawn} --seed {options.seed}"
            options.out.write_text(json.dumps({**machine(), "command": command, "rows": rows}, indent=1) + "\n")
    for key in ("ratio", "captured_ratio"):
        ratios = sorted(row[key] for row in rows if key in row)
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            console.print(f"{key}: {len(ratios)} rows, mean {mean:.3f}, least {ratios[0]}", highlight=False)


if __name__ == "__main__":
    main()
