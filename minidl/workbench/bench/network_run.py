"""Measure networks, each in a process of its own: fresh caches of compiled kernels, and memory that nothing else holds.

    python -m minidl.workbench.bench.network_run ROW PEERS

measures one and prints what is known of it as a line of JSON, again after each further peer: what takes long to
compile comes last, and a process that is ended has left the row without it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidl.captured import capture
from minidl.later import fusion
from minidl.rehearsal import compile_ahead, rehearsal, rehearse
from minidl.workbench.bench import network_sides as sides
from minidl.workbench.bench.measure import Clock, HostClock, Launched, Replay, in_turn
from minidl.workbench.bench.network_rows import NETS, Net, floor_of
from minidl.workbench.first_line import first_line

# How torch runs a network, by the names that --against takes, with those that rows have.
PEERS = {
    "eager": "torch",
    "graph": "torch, CUDA graph",
    "compile": "torch.compile, CUDA graph",
    "autotune": "torch.compile max-autotune, CUDA graph",
}
MARK = "row: "
LEAST_SECONDS = 25.0  # that a row may take; with less left none is begun
_MEGABYTE = 2.0**20


def measured(
    net: Net,
    peers: Sequence[str],
    keep: Callable[[dict[str, Any]], None],
    device: str = "cuda",
    dtype: torch.dtype | None = None,
) -> None:
    """Measure a row beside these peers; `keep` gets it after each peer. A wrong one is not timed.

    Without a GPU, for tests: kernels are interpreted, and the host's clock times all but what only a GPU has.
    """
    dtype = dtype or net.dtype
    torch.backends.cudnn.benchmark = True
    batch = sides.batch_of(net, device, dtype)
    floor = floor_of(net)
    row = _Row(net, device, dtype, floor)
    ours = row.begun("ours", lambda: sides.Side(net, sides.ours(device, dtype)))
    row.first("ours", capture(ours.given(batch)))
    row.memory("ours", ours, ours.given(batch))
    row.found |= counted(ours.given(batch))
    ours.forget_gradients()
    cast = dtype if net.training and dtype != torch.float32 else None
    theirs = row.begun("torch", lambda: sides.Side(net, sides.torchs(device, torch.float32 if cast else dtype, cast)))
    row.first("torch", theirs.given(batch))
    row.memory("torch", theirs, theirs.given(batch))
    row.judge(ours, theirs, batch)
    if not row.found["error_ok"]:
        keep(row.wrong())
        return
    row.clock("ours", ours, ours.given(batch))
    for peer, name in PEERS.items():
        if peer not in peers:
            continue
        try:
            row.beside(peer, name, theirs, batch)
        except Exception as error:  # noqa: BLE001 (whatever torch raises is why it is left out)
            row.found.setdefault("left_out", {})[name] = first_line(error)
        if len(row.clocks) > 1:
            keep(row.timed())


def _compiled(network: torch.nn.Module, peer: str) -> Any:
    """The network under torch.compile; in inference its weights are frozen (by TORCHINDUCTOR_FREEZING, see `run`)."""
    mode = "max-autotune-no-cudagraphs" if peer == "autotune" else "default"
    return torch.compile(network, dynamic=False, mode=mode)


class _Row:
    """What is known of a row, and the clocks of its sides."""

    def __init__(self, net: Net, device: str, dtype: torch.dtype, floor: float) -> None:
        self.net, self.dtype, self.floor = net, dtype, floor
        self.gpu = device == "cuda"
        self.found: dict[str, Any] = {
            "name": net.title, "dtype": str(dtype).removeprefix("torch."), "images": net.images,
            "first_step_s": {}, "peak_mb": {}, "pool_mb": {},
        }  # fmt: skip
        self.clocks: dict[str, Clock] = {}
        self._static: dict[str, float] = {}
        self._base: dict[str, float] = {}
        # All graphs take their memory from one pool: they run one after another.
        self._pool = torch.cuda.graph_pool_handle() if self.gpu else None

    def begun(self, name: str, make: Callable[[], sides.Side]) -> sides.Side:
        """Make a side, and remember what memory others had before."""
        self._base[name] = self._allocated()
        return make()

    def first(self, name: str, call: Callable[[], Any]) -> None:
        """Time the first call, kernels compiled in it."""
        self._wait()
        started = time.perf_counter()
        call()
        self._wait()
        self.found["first_step_s"][name] = round(time.perf_counter() - started, 2)

    def memory(self, name: str, side: sides.Side, call: Callable[[], Any], of: str = "") -> None:
        """The most memory that a call holds at a time, weights and an optimizer's state included, the batch not."""
        if not self.gpu:
            return
        side.forget_gradients()
        self._wait()
        gc.collect()
        before = self._allocated()
        # Of what lasts: as it is before anything was captured or compiled.
        lasting = self._static.setdefault(of or name, before - self._base[of or name])
        torch.cuda.reset_peak_memory_stats()
        call()
        self._wait()
        self.found["peak_mb"][name] = round(lasting + torch.cuda.max_memory_allocated() / _MEGABYTE - before, 1)

    def judge(self, ours: sides.Side, theirs: sides.Side, batch: sides.Batch) -> None:
        """Compare both sides with float64 on a small batch."""
        exact = sides.Side(self.net, sides.torchs(batch[0].device.type, torch.float64))
        exact.load(ours)
        if not self.net.training:
            exact.take_statistics(sides.few_of(batch))
            ours.load(exact)
            exact.load(ours)
        theirs.load(ours)
        compile_ahead(lambda: ours.compared(sides.few_of(batch)))
        own, torchs = sides.errors_of([ours, theirs], exact, batch)
        self.found["errors"], self.found["torch_errors"] = own.as_json(), torchs.as_json()
        self.found["error_ok"] = sides.right(own, torchs, self.dtype)

    def clock(self, name: str, side: sides.Side, call: Callable[[], Any], graph: bool = True) -> None:
        """Make the clock of a side: its call in a CUDA graph, or launched as it is."""
        side.forget_gradients()
        if not self.gpu:
            self.clocks[name] = HostClock([call], True, target_ms=0.1)
            return
        self._emptied()
        if graph:
            # Alone first, to see what memory a graph of it keeps.
            before = torch.cuda.memory_reserved()
            alone = Replay([call], True)
            side.forget_gradients()
            self._wait()
            torch.cuda.empty_cache()
            self.found["pool_mb"][name] = round((torch.cuda.memory_reserved() - before) / _MEGABYTE, 1)
            del alone
            self._emptied()
        self.clocks[name] = Replay([call], True, pool=self._pool) if graph else Launched([call], True)

    def beside(self, peer: str, name: str, theirs: sides.Side, batch: sides.Batch) -> None:
        """Make the clock of torch running the network in one of its ways."""
        if peer in ("compile", "autotune"):
            theirs.calls = {part: _compiled(network, peer) for part, network in theirs.networks.items()}
            self.first(name, theirs.given(batch))
            self.memory(name, theirs, theirs.given(batch), "torch")
        self.clock(name, theirs, theirs.given(batch), graph=peer != "eager")

    def timed(self) -> dict[str, Any]:
        """The row with what all clocks say in turn."""
        times = in_turn(self.clocks)
        medians = {name: statistics.median(values) for name, values in times.items()}
        peers = [name for name in self.clocks if name != "ours"]
        ratios = {
            name: statistics.median(b / a for a, b in zip(times["ours"], times[name], strict=True)) for name in peers
        }
        peer = min(peers, key=lambda name: medians[name])
        ms = medians["ours"]
        return {
            **self.found,
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
        """The row of a network whose results are wrong."""
        return {
            **self.found,
            **dict.fromkeys(("ours_ms", "peer", "peer_ms", "ratio")),
            "floor_ms": round(self.floor, 5),
        }

    def _emptied(self) -> None:
        self._wait()
        gc.collect()
        torch.cuda.empty_cache()

    def _allocated(self) -> float:
        return torch.cuda.memory_allocated() / _MEGABYTE if self.gpu else 0.0

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


class _Copies(TorchDispatchMode):
    """Counts copies of images that torch makes, by what it does and the shape of (the first of) them."""

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
    """Launches of a call with fused operations and with none, and the copies of images that torch makes in it."""
    found: dict[str, Any] = {}
    for name, fused in (("launches", True), ("launches_plain", False)):
        count, copies = 0, _Copies()

        def keep(*launched: Any) -> None:
            nonlocal count
            count += 1

        with fusion(fused), rehearsal(keep), copies:
            rehearse(call)
        found[name] = count
        if fused:
            found |= {"copies": copies.of.total(), "copied": dict(copies.of)}
    return found


def is_whole(row: dict[str, Any], peers: Sequence[str]) -> bool:
    """Whether a row has been measured beside all of these peers, or was found to be wrong."""
    tried = {*row.get("peers_ms", ()), *row.get("left_out", ())}
    return not row["error_ok"] or {PEERS[peer] for peer in peers} <= tried


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """A row with the peers that it was measured beside before, and not now: their ratios are those of that run."""
    if old is None or not (old["error_ok"] and new["error_ok"]):
        return new
    row = dict(new)
    for key in ("peers_ms", "ratios", "first_step_s", "peak_mb", "pool_mb"):
        row[key] = {**old.get(key, {}), **new.get(key, {})}
    left_out = {
        n: why for n, why in (old.get("left_out", {}) | new.get("left_out", {})).items() if n not in row["ratios"]
    }
    row.pop("left_out", None)
    peer = min(row["ratios"], key=lambda name: row["ratios"][name])
    row |= {"peer": peer, "peer_ms": row["peers_ms"][peer], "ratio": row["ratios"][peer]}
    return row | ({"left_out": left_out} if left_out else {})


def run(
    nets: Sequence[Net],
    rows: dict[str, dict[str, Any]],
    peers: Sequence[str],
    keep: Callable[[str, dict[str, Any]], None],
    tell: Callable[[str], None],
    minutes: float | None = None,
) -> tuple[int, list[str]]:
    """Measure the networks that `rows` has not beside all peers, in processes of their own; `keep` gets each row.

    After so many minutes the one under way is ended, and what it has measured is kept. Returns how many are left, and
    a message for each that failed.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    wanted = [net for net in nets if net.row not in rows or not is_whole(rows[net.row], peers)]
    left, failures = 0, []
    for net in wanted:
        seconds = None if deadline is None else deadline - time.monotonic()
        if seconds is not None and seconds < LEAST_SECONDS:
            left += 1
            continue
        started = time.perf_counter()
        row, why = _in_process(net, peers, seconds)
        took = round(time.perf_counter() - started, 1)
        if row is None:
            failures.append(f"{net.row}: {why}")
            tell(f"{net.row}: {why} after {took} s")
            continue
        row = merged(rows.get(net.row), {**row, "seconds": took})
        keep(net.row, row)
        left += not is_whole(row, peers)
        ratio = f"{row['ratio']:.2f}" if row["error_ok"] else "wrong"
        tell(f"{net.row}: {ratio} in {took} s" + (f" ({why})" if why else ""))
    return left, failures


def _in_process(net: Net, peers: Sequence[str], seconds: float | None) -> tuple[dict[str, Any] | None, str]:
    """The last row that a process printed, None without one; and why it is not whole."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        frozen = {} if net.training else {"TORCHINDUCTOR_FREEZING": "1"}
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("w") as to, err.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "minidl.workbench.bench.network_run", net.row, ",".join(peers)],
                stdout=to, stderr=errors, env={**os.environ, **caches, **frozen}, start_new_session=True,
            )  # fmt: skip
            why = ""
            try:
                if process.wait(seconds):
                    why = "it failed"
            except subprocess.TimeoutExpired:
                why = "ended: the minutes are over"
            finally:
                # With the processes that it compiles in.
                _end_group(process.pid)
                process.wait()
        whole, _, _ = out.read_text().rpartition("\n")
        lines = [line for line in whole.splitlines() if line.startswith(MARK)]
        said = [line for line in err.read_text(errors="replace").splitlines() if line.strip()]
        if why == "it failed":
            why = f"it failed: {said[-1][:300]}" if said else f"it failed with {process.returncode}"
        return (json.loads(lines[-1].removeprefix(MARK)) if lines else None), why or ("" if lines else "no row")


def _end_group(group: int) -> None:
    """End a process and those of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Measure the row named, beside these peers."""
    name, peers = arguments
    measured(NETS[name], peers.split(","), lambda row: print(f"{MARK}{json.dumps(row)}", flush=True))
    # What torch's threads do at the end is not waited for.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
