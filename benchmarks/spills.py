"""List the kernels of drawn shapes that spill registers with their chosen tiles. Needs no GPU.

    TRITON_INTERPRET=0 python -m benchmarks.spills [--drawn 60] [--seed 0] [--arch 90] [--json FILE]

`minidl doctor --compile` compiles every tile for some shapes; this compiles convolutions and their gradients of the
shapes of `python -m benchmarks.bench --drawn`, each kernel once. Estimates do not include the cost of a spill.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from minidl.kernels import conv
from minidl.kernels.conv.geometry import Geometry
from minidl.tools.doctor import offline
from minidl.tools.tuning import drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jobs: dict[Any, tuple[Any, str]] = {}
    for index in range(options.drawn):
        shape = drawn.draw("conv", options.seed, index)
        for direction, run in calls(shape):
            with offline.recording(options.arch) as recorded:
                run()
            for job in recorded:
                jobs.setdefault(job.key, (job, f"{direction} of {shape}"))
    print(f"{options.drawn} shapes, {len(jobs)} kernels", flush=True)
    spills = []
    with ProcessPoolExecutor() as pool:
        figures = pool.map(offline.compile_job, [job for job, _ in jobs.values()])
        for (job, shape), figure in zip(jobs.values(), figures, strict=True):
            if figure.spill or figure.error:
                spills.append(
                    {"kernel": job.kernel.partition(":")[2], "tile": job.tile, "bytes": figure.spill, "shape": shape}
                )
                print(figure.error or f"{figure.spill} bytes", spills[-1], flush=True)
    print(f"{len(spills)} of {len(jobs)} kernels spill")
    if options.json:
        options.json.write_text(json.dumps(spills, indent=1) + "\n")


def calls(shape: Any) -> list[tuple[str, Any]]:
    """Return calls of a shape's convolution and both its gradients, on uninitialised memory."""
    padding = tuple((size, size) for size in shape.padding)
    at = Geometry.of(shape.size, shape.kernel, shape.stride, padding, shape.dilation, shape.groups)
    order = {"dtype": torch.float16, "memory_format": torch.channels_last}
    x = torch.empty(shape.images, shape.channels, *shape.size, **order)
    w = torch.empty(shape.outputs, shape.channels // shape.groups, *shape.kernel, **order)
    dy = torch.empty(shape.images, shape.outputs, at.h.output, at.w.output, **order)
    return [
        ("forward", lambda: conv.forward(x, w, at)), ("gradient of the input", lambda: conv.grad_input(dy, w, at)),
        ("gradient of the weight", lambda: conv.grad_weight(x, dy, at)),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
