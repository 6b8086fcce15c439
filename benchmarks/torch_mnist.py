"""Train the network of `minidl train images --data mnist` with torch, as fast as possible.

    python -m benchmarks.torch_mnist [--epochs 10] [--precision float32 tf32 bfloat16] [--minidl] [--out FILE]

Architecture, batch size, optimiser, schedule and augmentation are the command's defaults. The data set is on the
device; a step, with selection, shifts and standardisation of its pictures and the learning rate's schedule, is compiled
and replayed as one CUDA graph, and so is the evaluation of the validation split after every epoch. The time covers the
first step to the last evaluation; `setup_seconds` is the time of compilation and capture. The last weights are
evaluated on the test pictures. float32 is IEEE, and bfloat16 is autocast over float32 weights.

--minidl trains the same in processes of `minidl train images`. On a CPU nothing is compiled or captured; try
--epochs 1 --limit 512.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from minidl.data.images import load_mnist
from minidl.data.records import ImageDataset, Images
from minidl.tools.bench.machine import machine
from minidl.training.tasks.images import TrainImages
from minidl.training.tasks.images.settings import suited

PRECISIONS = ("float32", "tf32", "bfloat16")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
JUDGED = 1000  # test pictures at a time


def small_cnn(classes: int) -> torch.nn.Sequential:
    """`minidl.models.SmallCNN` for grey pictures of 28x28 pixels."""
    layers: list[torch.nn.Module] = []
    channels = 1
    for stage in range(3):
        width = 32 << stage
        if stage > 0:
            layers.append(torch.nn.MaxPool2d(2))
        for _ in range(2):
            layers += [
                torch.nn.Conv2d(channels, width, 3, padding=1, bias=False), torch.nn.BatchNorm2d(width),
                torch.nn.ReLU(),
            ]  # fmt: skip
            channels = width
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, classes)]
    return torch.nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)


class Trainer:
    """Model, optimiser and data on the device, and everything a step reads, at addresses that stay."""

    def __init__(self, dataset: ImageDataset, config: TrainImages, precision: str, mode: str | None) -> None:
        self.config, self.precision = config, precision
        self.mean, self.std = dataset.mean[0], dataset.std[0]
        self.shift = dataset.augment.shift
        pixels, self.labels = placed(dataset.train)
        self.pixels = F.pad(pixels, (self.shift,) * 4)  # [N, H + 2 shift, W + 2 shift]
        self.validation, self.test = placed(dataset.validation), placed(dataset.test)
        self.count, self.size = len(self.labels), pixels.shape[1:]
        self.steps = math.ceil(self.count / config.batch_size)

        self.model = small_cnn(len(dataset.labels))
        self.order = torch.arange(self.count, device=DEVICE)
        self.moves = torch.zeros(self.count, 2, dtype=torch.int64, device=DEVICE)
        self.first = torch.zeros((), dtype=torch.int64, device=DEVICE)  # the batch's start in the order
        self.step_number = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.rates = torch.tensor(self._rates(), device=DEVICE)
        self.rate = self.rates[0].clone() if ON_GPU else torch.tensor(float(self.rates[0]))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, weight_decay=config.weight_decay, fused=True, capturable=ON_GPU
        )
        self.loss, self.judge = self._loss, self._right
        if mode is not None:
            self.loss = torch.compile(self._loss, dynamic=False, mode=mode)
            self.judge = torch.compile(self._right, dynamic=False, mode=mode)

    def _rates(self) -> list[float]:
        """The learning rate of every step: a straight line up, then half a cosine down to 0."""
        config, steps = self.config, self.config.epochs * self.steps
        warmup = min(round(config.warmup * self.steps), steps - 1)
        falling = [0.5 * (1 + math.cos(math.pi * (i - warmup) / (steps - warmup))) for i in range(warmup, steps)]
        return [config.lr * share for share in [(i + 1) / warmup for i in range(warmup)] + falling]

    def _network(self, x: torch.Tensor) -> torch.Tensor:
        x = ((x.to(torch.float32) - self.mean) / self.std).unsqueeze(1).contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE.type, torch.bfloat16, self.precision == "bfloat16", cache_enabled=False):
            return self.model(x).float()

    def _loss(self, picked: torch.Tensor) -> torch.Tensor:
        down, right = self.moves[picked].unbind(1)
        rows = torch.arange(self.size[0], device=DEVICE)[None, :, None] + down[:, None, None]
        columns = torch.arange(self.size[1], device=DEVICE)[None, None, :] + right[:, None, None]
        x = self.pixels[picked[:, None, None], rows, columns]
        return F.cross_entropy(self._network(x), self.labels[picked])

    def _right(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self._network(x).argmax(1) == labels).sum()

    def step(self, size: int) -> None:
        """Train one step on the next `size` pictures of the order."""
        # The index has one element, because the host reads an index without dimensions, which ends a capture.
        self.rate.copy_(self.rates[self.step_number.view(1)].view(()))
        picked = self.order[self.first + torch.arange(size, device=DEVICE)]
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(picked).backward()
        self.optimizer.step()
        self.first += size
        self.step_number += 1

    @torch.no_grad()
    def judged(self) -> torch.Tensor:
        """Return the number of validation pictures that the model classifies correctly."""
        return self.judge(*self.validation)

    def train(self) -> dict[str, Any]:
        """Train, and return the seconds and accuracies."""
        started = time.perf_counter()
        full, rest = divmod(self.count, self.config.batch_size)
        sizes = {size: times for size, times in ((self.config.batch_size, full), (rest, 1)) if size * times}
        steps = {size: self._captured(lambda size=size: self.step(size)) for size in sizes}
        self.model.eval()
        judged = self._captured(self.judged)
        setup = time.perf_counter() - started

        generator = torch.Generator(DEVICE).manual_seed(self.config.seed)
        accuracies = []
        started = time.perf_counter()
        for _ in range(self.config.epochs):
            self.model.train()
            torch.randperm(self.count, generator=generator, device=DEVICE, out=self.order)
            self.moves.random_(0, 2 * self.shift + 1, generator=generator)
            self.first.zero_()
            for size, times in sizes.items():
                for _ in range(times):
                    steps[size]()
            self.model.eval()
            accuracies.append(int(judged()) / len(self.validation[1]))
        seconds = time.perf_counter() - started
        return {
            "side": "torch", "precision": self.precision, "epochs": self.config.epochs,
            "seconds": round(seconds, 3), "setup_seconds": round(setup, 1), "test_accuracy": self.tested(),
            "validation_accuracy": accuracies[-1], "graph": ON_GPU,
        }  # fmt: skip

    @torch.no_grad()
    def tested(self) -> float:
        """Return the accuracy on the test pictures."""
        x, labels = self.test
        parts = zip(x.split(JUDGED), labels.split(JUDGED), strict=True)
        return sum(int(self._right(*part)) for part in parts) / len(labels)

    def _captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return the call as a CUDA graph, and restore weights and state; on a CPU return the call."""
        if not ON_GPU:
            return call
        saved = [tensor.clone() for tensor in self._state()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.first.zero_()
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.first.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        with torch.no_grad():
            # The first step created the optimiser's state, which is initially 0.
            for tensor, before in zip(self._state(), saved + [None] * len(self._state()), strict=False):
                tensor.zero_() if before is None else tensor.copy_(before)

        def replayed() -> Any:
            graph.replay()
            return result

        return replayed

    def _state(self) -> list[torch.Tensor]:
        parts = [*self.model.state_dict().values(), self.step_number, self.first]
        for state in self.optimizer.state.values():
            parts += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return parts


def placed(images: Images) -> tuple[torch.Tensor, torch.Tensor]:
    """Return grey pixels uint8 [N, H, W] and labels int64 [N] on the device."""
    pixels = torch.from_numpy(np.ascontiguousarray(images.pixels[..., 0]).copy())
    return pixels.to(DEVICE), torch.from_numpy(images.labels.copy()).to(DEVICE)


def set_precision(name: str) -> None:
    """Use IEEE products for float32, else TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name != "float32"
    torch.backends.cudnn.benchmark = True


def by_minidl(config: TrainImages, precision: str) -> dict[str, Any]:
    """Return the same figures of `minidl train images` in a separate process, with the seconds of the process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable, "-m", "minidl", "train", "images", "--data", config.data, "--epochs", str(config.epochs),
            "--patience", "0", "--seed", str(config.seed), "--precision", precision, "--out", str(out), "--quiet",
            "--no-plots",
        ]  # fmt: skip
        started = time.perf_counter()
        subprocess.run(command, check=True)
        wall = time.perf_counter() - started
        report = json.loads((out / "report.json").read_text())
    return {
        "side": "minidl", "precision": precision, "epochs": report["epochs"], "seconds": report["seconds"],
        "process_seconds": round(wall, 1), "test_accuracy": report["accuracy"],
        "validation_accuracy": report["validation"]["accuracy"], "best_epoch": report["best_epoch"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--precision", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="so many pictures of each split")
    parser.add_argument("--mode", default="max-autotune-no-cudagraphs", help="of torch.compile; 'eager' for none")
    parser.add_argument("--minidl", action="store_true", help="also train by minidl")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = TrainImages(data="mnist", out=Path("unused"), epochs=options.epochs, seed=options.seed)
    dataset = load_mnist()
    config = config.model_copy(update=suited(config, (28, 28), half=False))
    if options.limit:
        parts = {name: getattr(dataset, name) for name in ("train", "validation", "test")}
        first = {n: Images(p.pixels[: options.limit], p.labels[: options.limit]) for n, p in parts.items()}
        dataset = replace(dataset, **first)
    mode = options.mode if ON_GPU and options.mode != "eager" else None
    results = []
    for precision in options.precision:
        torch.manual_seed(options.seed)
        set_precision(precision)
        torch.compiler.reset()
        results.append(Trainer(dataset, config, precision, mode).train())
        print(json.dumps(results[-1]), flush=True)
        if options.minidl:
            results.append(by_minidl(config, precision))
            print(json.dumps(results[-1]), flush=True)
    content = {**(machine() if ON_GPU else {"torch": torch.__version__}), "compile": mode, "rows": results}
    if options.out:
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
