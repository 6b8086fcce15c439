"""The figures of a network: times of all sides in turn, memory, errors, launches and copies."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bench import network_sides as sides
from benchmarks.bench.network_rows import TF32, Net
from minidl.autograd.deferred import fusion
from minidl.compilation.rehearsal import compile_ahead, rehearsal, rehearse
from minidl.tools.bench.measure import ROUNDS, Clock, HostClock, Launched, Replay, in_turn
from minidl.tools.first_line import first_line

S = TypeVar("S", bound=sides.Side)
# The ways in which torch runs a network: the names for --against, and the names in rows.
PEERS = {
    "eager": "torch",
    "graph": "torch, CUDA graph",
    "compile": "torch.compile, CUDA graph",
    "autotune": "torch.compile max-autotune, CUDA graph",
}
_MEGABYTE = 2.0**20


def _compiled(network: torch.nn.Module, peer: str) -> Any:
    """Return the network under torch.compile; in inference weights are frozen (TORCHINDUCTOR_FREEZING, see `run`)."""
    mode = "max-autotune-no-cudagraphs" if peer == "autotune" else "default"
    return torch.compile(network, dynamic=False, mode=mode)


class Row:
    """The figures of a row, and the clocks of its sides."""

    def __init__(self, net: Net, device: str, dtype: torch.dtype, floor: float) -> None:
        self.net, self.dtype, self.floor = net, dtype, floor
        self.gpu = device == "cuda"
        self.figures: dict[str, Any] = {
            "name": net.title, "dtype": str(dtype).removeprefix("torch."), "images": net.images,
            "first_step_s": {}, "peak_mb": {}, "pool_mb": {},
        }  # fmt: skip
        self.clocks: dict[str, Clock] = {}
        self._static: dict[str, float] = {}
        self._base: dict[str, float] = {}
        # All graphs share a memory pool, because they run one after another.
        self._pool = torch.cuda.graph_pool_handle() if self.gpu else None

    def new_side(self, name: str, make: Callable[[], S]) -> S:
        """Make a side, and store the memory allocated before it."""
        self._base[name] = self._allocated()
        return make()

    def first(self, name: str, call: Callable[[], Any]) -> None:
        """Time the first call, including compilation."""
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        self.figures["first_step_s"][name] = round(time.perf_counter() - start, 2)

    def memory(self, name: str, side: sides.Side, call: Callable[[], Any], of: str = "") -> None:
        """Store the peak memory of a call, including weights and the state of an optimizer, but not the batch."""
        if not self.gpu:
            return
        side.forget_gradients()
        self._wait()
        gc.collect()
        before = self._allocated()
        # Weights and states, before anything is captured or compiled.
        static = self._static.setdefault(of or name, before - self._base[of or name])
        torch.cuda.reset_peak_memory_stats()
        call()
        self._wait()
        self.figures["peak_mb"][name] = round(static + torch.cuda.max_memory_allocated() / _MEGABYTE - before, 1)

    def judge(self, ours: sides.Side, theirs: sides.Side, exact: sides.Side, batch: sides.Batch) -> None:
        """Compare both sides with float64 on a small batch."""
        exact.load(ours)
        if not self.net.training:
            exact.take_statistics(sides.few_of(batch))
            ours.load(exact)
            exact.load(ours)
        theirs.load(ours)
        compile_ahead(lambda: ours.compared(sides.few_of(batch)))
        our_errors, torch_errors = sides.errors_of([ours, theirs], exact, batch)
        self.figures["errors"], self.figures["torch_errors"] = our_errors.as_json(), torch_errors.as_json()
        # TF32 keeps as many bits as float16.
        tolerance = torch.float16 if self.net.precision == TF32 else self.dtype
        self.figures["error_ok"] = sides.right(our_errors, torch_errors, tolerance)

    def clock(self, name: str, side: sides.Side, call: Callable[[], Any], graph: bool = True) -> None:
        """Make the clock of a side: its call in a CUDA graph, or launched directly."""
        side.forget_gradients()
        if not self.gpu:
            self.clocks[name] = HostClock([call], True, target_ms=0.1)
            return
        self._empty_cache()
        if graph:
            # First with a separate memory pool, to measure the memory of a graph.
            before = torch.cuda.memory_reserved()
            replay = Replay([call], True)
            side.forget_gradients()
            self._wait()
            torch.cuda.empty_cache()
            self.figures["pool_mb"][name] = round((torch.cuda.memory_reserved() - before) / _MEGABYTE, 1)
            del replay
            self._empty_cache()
        self.clocks[name] = Replay([call], True, pool=self._pool) if graph else Launched([call], True)

    def time(self, call: Callable[[], Any]) -> float:
        """Return milliseconds of a call, timed without other sides."""
        self._empty_cache()
        clock = Replay([call], True) if self.gpu else HostClock([call], True, target_ms=0.1)
        return statistics.median(clock.time() for _ in range(ROUNDS))

    def measure_peers(
        self, peers: Sequence[str], theirs: sides.Side, batch: sides.Batch, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        """Time torch in each of these ways, and pass the row to `keep` after each."""
        for peer, name in PEERS.items():
            if peer not in peers:
                continue
            try:
                self.add_peer(peer, name, theirs, batch)
            except Exception as error:  # noqa: BLE001 (any error of torch is the reason to leave it out)
                self.figures.setdefault("left_out", {})[name] = first_line(error)
            if len(self.clocks) > 1:
                keep(self.timed())

    def add_peer(self, peer: str, name: str, theirs: sides.Side, batch: sides.Batch) -> None:
        """Make the clock of torch in one of its ways."""
        if peer in ("compile", "autotune"):
            theirs.calls = {part: _compiled(network, peer) for part, network in theirs.networks.items()}
            self.first(name, theirs.call_on(batch))
            self.memory(name, theirs, theirs.call_on(batch), "torch")
        self.clock(name, theirs, theirs.call_on(batch), graph=peer != "eager")

    def timed(self) -> dict[str, Any]:
        """Return the row with the times of all clocks, measured in turn."""
        times = in_turn(self.clocks)
        medians = {name: statistics.median(values) for name, values in times.items()}
        peers = [name for name in self.clocks if name != "ours"]
        ratios = {
            name: statistics.median(b / a for a, b in zip(times["ours"], times[name], strict=True)) for name in peers
        }
        peer = min(peers, key=lambda name: medians[name])
        ms = medians["ours"]
        return {
            **self.figures,
            "ours_ms": round(ms, 5),
            "peer": peer,
            "peer_ms": round(medians[peer], 5),
            "ratio": round(ratios[peer], 3),
            "floor_ms": round(self.floor, 5),
            "share_of_floor": round(self.floor / ms, 4),
            "images_per_second": round(1e3 * self.net.images / ms),
            "peers_ms": {name: round(medians[name], 5) for name in peers},
            "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        }

    def wrong(self) -> dict[str, Any]:
        """Return the row of a network whose results are wrong."""
        return {
            **self.figures,
            **dict.fromkeys(("ours_ms", "peer", "peer_ms", "ratio")),
            "floor_ms": round(self.floor, 5),
        }

    def _empty_cache(self) -> None:
        self._wait()
        gc.collect()
        torch.cuda.empty_cache()

    def _allocated(self) -> float:
        return torch.cuda.memory_allocated() / _MEGABYTE if self.gpu else 0.0

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


class _Copies(TorchDispatchMode):
    """Counts copies of images by torch, by operation and the shape of the first image."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::clone", "aten::_to_copy", "aten::copy_", "aten::cat"):
            first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            if first.dim() == 4:
                self.of[f"{func._schema.name.removeprefix('aten::')} {'x'.join(map(str, first.shape))}"] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the launches of a call with and without fused operations, and torch's copies of images in it."""
    figures: dict[str, Any] = {}
    for name, fused in (("launches", True), ("launches_plain", False)):
        count, copies = 0, _Copies()

        def keep(*launched: Any) -> None:
            nonlocal count
            count += 1

        with fusion(fused), rehearsal(keep), copies:
            rehearse(call)
        figures[name] = count
        if fused:
            figures |= {"copies": copies.of.total(), "copied": dict(copies.of)}
    return figures
