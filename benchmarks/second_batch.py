"""Kernels that a training step of ResNet-50 compiles at a second batch size; needs no GPU.

    python -m benchmarks.second_batch [--sizes 64 256] [--dtype float16] [--arch 90] [--compile]

It prints how many kernels each batch size launches, how many of them the earlier sizes have not, and for each of those
what differs from the nearest earlier one. With `--compile` each new one is compiled, and its seconds are printed.
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
    """A training step on a batch."""
    model = models.resnet50(dtype=dtype)
    optimizer = optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9, weight_decay=1e-4)
    x = torch.empty(size, 3, 224, 224, dtype=dtype).contiguous(memory_format=torch.channels_last)
    loss = ops.cross_entropy(model(Tensor(x)), Tensor(torch.zeros(size, dtype=torch.int64)))
    loss.backward()
    optimizer.step()


def facts(job: Job) -> dict[str, Any]:
    """What a kernel is compiled for, by name."""
    names = list(job.signature)
    found: dict[str, Any] = {f"{name} type": kind for name, kind in job.signature.items()}
    found |= {f"{'.'.join(map(str, [names[p[0]], *p[1:]]))} =": str(value) for p, value in job.constants}
    found |= {f"{'.'.join(map(str, [names[p[0]], *p[1:]]))} is": str(known) for p, known in job.attributes if known}
    return found | job.options


def differences(job: Job, others: list[Job]) -> dict[str, tuple[Any, Any]]:
    """What differs from the nearest of the others of the same kernel."""
    own, found = facts(job), []
    for other in others:
        if other.kernel == job.kernel:
            theirs = facts(other)
            names = [name for name in own | theirs if own.get(name) != theirs.get(name)]
            found.append({name: (theirs.get(name), own.get(name)) for name in names})
    return min(found, key=len, default={"kernel": ("-", "new")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    known: dict[str, Job] = {}
    for size in options.sizes:
        jobs = launched(lambda n=size: step(n, getattr(torch, options.dtype)), options.arch, target_name(options.arch))
        new = [job for job in jobs if job.key not in known]
        print(f"batch {size}: {len(jobs)} kernels, {len(new)} of them new")
        reasons: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for job in new if known else ():
                differ = differences(job, list(known.values()))
                reasons.update(list(differ))
                seconds = ""
                if options.compile:
                    os.environ["TRITON_CACHE_DIR"] = folder
                    started = time.perf_counter()
                    launch_jobs.compile_job(job)
                    seconds = f" {time.perf_counter() - started:.2f} s"
                print(f"  {job.name}{seconds}:", ", ".join(f"{n} {a} -> {b}" for n, (a, b) in differ.items()))
        print("  most frequent:", ", ".join(f"{name} {count}" for name, count in reasons.most_common(20)))
        known |= {job.key: job for job in jobs}


if __name__ == "__main__":
    main()
