"""Tries inputs of one target in a process of its own and says on standard output, a JSON object per line, what came.

    python -m tests.trials.fuzz.worker TARGET[,TARGET...] FOLDER SECONDS SEED MOST    (`__main__.py` starts it)

What is tried lies in FOLDER/current, so that it is still there when the process is not. SECONDS and MOST inputs are for
each target.
"""

import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random

from tests.trials.fuzz import limits, mutate
from tests.trials.fuzz.arcs import Arcs
from tests.trials.fuzz.guard import Guard, TooSlow
from tests.trials.fuzz.target import Make
from tests.trials.fuzz.targets import TARGETS

_CORPUS = 2000
_SAY_SECONDS = 0.5


class Trial:
    """One target with its guard: `of` says what is wrong with an input, or with what it did."""

    def __init__(self, make: Make, folder: Path, follow: bool = True) -> None:
        work = Path(tempfile.mkdtemp(dir=folder))
        self.target = make(work)
        self.current = folder / "current"
        os.chdir(work)
        logging.disable()
        warnings.simplefilter("error")
        self.guard = Guard(folder, self.target.anywhere)
        self.arcs = Arcs(self.target.traced if follow else ())
        self.guard.limit_address_space()
        # What is loaded when it is first used is loaded now.
        for seed in self.target.seeds:
            self._run(seed)
        self.refused = 0

    def of(self, data: bytes) -> tuple[str, str] | None:
        """What the input did that it must not: a key, equal for equal causes, and the text; None when nothing."""
        self.current.write_bytes(data)
        guard = self.guard
        before = guard.forget_peak()
        guard.arm()
        try:
            error, trace = self._run(data)
        finally:
            guard.disarm()
        used = guard.resident(b"VmHWM:") - before
        if guard.broken:
            return guard.broken[0][:60], "\n".join(guard.broken[:5])
        if used > self.target.memory:
            return "memory", f"took {used / limits.MIB:.0f} MiB, the limit is {self.target.memory / limits.MIB:.0f}"
        if error is None:
            return None
        if type(error) not in self.target.errors:
            return f"{type(error).__name__} at {_place(error)}", trace
        self.refused += 1
        message = str(error)
        if not 1 <= len(message) <= limits.MESSAGE:
            return f"message at {_place(error)}", f"a message of {len(message)} characters: {message:.300}"
        return None

    def _run(self, data: bytes) -> tuple[BaseException | None, str]:
        try:
            with self.arcs:
                self.target.run(data)
        except (Exception, TooSlow) as error:  # noqa: BLE001  (which it may be is what is asked)
            return error, "".join(traceback.format_exception(error)[-6:])
        return None, ""


def _place(error: BaseException) -> str:
    """The innermost line of the package's own, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/minidl/" in frame.filename and "/tests/" not in frame.filename] or frames[-1:]
    return f"{own[-1].filename.rpartition('/minidl/')[2]}:{own[-1].lineno}" if own else "nowhere"


class Loop:
    """Changes inputs that took new ways, most often the newest."""

    def __init__(self, trial: Trial, seed: int) -> None:
        self.trial, self.draw = trial, Random(seed)
        self.corpus: list[bytes] = []
        self.known: set[str] = set()
        self.inputs = 0
        self.ways = 0

    def run(self, seconds: float, most: int) -> None:
        """Until the time is over, or so many inputs were tried; seeds come first."""
        end, said = time.monotonic() + seconds, 0.0
        for seed in self.trial.target.seeds:
            self._try(seed, keep=True)
        while time.monotonic() < end and self.inputs < most:
            self._try(self._next(), keep=False)
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                self._say()
        self._say()

    def _next(self) -> bytes:
        draw, target = self.draw, self.trial.target
        recent = draw.randrange(2) and self.corpus[-20:]
        data = draw.choice(recent or self.corpus)
        changed = None
        if target.change is not None and draw.randrange(3):
            try:
                changed = target.change(draw, data)
            except (ValueError, RecursionError, LookupError, OverflowError):
                changed = None
        if changed is None:
            changed = mutate.change_bytes(draw, data, self.corpus, target.words)
        if target.repair is not None and draw.randrange(2):
            changed = target.repair(changed)
        return changed[: limits.INPUT * 2]

    def _try(self, data: bytes, keep: bool) -> None:
        wrong = self.trial.of(data)
        self.inputs += 1
        ways = self.trial.arcs.seen
        if len(ways) > self.ways or keep:
            self.ways = len(ways)
            self.corpus.append(data)
            if len(self.corpus) > _CORPUS:
                del self.corpus[len(self.trial.target.seeds)]
        if wrong is not None and wrong[0] not in self.known:
            self.known.add(wrong[0])
            print(json.dumps({"key": wrong[0], "wrong": wrong[1], "input": data.hex()}), flush=True)

    def _say(self) -> None:
        said = {
            "inputs": self.inputs,
            "ways": self.ways,
            "kept": len(self.corpus),
            "refused": self.trial.refused,
        }
        print(json.dumps(said), flush=True)


def main() -> None:
    names, folder, seconds, seed, most = sys.argv[1:]
    for name in names.split(","):
        Loop(Trial(TARGETS[name], Path(folder)), int(seed)).run(float(seconds), int(most))


if __name__ == "__main__":
    main()
