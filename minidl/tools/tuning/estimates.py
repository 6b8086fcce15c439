"""`minidl tune --estimates`: measurements, which continue those in a file, and the fit to them."""

from __future__ import annotations

import datetime as dt
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from minidl.common import read_files
from minidl.common.console import cut
from minidl.data.parsing import parse_json
from minidl.errors import ConfigError
from minidl.kernels import gemm
from minidl.runtime import launch
from minidl.runtime.cost_model import devices, schema
from minidl.runtime.cost_model.schema import Constants
from minidl.tools.bench import machine
from minidl.tools.bench.measure import Replay
from minidl.tools.tuning import fit, trials
from minidl.tools.tuning.trials import Setup, Trial
from minidl.training.run_folder import files
from minidl.training.run_folder.progress import is_number

TARGET_MS = 4.0
COPIED = 2**29  # bytes, more than any cache
# Rows and columns of square products, by dtype or precision of float32: rates of the largest are the device's.
SQUARES = {"float16": 8192, "bfloat16": 8192, "tf32": 4096, "tf32x3": 4096}
WIDE = 118  # of a line in a file
_SAME = "device", "driver", "torch", "triton", "seed", "target", "processors"


@dataclass
class Rows:
    """The measurements: trials of shapes drawn from a seed, and the rates of copies and of products."""

    about: dict[str, Any]
    rates: dict[str, float] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)

    @property
    def setup(self) -> Setup:
        return Setup(self.about["seed"], self.about["target"], self.about["processors"])

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        rows = [trial.as_json() for trial in self.trials]
        files.write_json(path, {"estimates": self.about, "rates": self.rates, "rows": rows})


def stored_rows(path: Path | None, about: dict[str, Any]) -> Rows:
    """Return the rows in a file, or none. Raises ConfigError for another kind of file, device or seed."""
    if path is None or not path.exists():
        return Rows(about)
    rows = load(path)
    for name in _SAME:
        if rows.about.get(name) != about[name]:
            raise ConfigError(
                f"--json {path} has rows of {name} {rows.about.get(name)}; this is {about[name]}: give another file"
            )
    return rows


def load(path: Path) -> Rows:
    """Return the rows in a file. Raises ConfigError for any other file."""
    try:
        content = parse_json(read_files.read_bytes(path))
        if not isinstance(content, dict) or content.keys() != {"estimates", "rates", "rows"}:
            raise ValueError("expected estimates, rates and rows")
        about, rates = content["estimates"], content["rates"]
        if not isinstance(about, dict) or any(name not in about for name in _SAME):
            raise ValueError("expected the machine")
        if not isinstance(rates, dict) or not all(is_number(rate) and rate > 0 for rate in rates.values()):
            raise ValueError("expected rates above 0")
        rows = [Trial.from_json(row) for row in content["rows"]]
        if not all(row.is_valid for row in rows):
            raise ValueError("this version has no shape or form of a row, or a row has no time")
        return Rows(about, rates, rows)
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = cut(error) if isinstance(error, ValueError) else "a row is incomplete"
    raise ConfigError(f"{path} has no rows of `minidl tune --estimates` ({why}); give a file that its --json wrote")


def about(seed: int) -> dict[str, Any]:
    """Return the machine and the seed of the shapes. Needs a CUDA device."""
    entries = machine.machine()
    environment = {name: entries[name] for name in ("device", "driver", "torch", "triton", "date")}
    figures = devices.figures_of(torch.cuda.get_device_properties("cuda"), launch.target())._asdict()
    return {
        **environment, "seed": seed, "target": launch.target(), "processors": launch.processors(), "figures": figures,
    }  # fmt: skip


def measure(rows: Rows, seconds: float, console: Console, keep: Callable[[], None]) -> None:
    """Measure more shapes for `seconds`, with a progress bar; `keep` is called after each shape."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("trials", total=seconds, status="")

        def report(done: float, status: str) -> None:
            bar.update(task, completed=done, status=status)

        if not rows.rates:
            rows.rates = rates()
            keep()
        clock = partial(Replay, target_ms=TARGET_MS)
        trials.run(rows.setup, rows.trials, seconds, "cuda", clock, report, keep)


def rates() -> dict[str, float]:
    """Return this device's bytes per us of copies, and operations per us of products by dtype or precision."""
    target, source = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    result = {"copy": 2 * COPIED / _us(partial(target.copy_, source))}
    for name, size in SQUARES.items():
        dtype = getattr(torch, name, torch.float32)
        with launch.in_precision(name if dtype == torch.float32 else launch.float32_precision()):
            a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
            result[name] = 2 * size**3 / _us(partial(gemm.gemm, a, b.t()))
    return result


def _us(call: Callable[[], Any]) -> float:
    clock = Replay([call], False)
    return 1e3 * statistics.median(clock.time() for _ in range(trials.ROUNDS))


def with_rates(constants: Constants, rates: dict[str, float]) -> Constants:
    """Return the constants with the measured rates."""
    products = {name: rates.get(name, rate) for name, rate in constants.products.items()}
    return constants._replace(copy=rates.get("copy", constants.copy), products=products)


def fitted(rows: Rows, start: Constants, say: Callable[[str], None]) -> Constants | None:
    """Return the constants that fit the rows, or None if they choose worse on held-out shapes than `start`.

    Reports the scores before and after, on the shapes of the fit and on the held-out ones."""
    fitting, held_out = fit.halves(rows.trials)
    constants = fit.fitted(rows.setup, fitting, with_rates(start, rows.rates))
    better = True
    for name, subset in (("fitted to", fitting), ("left out", held_out)):
        shapes = len({trial.problem[:2] for trial in subset})
        before, after = (fit.score(rows.setup, subset, each) for each in (start, constants))
        better = after.regret <= before.regret
        say(f"{name}, {len(subset)} trials of {shapes} shapes")
        say(f"  before  {before}")
        say(f"  after   {after}")
    return constants if better else None


def content(rows: Rows, constants: Constants, path: Path) -> dict[str, Any]:
    """Return the content of the file of estimates at `path` for this device."""
    base = devices.USUAL[rows.about["target"]]
    device = json.loads(path.read_text())["device"] if path.parent == devices.FOLDER and path.exists() else None
    return {
        "device": device or rows.about["device"],
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "source": (
            f"minidl tune --estimates, seed {rows.about['seed']}: {len(rows.trials)} trials of "
            f"{len({trial.problem[:2] for trial in rows.trials})} shapes, float16, torch {rows.about['torch']}, "
            f"Triton {rows.about['triton']}."
        ),
        "figures": rows.about["figures"],
        # Constants that only a later minidl has then come from the base.
        **({"base": base} if path != devices.FOLDER / f"{base}.json" else {}),
        "constants": fit.rounded(schema.as_json(constants)),
    }


def as_text(value: Any, indent: int = 0) -> str:
    """Return JSON with short values on one line."""
    line = json.dumps(value)
    if not isinstance(value, dict) or (indent and indent + len(line) <= WIDE):
        return line
    inner = " " * (indent + 2)
    parts = [f"{inner}{json.dumps(name)}: {as_text(part, indent + 2)}" for name, part in value.items()]
    return "{\n" + ",\n".join(parts) + f"\n{' ' * indent}}}"
