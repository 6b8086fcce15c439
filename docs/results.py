"""Write the page of all measured times: a table for each file of benchmarks/results, and a chart of its ratios."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.bench.drawn_results import figures, is_drawn
from minidl.tools.bench.chart import as_bytes

INTRODUCTION = """# All results

This page shows all timing files in `benchmarks/results`, unedited; read [Performance](../performance.md) for the method
and the conclusions. The ratio is the time of the best alternative divided by minidl's: above 1, minidl is faster.
"""
TITLES = {
    "nvidia-h200": "Operations and networks", "commands-": "Commands", "networks-": "Networks",
    "scaling-": "Several GPUs", "in-torch-": "PyTorch models", "drawn-": "Random shapes",
    "drawn-regret-": "Random shapes timed in every form",
    "layers-": "Layers as they are written in PyTorch", "sequences-": "Attention and recurrent layers",
    "generation-": "Image generation with a DCGAN", "launch-cost-": "Cost of a launch",
    "text-network-": "A text network",
    "gemm-ladder-": "Worklog of a matrix product", "convolution-ladder-": "Worklog of a convolution",
    "cpu-": "Without a GPU, compiled for the CPU",
    "nvidia-h200-agreement": "Compiled and interpreted results compared",
}  # fmt: skip
Row = dict[str, Any]


def write(results: Path, folder: Path) -> None:
    """Write results.md and its charts to a folder."""
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
            if path.stem == "nvidia-h200":  # the README shows it as well
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
    """Return the rows that have a ratio and passed their check."""
    rows = content.get("rows", [])
    return [row for row in rows if row.get("ratio") and row.get("error_ok", True)] if isinstance(rows, list) else []


def _table(path: Path, content: Row) -> Iterator[Sequence[str]]:
    """Yield the cells of the header, of a line of dashes, and of the rows."""
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
        return _of_several_gpus(row)
    if "ours_us" in row:
        return {"work": row["name"], "minidl, us": f"{row['ours_us']:.1f}", "launches": str(row["launches"])}
    other = f"{_ms(row['peer_ms'])} ({row['peer']})" if row["peer"] else ""
    ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
    return {
        "work": row["name"], "dtype": row.get("dtype", ""), "minidl, ms": _ms(row["ours_ms"]),
        "best alternative, ms": other, "ratio": ratio, "goal": _goal(row.get("goal", "")),
    }  # fmt: skip


def _of_several_gpus(row: Row) -> dict[str, str]:
    images = f", {row['each']:,} per GPU" if "each" in row else f", {row['images']:,}" if "images" in row else ""
    other = f"{_ms(row['ddp_ms'])} (DDP)" if row.get("ddp_ms") else ""
    if row.get("all_reduce_ms"):
        other = f"{_ms(row['all_reduce_ms'])} (all-reduce)"
    return {
        "work": f"{row['what']}: {row['name']}{images}", "GPUs": str(row["devices"]),
        "shards": str(row.get("shards", "")), "minidl, ms": _ms(row["ours_ms"]) if "ours_ms" in row else "",
        "speedup": str(row.get("times", "")), "torch, ms": other, "same bits": "yes" if row.get("same") else "",
    }  # fmt: skip


def _ms(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _goal(goal: Any) -> str:
    if not isinstance(goal, dict):
        return str(goal)
    formats = {"seconds": "{:g} s", "ratio": "{:g}", "rate": "{:,.0f} per second", "times_file": "memory of {:g} files"}
    return ", ".join(formats[name].format(value) for name, value in goal.items())


def _groups(rows: list[Row]) -> Iterator[dict[str, str]]:
    for of, direction in dict.fromkeys((row["of"], row["direction"]) for row in rows):
        values = figures([row for row in rows if (row["of"], row["direction"]) == (of, direction)])
        cells = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in values.items()}
        yield {"operation": of, "direction": direction} | {n: cell for n, cell in cells.items() if "reg" not in n}


def _agreement(rows: dict[str, Row]) -> Iterator[dict[str, str]]:
    for dtype in dict.fromkeys(name.partition("/")[2] for name in rows):
        matches = [row for name, row in rows.items() if name.endswith(f"/{dtype}")]
        values = sum(row["values"] for row in matches)
        yield {
            "dtype": dtype, "operations": str(len(matches)), "values": f"{values:,}",
            "the same bits": f"{sum(row['same_bits'] for row in matches) / values:.1%}",
            "largest share of the bound": f"{max(row['share_of_bound'] for row in matches):.2f}",
        }  # fmt: skip


def _steps(content: Row) -> Iterator[dict[str, str]]:
    if "steps" in content:
        layers = {f"{content['size']} x {content['size']} x {content['size']}": content["steps"]}
    elif "layers" in content:
        layers = {f"{name}, {n} images": steps for name, at in content["layers"].items() for n, steps in at.items()}
    else:
        columns = ("network", "documents", "passes", "batch_size", "seconds")
        yield {name.replace("_", " "): str(content[name]) for name in columns}
        return
    for layer, steps in layers.items():
        for step, time in steps.items():
            yield {"work": layer, "step": step, "ms": _ms(time["ms"]), "TFLOP/s": f"{time['tflops']:.4g}"}


def _picture(rows: list[Row], drawn: bool) -> bytes:
    """Return an SVG chart of the ratios and their goals; for random shapes a histogram of the ratios."""
    figure = Figure(figsize=(9, 3 if drawn else 0.9 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time of the best alternative / time of minidl")
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
