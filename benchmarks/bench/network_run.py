"""Measure networks, each in a separate process, with empty caches of compiled kernels and all of the memory.

    python -m benchmarks.bench.network_run ROW PEERS

measures one network and prints its row as a line of JSON after each peer. The peers that compile longest come last, so
that a process that is ended early leaves a row without them.
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
from benchmarks.bench.network_rows import HALF, NETS, TF32, Net, floor_of
from minidl.common import import_lock
from minidl.common.console import echo
from minidl.compilation.capture import capture
from minidl.runtime import launch

MARK = "row: "
_START = "import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
N = TypeVar("N")
LEAST_SECONDS = 25.0  # of a row; with less time left none is started


def measured(
    net: Net,
    peers: Sequence[str],
    keep: Callable[[dict[str, Any]], None],
    device: str = "cuda",
    dtype: torch.dtype | None = None,
) -> None:
    """Measure a row and these peers; `keep` gets the row after each peer. A wrong one is not timed.

    Without a GPU, for tests, kernels are interpreted, the host's clock is used, and figures of the GPU are left out.
    """
    if net.precision != HALF:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = net.precision == TF32
        launch.set_float32_precision(TF32 if net.precision == TF32 else "tf32x3")
    dtype = dtype or net.dtype
    torch.backends.cudnn.benchmark = True
    batch = sides.batch_of(net, device, dtype)
    floor = floor_of(net)
    row = Row(net, device, dtype, floor)
    ours = row.new_side("ours", lambda: sides.Side(net, sides.ours(device, dtype)))
    row.first("ours", capture(ours.call_on(batch)))
    row.memory("ours", ours, ours.call_on(batch))
    row.figures |= counted(ours.call_on(batch))
    ours.forget_gradients()
    cast = dtype if net.training and dtype != torch.float32 else None
    kit = sides.torchs(device, torch.float32 if cast else dtype, cast)
    theirs = row.new_side("torch", lambda: sides.Side(net, kit))
    row.first("torch", theirs.call_on(batch))
    row.memory("torch", theirs, theirs.call_on(batch))
    row.judge(ours, theirs, sides.Side(net, sides.torchs(device, torch.float64)), batch)
    if not row.figures["error_ok"]:
        keep(row.wrong())
        return
    row.clock("ours", ours, ours.call_on(batch))
    row.measure_peers(peers, theirs, batch, keep)


def is_complete(row: dict[str, Any], peers: Sequence[str]) -> bool:
    """Return whether a row has all of these peers, or is wrong."""
    tried = {*row.get("peers_ms", ()), *row.get("left_out", ())}
    return not row["error_ok"] or {PEERS[peer] for peer in peers} <= tried


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return the new row with the peers of an older row that it lacks, with their ratios of that run."""
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
    """Measure the networks that are missing or incomplete in `rows`, each in a process that runs `module`; `keep` gets
    each row.

    After `minutes` the current process is ended, and its row is kept. Returns the number of remaining networks, and a
    message for each failure.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    remaining = [net for net in nets if net.row not in rows or not is_complete(rows[net.row], peers)]
    left, failures = 0, []
    for net in remaining:
        seconds = None if deadline is None else deadline - time.monotonic()
        if seconds is not None and seconds < LEAST_SECONDS:
            left += 1
            continue
        start = time.perf_counter()
        row, why = _in_process(net, peers, seconds, module)
        duration = round(time.perf_counter() - start, 1)
        if row is None:
            failures.append(f"{net.row}: {why}")
            tell(f"{net.row}: {why} after {duration} s")
            continue
        row = merged(rows.get(net.row), {**row, "seconds": duration})
        keep(net.row, row)
        left += not is_complete(row, peers)
        ratio = f"{row['ratio']:.2f}" if row["error_ok"] else "wrong"
        tell(f"{net.row}: {ratio} in {duration} s" + (f" ({why})" if why else ""))
    return left, failures


def _in_process(
    net: Net, peers: Sequence[str], seconds: float | None, module: str
) -> tuple[dict[str, Any] | None, str]:
    """Return the last row that a process printed, None without one, and why it is incomplete."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        frozen = {} if net.training else {"TORCHINDUCTOR_FREEZING": "1"}
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("w") as output_file, err.open("w") as error_file:
            process = subprocess.Popen(
                import_lock.python(_START.format(module=module), net.row, ",".join(peers)),
                stdout=output_file, stderr=error_file, env={**os.environ, **caches, **frozen}, start_new_session=True,
            )  # fmt: skip
            why = ""
            try:
                if process.wait(seconds):
                    why = "it failed"
            except subprocess.TimeoutExpired:
                why = "ended: the time is over"
            finally:
                # Also ends its compiler processes.
                _end_group(process.pid)
                process.wait()
        output, _, _ = out.read_text().rpartition("\n")
        lines = [line for line in output.splitlines() if line.startswith(MARK)]
        errors = [line for line in err.read_text(errors="replace").splitlines() if line.strip()]
        if why == "it failed":
            why = f"it failed: {errors[-1][:300]}" if errors else f"it failed with {process.returncode}"
        return (json.loads(lines[-1].removeprefix(MARK)) if lines else None), why or ("" if lines else "no row")


def _end_group(group: int) -> None:
    """End all processes of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main(nets: Mapping[str, N], measured: Callable[[N, list[str], Callable[[Any], None]], None]) -> None:
    """Measure the row and the peers that the command line names."""
    name, peers = sys.argv[1:]
    measured(nets[name], peers.split(","), lambda row: echo(f"{MARK}{json.dumps(row)}"))
    # Does not wait for torch's threads.
    os._exit(0)


if __name__ == "__main__":
    main(NETS, measured)
