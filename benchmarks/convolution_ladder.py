"""Time the steps of notebooks/03_convolution_ladder on this GPU: python -m benchmarks.convolution_ladder [--out FILE].

The layers of reports 1, 2 and 5 at batches of 10, 100 and 10,000, float16, channels-last. Kernels are timed in CUDA
graphs, so that launches from Python cost nothing on either side; a wrong kernel stops the run. The faster of torch's
two memory formats counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from minidl.tools.bench.machine import machine

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "03_convolution_ladder.py"
BATCHES = (10, 100, 10_000)


def ladder() -> ModuleType:
    """Return the notebook as a module: its layers, its steps and its check."""
    os.environ["MPLBACKEND"] = "Agg"
    spec = importlib.util.spec_from_file_location("convolution_ladder", NOTEBOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def torch_calls(x: torch.Tensor, w: torch.Tensor) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """Return torch's convolution alone and with ReLU and pool, in both formats; x and w are channels-last."""
    last = x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)
    first = tuple(t.contiguous() for t in last)
    return {
        "torch (cuDNN)": [lambda t=t: F.conv2d(*t) for t in (last, first)],
        "torch (cuDNN), with ReLU and pool": [lambda t=t: F.avg_pool2d(F.conv2d(*t).relu_(), 2) for t in (last, first)],
    }


RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "convolution-ladder-nvidia-h200.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the ladder requires a CUDA device")
    # Triton must be imported after minidl.
    from triton.testing import do_bench_cudagraph

    torch.backends.cudnn.benchmark = True
    steps = ladder()
    layers: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for layer, (C, M, size, kernel) in steps.LAYERS.items():
        layers[layer] = {}
        for N in BATCHES:
            x, w = steps.problem(N, C, M, size, kernel)
            flop = 2.0 * N * (size - kernel + 1) ** 2 * M * C * kernel**2
            times = {}
            for name, run in steps.RUNGS.items():
                if name == "batch-tiled" and C % 16:
                    continue
                steps.check(run(x, w), x, w)
                times[name] = do_bench_cudagraph(lambda run=run, x=x, w=w: run(x, w), rep=20, return_mode="median")
            for name, calls in torch_calls(x, w).items():
                times[name] = min(do_bench_cudagraph(call, rep=20, return_mode="median") for call in calls)
            layers[layer][str(N)] = {
                name: {"ms": round(ms, 5), "tflops": round(flop / ms / 1e9, 3)} for name, ms in times.items()
            }
            print(f"{layer}, {N:,} images: " + ", ".join(f"{name} {ms:.4f}" for name, ms in times.items()), flush=True)
            del x, w
            torch.cuda.empty_cache()
    written = options.out.with_suffix(".new")
    written.write_text(json.dumps({**machine(), "dtype": "float16", "layers": layers}, indent=1) + "\n")
    written.replace(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
