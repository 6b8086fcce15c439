"""The page of all measured times: a table, and a picture where there are ratios, for each such file of
benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.bench.drawn_results import figures, is_drawn
from minidl.tools.bench.table import as_bytes

INTRODUCTION = """# All results

Every file of times in `benchmarks/results`, as it was measured. The ratio is the time of the best other divided by
minidl's: above 1, minidl is faster. What was measured how, and what came of it, is in [Performance](../performance.md).
"""
TITLES = {
    "nvidia-h200": "Operations and networks", "commands-": "Whole commands", "networks-": "Whole networks",
    "scaling-": "Several GPUs", "in-torch-": "Models of torch", "drawn-": "Shapes drawn from a seed",
    "drawn-regret-": "Shapes timed in every form",
    "generation-": "Pictures from a DCGAN", "launch-cost-": "What a launch costs", "text-network-": "A text network",
    "gemm-ladder-": "Steps to a product", "convolution-ladder-": "Steps to a convolution",
    "nvidia-h200-agreement": "Compiled beside interpreted",
}  # fmt: skip
Row = dict[str, Any]


def write(results: Path, folder: Path) -> None:
    """The page results.md in a folder, and its pictures beside it."""
    parts = [INTRODUCTION]
    timed = (path for path in results.glob("*.json") if not path.stem.startswith("sanitizer-"))
    for path in sorted(timed, key=_order):
        content = json.loads(path.read_text())
        versions = "{device}, torch {torch}, Triton {triton}".format_map(content)
        title = TITLES[_kind(path)]
        device = content["device"].removeprefix("NVIDIA ").partition(" ")[0]
        parts.append(f"## {title} ({device})\n\n{versions}, {content.get('date', 'no date')}; `{path.name}`.\n")
        compared = _compared(content)
        if compared:
            picture = f"{path.stem}.svg"
            if path.stem == "nvidia-h200":  # is on the front page, too
                picture = f"../../benchmarks/results/{picture}"
            else:
                (folder / picture).write_bytes(_picture(compared, is_drawn(path)))
            mean = geometric_mean(row["ratio"] for row in compared)
            parts.append(f"![{len(compared)} ratios, {mean:.2f} in geometric mean]({picture})\n")
        parts += ["\n".join(f"| {' | '.join(cells)} |" for cells in _table(path, content)), ""]
    (folder / "results.md").write_text("\n".join(parts))


def _kind(path: Path) -> str:
    return max((kind for kind in TITLES if path.stem.startswith(kind)), key=len)


def _order(path: Path) -> tuple[int, str]:
    return list(TITLES).index(_kind(path)), path.name


def _compared(content: Row) -> list[Row]:
    """The rows with a ratio, of right results."""
    rows = content.get("rows", [])
    return [row for row in rows if row.get("ratio") and row.get("error_ok", True)] if isinstance(rows, list) else []


def _table(path: Path, content: Row) -> Iterator[Sequence[str]]:
    """Cells: a line of titles, one of dashes, and the rows."""
    if is_drawn(path):
        lines = list(_groups(_compared(content)))
    elif "rows" in content and isinstance(content["rows"], dict):
        lines = list(_agreement(content["rows"]))
    elif "rows" in content:
        lines = [_measured(row) for row in content["rows"]]
    else:
        lines = list(_steps(content))
    titles = list(lines[0])
    yield titles
    yield ["---"] * len(titles)
    yield from (list(line.values()) for line in lines)


def _measured(row: Row) -> dict[str, str]:
    if "devices" in row:
        return _shared_out(row)
    if "ours_us" in row:
        return {"work": row["name"], "ours, us": f"{row['ours_us']:.1f}", "launches": str(row["launches"])}
    other = f"{_ms(row['peer_ms'])} ({row['peer']})" if row["peer"] else ""
    ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
    return {
        "work": row["name"], "dtype": row.get("dtype", ""), "ours, ms": _ms(row["ours_ms"]),
        "best other, ms": other, "ratio": ratio, "goal": _goal(row.get("goal", "")),
    }  # fmt: skip


def _shared_out(row: Row) -> dict[str, str]:
    """Of several GPUs."""
    images = f", {row['each']:,} a GPU" if "each" in row else f", {row['images']:,}" if "images" in row else ""
    other = f"{_ms(row['ddp_ms'])} (DDP)" if row.get("ddp_ms") else ""
    if row.get("all_reduce_ms"):
        other = f"{_ms(row['all_reduce_ms'])} (all-reduce)"
    return {
        "work": f"{row['what']}: {row['name']}{images}", "GPUs": str(row["devices"]),
        "shards": str(row.get("shards", "")), "ours, ms": _ms(row["ours_ms"]) if "ours_ms" in row else "",
        "times one": str(row.get("times", "")), "torch, ms": other, "same bits": "yes" if row.get("same") else "",
    }  # fmt: skip


def _ms(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _goal(goal: Any) -> str:
    if not isinstance(goal, dict):
        return str(goal)
    said = {"seconds": "{:g} s", "ratio": "{:g}", "rate": "{:,.0f} a second", "times_file": "memory of {:g} files"}
    return ", ".join(said[name].format(value) for name, value in goal.items())


def _groups(rows: list[Row]) -> Iterator[dict[str, str]]:
    for of, direction in dict.fromkeys((row["of"], row["direction"]) for row in rows):
        found = figures([row for row in rows if (row["of"], row["direction"]) == (of, direction)])
        said = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in found.items()}
        yield {"operation": of, "direction": direction} | {name: said[name] for name in list(said) if "reg" not in name}


def _agreement(rows: dict[str, Row]) -> Iterator[dict[str, str]]:
    for dtype in dict.fromkeys(name.partition("/")[2] for name in rows):
        of_it = [row for name, row in rows.items() if name.endswith(f"/{dtype}")]
        values = sum(row["values"] for row in of_it)
        yield {
            "dtype": dtype, "operations": str(len(of_it)), "values": f"{values:,}",
            "the same bits": f"{sum(row['same_bits'] for row in of_it) / values:.1%}",
            "largest share of the bound": f"{max(row['share_of_bound'] for row in of_it):.2f}",
        }  # fmt: skip


def _steps(content: Row) -> Iterator[dict[str, str]]:
    if "steps" in content:
        layers = {f"{content['size']} x {content['size']} x {content['size']}": content["steps"]}
    elif "layers" in content:
        layers = {f"{name}, {n} images": steps for name, at in content["layers"].items() for n, steps in at.items()}
    else:
        known = ("network", "documents", "passes", "batch_size", "seconds")
        yield {name.replace("_", " "): str(content[name]) for name in known}
        return
    for layer, steps in layers.items():
        for step, found in steps.items():
            yield {"work": layer, "step": step, "ms": _ms(found["ms"]), "TFLOP/s": f"{found['tflops']:.4g}"}


def _picture(rows: list[Row], drawn: bool) -> bytes:
    """Ratios with their goals, a row each; of many shapes how many have which."""
    figure = Figure(figsize=(9, 3 if drawn else 0.9 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time of the best other / ours")
    ratios = [row["ratio"] for row in rows]
    if drawn:
        axes.stairs(*np.histogram(ratios, [2 ** (i / 10) for i in range(-30, 61)]), fill=True)
        axes.set_ylabel("shapes")
    else:
        places = range(len(rows), 0, -1)
        colours = ["tab:blue" if ratio >= 1 else "tab:orange" for ratio in ratios]
        axes.barh(places, [ratio - 1 for ratio in ratios], left=1.0, color=colours)
        goals = [(r["goal"], at) for r, at in zip(rows, places, strict=True) if isinstance(r.get("goal"), float | int)]
        axes.scatter(
            [goal for goal, _ in goals], [at for _, at in goals], marker="|", color="black", s=50, label="goal"
        )
        if goals:
            axes.legend(loc="lower right")
        axes.set_ylim(0.3, len(rows) + 0.7)
        axes.set_yticks(places, [row.get("row", row["name"]) for row in rows], fontsize=7)
    low, high = axes.get_xlim()
    ticks = [2.0**i for i in range(-6, 7)] if high > 4 * low else [0.5, 0.75, 1, 1.25, 1.5, 2, 2.5]
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_major_formatter("{x:g}")
    return as_bytes(figure, "svg")
