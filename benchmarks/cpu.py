"""Time kernels that are compiled for the CPU beside torch, and commands beside the interpreter.

    MINIDL_CPU=compiled python -m benchmarks.cpu --out benchmarks/results/cpu-NAME.json --drawn 8 --seed 0 --commands

Problems are drawn from a seed, `--drawn` of each operation, in sizes that people run on a CPU. A row has the medians of
both sides, measured in turns in one process with one number of threads, and whether the result is within the error
bound of float32 sums. `--commands` trains on digits and docstrings: interpreted, compiled with an empty cache, and
compiled again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import minidl
from minidl import ops
from minidl.cpu import build
from minidl.runtime import launch
from minidl.training.process import environment

Call = Callable[[], Any]
Problem = tuple[str, Call, Call]
GOAL = 0.5
COMMANDS = ("images", "digits"), ("text", "docstrings")


def drawn(count: int, seed: int) -> Iterator[Problem]:
    """Draw problems: a name, our call and torch's."""
    draw = random.Random(seed)
    for _ in range(count):
        m, n, k = (2 ** draw.uniform(5, 10) for _ in range(3))
        yield _product(int(m), int(n), int(k))
        yield _linear(draw.choice([32, 128, 256]), int(n), int(k))
        images, channels = draw.choice([1, 8, 32]), draw.choice([1, 3, 16, 32, 64])
        size, kernel = draw.choice([7, 14, 28, 32]), draw.choice([1, 3, 3, 5])
        yield _conv(images, channels, draw.choice([8, 16, 32, 64]), size, kernel)
        rows, columns = int(2 ** draw.uniform(4, 11)), int(2 ** draw.uniform(3, 12))
        x, y = torch.randn(rows, columns), torch.randn(rows, columns)
        for name, ours, theirs in (
            ("add", ops.add, torch.add),
            ("gelu", lambda a, _: ops.gelu(a), lambda a, _: F.gelu(a)),
            ("softmax", lambda a, _: ops.softmax(a, -1), lambda a, _: torch.softmax(a, -1)),
            ("sum", lambda a, _: ops.sum(a, 1), lambda a, _: a.sum(1)),
            ("layer_norm", lambda a, _: ops.layer_norm(a, a.shape[1:]), lambda a, _: F.layer_norm(a, a.shape[1:])),
        ):
            yield _pair(f"{name} {rows}x{columns}", ours, theirs, x, y)
        pictures = torch.randn(images, channels, size, size)
        yield _pair(
            f"max_pool {images}x{channels}x{size}x{size}",
            lambda a: ops.max_pool2d(a, 2),
            lambda a: F.max_pool2d(a, 2),
            pictures,
        )


def _pair(name: str, ours: Callable[..., Any], theirs: Callable[..., Any], *tensors: torch.Tensor) -> Problem:
    wrapped = tuple(map(minidl.tensor, tensors))
    return name, lambda: ours(*wrapped), lambda: theirs(*tensors)


def _product(m: int, n: int, k: int) -> Problem:
    return _pair(f"matmul {m}x{n}x{k}", ops.matmul, torch.matmul, torch.randn(m, k), torch.randn(k, n))


def _linear(rows: int, outputs: int, inputs: int) -> Problem:
    """A linear layer and its gradients."""
    tensors = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
    return _gradients(f"linear training {rows}x{outputs}x{inputs}", ops.linear, F.linear, *tensors)


def _conv(images: int, channels: int, outputs: int, size: int, kernel: int) -> Problem:
    """A convolution and its gradients."""
    x = torch.randn(images, channels, size, size)
    w, dy = torch.randn(outputs, channels, kernel, kernel), torch.randn(images, outputs, size, size)
    name = f"conv training {images}x{channels}x{size}x{size} {outputs} of {kernel}x{kernel}"
    ours, theirs = (functools.partial(function, padding=kernel // 2) for function in (ops.conv2d, F.conv2d))
    return _gradients(name, ours, theirs, x, w, dy)


def _gradients(
    name: str, ours: Callable[..., Any], theirs: Callable[..., Any], x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor
) -> Problem:
    a, b, c = (minidl.tensor(each) for each in (x, w, dy))
    p, q = x.clone().requires_grad_(), w.clone().requires_grad_()
    a.requires_grad_(), b.requires_grad_()

    def run_ours() -> Any:
        a.grad = b.grad = None
        ours(a, b).backward(c)
        return b.grad

    def run_theirs() -> Any:
        p.grad = q.grad = None
        theirs(p, q).backward(dy)
        return q.grad

    return name, run_ours, run_theirs


def milliseconds(call: Call, repeats: int) -> float:
    """Return the time of a call, the median of `repeats`."""
    times = []
    time.sleep(0.02)  # threads of the other side, which wait spinning, have gone to sleep
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def row(problem: Problem) -> dict[str, Any]:
    """Measure one problem, in turns of ours and torch's."""
    name, ours, theirs = problem
    result, expected = ours().detach().to_torch().double(), theirs().detach().double()
    scale = expected.abs().max().clamp(min=1)
    right = bool((result - expected).abs().max() <= 1e-4 * scale)
    first = milliseconds(theirs, 3)
    repeats = max(3, min(50, int(30 / max(first, 1e-3))))
    pairs = [(milliseconds(ours, repeats), milliseconds(theirs, repeats)) for _ in range(3)]
    ours_ms, peer_ms = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "name": name, "ours_ms": ours_ms, "peer": "torch", "peer_ms": peer_ms, "ratio": peer_ms / ours_ms, "goal": GOAL,
        "error_ok": right,
    }  # fmt: skip


def commands() -> Iterator[dict[str, Any]]:
    """Train by command beside the interpreter: the training, the command, and the first, which compiles."""
    for kind, data in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            cache = {"TRITON_CACHE_DIR": f"{folder}/cache", "MINIDL_CPU": "compiled"}
            interpreted = _train(kind, data, f"{folder}/0", {"MINIDL_CPU": "interpreted"})
            cold, warm = (_train(kind, data, f"{folder}/{i}", cache) for i in (1, 2))
        for what, field, ours, goal in (
            ("training", "seconds", warm, 10),
            ("command", "command", warm, ""),
            ("first command", "command", cold, ""),
        ):
            ours_ms, peer_ms = 1e3 * ours[field], 1e3 * interpreted[field]
            yield {
                "name": f"{what}: minidl train {kind} --data {data}", "ours_ms": ours_ms, "peer": "interpreted",
                "peer_ms": peer_ms, "ratio": peer_ms / ours_ms, "goal": goal,
                "error_ok": abs(ours["accuracy"] - interpreted["accuracy"]) < 0.02,
            }  # fmt: skip


def _train(kind: str, data: str, out: str, environment_: dict[str, str]) -> dict[str, float]:
    """Train; return the seconds of the command, and of the training and the accuracy from its report."""
    command = [sys.executable, "-m", "minidl", "train", kind, "--data", data, "--out", out, "--quiet"]
    start = time.perf_counter()
    subprocess.run(command, env={**os.environ, **environment_}, check=True)
    seconds = time.perf_counter() - start
    report = json.loads((Path(out) / "report.json").read_text())
    return {"command": seconds, "seconds": report["seconds"], "accuracy": report["accuracy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drawn", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", action="store_true")
    args = parser.parse_args()
    if not launch.COMPILED_CPU:
        parser.error("set MINIDL_CPU=compiled; there must be no GPU")
    torch.manual_seed(args.seed)
    rows = [row(problem) for problem in drawn(args.drawn, args.seed)]
    trained = list(commands()) if args.commands else []
    compiler = build.compiler()
    results = {
        "device": environment.processor(), "compiler": compiler.name if compiler else "",
        "torch": torch.__version__, "triton": version("triton"),
        "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.cpu --drawn {args.drawn} --seed {args.seed}" + " --commands" * args.commands,
        "rows": rows + trained,
    }  # fmt: skip
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    table = Table("name", "ours ms", "torch ms", "ratio", "right")
    for each in sorted(rows + trained, key=lambda each: each["ratio"]):
        figures = (f"{each[key]:.3f}" for key in ("ours_ms", "peer_ms", "ratio"))
        table.add_row(each["name"], *figures, str(each["error_ok"]))
    Console().print(table)
    mean = math.exp(statistics.fmean(math.log(each["ratio"]) for each in rows))
    print(f"{len(rows)} rows, geometric mean {mean:.2f}, least {min(each['ratio'] for each in rows):.2f}")


if __name__ == "__main__":
    main()
