"""Run a Python script or module with every kernel checked, in its process and in all processes that it starts.

The script runs as with `python script.py`. Each process appends its findings to one file immediately, so that they
survive even SIGKILL. The PYTHONPATH of all processes begins with `testing.sanitizer.startup`, which starts the checks.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidl.testing.sanitizer.findings import Finding, Place

_RECORD, _FIRST = "SANITIZED_RECORD", "SANITIZED_FIRST"  # variables that `startup` reads
_STARTUP = Path(__file__).parents[1] / "testing/sanitizer/startup"
_PATIENCE = 5.0  # seconds to wait for processes that outlive the script or ignore a signal


@dataclass
class Outcome:
    """The results of all processes of a script: exit code, launches by kernel, bugs, and unchecked launches."""

    code: int
    launches: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def run(script: str, arguments: Sequence[str], *, module: bool, stop: bool) -> Outcome:
    """Run a script's file, or a module by name, with its arguments; with `stop` a process ends at its first bug.

    If a signal ended the script, its exit code is 128 plus the number of the signal, as in a shell.
    """
    with tempfile.TemporaryDirectory(prefix="minidl-") as folder:
        record = Path(folder) / "record.jsonl"
        record.touch()
        folders = [str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, _RECORD: str(record), "PYTHONPATH": os.pathsep.join(folders)}
        if stop:
            env[_FIRST] = "1"
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        command = [sys.executable, *flags, *(["-m"] if module else []), script, *arguments]
        code = _wait(subprocess.Popen(command, env=env))
        has_ended = _wait_for_all(record)
        outcome = _read(record.read_text(), code)
    if not has_ended:
        outcome.unchecked.append("processes of the script that still run")
    if stop and outcome.findings and code == 1:
        outcome.code = 0  # the bug ended it
    return outcome


def has_module(name: str) -> bool:
    """Return whether a module, or the package that may contain it, exists, also in the current folder."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process and return its exit code. Passes a signal on, unless a terminal sends it to both."""
    try:
        code = process.wait()
    except KeyboardInterrupt:
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0 if number is None else _PATIENCE)
                break
        code = -2
    return code if code >= 0 else 128 - code


def _wait_for_all(record: Path) -> bool:
    """Wait for all processes that write to the record; return False if some still run after _PATIENCE."""
    end = time.monotonic() + _PATIENCE
    with record.open("rb") as file:
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.02)
    return False


def _read(text: str, code: int) -> Outcome:
    outcome, findings = Outcome(code), dict[tuple[Any, ...], Finding]()
    for entry in map(json.loads, text.splitlines()):
        if "launch" in entry:
            outcome.launches[entry["launch"]] += 1
        elif "unchecked" in entry:
            outcome.unchecked.append(f"{entry['unchecked']}: {entry['why']}")
        else:
            place, index, program = Place(*entry["place"]), entry["index"], tuple(entry["program"])
            bug = Finding(
                entry["kind"], entry["kernel"], program, place, entry["tensor"], entry["what"],
                None if index is None else tuple(index),
            )  # fmt: skip
            bug = findings.setdefault((bug.kind, bug.kernel, place, bug.tensor), bug)
            bug.elements += entry["elements"]
            bug.programs.add(program)
    outcome.findings = list(findings.values())
    return outcome
