"""Measure networks, each in a process of its own: fresh caches of compiled kernels, and memory that nothing else holds.

    python -m benchmarks.bench.network_run ROW PEERS

measures one and prints what is known of it as a line of JSON, again after each further peer: what takes long to
compile comes last, and a process that is ended has left the row without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.bench import network_sides as sides
from benchmarks.bench.network_clocks import PEERS, Row, counted
from benchmarks.bench.network_rows import NETS, Net, floor_of
from minidl.common import import_lock
from minidl.common.console import echo
from minidl.compilation.capture import capture

MARK = "row: "
_START = "import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
N = TypeVar("N")
LEAST_SECONDS = 25.0  # that a row may take; with less left none is begun


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
    row = Row(net, device, dtype, floor)
    ours = row.begun("ours", lambda: sides.Side(net, sides.ours(device, dtype)))
    row.first("ours", capture(ours.given(batch)))
    row.memory("ours", ours, ours.given(batch))
    row.found |= counted(ours.given(batch))
    ours.forget_gradients()
    cast = dtype if net.training and dtype != torch.float32 else None
    theirs = row.begun("torch", lambda: sides.Side(net, sides.torchs(device, torch.float32 if cast else dtype, cast)))
    row.first("torch", theirs.given(batch))
    row.memory("torch", theirs, theirs.given(batch))
    row.judge(ours, theirs, sides.Side(net, sides.torchs(device, torch.float64)), batch)
    if not row.found["error_ok"]:
        keep(row.wrong())
        return
    row.clock("ours", ours, ours.given(batch))
    row.beside_all(peers, theirs, batch, keep)


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
    module: str = __name__,
) -> tuple[int, list[str]]:
    """Measure the networks that `rows` has not beside all peers, in processes of their own, which run `module` as this
    one is run; `keep` gets each row.

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
        row, why = _in_process(net, peers, seconds, module)
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


def _in_process(
    net: Net, peers: Sequence[str], seconds: float | None, module: str
) -> tuple[dict[str, Any] | None, str]:
    """The last row that a process printed, None without one; and why it is not whole."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        frozen = {} if net.training else {"TORCHINDUCTOR_FREEZING": "1"}
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("w") as to, err.open("w") as errors:
            process = subprocess.Popen(
                import_lock.python(_START.format(module=module), net.row, ",".join(peers)),
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


def main(nets: Mapping[str, N], measured: Callable[[N, list[str], Callable[[Any], None]], None]) -> None:
    """Measure the row that the command line names, beside its peers."""
    name, peers = sys.argv[1:]
    measured(nets[name], peers.split(","), lambda row: echo(f"{MARK}{json.dumps(row)}"))
    # What torch's threads do at the end is not waited for.
    os._exit(0)


if __name__ == "__main__":
    main(NETS, measured)
