"""List the kernels that a training step of ResNet-50 compiles at a second batch size. Needs no GPU.

    python -m benchmarks.second_batch [--sizes 64 256] [--dtype float16] [--arch 90] [--compile]

It prints the number of kernels of each batch size, and for each new one the differences from the nearest earlier one.
With `--compile` it also compiles each new kernel, and prints the seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "0")

import torch

from minidl import models, ops, optim
from minidl.compilation import launch_jobs
from minidl.compilation.job import Job
from minidl.compilation.rehearsal import launched
from minidl.tensors import Tensor
from minidl.tools.doctor.jobs import target_name


def step(size: int, dtype: torch.dtype) -> None:
    """Run a training step on a batch."""
    model = models.resnet50(dtype=dtype)
    optimizer = optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9, weight_decay=1e-4)
    x = torch.empty(size, 3, 224, 224, dtype=dtype).contiguous(memory_format=torch.channels_last)
    loss = ops.cross_entropy(model(Tensor(x)), Tensor(torch.zeros(size, dtype=torch.int64)))
    loss.backward()
    optimizer.step()


def facts(job: Job) -> dict[str, Any]:
    """Return the types, constants, attributes and options of a kernel by name."""
    names = list(job.signature)
    result: dict[str, Any] = {f"{name} type": kind for name, kind in job.signature.items()}
    result |= {f"{'.'.join(map(str, [names[p[0]], *p[1:]]))} =": str(value) for p, value in job.constants}
    result |= {f"{'.'.join(map(str, [names[p[0]], *p[1:]]))} is": str(value) for p, value in job.attributes if value}
    return result | job.options


def differences(job: Job, others: list[Job]) -> dict[str, tuple[Any, Any]]:
    """Return the differences from the nearest other launch of the same kernel."""
    ours, candidates = facts(job), []
    for other in others:
        if other.kernel == job.kernel:
            theirs = facts(other)
            names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
            candidates.append({name: (theirs.get(name), ours.get(name)) for name in names})
    return min(candidates, key=len, default={"kernel": ("-", "new")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    earlier: dict[str, Job] = {}
    for size in options.sizes:
        jobs = launched(lambda n=size: step(n, getattr(torch, options.dtype)), options.arch, target_name(options.arch))
        new = [job for job in jobs if job.key not in earlier]
        print(f"batch {size}: {len(jobs)} kernels, {len(new)} of them new")
        reasons: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for job in new if earlier else ():
                differ = differences(job, list(earlier.values()))
                reasons.update(list(differ))
                seconds = ""
                if options.compile:
                    os.environ["TRITON_CACHE_DIR"] = folder
                    start = time.perf_counter()
                    launch_jobs.compile_job(job)
                    seconds = f" {time.perf_counter() - start:.2f} s"
                print(f"  {job.name}{seconds}:", ", ".join(f"{n} {a} -> {b}" for n, (a, b) in differ.items()))
        print("  most frequent:", ", ".join(f"{name} {count}" for name, count in reasons.most_common(20)))
        earlier |= {job.key: job for job in jobs}


if __name__ == "__main__":
    main()
