"""Time complete commands, as users run them, and their alternatives.

    python -m benchmarks.commands PART [PART ...] --out FILE     measure parts and put their rows into FILE
    python -m benchmarks.commands --list                         the parts
    python -m benchmarks.commands --check FILE                   exit code 1 if a row misses its goal
    python -m benchmarks.commands --plot FILE                    the growth with the number of texts, as FILE's .svg

Inputs are made from a seed in --work (default: a temporary folder). minidl's command and its peers run one after the
other on the same machine, with a separate kernel cache: first empty, then filled (rows "warm"). Seconds are those of
complete processes including their start, except for the peers of texts; phases are those of report.json. Peers for
texts: fastText (the wheel fasttext-wheel) and scikit-learn's TfidfVectorizer with SGDClassifier, on the training and
test rows of minidl's split; for pictures: Pillow in processes. The part cpu needs no GPU and no peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import inputs

Row = dict[str, Any]
_NOISE = 0.1  # seconds, of the median of five starts
_LARGE = 1_000_000  # with more texts, no second run and no linear classifier, which takes minutes


class Ran(NamedTuple):
    """The seconds of a process, and its peak memory in kilobytes without its workers."""

    seconds: float
    kilobytes: int
    out: str


class Bench:
    """The rows of a measurement, and the folder of its inputs and compiled kernels."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.rows: list[Row] = []

    def minidl(self, *arguments: object, cache: str = "kernels", **environment: str) -> Ran:
        """Run a command of minidl with a kernel cache of this name."""
        return run(
            [sys.executable, "-m", "minidl", *map(str, arguments)], TRITON_CACHE_DIR=str(self.work / cache),
            **environment,
        )  # fmt: skip

    def empty(self, cache: str) -> None:
        """Empty this kernel cache."""
        shutil.rmtree(self.work / cache, ignore_errors=True)

    def add(
        self, name: str, seconds: float, goal: dict[str, float], peer: str = "", peer_s: float = 0.0, **more: Any
    ) -> None:
        """Add a row: its goal is "seconds" (at most), "ratio" (at least) or "rate" (at least)."""
        row = {
            "name": name, "ours_ms": round(1000 * seconds, 1), "peer": peer, "peer_ms": round(1000 * peer_s, 1),
            "ratio": round(peer_s / seconds, 3) if peer_s else None, "goal": goal, "error_ok": True, **more,
        }  # fmt: skip
        row["behind"] = behind(row)
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def texts(self, count: int) -> Path:
        path = self.work / f"texts-{count}.csv"
        return path if path.exists() else inputs.texts(path, count)

    def photos(self, count: int) -> Path:
        folder = self.work / f"photos-{count}"
        return folder if folder.exists() else inputs.photos(folder, count)


def run(command: list[str], **environment: str) -> Ran:
    """Run a process. Raises SystemExit with its output if it fails."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        out.seek(0)
        output = out.read().decode(errors="replace")
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{output[-3000:]}")
    return Ran(seconds, usage.ru_maxrss, output)


def behind(row: Row) -> bool:
    """Return whether a row misses its goal by more than 1 %."""
    goal, seconds = row["goal"], row["ours_ms"] / 1000
    return (
        seconds > 1.01 * goal.get("seconds", float("inf"))
        or ("ratio" in goal and (row["ratio"] or 0.0) < goal["ratio"] - 0.01)
        or ("rate" in goal and row.get("rate", 0.0) < 0.99 * goal["rate"])
        or ("accuracy" in row and row["accuracy"] < row.get("peer_accuracy", 0.0))
        or ("times_file" in goal and row.get("times_file", 0.0) > goal["times_file"])
        or not row["error_ok"]
    )


def train_text(bench: Bench, count: int, epochs: int = 5) -> None:
    """Time training on a file, and fastText and a linear classifier on the same rows."""
    data = bench.texts(count)
    options = ("train", "text", "--data", data, "--epochs", epochs, "--overwrite", "--quiet", "--out")
    runs: dict[str, tuple[Ran, dict[str, Any]]] = {}
    bench.empty(f"kernels-{count}")
    for name in ("cold",) if count > _LARGE else ("cold", "warm"):
        done = bench.minidl(*options, bench.work / "run", cache=f"kernels-{count}")
        runs[name] = done, json.loads((bench.work / "run" / "report.json").read_text())
    others = [sys.executable, "-m", "benchmarks.text_peers", str(data), str(epochs)]
    peers = json.loads(run(others + ["--fast"] * (count > _LARGE)).out.splitlines()[-1])
    best = min(peers.values(), key=lambda peer: peer["seconds"])
    linear = max((peer["accuracy"] for name, peer in peers.items() if name != "fastText"), default=0.0)
    goals: dict[int, dict[str, float]] = {
        300_000: {"seconds": 5.0, "ratio": 1.0},
        4_000_000: {"ratio": 1.0, "times_file": 8.0},
    }
    for name, (done, report) in runs.items():
        bench.add(
            f"train text, {count:,} texts, {epochs} epochs, {name}", done.seconds,
            goals.get(count, {}) if name == "cold" else {}, best["name"], best["seconds"], texts=count,
            accuracy=report["accuracy"], peer_accuracy=linear, peers=peers, phases=report["phases"],
            host_kilobytes=done.kilobytes, device_bytes=report["memory"]["device_bytes"],
            times_file=round(1024 * done.kilobytes / data.stat().st_size, 2),
        )  # fmt: skip


def predict_text(bench: Bench, count: int = 60_000) -> None:
    """Time predictions of the texts of a file, without the start (measured with one text): medians of five."""
    data = bench.texts(300_000)
    if not (bench.work / "run" / "report.json").exists():
        bench.minidl("train", "text", "--data", data, "--epochs", 1, "--quiet", "--out", bench.work / "run")
    part = bench.work / "some.csv"
    with data.open() as file:
        part.write_text("".join(line for _, line in zip(range(count + 1), file, strict=False)))
    runs: dict[str, list[Ran]] = {"alone": [], "many": []}
    for _ in range(6):  # the first compiles the kernels
        runs["alone"].append(bench.minidl("predict", bench.work / "run", "one text"))
        runs["many"].append(bench.minidl("predict", bench.work / "run", "--file", part))
    alone, many = (statistics.median(ran.seconds for ran in rans[1:]) for rans in runs.values())
    more = max(many - alone, _NOISE)  # the file is read during the import of torch, which `alone` includes
    bench.add(
        f"predict of {count:,} texts from a file", many, {"rate": 100_000.0}, rate=round(count / more),
        error_ok=all(len(ran.out.splitlines()) == count for ran in runs["many"]), start_s=round(alone, 2),
    )  # fmt: skip


def cold(bench: Bench) -> None:
    """Time first commands, complete or only their training, without and with compiled kernels."""
    commands = {
        "train text --data docstrings": (("text", "--data", "docstrings"), 6.0, 3.0, "total"),
        "train images --data digits --epochs 3": (("images", "--data", "digits", "--epochs", 3), 2.0, None, "training"),
        "train gan --data digits --epochs 1": (("gan", "--data", "digits", "--epochs", 1), 2.0, None, "training"),
    }
    for number, (name, (arguments, goal, warm_goal, part)) in enumerate(commands.items()):
        cache = f"kernels-cold-{number}"  # not in the run folder, which --overwrite replaces
        bench.empty(cache)
        for state, limit in (("cold", goal), ("warm", warm_goal)):
            out = bench.work / f"cold-{number}"
            done = bench.minidl("train", *arguments, "--overwrite", "--quiet", "--out", out, cache=cache)
            phases = json.loads((out / "report.json").read_text())["phases"]
            seconds = done.seconds if part == "total" else phases["train"] + phases["compile"] + phases["evaluate"]
            bench.add(f"{name}, {state}, {part}", seconds, {} if limit is None else {"seconds": limit}, phases=phases)


def generate(bench: Bench, count: int = 10_000) -> None:
    """Time PNG files of generated pictures, and Pillow writing as many in processes."""
    bench.minidl("generate", "--seeds", "0-9", "--quiet", "--overwrite", "--out", bench.work / "few")
    out = bench.work / "made"
    done = bench.minidl("generate", "--seeds", f"0-{count - 1}", "--quiet", "--overwrite", "--out", out)
    peer = run([sys.executable, "-m", "benchmarks.picture_peers", "write", str(count), str(bench.work / "theirs")])
    bench.add(
        f"generate --seeds 0-{count - 1} to PNG", done.seconds, {"seconds": 3.0}, "Pillow in processes, writing alone",
        peer.seconds, error_ok=len(list(out.glob("*.png"))) == count,
    )  # fmt: skip


def train_photos(bench: Bench, count: int = 20_000) -> None:
    """Time training on a folder of JPEG files, and Pillow decoding them in processes."""
    folder, out = bench.photos(count), bench.work / "photos-run"
    options = ("--size", 64, "--epochs", 5, "--overwrite", "--quiet", "--out", out)
    bench.empty("photos")
    done = bench.minidl("train", "images", "--data", folder, *options, cache="photos")
    report = json.loads((out / "report.json").read_text())
    peer = run([sys.executable, "-m", "benchmarks.picture_peers", "read", str(folder), "64"])
    bench.add(
        f"train images on {count:,} JPEGs at 64x64, 5 epochs, cold", done.seconds, {"seconds": 8.0},
        "Pillow in processes, decoding alone", peer.seconds, phases=report["phases"], host_kilobytes=done.kilobytes,
    )  # fmt: skip
    some = [str(path) for path in sorted(folder.rglob("*.jpg"))[:2000]]
    bench.minidl("predict", out, *some, cache="photos")
    answers = bench.minidl("predict", out, *some, cache="photos")
    bench.add(
        "predict of 2,000 JPEGs", answers.seconds, {"seconds": 3.0}, error_ok=len(answers.out.splitlines()) == 2000
    )


def first_step(bench: Bench) -> None:
    """Time the first training step of ResNet-50 without compiled kernels, and the first at another batch size."""
    module = [sys.executable, "-m", "benchmarks.first_step"]
    seconds = {}
    for who, options in (("ours", []), ("theirs", ["--peer"])):
        bench.empty("first")
        caches = {name: str(bench.work / "first") for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        seconds[who] = json.loads(run([*module, *options], **caches).out.splitlines()[-1])
    for size, goal, when in (("64", 8.0, "nothing compiled"), ("256", 2.0, "after 64 in the same process")):
        name = f"first step of ResNet-50's training, batch {size}, {when}"
        bench.add(name, seconds["ours"][size], {"seconds": goal}, "torch.compile", seconds["theirs"][size])


def cpu(bench: Bench, count: int = 60_000) -> None:
    """Time training without a GPU, on two processors."""
    data = bench.texts(count)
    command = [sys.executable, "-m", "minidl", "train", "text", "--data", str(data), "--epochs", "1", "--overwrite"]
    done = run(["taskset", "-c", "0,1", *command, "--quiet", "--out", str(bench.work / "cpu")], CUDA_VISIBLE_DEVICES="")
    report = json.loads((bench.work / "cpu" / "report.json").read_text())
    bench.add(
        f"train text, {count:,} texts, 1 epoch, two processors, no GPU", done.seconds, {"seconds": 20.0},
        phases=report["phases"], accuracy=report["accuracy"], host_kilobytes=done.kilobytes,
    )  # fmt: skip


PARTS: dict[str, Callable[[Bench], None]] = {
    **{f"text-{n}": lambda bench, n=n: train_text(bench, n) for n in (10_000, 100_000, 300_000, 1_000_000, 4_000_000)},
    "predict": predict_text,
    "cold": cold,
    "generate": generate,
    "photos": train_photos,
    "first-step": first_step,
    "cpu": cpu,
}


def measured_on() -> dict[str, str]:
    """Return the GPU and versions; without a GPU, the host and versions."""
    import torch

    if torch.cuda.is_available():
        from minidl.tools.bench.machine import machine

        return machine()
    return {"device": "cpu", "torch": torch.__version__, "python": platform.python_version()}


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a results file. Raises SystemExit for any other file."""
    try:
        return list(json.loads(path.read_text())["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path} has no results of this benchmark ({type(error).__name__}: {error}); make it with --out")


def merged(path: Path, rows: list[Row]) -> dict[str, Any]:
    """Return the content of a results file in which these rows replace rows of the same names."""
    old = rows_of(path) if path.exists() else []
    names = {row["name"] for row in rows}
    return {**measured_on(), "processors": os.cpu_count(), "rows": [*(r for r in old if r["name"] not in names), *rows]}


def plot(path: Path) -> None:
    """Draw seconds and memory by the number of texts."""
    from matplotlib.figure import Figure

    rows = [row for row in rows_of(path) if "texts" in row and row["name"].endswith("cold")]
    if not rows:
        sys.exit(f"{path} has no rows of the parts text-...: measure them first")
    rows.sort(key=lambda row: row["texts"])
    counts = [row["texts"] for row in rows]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog(counts, [row["ours_ms"] / 1000 for row in rows], marker="o", label="minidl, whole command")
    for peer in rows[0]["peers"]:
        measured = [row for row in rows if peer in row["peers"]]
        seconds = [row["peers"][peer]["seconds"] for row in measured]
        left.loglog([row["texts"] for row in measured], seconds, marker=".", label=peer)
    left.set(xlabel="texts", ylabel="seconds")
    left.legend()
    right.loglog(counts, [row["host_kilobytes"] / 2**20 for row in rows], marker="o", label="host memory")
    right.set(xlabel="texts", ylabel="GiB")
    right.legend()
    figure.savefig(path.with_suffix(".svg"))


def check(path: Path) -> int:
    """Print the rows that miss their goals; return the exit code."""
    rows = rows_of(path)
    late = [row for row in rows if behind(row)]
    for row in late:
        ratio = "" if row["ratio"] is None else f", ratio {row['ratio']}"
        print(f"behind: {row['name']}: {row['ours_ms'] / 1000:.2f} s{ratio}, goal {row['goal']}")
    print(f"{len(rows) - len(late)} of {len(rows)} rows are at their goals")
    return 1 if late else 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    if not (options.parts or options.list or options.plot or options.check):
        parser.error("name parts, or give --list, --check FILE or --plot FILE")
    if options.list:
        print("\n".join(PARTS))
    if options.parts:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(options.work or Path(folder))
            bench.work.mkdir(parents=True, exist_ok=True)
            for part in options.parts:
                PARTS[part](bench)
                if options.out is not None:
                    options.out.write_text(json.dumps(merged(options.out, bench.rows), indent=1) + "\n")
    if options.plot is not None:
        plot(options.plot)
    if options.check is not None:
        sys.exit(check(options.check))


if __name__ == "__main__":
    main()
