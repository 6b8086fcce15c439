"""Every operation's examples under NVIDIA's compute-sanitizer: python -m tests.compute_sanitizer [--tool memcheck].

memcheck finds accesses outside of allocations, racecheck hazards in shared memory, initcheck reads of global memory
that nothing has written, synccheck wrong barriers. torch's caching allocator is off, so that each tensor is an
allocation. A first run without a tool compiles the kernels; the tools then find them in Triton's cache. Each tool must
report a planted bug first. initcheck (of CUDA 13.0) does not see stores through tensor descriptors and takes what is
read from there for never written: it gets convolutions that store through pointers.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SELECTED = (
    "tests/test_operations.py", "tests/optim/test_optimizers.py", "tests/kernels/test_images.py",
    "-k", "test_fixed_examples or test_many_steps or test_images",
)  # fmt: skip
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--device", "cuda", "--timeout", "0")
REPORT = re.compile(
    r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY|\s)(.*)$", re.MULTILINE
)


def tests(only: str) -> list[str]:
    """The ids of the tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", *QUIET, *SELECTED],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "::" in line and only in line]


def start(
    tool: str | None, ids: list[str], folder: Path, number: int, *more: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """A process that runs some tests, under a tool or none, and the file of what it prints."""
    listed, log = folder / f"{tool}-{number}.txt", folder / f"{tool}-{number}.log"
    listed.write_text("\n".join(ids))
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if "CUDA_VISIBLE_DEVICES" not in environment:
        environment["CUDA_VISIBLE_DEVICES"] = str(number % devices())
    command = [*(under(tool) if tool else ()), sys.executable, "-m", "pytest", *QUIET, *more, f"@{listed}"]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment), log


def devices() -> int:
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return max(1, len(done.stdout.splitlines()))


def passed(log: str) -> Counter[str]:
    """pytest's counts, from its closing line, behind which a tool may print more."""
    closing = [line for line in log.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", closing[-1] if closing else "")
    return Counter({kind: int(count) for count, kind in found})


def reports(log: str) -> Counter[str]:
    """First lines of a tool's reports."""
    return Counter(re.sub(r"0x[0-9a-f]+|\d+", "N", text).strip() for text in REPORT.findall(log))


def under(tool: str) -> list[str]:
    """The beginning of a command that runs under a tool."""
    report = ["--racecheck-report", "all"] if tool == "racecheck" else []
    return ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--print-limit", "50", *report]


def reports_planted(tool: str, what: str) -> bool:
    """Whether a tool reports anything of a planted program."""
    command = [*under(tool), sys.executable, "-m", "tests.compute_sanitizer.planted", what]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return bool(reports(done.stdout))


def main(
    tool: Annotated[
        list[str] | None, typer.Option("--tool", help="Of the four; may be repeated. Default: all.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Processes at a time.")] = 8,
    only: Annotated[str, typer.Option("--only", help="Tests with this in their id.")] = "",
    out: Annotated[Path | None, typer.Option("--json", help="Also write the counts here.")] = None,
    logs: Annotated[Path | None, typer.Option("--logs", help="Keep what was printed in this folder.")] = None,
) -> None:
    """Run the tools one after another; exit status 1 where one reports anything or a test fails."""
    ids, rows, bad = tests(only), {}, False
    with tempfile.TemporaryDirectory() as temporary:
        folder = logs or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in (None, *(tool or TOOLS)):
            begun = time.time()
            if name and not reports_planted(name, name):
                raise SystemExit(f"{name} does not report a planted bug: what it says of the rest means nothing")
            more = []
            if name == "initcheck" and reports_planted(name, "box"):
                print("initcheck does not see what is stored in boxes: convolutions store through pointers in its run")
                more = ["-p", "tests.compute_sanitizer.pointers"]
            running = [start(name, ids[i::jobs], folder, i, *more) for i in range(jobs) if ids[i::jobs]]
            counts, found = Counter(), Counter()
            for process, log in running:
                process.wait()
                text = log.read_text(errors="replace")
                counts += passed(text)
                found += reports(text)
            row = {"tests": dict(counts), "reports": dict(found), "seconds": round(time.time() - begun)}
            rows[name or "no tool"] = row
            print(
                f"{name or 'no tool':10} {dict(counts)}, {sum(found.values())} reports, {row['seconds']} s", flush=True
            )
            for text, count in found.most_common(10):
                print(f"    {count} x {text}", flush=True)
            bad = bad or bool(found) or not counts["passed"] or counts["passed"] + counts["skipped"] != len(ids)
            if out is not None:
                out.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(int(bad))


if __name__ == "__main__":
    typer.run(main)
