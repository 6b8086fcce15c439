"""The processes of one command on one host, each with torchrun's environment: started, watched, and ended together.

    RANK, LOCAL_RANK    the number of the process, from 0 on
    WORLD_SIZE          how many there are, LOCAL_WORLD_SIZE on this host
    MASTER_ADDR, _PORT  where they can meet
    MINIDL_RUN          letters that no other start has

None outlives the one that started them, however that ended: Linux kills them with it. Each is a group of its own, so
that Ctrl-C reaches them through that one alone, and that what they have started ends with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from minidl.common import console, import_lock, timing
from minidl.data.records import DataError
from minidl.data.workers import STOPPED, WorkerError, is_stopped

RUN = "MINIDL_RUN"
_POLL, _PATIENCE = 0.02, 10.0  # seconds between two looks; until those that were asked to end are killed
_HEARD = 5.0  # seconds in which one says what is wrong that another has left to it
LEFT = "another process says what is wrong"  # printed by those that end without saying it; not passed on
_ERROR, _INTERRUPTED = "error: ", "interrupted"  # how the last line of a command that has judged itself begins
# prctl's PR_SET_PDEATHSIG; a parent that has ended before is told by its number.
_START = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
_COUNT = (
    "import ctypes; cuda, count = ctypes.CDLL('libcuda.so.1'), ctypes.c_int(); "
    "cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)); print(count.value)"
)


class Place(NamedTuple):
    """What a process is among those of its command."""

    rank: int
    world: int
    local: int
    local_world: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that torchrun, or `run`, has given this process; None where it is alone. Raises DataError for variables
    that do not belong together."""
    if "WORLD_SIZE" not in environment or "RANK" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    usual = dict(zip(names, ("", "", environment["RANK"], environment["WORLD_SIZE"]), strict=True))
    texts = [environment.get(name, usual[name]) for name in names]
    if not all(text.isascii() and text.isdecimal() and len(text) < 10 for text in texts):
        found = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
        raise DataError(f"{found}: expected whole numbers, as torchrun sets them; unset them for one process")
    rank, world, local, local_world = map(int, texts)
    if not (rank < world and local < local_world <= world):
        raise DataError(f"RANK={rank} of WORLD_SIZE={world}, LOCAL_RANK={local} of {local_world}: no such place")
    return Place(rank, world, local, local_world)


def missing_address(environment: Mapping[str, str] = os.environ) -> str:
    """What to say where it is not told where the processes meet; else nothing."""
    lacking = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name))
    if not lacking:
        return ""
    return (
        f"WORLD_SIZE={environment.get('WORLD_SIZE')} is set, but not {lacking}, where the processes meet: start them "
        "by torchrun, which sets all; for one process unset RANK and WORLD_SIZE"
    )


def gpus() -> int:
    """How many GPUs CUDA gives this process, asked without torch, and by another process: one that has asked goes on
    seeing all of them, whatever `only` says afterwards."""
    try:
        ctypes.CDLL("libcuda.so.1")
        ask = [sys.executable, "-I", "-S", "-c", _COUNT]
        return int(subprocess.run(ask, check=True, capture_output=True, text=True, timeout=60).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def only(gpu: int) -> dict[str, str]:
    """The variable that shows a process one of the GPUs that this one sees; those are shared where they are fewer."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return {"CUDA_VISIBLE_DEVICES": str(gpu)}
    seen = [name.strip() for name in given.split(",")]
    return {"CUDA_VISIBLE_DEVICES": seen[gpu % len(seen)]}


def starter() -> str:
    """What tells the torchrun, or the `run`, that has started this process from all others, also when it starts this
    process anew; nothing where neither did."""
    if RUN in os.environ:
        return os.environ[RUN]
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # which users repeat, or leave out
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot} {os.getppid()} {timing.begun(os.getppid())}".encode()).hexdigest()[:16]


def started_together() -> int:
    """How many processes `run` has started together with this one; 0 where it did not start it."""
    return int(os.environ["WORLD_SIZE"]) if RUN in os.environ else 0


def again() -> list[str]:
    """The command line of this process, which is one of minidl."""
    return import_lock.python("from minidl.__main__ import main; sys.argv[0] = 'minidl'; main()", *sys.argv[1:])


def run(
    command: Sequence[str],
    count: int,
    restarts: int = 0,
    first: bool = False,
    left: Callable[[], str] = lambda: "",
    together: bool = False,
    stopped: float = STOPPED,
) -> None:
    """Run a command in `count` processes until all have done their work, and pass on what they print.

    When one fails the others are ended. One that is killed or crashes is started anew, each up to `restarts` times; not
    one whose last line says what is wrong, or that refuses the command (exit code 2). With `together`, all are then
    started anew, so many times. With `first`, all is done when the first process has ended well. One that
    is stopped for more than `stopped` seconds is killed.

    Raises DataError for an exit code of 2, else WorkerError: with what it says is wrong where it speaks for all (of a
    command, or `together`), else with the rank, how it ended, and its last line; `left` adds what is left to do.
    """
    variables = {**os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), RUN: secrets.token_hex(8)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
    ones: list[_One] = []
    begun = [0] * count
    try:
        ones.extend(_One(command, rank, variables) for rank in range(count))
        while any(one.popen.returncode != 0 for one in ones[: 1 if first else count]):
            time.sleep(_POLL)
            for one in ones:
                one.look(stopped)
            for one in _failed(ones)[: 1 if together else count]:
                if first and ones[0].popen.returncode == 0:
                    break
                if one.refused or one.spoke or begun[one.rank] >= restarts:
                    _end(ones)
                    one.tell(left(), together)
                what = "all are started anew, and go on from what is saved" if together else "it is started anew"
                console.note(f"{one.ending()}; {what}")
                anew = list(ones) if together else [one]
                _end(anew)
                for each in anew:
                    begun[each.rank] += 1
                    ones[each.rank] = _One(command, each.rank, variables)
    except OSError as error:
        raise WorkerError(f"{count} processes cannot be started: {error.strerror or error}; give fewer") from None
    finally:
        _end(ones)


class _One:
    """One process."""

    def __init__(self, command: Sequence[str], rank: int, variables: dict[str, str]) -> None:
        self.rank, self.last, self.quiet, self.silent = rank, "", False, False
        self._still, self._why = 0.0, ""  # seconds for which it is stopped; why it was killed
        # Its progress bar needs the terminal itself.
        own = None if rank == 0 and sys.stdout.isatty() else subprocess.PIPE
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}, process_group=0,
            stdin=subprocess.DEVNULL, stdout=own, stderr=subprocess.PIPE, encoding="utf-8", errors="backslashreplace",
        )  # fmt: skip
        pipes = [(self.popen.stdout, "stdout"), (self.popen.stderr, "stderr")]
        self._threads = [threading.Thread(target=self._pass_on, args=pipe, daemon=True) for pipe in pipes if pipe[0]]
        for thread in self._threads:
            thread.start()

    def _pass_on(self, pipe: IO[str], name: str) -> None:
        with pipe:
            for line in pipe:
                if line.strip() == LEFT:
                    self.silent = True
                    continue
                # What was printed before an error may be read after it: the streams are two.
                if line.strip() not in ("", _INTERRUPTED) and not self.spoke:
                    self.last = line.strip()
                # An error is told once, when the others have ended; that all are interrupted, by what started them.
                if not self.quiet and not line.startswith(_ERROR) and line.strip() != _INTERRUPTED:
                    with contextlib.suppress(OSError, ValueError):
                        console.echo(line, error=name == "stderr", end="")

    @property
    def running(self) -> bool:
        # It stays a zombie, so that no other group gets its number.
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.popen.returncode is None and os.waitid(os.P_PID, self.popen.pid, look) is None

    @property
    def stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP: it answers nothing, and ends by SIGKILL alone."""
        return self.popen.returncode is None and is_stopped(self.popen.pid)

    def look(self, most: float) -> None:
        """Kill it where it is stopped for more than `most` seconds, counted in looks: this process may be, too."""
        self._still = self._still + _POLL if self.stopped else 0.0
        if self._still > most:
            self._why = f"process {self.rank} was stopped for {most:g} s, as by SIGSTOP, and killed"
            self.ended()

    def ended(self) -> int:
        """Its exit code, once it and what it has started are ended and what it has printed is read."""
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            for thread in self._threads:
                thread.join(5.0)  # what has left its group may hold the pipe open
        return self.popen.returncode

    @property
    def spoke(self) -> bool:
        """Whether it has said what is wrong."""
        return self.last.startswith(_ERROR)

    @property
    def refused(self) -> bool:
        """Whether it has ended with the exit code of a command that cannot be done as it is given."""
        return self.popen.returncode == 2

    def ending(self) -> str:
        """How it ended."""
        code = self.popen.returncode
        names = {number.value: number.name for number in signal.Signals}
        how = f"was ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
        return (self._why or f"process {self.rank} {how}") + (f" (its last line: {self.last})" if self.last else "")

    def tell(self, left: str, for_all: bool) -> None:
        """Raises what `run` does."""
        alone = self.spoke and (for_all or self.refused)
        what = self.last.removeprefix(_ERROR) if alone else self.ending()
        what += f"; {left}" if left else ""
        raise DataError(what) if self.refused else WorkerError(what)


def _failed(ones: Sequence[_One]) -> list[_One]:
    """Those that have not ended well; where one of them leaves it to another to say why, once that one has ended."""
    end = time.monotonic() + _HEARD
    while True:
        failed = [one for one in ones if not one.running and one.ended() != 0]
        unheard = any(one.silent for one in failed) and not any(one.spoke for one in failed)
        if not (unheard and any(one.running for one in ones) and time.monotonic() < end):
            # One that was killed or crashed comes first: others end as it is gone.
            return sorted(failed, key=lambda one: (one.popen.returncode > 0, one.spoke or one.silent, one.silent))
        time.sleep(_POLL)


def _end(ones: Sequence[_One]) -> None:
    """End all: each is asked, and killed if it takes too long or Ctrl-C comes again."""
    try:
        for one in ones:
            if one.running:
                one.quiet = one.rank > 0
                os.kill(one.popen.pid, signal.SIGTERM)
        end = time.monotonic() + _PATIENCE
        while any(one.running and not one.stopped for one in ones) and time.monotonic() < end:
            time.sleep(_POLL)
    finally:
        for one in ones:
            one.ended()


def _port() -> int:
    """A port that nobody uses: MASTER_PORT where it is set. Raises DataError for one in use."""
    given = os.environ.get("MASTER_PORT", "0")
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", int(given)))
        except (OSError, ValueError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "not a number of a port"
            raise DataError(f"MASTER_PORT is {given}: {why}; unset it, and a free one is taken") from None
        return int(tried.getsockname()[1])
