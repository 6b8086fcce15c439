"""Feeds minidl's readers inputs that nobody meant well, for so many minutes, and ends with 1 where one broke a promise.

    python -m tests.trials.fuzz --minutes 10 [--target texts ...] [--seed 0] [--found FOLDER]
    python -m tests.trials.fuzz --target texts --input FILE                one input again
    python -m tests.trials.fuzz --list

The promises: a reader raises its own errors only, with a message of a sentence or two; it executes, unpickles and
starts nothing, opens no network, reads nothing but what it was given and writes nowhere but in its folder; and it keeps
to the time and the memory of `limits.py`. Inputs are changed ones of those that took a new way through the code.
"""

import argparse
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.trials.fuzz import limits
from tests.trials.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[3]
_SLICE = 60.0  # seconds of a worker; then the next target's turn comes
_START_SECONDS = 120.0  # a worker may take to load everything


class Session:
    """All workers of a command, and what they found."""

    def __init__(self, found: Path, folder: Path) -> None:
        self.found, self.folder = found, folder
        self.inputs: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.ways: dict[str, int] = {}
        self.violations: dict[tuple[str, str], Path] = {}

    def work(self, name: str, seconds: float, seed: int, most: int = 10**12) -> None:
        """One worker on a target; after a crash or a hang what it tried is kept."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        started = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "tests.trials.fuzz.worker",
            name,
            str(place),
            str(seconds),
            str(seed),
            str(most),
        ]
        with (place / "said").open("w+") as said:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True, env=_environment()
            )
            lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=_lines, args=(process, lines), daemon=True).start()
            last: dict[str, int] = {}
            try:
                wait = _START_SECONDS
                while line := lines.get(timeout=wait):
                    wait = limits.HANG_SECONDS
                    last = self._take(name, json.loads(line), started) or last
            except queue.Empty:
                process.kill()
                last["killed"] = 1
                self._keep(name, "hang", f"says nothing for {wait:g} s", (place / "current").read_bytes())
            code = process.wait()
            if not last.get("killed") and (code or not last):
                said.seek(0)
                current = place / "current"
                text = said.read()[-2000:] or f"ended with {code}"
                self._keep(name, f"crash {code}", text, current.read_bytes() if current.exists() else b"")
        self.inputs[name] += last.get("inputs", 0)
        self.refused[name] += last.get("refused", 0)
        self.ways[name] = max(self.ways.get(name, 0), last.get("ways", 0))
        self.seconds[name] += time.monotonic() - started

    def _take(self, name: str, told: dict, started: float) -> dict | None:
        if "key" in told:
            self._keep(name, told["key"], told["wrong"], bytes.fromhex(told["input"]))
            return None
        if sys.stderr.isatty():
            done = self.inputs[name] + told["inputs"]
            rate = told["inputs"] / (time.monotonic() - started)
            text = f"{name:14} {done:>10,} inputs, {rate:6,.0f}/s, {told['ways']:,} ways"
            text += f", {len(self.violations)} violations"
            print(f"\r{text:<100}", end="", file=sys.stderr, flush=True)
        return told

    def _keep(self, name: str, key: str, wrong: str, data: bytes) -> None:
        if (name, key) in self.violations:
            return
        self.found.mkdir(parents=True, exist_ok=True)
        path = self.found / f"{name}-{len(self.violations)}"
        path.write_bytes(data)
        self.violations[name, key] = path
        print(f"\n{name}: {key}\n{wrong.rstrip()}\n  repeat: {_repeat(name, path)}", flush=True)

    def summary(self) -> str:
        """A line per target, and one for all."""
        lines = [
            f"{name:14} {self.inputs[name]:>10,} inputs  {self.refused[name]:>10,} refused  {self.ways[name]:>6,} ways"
            f"  {self.seconds[name] / 60:6.1f} min"
            for name in self.inputs
        ]
        every = sum(self.inputs.values())
        lines.append(
            f"{every:,} inputs in {sum(self.seconds.values()) / 3600:.2f} h, {len(self.violations)} violations"
        )
        return "\n".join(lines)


def _lines(process: subprocess.Popen, lines: queue.Queue) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


def _environment() -> dict[str, str]:
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **one, "TRITON_INTERPRET": "1", "PYTHONHASHSEED": "0", "MINIDL_DATA": "/nonexistent"}


def _repeat(name: str, path: Path) -> str:
    return shlex.join(["python", "-m", "tests.trials.fuzz", "--target", name, "--input", str(path)])


def _again(name: str, path: Path) -> int:
    """One input in this process, with no limit but those that are measured."""
    from tests.trials.fuzz.worker import Trial

    data = path.resolve().read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        wrong = Trial(TARGETS[name], Path(folder), follow=False).of(data)
        os.chdir(ROOT)
    print("nothing is wrong" if wrong is None else f"{wrong[0]}\n{wrong[1]}")
    return int(wrong is not None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trials.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="in all, shared by the targets")
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=10**12, help="most of a target")
    parser.add_argument("--input", type=Path, help="a file that was found: only this, of the one --target")
    parser.add_argument(
        "--found", type=Path, default=Path(tempfile.gettempdir()) / "minidl-fuzz", help="folder of violations"
    )
    parser.add_argument("--list", action="store_true", help="only name the targets")
    given = parser.parse_args()
    if given.list:
        for name, make in TARGETS.items():
            print(f"{name:14} {make.__doc__}")
        return 0
    names = given.target or list(TARGETS)
    if given.input is not None:
        if len(names) != 1:
            parser.error("--input goes with one --target")
        return _again(names[0], given.input)
    with tempfile.TemporaryDirectory(prefix="minidl-fuzz-") as folder:
        session = Session(given.found, Path(folder))
        each = given.minutes * 60 / len(names)
        rounds = max(1, round(each / _SLICE))
        try:
            for turn in range(rounds):
                for name in names:
                    session.work(name, each / rounds, given.seed * 1000 + turn, given.inputs)
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
        print(f"\n{session.summary()}")
    return int(bool(session.violations))


if __name__ == "__main__":
    sys.exit(main())
