"""Timing of alternatives side by side: minidl and its peers, or several tiles of a kernel.

Each side's calls are captured in a CUDA graph, which excludes launch costs in Python. The graphs are replayed in turn
for several rounds; a time is the median over rounds. Inputs rotate through enough sets to exceed the L2 cache, as in a
real run. Without a GPU, the host's clock is used.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from minidl.tools.bench.peers import PEERS, READ_THE_DEVICE, Others
from minidl.tools.bench.sides import Call
from minidl.tools.first_line import first_line

K = TypeVar("K")
L2_BYTES = 60e6
# Measured on an H200: bytes that a copy on the device reads and writes, and operations by dtype or precision.
COPY_BYTES_PER_MS = 4.30e9
MATRIX_FLOP_PER_MS = {
    "bfloat16": 0.79e12, "float16": 0.79e12, "tf32": 0.40e12, "ieee": 0.05e12,
    "tf32x3": 0.40e12 / 3,  # three products for one
}  # fmt: skip
ROUNDS = 5
TARGET_MS = 20.0


@dataclass
class Work:
    """One row: minidl's calls and those of each peer (one per input set), and the check of the first result.

    A `whole_step` is captured once and replayed, as in training; other calls are repeated within a graph. `others`
    makes the calls of other projects' kernels; `judge_others` checks them if they compute less than minidl's.
    """

    name: str
    dtype: str
    ours: Sequence[Call]
    peers: Mapping[str, Sequence[Call]]
    floor_ms: float
    judge: Callable[[Any], bool]
    whole_step: bool = False
    others: Callable[[], Others] | None = None
    judge_others: Callable[[Any], bool] | None = None


# A row's name, its goal, and the function that allocates its inputs on the GPU.
Row = tuple[str, float, Callable[[], Work]]


def floor_ms(bytes_moved: float, flop: float = 0.0, rate: str = "bfloat16") -> float:
    """Return the larger of the time to move the bytes once and the time to do the operations."""
    return max(bytes_moved / COPY_BYTES_PER_MS, flop / MATRIX_FLOP_PER_MS[rate])


def input_sets(bytes_each: float) -> int:
    """Return how many sets of inputs together are twice as large as the L2 cache."""
    return max(1, min(32, int(2 * L2_BYTES / max(bytes_each, 1)) + 1))


def measure(
    work: Work, others: bool = False, make_clock: MakeClock | None = None, rounds: int = ROUNDS, agree: float = 0.0,
    done: Callable[[str], None] = lambda phase: None,
) -> dict[str, Any]:  # fmt: skip
    """Return a row of the results file: the best peer, its time, the ratio theirs / ours. Wrong kernels are not timed.

    With `others`, kernels of other projects are peers, too; "left_out" names those that are wrong or fail, with the
    reason. `make_clock` replaces `Replay` as the clock of calls, `agree` is that of `in_turn`, and `done` is called
    with "called", "checked", "captured" and "timed" after these phases.
    """
    make_clock = make_clock or Replay
    row: dict[str, object] = {"name": work.name, "dtype": work.dtype}
    result = work.ours[0]()
    done("called")
    right = work.judge(result)
    done("checked")
    del result
    if not right:
        unknown = dict.fromkeys(("ours_ms", "peer", "peer_ms", "ratio"))
        return {**row, **unknown, "floor_ms": work.floor_ms, "error_ok": False}
    clocks: dict[str, Clock] = {"ours": make_clock(work.ours, work.whole_step)}
    clocks |= {name: make_clock(calls, work.whole_step) for name, calls in work.peers.items()}
    left_out: dict[str, str] = {}
    for name, make in work.others() if others and work.others is not None else ():
        try:
            calls = make()
            if not (work.judge_others or work.judge)(calls[0]()):
                raise ValueError("its result is wrong")
            one_by_one = make_clock is Replay and name in READ_THE_DEVICE.get(work.name.split()[0], ())
            clocks[name] = (Launched if one_by_one else make_clock)(calls, work.whole_step)
        except Exception as error:  # noqa: BLE001 (any error of another project's kernel is the reason to leave it out)
            line = first_line(error)
            left_out[name] = line.removeprefix("ValueError: ") or line
    done("captured")
    times = in_turn(clocks, rounds, agree)
    done("timed")
    medians = {name: statistics.median(values) for name, values in times.items()}
    peers = [name for name in clocks if name != "ours"]
    peer = min(peers, key=lambda name: medians[name])
    ratios = sorted(theirs / ours for theirs, ours in zip(times[peer], times["ours"], strict=True))
    return {
        **row,
        "ours_ms": round(medians["ours"], 5),
        "peer": peer,
        "peer_ms": round(medians[peer], 5),
        "ratio": round(statistics.median(ratios), 3),
        "floor_ms": round(work.floor_ms, 5),
        "error_ok": True,
        "share_of_floor": float(f"{work.floor_ms / medians['ours']:.3g}"),
        "peers_ms": {name: round(medians[name], 5) for name in peers},
        **({"others": {name: PEERS[name].version for name in peers if name in PEERS}} if others else {}),
        **({"left_out": left_out} if left_out else {}),
    }


def in_turn(sides: Mapping[K, Clock], rounds: int = ROUNDS, agree: float = 0.0) -> dict[K, list[float]]:
    """Return milliseconds per call of each side in each round; a round times every side once.

    The first two rounds suffice if the times of each side differ by at most the fraction `agree`.
    """
    times: dict[K, list[float]] = {name: [] for name in sides}
    for done in range(rounds):
        if done == 2 and all(max(two) <= (1 + agree) * min(two) for two in times.values()):
            break
        for name, side in sides.items():
            times[name].append(side.time())
    return times


class HostClock:
    """Calls timed by the host's clock, enough to last `target_ms`: for interpreted kernels."""

    most = sys.maxsize

    def __init__(self, calls: Sequence[Call], whole_step: bool = False, target_ms: float = TARGET_MS) -> None:
        self.calls, self.count = calls, len(calls)
        self.count = max(1, min(self.most, int(target_ms / max(self.time(), 1e-3))))

    def time(self) -> float:
        """Return milliseconds per call."""
        return self.timed(lambda: [self.calls[i % len(self.calls)]() for i in range(self.count)]) / self.count

    def timed(self, call: Call) -> float:
        """Return milliseconds of one call."""
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


class Launched(HostClock):
    """Calls launched one by one between two events, enough to last `target_ms`: for calls that no graph can contain."""

    most = 400

    def timed(self, call: Call) -> float:
        """Return milliseconds of one call on the device."""
        return _timed(call)


class Replay:
    """A CUDA graph with enough calls to last `target_ms`, cycling through the input sets.

    `pool` is the memory pool of the graph (default: a new one); graphs that run in turn may share one. A graph has at
    most `longest` calls and is replayed several times for more: capturing a call takes longer (some 30 us) than running
    it, and a replay adds some 2 us. The number of calls follows from a first graph, because single launches of short
    calls measure Python (98x50 of softmax with its gradient: 22 us in a graph of few calls, launch included).
    """

    most = 400

    def __init__(
        self, calls: Sequence[Call], whole_step: bool, target_ms: float = TARGET_MS, pool: Any = None,
        longest: int = most,
    ) -> None:  # fmt: skip
        self.calls, self.replays, self.pool = calls, 1, pool
        stream = _side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in (*calls, calls[0]):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._capture(len(calls))
        ms = self.time()
        if ms * self.count < target_ms:
            ms = min(ms, self.time(), self.time())
        total = max(len(calls), min(self.most, int(target_ms / max(ms, 1e-3)))) // len(calls) * len(calls)
        if whole_step:
            self.replays = total
            return
        count = min(total, max(len(calls), longest // len(calls) * len(calls)))
        if count != self.count:
            self._capture(count)
        self.replays = -(-total // count)

    def _capture(self, count: int) -> None:
        self.count, self.graph = count, torch.cuda.CUDAGraph()
        make_room()
        # Like torch.cuda.graph, but without emptying the memory cache each time.
        with torch.cuda.stream(_side_stream()):
            self.graph.capture_begin(*(() if self.pool is None else (self.pool,)))
            try:
                for index in range(count):
                    self.calls[index % len(self.calls)]()
            finally:
                self.graph.capture_end()
        self.graph.replay()
        torch.cuda.synchronize()

    def time(self) -> float:
        """Return milliseconds per call."""
        return _timed(self._replay) / (self.count * self.replays)

    def _replay(self) -> None:
        for _ in range(self.replays):
            self.graph.replay()


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """Return the stream that captures graphs: one for all, because cuBLAS keeps memory per stream."""
    return torch.cuda.Stream()


def make_room() -> None:
    """Release unused memory if less than half of the device's is free; this takes as long as a short row."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    if free < total / 2:
        torch.cuda.empty_cache()


Clock = HostClock | Replay
MakeClock = Callable[[Sequence[Call], bool], Clock]


def _timed(call: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
