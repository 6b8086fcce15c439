"""Time calls on the host: Python and the driver, from a call until the next one can start.

    python -m benchmarks.launch_cost --out FILE

Microseconds, medians of many rounds of calls on small tensors, whose kernels end before the next launch: bare launches
by Triton and by `launch.run`, minidl's and torch's public operations without and with a gradient, and training steps.
`launches` counts minidl's kernels in a call. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import minidl
from minidl import models, nn, ops, optim
from minidl.kernels import conv
from minidl.kernels.conv.geometry import Geometry
from minidl.runtime import launch
from minidl.runtime.launch_cache import fast_launch
from minidl.tensors import Tensor, default_device
from minidl.tools.bench.machine import machine

Call = Callable[[], object]
Row = dict[str, Any]


def microseconds(call: Call, rounds: int, calls: int) -> float:
    """Return the time of a call on the host: the median over rounds of `calls` calls, each from an idle device."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def launches(call: Call) -> int:
    count = 0

    def watcher(kernel: Any, grid: Any, args: Any, meta: Any, go: Call) -> None:
        nonlocal count
        count += 1
        go()

    with launch.watch(watcher):
        call()
    return count


def launched(call: Call) -> list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """Return kernel, grid, arguments and options of each launch of a call."""
    records = []

    def watcher(kernel: Any, grid: Any, args: Any, meta: Any, go: Call) -> None:
        records.append((kernel, grid, args, dict(meta)))
        go()

    with launch.watch(watcher):
        call()
    return records


def bare_rows(name: str, call: Call, rounds: int) -> list[Row]:
    """Return a row for each way to launch the first kernel of a call."""
    kernel, grid, args, meta = launched(call)[0]
    launch.run(kernel, grid, *args, **meta)
    ways: dict[str, Call] = {
        "Triton": lambda: kernel[grid](*args, **meta),
        "launch.run": lambda: launch.run(kernel, grid, *args, **meta),
        "direct.launch": lambda: fast_launch.launch(kernel, grid, args, meta),
    }
    if not fast_launch.launch(kernel, grid, args, meta):
        raise RuntimeError(f"{kernel.__name__} is not launched directly with this Triton")
    return [
        {"name": f"{name}: {kernel.__name__} by {way}", "ours_us": microseconds(launch_, rounds, 200), "launches": 1}
        for way, launch_ in ways.items()
    ]


def pair(name: str, ours: Call, theirs: Call, rounds: int, calls: int = 100) -> Row:
    return {
        "name": name, "ours_us": microseconds(ours, rounds, calls), "torch_us": microseconds(theirs, rounds, calls),
        "launches": launches(ours),
    }  # fmt: skip


def operation_rows(device: torch.device, rounds: int) -> list[Row]:
    """Return rows of public operations without and with a recorded gradient, and of forward with backward."""
    half = torch.float16
    x = torch.randn(64, 64, device=device, dtype=half)
    weight, bias = torch.randn(64, 64, device=device, dtype=half), torch.randn(64, device=device, dtype=half)
    last = torch.channels_last
    image = torch.randn(64, 32, 8, 8, device=device, dtype=half).to(memory_format=last)
    filters = torch.randn(32, 32, 3, 3, device=device, dtype=half).to(memory_format=last)
    shift = torch.randn(32, device=device, dtype=half)
    functional = torch.nn.functional
    kinds: list[tuple[str, list[torch.Tensor], Callable[..., Any], Callable[..., Any]]] = [
        ("relu", [x], ops.relu, torch.relu),
        ("add", [x, x], ops.add, torch.add),
        ("softmax", [x], lambda t: ops.softmax(t, -1), lambda t: torch.softmax(t, -1)),
        ("linear", [x, weight, bias], ops.linear, functional.linear),
        (
            "conv2d 3x3", [image, filters, shift], lambda *t: ops.conv2d(*t, padding=1),
            lambda *t: functional.conv2d(*t, padding=1),
        ),
    ]  # fmt: skip
    rows = [*bare_rows("relu", lambda: ops.relu(Tensor(x)), rounds)]
    rows += bare_rows("linear", lambda: ops.linear(Tensor(x), Tensor(weight), Tensor(bias)), rounds)
    rows += bare_rows("conv2d", lambda: ops.conv2d(Tensor(image), Tensor(filters), Tensor(shift), padding=1), rounds)
    for name, operands, ours, theirs in kinds:
        rows += three_rows(name, operands, ours, theirs, rounds)
    return rows


# (N, C, M, size, kernel, padding, stride): the batch, box and banded forms, and all phases of a gradient at once.
CONVOLUTIONS = {
    "32 to 32, 64 images": (64, 32, 32, 8, 3, 1, 1),
    "64 to 64, 8 images": (8, 64, 64, 8, 3, 1, 1),
    "1 to 12, 64 images": (64, 1, 12, 12, 5, 0, 1),
    "32 to 64, stride 2, 64 images": (64, 32, 64, 8, 3, 1, 2),
}


def convolution_rows(device: torch.device, rounds: int) -> list[Row]:
    """Return rows of the launchers of `kernels.conv`: checks, the choice of a form, and its launches."""

    def images(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float16).to(memory_format=torch.channels_last)

    rows = []
    for name, (N, C, M, size, kernel, padding, stride) in CONVOLUTIONS.items():
        geometry = Geometry.of((size, size), (kernel,) * 2, (stride,) * 2, ((padding,) * 2,) * 2, (1, 1))
        x, w = images(N, C, size, size), images(M, C, kernel, kernel)
        dy = images(N, M, geometry.h.output, geometry.w.output)
        bias = torch.randn(M, device=device, dtype=torch.float16)
        how = None, (stride, stride), (padding, padding), (1, 1), False, (0, 0), 1

        def backward(*mask: bool, dy: Any = dy, x: Any = x, w: Any = w, how: Any = how) -> object:
            return torch.ops.aten.convolution_backward(dy, x, w, *how, mask)

        calls: dict[str, tuple[Call, Call]] = {
            "forward": (
                lambda x=x, w=w, g=geometry, b=bias: conv.forward(x, w, g, b, "relu"),
                lambda x=x, w=w, b=bias, s=stride, p=padding: torch.relu(torch.nn.functional.conv2d(x, w, b, s, p)),
            ),
            "gradient of the input": (
                lambda dy=dy, w=w, g=geometry: conv.grad_input(dy, w, g), lambda f=backward: f(True, False, False),
            ),
            "gradient of the weight": (
                lambda x=x, dy=dy, g=geometry: conv.grad_weight(x, dy, g), lambda f=backward: f(False, True, False),
            ),
        }  # fmt: skip
        rows += [pair(f"kernels.conv {name}, {what}", *both, rounds) for what, both in calls.items()]
    return rows


def three_rows(
    name: str, operands: list[torch.Tensor], ours: Callable[..., Any], theirs: Callable[..., Any], rounds: int
) -> list[Row]:
    plain = [Tensor(t) for t in operands]
    leaves = [Tensor(t.clone(), requires_grad=True) for t in operands]
    leaves_torch = [t.clone().requires_grad_() for t in operands]
    dy = torch.ones_like(theirs(*operands))
    cotangent = Tensor(dy)

    def both() -> None:
        ours(*leaves).backward(cotangent)

    def both_torch() -> None:
        theirs(*leaves_torch).backward(dy)

    return [
        pair(f"{name}, no gradient", lambda: ours(*plain), lambda: theirs(*operands), rounds),
        pair(f"{name}, gradient recorded", lambda: ours(*leaves), lambda: theirs(*leaves_torch), rounds),
        pair(f"{name}, forward and backward", both, both_torch, rounds, calls=50),
    ]


def step_rows(device: torch.device, rounds: int) -> list[Row]:
    """Return rows of training steps without CUDA graphs: zero_grad, forward, loss, backward, Adam."""
    label = torch.randint(10, (64,), device=device)

    def ours_step(model: nn.Module, x: torch.Tensor) -> Call:
        adam = optim.Adam(model.parameters(), lr=1e-3)
        inputs, labels = Tensor(x), Tensor(label)

        def step() -> None:
            adam.zero_grad()
            ops.cross_entropy(model(inputs), labels).backward()
            adam.step()

        return step

    def torch_step(model: torch.nn.Module, x: torch.Tensor) -> Call:
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

        def step() -> None:
            adam.zero_grad()
            torch.nn.functional.cross_entropy(model(x), label).backward()
            adam.step()

        return step

    linear, relu, conv, pool = torch.nn.Linear, torch.nn.ReLU, torch.nn.Conv2d, torch.nn.AvgPool2d
    mlp = torch.nn.Sequential(linear(64, 128), relu(), linear(128, 128), relu(), linear(128, 10)).to(device)
    cnn = torch.nn.Sequential(
        conv(1, 32, 5), relu(), pool(2), conv(32, 64, 5), relu(), pool(2), torch.nn.Flatten(), linear(1024, 128),
        relu(), linear(128, 10),
    ).to(device, memory_format=torch.channels_last)  # fmt: skip
    x = torch.randn(64, 64, device=device)
    images = torch.randn(64, 1, 28, 28, device=device)
    return [
        pair(
            "training step, MLP 64-128-128-10", ours_step(nn.MLP(64, [128, 128], 10, act="relu"), x),
            torch_step(mlp, x), rounds, calls=20,
        ),
        pair(
            "training step, ECE 408 network", ours_step(models.ECE408(), images), torch_step(cnn, images), rounds,
            calls=10,
        ),
    ]  # fmt: skip


def show(rows: list[Row]) -> None:
    table = Table("", "ours us", "torch us", "ours / torch", "launches", box=None)
    for row in rows:
        theirs = row.get("torch_us")
        table.add_row(
            row["name"], f"{row['ours_us']:.1f}", f"{theirs:.1f}" if theirs else "-",
            f"{row['ours_us'] / theirs:.2f}" if theirs else "-", str(row["launches"]),
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if launch.INTERPRETED:
        parser.error("launches are timed on a CUDA device, but this process interprets kernels")
    minidl.manual_seed(0)
    device = default_device()
    rows = [
        *operation_rows(device, options.rounds), *convolution_rows(device, options.rounds),
        *step_rows(device, options.rounds),
    ]  # fmt: skip
    show(rows)
    result = {**machine(), "rounds": options.rounds, "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
