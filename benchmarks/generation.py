"""Time the 64x64x3 DCGAN end to end: from latents to pixels, both in the host's memory.

minidl's side is that of `minidl generate`: passes of a constant number of images, with copies to pinned memory that
overlap the kernels. torch's side is the same network, compiled with CUDA graphs or eager, channels-last, its batch
norms folded, in one batch or in passes whose copies overlap the next pass. Times are wall-clock medians of complete
calls. Both sides use TF32 in the rows called tf32, and neither in those called float32.

    python -m benchmarks.generation --out FILE
    python -m benchmarks.generation --only float16 --mode max-autotune
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidl import nn
from minidl.generation import passes
from minidl.models import Generator
from minidl.runtime import launch
from minidl.tools.bench.machine import machine

SIZE = (64, 64)
COUNTS = (1000, 5248)  # as in the course report that this repeats
ROUNDS = 7
LATENT = 100
KINDS = ("float16", "tf32", "float32")


def networks(dtype: torch.dtype) -> tuple[nn.Module, torch.nn.Module]:
    """Return minidl's network with folded batch norms, and torch's with the same shapes and no batch norms."""
    ours = nn.fold_batch_norms(Generator(LATENT, 3, SIZE).eval()).to("cuda", dtype)
    theirs = TorchGenerator().to("cuda", dtype).to(memory_format=torch.channels_last).eval()
    return ours, theirs


class TorchGenerator(torch.nn.Module):
    """Dense, then four transposed convolutions 5x5 of stride 2, scales folded into the weights."""

    def __init__(self) -> None:
        super().__init__()
        widths = (512, 256, 128, 64, 3)
        self.project = torch.nn.Linear(LATENT, 4 * 4 * 512)
        self.upward = torch.nn.ModuleList(
            torch.nn.ConvTranspose2d(a, b, 5, 2, 2, output_padding=1) for a, b in itertools.pairwise(widths)
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.project(z).view(-1, 4, 4, 512).permute(0, 3, 1, 2).relu()
        for layer in self.upward[:-1]:
            x = layer(x).relu()
        return self.upward[-1](x).tanh()


class Theirs:
    """torch's pipeline in passes of `step` images, whose pixels are copied while the next pass runs."""

    def __init__(
        self, model: Callable[[torch.Tensor], torch.Tensor], count: int, step: int, dtype: torch.dtype
    ) -> None:
        self.model, self.step, self.count = model, step, count
        self.z = torch.zeros(count, LATENT, dtype=dtype, pin_memory=True)
        self.pixels = torch.empty(count, *SIZE, 3, dtype=dtype, pin_memory=True)
        self.copies = torch.cuda.Stream()

    @torch.no_grad()
    def __call__(self, latents: np.ndarray) -> np.ndarray:
        self.z.copy_(torch.from_numpy(latents))
        z = self.z.to("cuda", non_blocking=True)
        for start in range(0, self.count, self.step):
            # The last pass may be shorter: the compiled network has a graph for either size.
            pixels = self.model(z[start : start + self.step]).permute(0, 2, 3, 1).contiguous()
            self.copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.copies):
                self.pixels[start : start + len(pixels)].copy_(pixels, non_blocking=True)
            torch.cuda.current_stream().wait_stream(self.copies)  # the graph reuses its output memory
        self.copies.synchronize()
        return self.pixels.numpy()


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the wall-clock time of a call that ends with its result on the host."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def rows(kind: str, mode: str) -> list[dict[str, Any]]:
    """Return a row for each count of images."""
    dtype = torch.float16 if kind == "float16" else torch.float32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    launch.set_float32_precision("tf32" if kind == "tf32" else "tf32x3")
    ours, theirs = networks(dtype)
    torch._dynamo.reset()  # it compiles 8 sizes of a network and runs others eagerly
    compiled = torch.compile(theirs, dynamic=False, mode=mode)
    result: list[dict[str, Any]] = []
    mine = passes.Passes(ours, 3, SIZE)
    for count in COUNTS:
        latents = np.random.default_rng(count).standard_normal((count, LATENT), dtype=np.float32)
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda latents=latents: sum(len(part) for part in mine.images(latents))
        }
        for name, model in (("eager", theirs), ("compiled", compiled)):
            for step in sorted({count, count // 4}, reverse=True):
                pipeline = Theirs(model, count, step, dtype)
                sides[f"{name}, passes of {step}"] = lambda pipeline=pipeline, latents=latents: pipeline(latents)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for call in sides.values():
            call()
            call()
        for _ in range(ROUNDS):
            for name, call in sides.items():
                times[name].append(milliseconds(call))
        medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
        median = medians.pop("ours")
        peer = min(medians, key=lambda name: medians[name])
        row = {
            "name": f"dcgan end to end {count} images",
            "dtype": kind,
            "ours_ms": median,
            "peer": peer,
            "peer_ms": medians[peer],
            "ratio": round(medians[peer] / median, 3),
            "peers_ms": medians,
        }
        result.append(row)
        print(json.dumps(row), flush=True)
    return result


def main() -> None:
    """Measure every precision and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, nargs="*", default=list(KINDS))
    parser.add_argument("--mode", default="reduce-overhead", help="of torch.compile")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if launch.INTERPRETED:
        parser.error("pictures are timed on a CUDA device; this process interprets kernels")
    torch.backends.cudnn.benchmark = True
    measured = [row for kind in arguments.only for row in rows(kind, arguments.mode)]
    if arguments.out:
        arguments.out.write_text(json.dumps({**machine(), "rows": measured}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
