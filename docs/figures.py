"""Provide the numbers, tables and figures that the chapters in docs/learn show of benchmarks/results.

A page inserts a value by its name, such as `{{ gemm.tiled.ms }}` or `{{ gemm_roofline }}`. Figures are inline SVG with
transparent backgrounds and the page's colors.
"""

from __future__ import annotations

import html
import json
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from minidl.distributed.parts import cut
from minidl.tools.bench.measure import COPY_BYTES_PER_MS, MATRIX_FLOP_PER_MS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# TB/s; TFLOP/s of tensor cores; TFLOP/s of multiply-adds outside of them.
COPY, MATRIX, SCALAR = COPY_BYTES_PER_MS / 1e9, MATRIX_FLOP_PER_MS["float16"] / 1e9, MATRIX_FLOP_PER_MS["ieee"] / 1e9
HALF = 2  # bytes of a float16
POOLED = ", with ReLU and pool"
OURS, THEIRS, PAPER = "var(--color-brand-content)", "var(--color-foreground-muted)", "var(--color-background-primary)"

# A tensor as cells: title, (columns, rows), the accessed cells as (x, y, width, height), and a caption.
Panel = tuple[str, tuple[int, int], Sequence[tuple[float, float, float, float]], str]
# The rungs of the worklogs, in order.
GEMM_RUNGS = ("one output per program", "tiled", "grouped", "pipelined", "TMA, persistent", "minidl.kernels.gemm")
CONV_RUNGS = (
    "one output per program", "tiled", "matrix form", "batch-tiled", "banded", "banded" + POOLED,
)  # fmt: skip
# What one program reads and, in the last panel, writes: a sentence and panels.
PROGRAMS: dict[str, tuple[str, Sequence[Panel]]] = {
    "conv_one": ("One output per program, 32 to 64 channels, 5x5 at 12x12.", [
        ("x, an image", (12, 12), [(3, 3, 5, 5)], "5 x 5 pixels of|32 channels: 800"),
        ("w, 64 filters", (8, 8), [(0, 0, 1, 1)], "one filter: 800"),
        ("y, 8 x 8 pixels", (8, 8), [(3, 3, 1, 1)], "1 of 64 channels|of one pixel"),
    ]),
    "conv_tiled": ("A tile of 128 pixels and all channels, one k at a time.", [
        ("x as pixels by k", (25, 16), [(7, 0, 0.25, 16)], "128 pixels by|one k of 800"),
        ("w as k by channels", (8, 25), [(0, 7, 8, 0.25)], "one k by|64 channels"),
        ("y", (8, 16), [(0, 0, 8, 16)], "128 pixels by|64 channels"),
    ]),
    "conv_matrix": ("The same tile, a block of k at a time.", [
        ("x as pixels by k", (25, 16), [(7, 0, 1, 16)], "128 pixels by 32 k,|an address for each row"),
        ("w as k by channels", (8, 25), [(0, 7, 8, 1)], "32 k by|64 channels"),
        ("y", (8, 16), [(0, 0, 8, 16)], "128 pixels by|64 channels"),
    ]),
    "conv_batch": ("A run of 128 images at one output pixel: plain boxes.", [
        ("x as images by values", (72, 36), [(3 + 12 * r, 8, 5, 14) for r in range(5)],
         "128 images by 5 boxes|of 5 pixels x 32"),
        ("w as channels by k", (25, 8), [(0, 0, 25, 8)], "64 channels|by 800"),
        ("y as images by values", (32, 36), [(6, 8, 1, 14)], "128 images, one pixel,|64 channels"),
    ]),
    "conv_banded": ("A group of 10 pixels of one row, 1 to 12 channels, 7x7 at 72x72.", [
        ("x, an image", (36, 36), [(6, 9, 8, 3.5)], "7 rows of|16 values"),
        ("w as a band", (10, 16), [(g, g, 1, 7) for g in range(10)], "7 bands of 16 by|10 x 12 columns"),
        ("y, 66 x 66 pixels", (33, 33), [(6, 9, 5, 0.5)], "10 pixels by 12|channels, side by side"),
    ]),
    "conv_fused": ("Two rows of outputs at once, pooled before they are written.", [
        ("x, an image", (36, 36), [(6, 9, 8, 4)], "8 rows of 16 values,|each loaded once"),
        ("w as a band", (10, 16), [(g, g, 1, 7) for g in range(10)], "band r for the upper,|r - 1 for the lower row"),
        ("y, pooled: 33 x 33", (33, 33), [(6, 9, 5, 1)], "5 pixels by|12 channels"),
    ]),
    "conv_paired": ("Two neighboring outputs as one of twice the channels, 32 to 64 channels, 5x5 at 12x12.", [
        ("x, an image", (12, 12), [(2, 3, 6, 5)], "5 x 6 pixels of|32 channels, once"),
        ("w as a band", (2, 6), [(0, 0, 1, 5), (1, 1, 1, 5)], "a sixth of it is zeros"),
        ("y, pairs", (4, 8), [(1, 3, 1, 1)], "two pixels of|64 channels"),
    ]),
    "gemm_one": ("One output per program.", [
        ("A", (16, 16), [(0, 5, 16, 0.5)], "a row: 4096"), ("B", (16, 16), [(9, 0, 0.5, 16)], "a column: 4096"),
        ("C", (16, 16), [(9, 5, 0.5, 0.5)], "one output"),
    ]),
    "gemm_tiled": ("A tile of 128 x 128, and the block being multiplied.", [
        ("A", (32, 32), [(10, 10, 1, 2)], "128 rows,|64 of K at a time"),
        ("B", (32, 32), [(18, 10, 2, 1)], "128 columns"),
        ("C", (32, 32), [(18, 10, 2, 2)], "128 x 128"),
    ]),
    "gemm_in_rows": ("132 concurrent programs, tiles in row order.", [
        ("A", (32, 32), [(0, 0, 32, 5)], "5 strips"), ("B", (32, 32), [(0, 0, 32, 32)], "32 strips"),
        ("C", (32, 32), [(0, 0, 32, 4), (0, 4, 4, 1)], "132 tiles"),
    ]),
    "gemm_grouped": ("132 concurrent programs, tiles in groups of eight rows.", [
        ("A", (32, 32), [(0, 0, 32, 8)], "8 strips"), ("B", (32, 32), [(0, 0, 17, 32)], "17 strips"),
        ("C", (32, 32), [(0, 0, 16, 8), (16, 0, 1, 4)], "132 tiles"),
    ]),
    "gemm_boxes": ("One box per operand, one instruction per box.", [
        ("A", (32, 32), [(10, 10, 1, 2)], "a box of 128 x 64"), ("B", (32, 32), [(18, 10, 4, 1)], "a box of 64 x 256"),
        ("C", (32, 32), [(18, 10, 4, 2)], "128 x 256, then|the next tile"),
    ]),
    "softmax_held": ("Rows that fit registers.", [
        ("x", (16, 16), [(0, 5, 16, 2)], "whole rows, once"),
        ("registers", (16, 2), [(0, 0, 16, 2)], "maximum, exponentials,|sum"),
        ("y", (16, 16), [(0, 5, 16, 2)], "whole rows, once"),
    ]),
    "softmax_walk": ("Longer rows: two passes, the second of which reads from the cache.", [
        ("x, first pass", (16, 16), [(0, 5, 16, 1)], "running maximum|and sum"),
        ("x, second pass", (16, 16), [(0, 5, 12, 1)], "all but the last part,|still in registers"),
        ("y", (16, 16), [(0, 5, 16, 1)], "the row, once"),
    ]),
    "batch_norm": ("Three launches forward.", [
        ("x, rows by channels", (16, 16), [(4, 4, 4, 4)], "a band: its mean and|squared distances"),
        ("bands", (16, 4), [(4, 0, 4, 4)], "joined in order,|in float64"),
        ("y", (16, 16), [(4, 9, 4, 4)], "x read a second time,|last rows first"),
    ]),
    "text": ("A document with entries in five columns.", [
        ("S, documents by terms", (24, 12), [(c, 4, 1, 1) for c in (2, 3, 9, 14, 22)], "the row's entries"),
        ("W, terms by hidden", (8, 24), [(0, c, 8, 1) for c in (2, 3, 9, 14, 22)], "one row per entry"),
        ("y, documents by hidden", (8, 12), [(0, 4, 8, 1)], "one row"),
    ]),
    "text_back": ("A term that three documents contain.", [
        ("S transposed", (12, 24), [(c, 9, 1, 1) for c in (1, 4, 8)], "its documents"),
        ("dy", (8, 12), [(0, c, 8, 1) for c in (1, 4, 8)], "one row per document"),
        ("dW, touched rows only", (8, 16), [(0, 6, 8, 1)], "one row"),
    ]),
}  # fmt: skip


def values() -> dict[str, Any]:
    """Return every value that a page may insert, by name."""
    gemm = _read("gemm-ladder-nvidia-h200.json")
    conv = _read("convolution-ladder-nvidia-h200.json")
    bench = _read("nvidia-h200.json")
    rows = {row["row"]: row for row in bench["rows"]}
    drawn = {card: _read(f"drawn-nvidia-{card.lower()}.json")["rows"] for card in ("H100", "H200")}
    ladders = {
        "gemm": Ladder(
            "the matrix product", GEMM_RUNGS, gemm["steps"], _gemm_bytes(gemm["size"]), 2.0 * gemm["size"] ** 3
        ),
        "few": _of_layer(conv, "1 to 12, 7x7 at 72x72", 1, 12, 72, 7),
        "many": _of_layer(conv, "32 to 64, 5x5 at 12x12", 32, 64, 12, 5),
    }
    by_name: dict[str, Any] = {
        "copy": f"{COPY:.2f}", "matrix": f"{MATRIX:.0f}", "multiply_adds": f"{SCALAR:.0f}",
        "card": "an {device} with torch {torch} and Triton {triton}".format(**conv), "day": conv["date"],
        "day_of_rows": bench["date"],
        "row": {_slug(name): _row(row) for name, row in rows.items()},
        "forms": _drawn_table(drawn, "conv", "forward", by_form=True),
        **{f"{of}_drawn": _drawn_table(drawn, of, None) for of in ("gemm", "softmax", "norm")},
        **{f"{family}_rows": _rows_table(rows, start) for family, start in FAMILIES.items()},
        **{f"{family}_bars": _rows_bars(rows, start) for family, start in FAMILIES.items()},
        **{f"{name}_program": _program(*drawing) for name, drawing in PROGRAMS.items()},
        **{f"tree_of_{size}": _tree(8, size) for size in (1, 2, 3)}, "plan": _plan(),
    }  # fmt: skip
    for name, ladder in ladders.items():
        by_name |= {name: ladder.numbers(), f"{name}_table": ladder.table(), f"{name}_roofline": ladder.roofline()}
    return by_name


FAMILIES = {"gemm": "gemm", "conv": "conv ", "softmax": "softmax", "norm": "batch norm", "text": "text"}


class Ladder:
    """The rungs of one problem: their times, the bytes their programs request, and the number of operations."""

    def __init__(
        self,
        title: str,
        rungs: Sequence[str],
        steps: dict[str, dict[str, float]],
        requested: dict[str, float],
        flop: float,
    ) -> None:
        self.title, self.requested, self.flop = title, requested, flop
        self.rungs = {name: number for number, name in enumerate(rungs, 1) if name in steps}
        self.steps = {name: steps[name] for name in [*self.rungs, *(n for n in steps if n not in self.rungs)]}

    def peer(self, name: str) -> float:
        """Return torch's time for the work of a rung."""
        pooled = name.endswith(POOLED)
        return next(s["ms"] for n, s in self.steps.items() if n.startswith("torch") and n.endswith(POOLED) == pooled)

    def intensity(self, name: str) -> float:
        """Return the operations per byte that programs request."""
        return self.flop / self.requested[name]

    def dram_limit(self, name: str) -> float:
        """Return the TFLOP/s that DRAM allows if no byte comes from a cache, at most those of the tensor cores."""
        return min(COPY * self.intensity(name), MATRIX)

    def numbers(self) -> dict[str, dict[str, str]]:
        rungs = {}
        before = None
        for name, step in self.steps.items():
            cells = {"ms": _short(step["ms"]), "tflops": _short(step["tflops"])}
            cells["ratio"] = f"{self.peer(name) / step['ms']:.2g}"
            cells["percent"] = f"{100 * self.peer(name) / step['ms']:.2g} %"
            if name in self.requested:
                cells |= {"gb": _short(self.requested[name] / 1e9), "intensity": _short(self.intensity(name))}
                cells["dram_limit"] = _short(self.dram_limit(name))
            if before is not None:
                cells["faster"] = f"{before / step['ms']:.2g}"  # than the rung before
            before = step["ms"]
            rungs[_slug(name)] = cells
        return rungs

    def table(self) -> str:
        head = ("", "rung", "ms", "torch / rung", "TFLOP/s", "DRAM-only limit", "flop per byte", "GB requested")
        lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
        for name, numbers in zip(self.steps, self.numbers().values(), strict=True):
            cells = [numbers.get(key, "") for key in ("ms", "ratio", "tflops", "dram_limit", "intensity", "gb")]
            # minidl has changed since.
            title = f"{name} (at that date)" if name.startswith("minidl") and name not in self.rungs else name
            lines.append(f"| {self.rungs.get(name, '')} | {title} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def roofline(self) -> str:
        points = [(self.intensity(n), self.steps[n]["tflops"], number, n) for n, number in self.rungs.items()]
        peer = next(s["tflops"] for n, s in self.steps.items() if n.startswith("torch"))
        return _roofline(self.title, points, peer)


def _gemm_bytes(size: int) -> dict[str, float]:
    """Return the bytes that all programs of each rung of a float16 product request."""
    outputs = size * size
    tile, wide = 128, 256
    tiled = outputs / tile**2 * size * 2 * tile * HALF + outputs * HALF
    boxes = outputs / (tile * wide) * size * (tile + wide) * HALF + outputs * HALF
    return {
        "one output per program": outputs * (2 * size + 1) * HALF,
        "tiled": tiled, "grouped": tiled, "pipelined": tiled, "TMA, persistent": boxes, "minidl.kernels.gemm": boxes,
    }  # fmt: skip


def _of_layer(results: dict[str, Any], layer: str, C: int, M: int, size: int, kernel: int) -> Ladder:
    N = 10_000
    steps = results["layers"][layer][str(N)]
    out, K = size - kernel + 1, kernel**2 * C
    pixels = N * out**2
    results_bytes, tile = pixels * M * HALF, 128
    tiled = pixels / tile * K * (tile + max(M, 16)) * HALF + results_bytes
    requested = {
        "one output per program": pixels * M * (2 * K + 1) * HALF,
        "tiled": tiled, "matrix form": tiled, "batch-tiled": tiled,
    }  # fmt: skip
    G, KP, NP = _group(C, M, kernel, out)
    groups = N * out * math.ceil(out / G)
    requested["banded"] = groups * kernel * KP * (1 + NP / 64) * HALF + results_bytes
    G, KP, NP = _group(C, M, kernel, out // 2 * 2)
    pairs = N * (out // 2) * math.ceil(out // 2 * 2 / G)
    requested["banded, with ReLU and pool"] = pairs * (kernel + 1) * KP * (1 + 2 * NP / 64) * HALF + results_bytes / 4
    requested = {name: size for name, size in requested.items() if name in steps}
    return Ladder(f"{layer} pixels", CONV_RUNGS, steps, requested, 2.0 * pixels * M * K)


def _group(C: int, M: int, S: int, width: int) -> tuple[int, int, int]:
    """Return (G, KP, NP) as `group` of notebooks/03_convolution_ladder.py does."""
    G = max(2, min(128 // M, 17 - S if C == 1 else 128 // C - S + 1, width) // 2 * 2)
    return G, _power((G + S - 1) * C), _power(G * M)


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _row(row: dict[str, Any]) -> dict[str, str]:
    return {
        "ms": _short(row["ours_ms"]), "us": f"{1e3 * row['ours_ms']:.3g}", "peer": row["peer"],
        "theirs": _short(row["peer_ms"]), "ratio": f"{row['ratio']:.2f}", "floor": _short(row["floor_ms"]),
        "share": f"{100 * row['share_of_floor']:.0f} %",
    }  # fmt: skip


def _rows_table(rows: dict[str, Any], start: str) -> str:
    lines = ["| work | minidl, ms | best alternative, ms | ratio | share of the floor |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        if name.startswith(start):
            cells = _row(row)
            other = f"{cells['theirs']} ({cells['peer']})"
            lines.append(f"| {name} | {cells['ms']} | {other} | {cells['ratio']} | {cells['share']} |")
    return "\n".join(lines)


def _drawn_table(drawn: dict[str, list[Any]], of: str, direction: str | None, by_form: bool = False) -> str:
    """Return a table of the geometric mean ratios of random shapes, with the number of shapes, for each card."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for card, rows in drawn.items():
        for row in rows:
            if row["of"] == of and direction in (None, row["direction"]) and row.get("ratio"):
                key = row["plan"].partition(":")[0].rpartition(", ")[2] if by_form else row["direction"]
                ratios.setdefault(key, {}).setdefault(card, []).append(row["ratio"])
    lines = [
        f"| {'form' if by_form else 'direction'} | " + " | ".join(f"{card}, ratio (shapes)" for card in drawn) + " |"
    ]
    lines.append("| --- |" + " ---: |" * len(drawn))
    for key, cards in sorted(ratios.items(), key=lambda each: -sum(map(len, each[1].values()))):
        cells = [f"{geometric_mean(cards[card]):.2f} ({len(cards[card])})" if card in cards else "" for card in drawn]
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _slug(name: str) -> str:
    """Return a name that a page can insert: letters, digits and underscores."""
    return re.sub(r"\W+", "_", name).strip("_")


def _short(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _figure(width: int, height: int, alt: str, body: Sequence[str]) -> str:
    # One line, because a blank line would end the HTML block in Markdown.
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(alt)}">'
    return f'<figure class="drawn">{head}{"".join(body)}</svg></figure>'


def _tag(name: str, inside: str = "", **attributes: object) -> str:
    """Return an SVG element; the argument `stroke_width` becomes its attribute stroke-width."""
    words = "".join(f' {key.replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{words}>{inside}</{name}>" if inside else f"<{name}{words}/>"


def _text(x: float, y: float, words: str, anchor: str = "middle", **attributes: object) -> str:
    return _tag("text", html.escape(words), x=f"{x:g}", y=f"{y:g}", text_anchor=anchor, **attributes)


def _program(alt: str, panels: Sequence[Panel]) -> str:
    """Draw the part of each tensor that one program accesses."""
    side, spacing, top = 108, 160, 22
    body = []
    for i, (title, (columns, rows), cells, below) in enumerate(panels, 1):
        scale, middle = side / max(columns, rows), spacing * (i - 0.5)
        shown = [_tag("rect", x=x, y=y, width=w, height=h) for x, y, w, h in cells]
        body += [
            _text(middle, 13, title, font_weight=600),
            _tag(
                "g",
                _tag("rect", width=columns, height=rows, fill="none", stroke="currentColor", stroke_width=1 / scale)
                + _tag("g", "".join(shown), fill=OURS, fill_opacity=1 if i == len(panels) else 0.55),
                transform=f"translate({middle - columns * scale / 2:g} {top + (side - rows * scale) / 2:g}) "
                f"scale({scale:g})",
            ),
            *(_text(middle, top + side + 17 + 15 * line, words) for line, words in enumerate(below.split("|"))),
        ]
    captions = "; ".join(f"{title}: {below.replace('|', ' ')}" for title, _, _, below in panels)
    return _figure(
        spacing * len(panels), top + side + 38, f"{alt} Tensors read, and last the tensor written: {captions}.", body
    )


def _roofline(title: str, points: Sequence[tuple[float, float, int, str]], peer: float) -> str:
    """Draw TFLOP/s over operations per byte, both in powers of ten; labels are the numbers of the rungs."""
    width, height = 480, 300
    left, right, top, bottom = 46, width - 20, 24, height - 40
    first, last, low, high = 10**-0.5, 10**3, 10**-1.5, 10**3.2

    def across(intensity: float) -> float:
        return left + (right - left) * math.log(intensity / first) / math.log(last / first)

    def up(rate: float) -> float:
        return bottom - (bottom - top) * math.log(rate / low) / math.log(high / low)

    def line(*ends: tuple[float, float], **attributes: object) -> str:
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in ends)
        return _tag("polyline", points=path, fill="none", stroke="currentColor", **attributes)

    body = [
        line((first, high), (first, low), (last, low), stroke_opacity=0.5),
        *(_text(across(10**power), bottom + 16, f"{10**power}") for power in range(4)),
        *(_text(left - 6, up(10**power) + 4, f"{10.0**power:g}", "end") for power in range(-1, 4)),
        _text(width / 2, height - 6, "operations per byte that programs request"),
        _text(4, 13, "TFLOP/s", "start"),
        line((first, COPY * first), (MATRIX / COPY, MATRIX), (last, MATRIX), stroke_width=1.5),
        line((SCALAR / COPY, SCALAR), (last, SCALAR), stroke_dasharray="4 4"),
        line((first, peer), (last, peer), stroke_dasharray="1 4"),
        _text(across(2.2), up(1.3), f"DRAM-only limit: {COPY:.2f} TB/s", "start"),
    ]
    baselines = []  # of the text at the right
    for rate, words in ((MATRIX, "tensor cores"), (SCALAR, "multiply-adds"), (peer, "torch")):
        baselines.append(up(rate) + (14 if rate is peer else -5))
        body.append(_text(right, baselines[-1], f"{words}: {_short(rate)}", "end"))
    dots = [(across(intensity), up(rate)) for intensity, rate, _, _ in points]
    labels: list[tuple[float, float]] = []
    disks: list[str] = []
    # The highest point of a cluster gets the first choice, which is above; a leader line joins a label to its dot.
    for (x, y), (_, _, number, _) in sorted(zip(dots, points, strict=True), key=lambda each: each[0][1]):
        angles = (1.57, 0.8, 2.3, 0, 3.14, -0.8, -2.3, -1.57)
        spots = ((x + r * math.cos(a), y - r * math.sin(a)) for r in range(24, 99, 8) for a in angles)
        spot = next(
            s for s in spots
            if all(math.dist(s, label) > 20 for label in labels) and all(math.dist(s, dot) > 15 for dot in dots)
            and (s[0] < right - 125 or all(abs(s[1] - b + 4) > 15 for b in baselines))
        )  # fmt: skip
        labels.append(spot)
        body.append(_tag("path", d=f"M{x:.1f} {y:.1f}L{spot[0]:.1f} {spot[1]:.1f}", stroke=OURS, stroke_width=1.2))
        body.append(_tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.5, fill=OURS))
        disks.append(_tag("circle", cx=f"{spot[0]:.1f}", cy=f"{spot[1]:.1f}", r=9, fill=OURS))
        disks.append(_text(spot[0], spot[1] + 4.5, str(number), fill=PAPER, font_weight=600))
    rungs = "; ".join(f"{number}, {name}: {_short(rate)} at {_short(at)}" for at, rate, number, name in points)
    return _figure(width, height, f"Roofline of {title}, TFLOP/s at operations per byte. {rungs}.", [*body, *disks])


def _rows_bars(rows: dict[str, Any], start: str) -> str:
    """Draw the shares of the floor of minidl and of the best alternative."""
    width, each = 480, 46
    body, captions = [], []
    for name, row in rows.items():
        if not name.startswith(start):
            continue
        y = each * len(captions)
        body.append(_text(0, y + 14, name, "start"))
        shares = [row["floor_ms"] / row[side] for side in ("ours_ms", "peer_ms")]
        for line, (share, colour) in enumerate(zip(shares, (OURS, THEIRS), strict=True)):
            length = f"{share * (width - 50):.1f}"
            body.append(_tag("rect", y=y + 19 + 11 * line, width=length, height=10, fill=colour))
            body.append(_text(float(length) + 5, y + 28 + 11 * line, f"{share:.0%}", "start", font_size=11))
        captions.append(f"{name} {shares[0]:.0%} and {shares[1]:.0%}")
    alt = f"Shares of the floor, minidl (colored) and the best alternative (gray): {'; '.join(captions)}."
    return _figure(width, each * len(captions), alt, body)


def _tree(leaves: int, processes: int) -> str:
    """Draw the tree of a sum over shards; filled nodes are added by the process that has all of their shards."""
    width, step, radius = 480, 50, 13
    each, parts = width / leaves, cut(leaves, processes)
    bottom = 20 + (leaves.bit_length() - 1) * step
    lines, nodes = [], []
    for level in range(leaves.bit_length()):
        size, y = 1 << level, bottom - level * step
        for start in range(0, leaves, size):
            x = (start + size / 2) * each
            if level:
                path = f"M{x - size * each / 4:g} {y + step}L{x:g} {y}L{x + size * each / 4:g} {y + step}"
                lines.append(_tag("path", d=path, fill="none", stroke="currentColor"))
            is_local = any(start >= part.start and start + size <= part.stop for part in parts)
            fill, ink = (OURS, PAPER) if is_local else (PAPER, "currentColor")
            nodes.append(_tag("circle", cx=f"{x:g}", cy=y, r=radius, fill=fill, stroke="currentColor"))
            nodes.append(_text(x, y + 4.5, "+" if level else str(start), fill=ink))
    for process, part in enumerate(parts):
        a, b = part.start * each + 6, part.stop * each - 6
        path = f"M{a:g} {bottom + 20}v6H{b:g}v-6"
        nodes.append(_tag("path", d=path, fill="none", stroke="currentColor"))
        nodes.append(_text((a + b) / 2, bottom + 42, f"process {process}"))
    alt = (
        f"A tree of {leaves} shards, number of processes: {processes}. The additions are the same; one process adds "
        "each filled node, and the others are added after the exchange of segments."
    )
    return _figure(width, bottom + 50, alt, [*lines, *nodes])


def _plan() -> str:
    """Draw the packages of minidl in the layers that import-linter checks; bars are lines of code."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in next(c["layers"] for c in contracts if c["id"] == "layers")]
    width, each, left, body = 480, 23, 118, []
    counts = [sum(map(_lines, layer)) for layer in layers]
    for row, (layer, lines) in enumerate(zip(layers, counts, strict=True)):
        y, length = row * each, max(2.0, (width - left - 58) * lines / max(counts))
        names = ", ".join(layer)
        body.append(_tag("rect", x=left, y=y + 3, width=f"{length:.1f}", height=each - 6, fill=OURS))
        if len(layer) > 2:
            body += [_text(left - 8, y + 16, f"{len(layer)} small parts", "end")]
            body += [_text(left + length + 6, y + 16, f"{lines:,}: {names}", "start", font_size=9)]
        else:
            body += [_text(left - 8, y + 16, names, "end"), _text(left + length + 6, y + 16, f"{lines:,}", "start")]
    order = "; ".join(", ".join(layer) for layer in layers)
    return _figure(width, each * len(layers), f"The layers; each imports only from those below it: {order}.", body)


def _lines(part: str) -> int:
    folder = ROOT / "minidl" / part
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return sum(len(path.read_text().splitlines()) for path in files)
