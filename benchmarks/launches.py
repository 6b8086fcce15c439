"""List the launches of the benchmark's networks on an H200. Needs no GPU, because nothing is computed.

    TRITON_INTERPRET=0 python -m benchmarks.launches before.json     # in the tree before a change
    TRITON_INTERPRET=0 python -m benchmarks.launches after.json      # and after it
    TRITON_INTERPRET=0 python -m benchmarks.launches --compare before.json after.json

If the same kernels are launched in the same order with the same grids and machine code, times measured in a CUDA graph
remain valid. `--ptx NAME` also compiles the kernels with NAME in their names, to compare kernels whose source changed.
A concat pair in the opposite memory order (U-Net) uses another form of the same kernel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.bench import network_sides as sides
from benchmarks.bench.network_rows import NETS
from minidl.compilation import launch_jobs
from minidl.compilation.rehearsal import rehearsal, rehearse
from minidl.runtime import launch
from minidl.runtime.cost_model import devices, selection
from minidl.tools.doctor.jobs import target_name

ARCH, DEVICE = 90, "NVIDIA H200"


def listed(ptx: str) -> dict[str, Any]:
    """Return the launches of every row in order, and the source and code of every kernel."""
    jobs: dict[str, Any] = {}
    rows: dict[str, list[Any]] = {}
    device = devices.of_name(DEVICE)
    assert device is not None
    for net in NETS.values():
        launches = rows[net.title] = []

        def keep(*launched: Any, launches: list[Any] = launches) -> None:
            job = launch_jobs.job_of(ARCH, *launched)
            jobs[job.key] = job
            launches.append([job.kernel, list(launched[1]), job.key])

        batch = sides.batch_of(net, "cpu", net.dtype)
        with launch.record(lambda *launched: None, target_name(ARCH)):
            side = sides.Side(net, sides.ours("cpu", net.dtype))
        with rehearsal(keep, target_name(ARCH)), selection.use(device[0]):
            rehearse(side.call_on(batch))
        print(f"{net.title}: {len(launches)}", flush=True)
    sources = {key: launch_jobs.source_of(job).fn.cache_key for key, job in jobs.items()}
    return {"rows": rows, "sources": sources, "ptx": {k: code(j) for k, j in jobs.items() if ptx and ptx in j.kernel}}


def code(job: Any) -> str:
    """Return the hash of a kernel's PTX without source lines."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        text = launch_jobs.compile_job(job).asm["ptx"]
    return hashlib.sha256(re.sub(r"(?m)^\s*(//|\.file).*$", "", text).encode()).hexdigest()


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed: Counter[str] = Counter()
    for title, launches in before["rows"].items():
        others = after["rows"].get(title, [])
        changes = [old[:2] for old, new in zip(launches, others, strict=False) if old[:2] != new[:2]]
        if changes or len(launches) != len(others):
            print(f"{title}: {len(launches)} launches, {len(others)} after; first change: {changes[:1]}")
        for old, new in zip(launches, others, strict=False):
            codes = [side["ptx"].get(key[2]) for side, key in ((before, old), (after, new))]
            same = old[2] == new[2] and before["sources"][old[2]] == after["sources"][new[2]]
            changed[old[0]] += not same and (codes[0] is None or codes[0] != codes[1])
    print(f"{len(before['rows'])} rows; changed kernels, with their launches: {+changed or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true", help="two files")
    parser.add_argument("--ptx", default="", metavar="NAME")
    options = parser.parse_args()
    if options.compare:
        compare(*(json.loads(path.read_text()) for path in options.files))
    else:
        torch.manual_seed(0)
        options.files[0].write_text(json.dumps(listed(options.ptx)))


if __name__ == "__main__":
    main()
