"""The recorder: watches launches, and joins them with the times of kernels."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from minidl.common import write_files
from minidl.runtime import launch
from minidl.tools.profiling.table import Event, Row, as_text, rows_of
from minidl.tools.profiling.work import Work, work_of
from minidl.training.run_folder import files
from minidl.training.run_folder.outputs import check_output
from minidl.training.run_folder.provenance import TRACE

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of work on the device in CUPTI's trace
UPDATE = "update_kernel"  # of an optimiser: one for each step and dtype
_running = threading.Lock()
_counting = threading.Lock()


def _stop(profiler: Any) -> dict[str, Any]:
    """Return torch's profile in Chrome's format: kernels have `cat` "kernel", `ts` and `dur` in microseconds."""
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        profiler.stop()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())


class Profile:
    """Context manager that profiles the kernels of all threads; its figures are complete after the block.

    trace    a file for the trace in Chrome's format (chrome://tracing, Perfetto), written at the end; missing folders
             are created
    updates  the number of optimisers that update weights in a training step
    """

    def __init__(self, trace: str | os.PathLike[str] | None = None, updates: int = 1) -> None:
        if type(updates) is not int or updates < 1:
            raise ValueError(f"profile: updates is {updates!r}, expected a number of at least 1")
        self.trace = None if trace is None else Path(trace)
        self.updates = updates
        self.events: list[Event] = []
        self.on_gpu = not launch.ON_CPU
        self.device = torch.cuda.get_device_name() if self.on_gpu else None
        self._launched: Counter[Work] = Counter()
        self._at_once = 0  # launches that were not recorded into a graph
        self._timed: list[Event] = []
        self._cuda: Any = None
        self._chrome: dict[str, Any] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Profile:
        if self.trace is not None:
            with contextlib.suppress(OSError):  # `check_output` reports it
                write_files.make_folder(self.trace.parent, parents=True)
            check_output("profile: trace", self.trace, TRACE)
        with contextlib.ExitStack() as stack:
            if not _running.acquire(blocking=False):
                raise RuntimeError(
                    "profile: another profile is running and records all kernels; end it before you start this one"
                )
            stack.callback(_running.release)
            self.events, self._timed, self._at_once = [], [], 0
            self._launched.clear()
            if self.on_gpu:
                # By CUPTI, which also sees the kernels that a CUDA graph launches.
                torch.cuda.synchronize()
                with warnings.catch_warnings(action="ignore"):
                    self._cuda = torch_profile(activities=[ProfilerActivity.CUDA])
                    self._cuda.start()
            stack.enter_context(launch.watch(self._on_launch))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self.events = self._timed
        if self._cuda is not None:
            # A failed device raises again, which must not hide the first error.
            with contextlib.suppress(*([] if error is None else [RuntimeError])):
                self._chrome = _stop(self._cuda)
                self.events = self._join(self._chrome["traceEvents"])
        if self.trace is not None and self.events:
            # A full disk must not hide it either.
            with contextlib.suppress(*([] if error is None else [OSError])):
                self.save(self.trace)

    def _on_launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any], go: Callable[[], None]
    ) -> None:
        work = work_of(kernel, grid, args, meta)
        if self.on_gpu:
            with _counting:
                self._launched[work] += 1
                self._at_once += not torch.cuda.is_current_stream_capturing()
            go()
            return
        start = time.perf_counter_ns()
        go()
        end = time.perf_counter_ns()
        self._timed.append(Event(work.kernel, ((work, 1),), start / 1e3, (end - start) / 1e3))

    def _join(self, records: list[dict[str, Any]]) -> list[Event]:
        """Return the runs on the device with the launches of the same kernel, grid and warps.

        A launch captured in a graph is one launch and many runs. If several kinds of launch have the same kernel, grid
        and warps, a run counts as each of them in part. The time of a dependent launch (`runtime.dependent_launch`)
        begins when the kernel before it on its stream ends.
        """
        kinds: dict[tuple[Any, ...], list[tuple[Work, int]]] = {}
        for work, count in self._launched.items():
            kinds.setdefault((work.kernel, work.grid, work.threads), []).append((work, count))
            kinds.setdefault((work.kernel,), []).append((work, count))
        events = []
        ends: dict[Any, float] = {}
        for event in sorted((e for e in records if e.get("cat") in ON_DEVICE), key=lambda e: float(e["ts"])):
            name, shape = event["name"], event.setdefault("args", {})
            grid, block = tuple(shape.get("grid", ())), shape.get("block", (0,))
            same = kinds.get((name, grid, block[0])) or kinds.get((name,), [])
            if same:
                shape["minidl"] = [work._asdict() for work, _ in same]
            start = float(event["ts"])
            end, before = start + float(event["dur"]), ends.get(shape.get("stream"), start)
            events.append(Event(name, tuple(same), start, max(0.0, end - max(start, before))))
            ends[shape.get("stream")] = max(end, before)
        return events

    @property
    def rows(self) -> list[Row]:
        """Return a row for each kernel and tile, the most time first. Kernels of other projects have no tile."""
        return rows_of(self.events, self.device)

    @property
    def launches_per_step(self) -> float | None:
        """Return the median number of minidl's kernels from one step's update to the next; None for fewer than two.

        Updates in direct succession belong to one optimiser, which has one for each dtype.
        """
        between = 0
        counts: list[int] = []
        for event in self.events:
            if not event.kinds:
                continue
            between += 1
            if event.kernel == UPDATE:
                if counts and between == 1:
                    counts[-1] += 1
                else:
                    counts.append(between)
                between = 0
        end = len(counts) // self.updates * self.updates
        steps = [sum(counts[i : i + self.updates]) for i in range(0, end, self.updates)]
        # The first step also counts earlier kernels.
        return statistics.median(steps[1:]) if len(steps) > 1 else None

    @property
    def missing(self) -> int:
        """Return a lower bound of launches without a time: the GPU's recorder stops when its buffer is full."""
        return max(0, self._at_once - sum(bool(event.kinds) for event in self.events))

    def __str__(self) -> str:
        return as_text(self.rows, self.device, self.launches_per_step, self.missing)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace in Chrome's format, with the rows of the table under "minidl"."""
        trace: dict[str, Any] = dict(self._chrome) if self.on_gpu else {"traceEvents": self._host_events()}
        trace["minidl"] = {
            "device": self.device or ("cpu (compiled)" if launch.COMPILED_CPU else "cpu (interpreted)"),
            "launches_per_step": self.launches_per_step,
            "missing": self.missing,
            "rows": [row.as_json() for row in self.rows],
        }
        files.write_text(Path(path), json.dumps(trace, separators=(",", ":")))

    def _host_events(self) -> list[dict[str, Any]]:
        process = {"pid": os.getpid(), "tid": 0}
        records: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "args": {"name": "Triton's interpreter"}, **process}
        ]
        for event in self.events:
            times = {"ts": event.start - self.events[0].start, "dur": event.duration}
            args = event.kinds[0][0]._asdict()
            records.append({"name": event.kernel, "cat": "kernel", "ph": "X", **times, "args": args, **process})
        return records


def profile(trace: str | os.PathLike[str] | None = None, *, updates: int = 1) -> Profile:
    """Return a context manager that profiles the kernels of its block; see `Profile`.

    trace    a file for the trace in Chrome's format
    updates  the number of optimisers that update weights in a training step, such as 2 for a GAN: for launches per step
    Entering raises ValueError for a trace that cannot be written, RuntimeError inside another profile or, on a GPU,
    inside torch's profiler.
    """
    return Profile(trace, updates)
