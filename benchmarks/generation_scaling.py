"""Time fixed numbers of pictures of 64x64x3 on 1, 2, 4, ... GPUs of one host.

    python -m benchmarks.generation_scaling --devices 1,2 --out benchmarks/results/generation-DEVICE-xN.json
    python -m benchmarks.generation_scaling --show FILE [--plot FILE.svg]

memory   from latents to pixels in host memory, until the last process has its part; the first call is not counted
files    `minidl generate` into PNG files, as a whole command and as the command itself reports its time, which begins
         after imports and the model; also with `--devices auto`. Commands run in turn; the median is the result

The network is the 64x64x3 DCGAN of `benchmarks.generation` in float32 (24 bits kept) and float16. `hash` is the
SHA-256 of all pictures in order; `error_ok` says whether it equals that of one GPU. The peer of a number of GPUs is one
GPU; the peer of `--devices auto` is the best number of GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scaling import generator

COUNTS = (10, 100, 1000, 5248, 50_000)
DTYPES = ("float32", "float16")
LATENT, CHANNELS, SIZE = 100, 3, (64, 64)
ROUNDS = 9
AUTO_GOAL = 0.9  # --devices auto costs at most a tenth
# Seconds of the course report on 1, 2 and 4 GPUs of each of two hosts, from a text file to a bitmap.
REPORT = {1000: (0.278, 0.224, 0.236), 5248: (1.01, 0.65, 0.50)}
LINES = (
    ("memory", "ours_ms", "memory", "-"), ("files", "ours_ms", "files", "--"),
    ("files", "without_start_ms", "files, without the start", ":"),
)  # fmt: skip
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--only", default="memory,files", help="parts")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command, in turn")
    parser.add_argument("--out", type=Path, default=Path("generation-scaling.json"))
    parser.add_argument("--show", type=Path, help="print the table of this file")
    parser.add_argument("--plot", type=Path, help="draw the table here, as .svg or .png")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--small", action="store_true", help="a small network, to try the script on a CPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.counts = [*map(int, options.counts.split(","))]
    if options.child:
        in_memory(options)
        return
    if not options.show:
        measure(options)
    results = json.loads((options.show or options.out).read_text())
    show(results["rows"])
    if options.plot:
        draw(results, options.plot)


def measure(options: argparse.Namespace) -> None:
    """Measure the selected parts; the file is written after each row, and keeps its other rows."""
    end = time.monotonic() + 60 * options.minutes
    numbers = [*map(int, options.devices.split(","))]
    for devices in numbers if "memory" in options.only else ():
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}",
            "-m", "benchmarks.generation_scaling", "--child", "--out", str(options.out), "--dtypes", options.dtypes,
            "--counts", ",".join(map(str, options.counts)), *(["--small"] if options.small else []),
        ]  # fmt: skip
        subprocess.run(command, check=False, timeout=max(30, end - time.monotonic()))
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes.split(",") if "files" in options.only else ():
            model = save(options, Path(folder) / f"{dtype}.safetensors")
            generate(model, dtype, 10, "1", Path(folder))  # compiles
            for count in options.counts:
                runs: dict[str, list[Row]] = {devices: [] for devices in (*map(str, numbers), "auto")}
                for _ in range(options.rounds):
                    for devices, rows in runs.items():
                        if time.monotonic() < end:
                            rows.append(generate(model, dtype, count, devices, Path(folder)))
                for rows in filter(None, runs.values()):
                    append(options.out, median_of(rows))
    results = json.loads(options.out.read_text())
    compare(results["rows"])
    options.out.write_text(json.dumps(results, indent=1) + "\n")


def median_of(rows: list[Row]) -> Row:
    """Return the row of the median time, with all times."""
    middle = sorted(rows, key=lambda row: row["ours_ms"])[(len(rows) - 1) // 2]
    return middle | {"runs_ms": [row["ours_ms"] for row in rows]}


def network(small: bool) -> Any:
    """Return the generator with weights of a fixed seed."""
    import torch

    torch.manual_seed(0)
    return generator(small)


def save(options: argparse.Namespace, path: Path) -> Path:
    from minidl.models import dcgan

    dcgan.save_generator(network(options.small), path, command="benchmarks/generation_scaling.py")
    return path


def in_memory(options: argparse.Namespace) -> None:
    """Measure this process's part of every count; the first process writes the rows."""
    import torch

    from minidl import distributed, nn
    from minidl.generation import latents, passes

    group = distributed.init()
    on_gpu = torch.cuda.is_available()
    if group.size == 1:
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")

    def meet() -> None:
        if group.size > 1:
            torch.distributed.barrier()
            if on_gpu:
                torch.cuda.synchronize()

    for dtype in options.dtypes.split(","):
        model = nn.fold_batch_norms(network(options.small)).to("cuda" if on_gpu else "cpu", getattr(torch, dtype))
        both = passes.Passes(model, CHANNELS, SIZE) if on_gpu else None
        for count in options.counts:
            share = range(group.rank * count // group.size, (group.rank + 1) * count // group.size)
            z = latents.from_seeds(share, LATENT)

            def pictures(z=z, model=model, both=both):
                return both.images(z) if both else passes.images(model, z, CHANNELS, SIZE)

            digests = [hashlib.sha256(each.tobytes()).digest() for part in pictures() for each in part]
            everyone: list[Any] = [None] * group.size
            torch.distributed.all_gather_object(everyone, digests)
            times = []
            for _ in range(2 if options.small else ROUNDS):
                meet()
                start = time.perf_counter()
                for _part in pictures():
                    pass
                meet()
                times.append(time.perf_counter() - start)
            if group.rank == 0:
                bits = hashlib.sha256(b"".join(digest for part in everyone for digest in part)).hexdigest()[:16]
                row = {"what": "memory", "count": count, "dtype": dtype, "devices": group.size, "hash": bits}
                append(options.out, row | {"ours_ms": round(1e3 * statistics.median(times), 3)})
    torch.distributed.destroy_process_group()


def generate(model: Path, dtype: str, count: int, devices: str, folder: Path) -> Row:
    """Run `minidl generate` into PNG files and return its row."""
    out = folder / "pictures"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable, "-m", "minidl", "generate", "--model", str(model), "--count", str(count), "--precision", dtype,
        "--devices", devices, "--out", str(out),
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    text = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {text}")
    hashed = hashlib.sha256()
    for path in sorted(out.glob("*.png")):
        hashed.update(path.name.encode() + path.read_bytes())
    row: Row = {"what": "files", "count": count, "dtype": dtype, "devices": devices, "hash": hashed.hexdigest()[:16]}
    if devices != "auto":
        row["devices"] = int(devices)
    elif chosen := re.search(r"--devices auto: (\d+) of", text):
        row["chosen"] = int(chosen[1])
    if spent := re.search(r"([0-9.]+) s,\s+[0-9,.]+\s+images/s", text):
        row["without_start_ms"] = round(1e3 * float(spent[1]))
    return row | {"ours_ms": round(1e3 * seconds)}


def append(path: Path, row: Row) -> None:
    if path.exists():
        results = json.loads(path.read_text())
    else:
        import torch

        from minidl.tools.bench.machine import machine

        start = machine() if torch.cuda.is_available() else {"device": "CPU"}
        start["command"] = "python -m benchmarks.generation_scaling"
        start["processors"] = str(os.cpu_count())
        results = {**start, "rows": []}
    key = {name: row[name] for name in ("what", "count", "dtype", "devices")}
    results["rows"] = [old for old in results["rows"] if not key.items() <= old.items()]
    results["rows"].append(row)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(row, flush=True)


def compare(rows: list[Row]) -> None:
    """Add names, peers and ratios to the rows."""
    for row in rows:
        alike = [r for r in rows if all(r[key] == row[key] for key in ("what", "count", "dtype"))]
        fixed = {r["devices"]: r for r in alike if r["devices"] != "auto"}
        best = min(fixed, key=lambda devices: fixed[devices]["ours_ms"]) if row["devices"] == "auto" else 1
        on = f"--devices auto ({row.get('chosen', 1)})" if row["devices"] == "auto" else f"{row['devices']} GPUs"
        row["name"] = f"{row['count']:,} pictures to {row['what']}, {row['dtype']}, {on}"
        row["peer"], row["peer_ms"] = f"{best} GPUs", fixed[best]["ours_ms"]
        row["ratio"] = round(row["peer_ms"] / row["ours_ms"], 3)
        row["goal"] = AUTO_GOAL if row["devices"] == "auto" else None
        row["error_ok"] = row["hash"] == fixed[1]["hash"]
        if row["count"] in REPORT:
            row["report_s"] = REPORT[row["count"]]


def show(rows: list[Row]) -> None:
    """Print one line for each count, type and destination, and from which count on more GPUs are faster."""
    from rich.console import Console
    from rich.table import Table

    numbers = sorted({row["devices"] for row in rows if row["devices"] != "auto"})
    titles = ["pictures", "to", "type", *(f"{n} GPU{'s' * (n > 1)}" for n in numbers), "auto", "of the best"]
    table = Table(*titles, "course report, 2, 4, 8 GPUs")
    last: dict[tuple[str, str], int | None] = {}
    kinds = sorted(
        {(row["what"] == "files", row["what"], row["dtype"] == "float16", row["dtype"], row["count"]) for row in rows}
    )
    for _, what, _, dtype, count in kinds:
        measured = {r["devices"]: r for r in rows if (r["what"], r["dtype"], r["count"]) == (what, dtype, count)}
        cells = [seconds(measured[n]) if n in measured else "" for n in numbers]
        auto = measured.get("auto")
        cells += [f"{seconds(auto)} ({auto.get('chosen', 1)})", f"{auto['ratio']:.2f}"] if auto else ["", ""]
        table.add_row(f"{count:,}", what, dtype, *cells, ", ".join(f"{s} s" for s in REPORT.get(count, ())))
        if numbers[-1] in measured and measured[numbers[-1]]["ours_ms"] < measured[1]["ours_ms"]:
            last.setdefault((what, dtype), count)
        else:
            last.pop((what, dtype), None)
    Console(width=140).print(table)
    for what, dtype in dict.fromkeys((row["what"], row["dtype"]) for row in rows):
        where = f"from {last[what, dtype]:,} pictures on" if (what, dtype) in last else "for none of these numbers"
        print(f"to {what}, {dtype}: {numbers[-1]} GPUs are faster {where}")
    print(f"same bits as on one GPU: {sum(row['error_ok'] for row in rows)} of {len(rows)} rows")


def seconds(row: Row) -> str:
    """Return a row's time; for a command also its time without the start."""
    if row["what"] == "memory":
        return f"{row['ours_ms']:.2f} ms"
    return f"{row['ours_ms'] / 1e3:.1f} s, {row['without_start_ms'] / 1e3:.1f}"


def draw(results: Row, path: Path) -> None:
    """Draw seconds by number of pictures for each number of GPUs, and the report's."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, plots = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axes, dtype in zip(plots, DTYPES, strict=True):
        rows = [row for row in results["rows"] if row["dtype"] == dtype and row["devices"] != "auto"]
        for devices in sorted({row["devices"] for row in rows}):
            on = f"{devices} GPU{'s' * (devices > 1)}"
            for what, key, title, style in LINES:
                of = [row for row in rows if (row["what"], row["devices"]) == (what, devices)]
                points = sorted((row["count"], row[key] / 1e3) for row in of)
                colour = f"C{devices.bit_length() - 1}"
                axes.plot(*zip(*points, strict=True), style, color=colour, marker=".", label=f"{title}, {on}")
        for count, times in REPORT.items():
            axes.plot([count] * len(times), times, "x", color="black", label="course report" if count == 1000 else None)
        axes.set(title=dtype, xscale="log", yscale="log", xlabel="pictures of 64x64x3")
    plots[0].set_ylabel("seconds")
    plots[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
