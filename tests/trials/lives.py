"""Processes that train, and how they are brought to their end."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("start-up", "set-up", "steps", "validation", "end of an epoch", "saving", "report", "end")
# A life is stopped when it takes so long: it hangs.
MOST_SECONDS = 600


def environment(**more):
    """That of every process of a trial: one thread each, and no colours in its log."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        **os.environ, **one_thread, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1",
        # The question whether there is a GPU must leave it untouched, or no child could use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1", **more,
    }  # fmt: skip


@dataclass
class Life:
    """One process. `code` is its exit status once it has ended."""

    handle: int  # a pidfd: it names this process even when its number is used again
    collect: object
    log: Path
    timeline: Path | None
    started: float = field(default_factory=time.monotonic)
    code: int | None = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.code is None:
            self.kill()

    def ended(self, seconds):
        """Wait for the end, at most so long; tells if it has come."""
        if self.code is None and select.select([self.handle], [], [], max(0.0, seconds))[0]:
            os.close(self.handle)
            self.code = self.collect()
        return self.code is not None

    def send(self, number):
        """A signal, if the process still lives."""
        if self.code is None:
            signal.pidfd_send_signal(self.handle, number)

    def kill(self):
        """SIGKILL, and wait for the end."""
        self.send(signal.SIGKILL)
        assert self.ended(60), "the process survives SIGKILL"

    def places(self):
        """(time, place) of every line that the timeline has."""
        text = self.timeline.read_text() if self.timeline and self.timeline.exists() else ""
        lines = [line.split(" ", 1) for line in text.splitlines()]
        return [(float(moment), place) for moment, place in lines]

    def place(self):
        """Where it is, or was when it ended."""
        return place_after(place for _, place in self.places())


def place_after(places):
    """Where a life is that has noted these: in a place, or saving, which a thread does beside it."""
    now, saving = PLACES[0], 0
    for place in places:
        if place.endswith("saving"):
            saving += 1 if place[0] == "+" else -1
        elif place != "file":
            now = place
    return "saving" if saving else now


class Parent:
    """A warm process, see `warm`. `ready` tells whether its children are lives as good as real ones."""

    def __init__(self, seed, **more):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.trials.warm"],
            cwd=ROOT, env=environment(PYTHONHASHSEED=str(seed), **more), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.ready = json.loads(self.process.stdout.readline())["ready"]
        if self.ready:
            self.ready = self.ask({"wait": self.ask({"probe": True})["pid"]})["code"] == 0

    def ask(self, request):
        """The answer to a request."""
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(self, argv, folder, name, die_at=None):
        """A life; its log and timeline are in `folder`."""
        log, timeline = folder / f"{name}.log", folder / f"{name}.timeline"
        request = {"argv": argv, "log": str(log), "timeline": str(timeline), "die_at": die_at}
        pid = self.ask(request)["pid"]
        return Life(os.pidfd_open(pid), lambda: self.ask({"wait": pid})["code"], log, timeline)

    def close(self):
        """End it."""
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


class Cold:
    """Where children of a parent cannot use the device: a process of its own for each life, with a timeline."""

    def start(self, argv, folder, name, die_at=None):
        """A life; its log and timeline are in `folder`."""
        log, timeline = folder / f"{name}.log", folder / f"{name}.timeline"
        request = {"argv": argv, "log": str(log), "timeline": str(timeline), "die_at": die_at}
        return _process(["-W", "error", "-m", "tests.trials.warm", json.dumps(request)], log, timeline)

    def close(self):
        """Nothing is left."""


def start_real(argv, folder, name):
    """`python -m minidl` as users have it: no timeline."""
    return _process(["-W", "error", "-m", "minidl", *argv], folder / f"{name}.log", None)


def _process(arguments, log, timeline):
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip
    return Life(os.pidfd_open(process.pid), process.wait, log, timeline)
