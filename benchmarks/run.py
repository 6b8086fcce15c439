"""Measure ours and torch side by side on this GPU: python -m benchmarks.run [--only WORDS] [--out FILE]."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import measure
from benchmarks.rows import names, rows

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str]:
    """Device, driver and versions that a figure depends on."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these words")
    parser.add_argument("--out", type=Path, help="results file; default: benchmarks/results/<device>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks need a CUDA device, and there is none here", file=sys.stderr)
        return 1
    info = machine()
    out = options.out or RESULTS / (info["device"].lower().replace(" ", "-") + ".json")
    makers = rows()
    kept = json.loads(out.read_text())["rows"] if options.only and out.exists() else []
    done = {row["name"]: row for row in kept}
    console = Console(width=140)
    for name in names(makers, options.only):
        started = time.perf_counter()
        torch.cuda.empty_cache()
        try:
            row = measure(makers[name]())
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            console.print(f"[red]{name}: {type(error).__name__}: {error}")
            continue
        done[str(row["name"])] = {**row, "date": info["date"]}
        console.print(f"{name}: ratio {row['ratio']} ({time.perf_counter() - started:.1f} s)")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**info, "rows": list(done.values())}, indent=1) + "\n")
    console.print(table(list(done.values())))
    return 0 if all(row["error_ok"] for row in done.values()) else 1


def table(found: list[dict[str, object]]) -> Table:
    """The rows as a table."""
    made = Table("row", "dtype", "ours ms", "peer ms", "peer", "ratio", "of the floor", "right")
    for row in found:
        made.add_row(*(str(row.get(k)) for k in (
            "name", "dtype", "ours_ms", "peer_ms", "peer", "ratio", "share_of_floor", "error_ok",
        )))  # fmt: skip
    return made


if __name__ == "__main__":
    sys.exit(main())
