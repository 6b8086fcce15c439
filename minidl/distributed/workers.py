"""Start, watch and end the processes of one command on one host, each with torchrun's environment.

    RANK, LOCAL_RANK    the number of the process, from 0
    WORLD_SIZE          the number of processes, LOCAL_WORLD_SIZE on this host
    MASTER_ADDR, _PORT  the address of the rendezvous
    MINIDL_RUN          a random identifier of this start

Linux kills the processes when their parent ends for any reason. Each has its own process group, so that Ctrl-C reaches
it only through the parent, and its child processes end with it.
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
_POLL, _PATIENCE = 0.02, 10.0  # seconds between polls; before processes that do not end are killed
_REPORT_TIMEOUT = 5.0  # seconds to wait for the process that prints the error
LEFT = "another process says what is wrong"  # printed by processes that do not print the error; not shown
_ERROR, _INTERRUPTED = "error: ", "interrupted"  # how the last line begins if the command reported its own failure
# PR_SET_PDEATHSIG; the process ID shows if the parent has already ended.
_START = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == int(sys.argv[1]) or os._exit(1); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
_COUNT = (
    "import ctypes; cuda, count = ctypes.CDLL('libcuda.so.1'), ctypes.c_int(); "
    "cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)); print(count.value)"
)


class Ranks(NamedTuple):
    """The ranks of a process."""

    rank: int
    world: int
    local: int
    local_world: int


def ranks(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """Return the ranks that torchrun or `run` gave this process, None for a single process. Raises DataError for
    inconsistent variables."""
    if "WORLD_SIZE" not in environment or "RANK" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    defaults = dict(zip(names, ("", "", environment["RANK"], environment["WORLD_SIZE"]), strict=True))
    texts = [environment.get(name, defaults[name]) for name in names]
    if not all(text.isascii() and text.isdecimal() and len(text) < 10 for text in texts):
        values = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
        raise DataError(f"{values}: expected whole numbers, as torchrun sets them; unset them for one process")
    rank, world, local, local_world = map(int, texts)
    if not (rank < world and local < local_world <= world):
        raise DataError(f"RANK={rank} of WORLD_SIZE={world}, LOCAL_RANK={local} of {local_world}: no such rank")
    return Ranks(rank, world, local, local_world)


def missing_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return an error message if the address of the rendezvous is not set, else ""."""
    missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name))
    if not missing:
        return ""
    return (
        f"WORLD_SIZE={environment.get('WORLD_SIZE')} is set, but not {missing}: start the processes with "
        "torchrun, which sets all; for one process unset RANK and WORLD_SIZE"
    )


def gpus() -> int:
    """Return the number of visible GPUs, without torch. A child process asks CUDA, because a process that has asked
    keeps seeing all GPUs, whatever `only` sets afterwards."""
    try:
        ctypes.CDLL("libcuda.so.1")
        command = [sys.executable, "-I", "-S", "-c", _COUNT]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def only(gpu: int) -> dict[str, str]:
    """Return the variable that makes one visible GPU visible to a process; processes share GPUs if there are fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(gpu)}
    names = [name.strip() for name in visible.split(",")]
    return {"CUDA_VISIBLE_DEVICES": names[gpu % len(names)]}


def starter() -> str:
    """Return an identifier of the torchrun or `run` that started this process, the same after a restart; "" for
    neither."""
    if RUN in os.environ:
        return os.environ[RUN]
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun's ID itself may be repeated or missing
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot} {os.getppid()} {timing.begun(os.getppid())}".encode()).hexdigest()[:16]


def started_together() -> int:
    """Return the number of processes that `run` started with this one, 0 if it did not start it."""
    return int(os.environ["WORLD_SIZE"]) if RUN in os.environ else 0


def own_command() -> list[str]:
    """Return the command line of this process, a command of minidl."""
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
    """Run a command in `count` processes until all have ended, and show their output.

    When one fails, the others are ended. A process that is killed or crashes is restarted up to `restarts` times, but
    not if it printed an error or rejected the command (exit code 2). With `together`, all are restarted. With `first`,
    the run is complete when the first process has ended with exit code 0. A process that is stopped (SIGSTOP) for more
    than `stopped` seconds is killed.

    Raises DataError for exit code 2, else WorkerError: with the printed error if it applies to all processes, else with
    the rank, exit status and last line; `left` adds the remaining work.
    """
    variables = {**os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), RUN: secrets.token_hex(8)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
    processes: list[_Process] = []
    starts = [0] * count
    try:
        processes.extend(_Process(command, rank, variables) for rank in range(count))
        while any(one.popen.returncode != 0 for one in processes[: 1 if first else count]):
            time.sleep(_POLL)
            for one in processes:
                one.poll(stopped)
            for one in _failed(processes)[: 1 if together else count]:
                if first and processes[0].popen.returncode == 0:
                    break
                if one.refused or one.reported or starts[one.rank] >= restarts:
                    _end(processes)
                    one.raise_error(left(), together)
                what = "all are restarted from the last checkpoint" if together else "it is restarted"
                console.note(f"{one.ending()}; {what}")
                restarted = list(processes) if together else [one]
                _end(restarted)
                for each in restarted:
                    starts[each.rank] += 1
                    processes[each.rank] = _Process(command, each.rank, variables)
    except OSError as error:
        raise WorkerError(f"{count} processes cannot be started: {error.strerror or error}; use fewer") from None
    finally:
        _end(processes)


class _Process:
    """One process of the command."""

    def __init__(self, command: Sequence[str], rank: int, variables: dict[str, str]) -> None:
        self.rank, self.last, self.quiet, self.silent = rank, "", False, False
        self._still, self._why = 0.0, ""  # seconds it has been stopped; why it was killed
        # Its progress bar needs the terminal.
        stdout = None if rank == 0 and sys.stdout.isatty() else subprocess.PIPE
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}, process_group=0,
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, encoding="utf-8",
            errors="backslashreplace",
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
                # Output printed before an error on the other stream may be read after it.
                if line.strip() not in ("", _INTERRUPTED) and not self.reported:
                    self.last = line.strip()
                # `run` reports an error once all have ended; the parent reports an interruption.
                if not self.quiet and not line.startswith(_ERROR) and line.strip() != _INTERRUPTED:
                    with contextlib.suppress(OSError, ValueError):
                        console.echo(line, error=name == "stderr", end="")

    @property
    def running(self) -> bool:
        # Leave it a zombie, so that its process ID is not reused.
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.popen.returncode is None and os.waitid(os.P_PID, self.popen.pid, look) is None

    @property
    def stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP: it does not respond, and only SIGKILL ends it."""
        return self.popen.returncode is None and is_stopped(self.popen.pid)

    def poll(self, limit: float) -> None:
        """Kill it if it is stopped for more than `limit` seconds, counted in polls (this process may stop, too)."""
        self._still = self._still + _POLL if self.stopped else 0.0
        if self._still > limit:
            self._why = f"process {self.rank} was stopped for {limit:g} s, as by SIGSTOP, and killed"
            self.kill()

    def kill(self) -> int:
        """End it and its child processes, read its output, and return its exit code."""
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            for thread in self._threads:
                thread.join(5.0)  # a child in another group may hold the pipe open
        return self.popen.returncode

    @property
    def reported(self) -> bool:
        """Whether it has printed an error."""
        return self.last.startswith(_ERROR)

    @property
    def refused(self) -> bool:
        """Whether it has rejected the command."""
        return self.popen.returncode == 2

    def ending(self) -> str:
        """Return how it ended, for a message."""
        code = self.popen.returncode
        names = {number.value: number.name for number in signal.Signals}
        how = f"was ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
        return (self._why or f"process {self.rank} {how}") + (f" (its last line: {self.last})" if self.last else "")

    def raise_error(self, left: str, for_all: bool) -> None:
        """Raise the error of `run`."""
        is_for_all = self.reported and (for_all or self.refused)
        what = self.last.removeprefix(_ERROR) if is_for_all else self.ending()
        what += f"; {left}" if left else ""
        raise DataError(what) if self.refused else WorkerError(what)


def _failed(processes: Sequence[_Process]) -> list[_Process]:
    """Return the failed processes; if one left the report to another, wait for that one."""
    end = time.monotonic() + _REPORT_TIMEOUT
    while True:
        failed = [one for one in processes if not one.running and one.kill() != 0]
        unreported = any(one.silent for one in failed) and not any(one.reported for one in failed)
        if not (unreported and any(one.running for one in processes) and time.monotonic() < end):
            # A process that was killed or crashed comes first: it made the others end.
            return sorted(failed, key=lambda one: (one.popen.returncode > 0, one.reported or one.silent, one.silent))
        time.sleep(_POLL)


def _end(processes: Sequence[_Process]) -> None:
    """Send SIGTERM to all; kill those that take too long, or all on another Ctrl-C."""
    try:
        for one in processes:
            if one.running:
                one.quiet = one.rank > 0
                os.kill(one.popen.pid, signal.SIGTERM)
        end = time.monotonic() + _PATIENCE
        while any(one.running and not one.stopped for one in processes) and time.monotonic() < end:
            time.sleep(_POLL)
    finally:
        for one in processes:
            one.kill()


def _port() -> int:
    """Return MASTER_PORT if set, else a free port. Raises DataError for a port in use."""
    text = os.environ.get("MASTER_PORT", "0")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", int(text)))
        except (OSError, ValueError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "not a number of a port"
            raise DataError(f"MASTER_PORT is {text}: {why}; unset it to use a free port") from None
        return int(probe.getsockname()[1])
