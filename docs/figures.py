"""What the chapters in docs/learn show of benchmarks/results: numbers, tables, and figures as SVG that takes the page's
colours. A page has them by name: `{{ gemm.tiled.ms }}`, `{{ gemm_roofline }}`.
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
# TB/s, and TFLOP/s of tensor cores and of multiply-adds.
COPY, MATRIX, SCALAR = COPY_BYTES_PER_MS / 1e9, MATRIX_FLOP_PER_MS["float16"] / 1e9, MATRIX_FLOP_PER_MS["ieee"] / 1e9
HALF = 2  # bytes of a float16
POOLED = ", with ReLU and pool"
OURS, THEIRS, PAPER = "var(--color-brand-content)", "var(--color-foreground-muted)", "var(--color-background-primary)"

# A tensor as cells: title, (columns, rows), those that are touched as (x, y, width, height), and what is said below.
Panel = tuple[str, tuple[int, int], Sequence[tuple[float, float, float, float]], str]
# What the worklogs climb, in their order.
GEMM_RUNGS = ("one output per program", "tiled", "grouped", "pipelined", "TMA, persistent", "minidl.kernels.gemm")
CONV_RUNGS = (
    "one output per program", "tiled", "matrix form", "batch-tiled", "banded", "banded" + POOLED, "the band held",
    "two rows of outputs, with ReLU", "pairs of pixels",
)  # fmt: skip
# What one program reads, and in the last panel writes: a sentence, and panels.
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
    "conv_two_rows": ("Ten outputs and the ten below them, all of their inputs as one K.", [
        ("x, an image", (36, 36), [(6, 9, 8, 4)], "8 rows of 16 values:|one K of 128"),
        ("w, held", (20, 24), [*((g, g, 1, 7) for g in range(10)), *((10 + g, 4 + g, 1, 7) for g in range(10))],
         "both rows' band, read|once for all tiles"),
        ("y, 66 x 66 pixels", (33, 33), [(6, 9, 5, 1)], "2 rows of 10 pixels|by 12 channels"),
    ]),
    "conv_paired": ("Pairs of pixels as one of twice the channels.", [
        ("x, pairs of an image", (6, 12), [(1, 3, 3, 5)], "128 images: 5 rows of|3 pairs of 64 values"),
        ("w as a band", (2, 6), [(0, 0, 1, 5), (1, 1, 1, 5)], "a sixth of it zeros"),
        ("y, pairs", (4, 8), [(1, 3, 1, 1)], "one pair of|64 channels"),
    ]),
    "gemm_one": ("One output per program.", [
        ("A", (16, 16), [(0, 5, 16, 0.5)], "a row: 4096"), ("B", (16, 16), [(9, 0, 0.5, 16)], "a column: 4096"),
        ("C", (16, 16), [(9, 5, 0.5, 0.5)], "one output"),
    ]),
    "gemm_tiled": ("A tile of 128 x 128, and the block that is multiplied now.", [
        ("A", (32, 32), [(10, 10, 1, 2)], "128 rows,|64 of K at a time"),
        ("B", (32, 32), [(18, 10, 2, 1)], "128 columns"),
        ("C", (32, 32), [(18, 10, 2, 2)], "128 x 128"),
    ]),
    "gemm_in_rows": ("132 programs at the same time, tiles in rows.", [
        ("A", (32, 32), [(0, 0, 32, 5)], "5 strips"), ("B", (32, 32), [(0, 0, 32, 32)], "32 strips"),
        ("C", (32, 32), [(0, 0, 32, 4), (0, 4, 4, 1)], "132 tiles"),
    ]),
    "gemm_grouped": ("132 programs at the same time, tiles in groups of eight rows.", [
        ("A", (32, 32), [(0, 0, 32, 8)], "8 strips"), ("B", (32, 32), [(0, 0, 17, 32)], "17 strips"),
        ("C", (32, 32), [(0, 0, 16, 8), (16, 0, 1, 4)], "132 tiles"),
    ]),
    "gemm_boxes": ("One box of each operand, one instruction each.", [
        ("A", (32, 32), [(10, 10, 1, 2)], "a box of 128 x 64"), ("B", (32, 32), [(18, 10, 4, 1)], "a box of 64 x 256"),
        ("C", (32, 32), [(18, 10, 4, 2)], "128 x 256, and on|to the next tile"),
    ]),
    "softmax_held": ("Rows that fit registers.", [
        ("x", (16, 16), [(0, 5, 16, 2)], "whole rows, once"),
        ("registers", (16, 2), [(0, 0, 16, 2)], "maximum, exponentials,|sum"),
        ("y", (16, 16), [(0, 5, 16, 2)], "whole rows, once"),
    ]),
    "softmax_walk": ("Rows that do not: two walks, the second over what the cache has kept.", [
        ("x, first walk", (16, 16), [(0, 5, 16, 1)], "running maximum|and sum"),
        ("x, second walk", (16, 16), [(0, 5, 12, 1)], "all but the last part,|kept in registers"),
        ("y", (16, 16), [(0, 5, 16, 1)], "the row, once"),
    ]),
    "batch_norm": ("Three launches forward.", [
        ("x, rows by channels", (16, 16), [(4, 4, 4, 4)], "a band: its mean and|squared distances"),
        ("bands", (16, 4), [(4, 0, 4, 4)], "joined in order,|in float64"),
        ("y", (16, 16), [(4, 9, 4, 4)], "from x, read again:|last rows first"),
    ]),
    "text": ("A document with entries in five of the columns.", [
        ("S, documents by terms", (24, 12), [(c, 4, 1, 1) for c in (2, 3, 9, 14, 22)], "the row's entries"),
        ("W, terms by hidden", (8, 24), [(0, c, 8, 1) for c in (2, 3, 9, 14, 22)], "a row for each entry"),
        ("y, documents by hidden", (8, 12), [(0, 4, 8, 1)], "one row"),
    ]),
    "text_back": ("A term that three documents have.", [
        ("S transposed", (12, 24), [(c, 9, 1, 1) for c in (1, 4, 8)], "its documents"),
        ("dy", (8, 12), [(0, c, 8, 1) for c in (1, 4, 8)], "a row for each"),
        ("dW, touched rows alone", (8, 16), [(0, 6, 8, 1)], "one row"),
    ]),
}  # fmt: skip


def values() -> dict[str, Any]:
    """Everything that a page may name."""
    gemm = _read("gemm-ladder-nvidia-h200.json")
    conv = _read("convolution-ladder-nvidia-h200.json")
    rows = {row["row"]: row for row in _read("nvidia-h200.json")["rows"]}
    drawn = {card: _read(f"drawn-nvidia-{card.lower()}.json")["rows"] for card in ("H100", "H200")}
    ladders = {
        "gemm": Ladder(
            "the matrix product", GEMM_RUNGS, gemm["steps"], _gemm_bytes(gemm["size"]), 2.0 * gemm["size"] ** 3
        ),
        "few": _of_layer(conv, rows, "1 to 12, 7x7 at 72x72", 1, 12, 72, 7),
        "many": _of_layer(conv, rows, "32 to 64, 5x5 at 12x12", 32, 64, 12, 5),
    }
    found: dict[str, Any] = {
        "copy": f"{COPY:.2f}", "matrix": f"{MATRIX:.0f}", "multiply_adds": f"{SCALAR:.0f}",
        "card": "an {device} with torch {torch} and Triton {triton}".format(**conv), "day": conv["date"],
        "row": {_slug(name): _row(row) for name, row in rows.items()},
        "forms": _drawn_table(drawn, "conv", "forward", by_form=True),
        **{f"{of}_drawn": _drawn_table(drawn, of, None) for of in ("gemm", "softmax", "norm")},
        **{f"{family}_rows": _rows_table(rows, start) for family, start in FAMILIES.items()},
        **{f"{family}_bars": _rows_bars(rows, start) for family, start in FAMILIES.items()},
        **{f"{name}_program": _program(*drawing) for name, drawing in PROGRAMS.items()},
        **{f"tree_of_{size}": _tree(8, size) for size in (1, 2, 3)}, "plan": _plan(),
    }  # fmt: skip
    for name, ladder in ladders.items():
        found |= {name: ladder.numbers(), f"{name}_table": ladder.table(), f"{name}_roofline": ladder.roofline()}
    return found


FAMILIES = {"gemm": "gemm", "conv": "conv ", "softmax": "softmax", "norm": "batch norm", "text": "text"}


class Ladder:
    """Rungs of one problem: their times, the bytes that their programs ask for, and the operations of all."""

    def __init__(
        self, title: str, rungs: Sequence[str], steps: dict[str, dict[str, float]], asked: dict[str, float], flop: float
    ) -> None:
        self.title, self.asked, self.flop = title, asked, flop
        self.places = {name: place for place, name in enumerate(rungs, 1) if name in steps}
        self.steps = {name: steps[name] for name in [*self.places, *(n for n in steps if n not in self.places)]}

    def peer(self, name: str) -> float:
        """The time of torch for as much work as a rung does."""
        pooled = name.endswith(POOLED)
        return next(s["ms"] for n, s in self.steps.items() if n.startswith("torch") and n.endswith(POOLED) == pooled)

    def intensity(self, name: str) -> float:
        """Operations for each byte that programs ask for."""
        return self.flop / self.asked[name]

    def roof(self, name: str) -> float:
        """TFLOP/s that memory would allow if no byte came from a cache, and the matrix units otherwise."""
        return min(COPY * self.intensity(name), MATRIX)

    def numbers(self) -> dict[str, dict[str, str]]:
        found = {}
        before = None
        for name, step in self.steps.items():
            own = {"ms": _short(step["ms"]), "tflops": _short(step["tflops"])}
            own["ratio"] = f"{self.peer(name) / step['ms']:.2g}"
            own["percent"] = f"{100 * self.peer(name) / step['ms']:.2g} %"
            if name in self.asked:
                asked = self.asked[name] / 1e9
                own |= {"gb": _short(asked), "intensity": _short(self.intensity(name)), "roof": _short(self.roof(name))}
            if before is not None:
                own["faster"] = f"{before / step['ms']:.2g}"  # than the rung before
            before = step["ms"]
            found[_slug(name)] = own
        return found

    def table(self) -> str:
        head = ("", "rung", "ms", "torch / it", "TFLOP/s", "roof", "flop a byte", "GB asked for")
        lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
        for name, own in zip(self.steps, self.numbers().values(), strict=True):
            cells = [own.get(key, "") for key in ("ms", "ratio", "tflops", "roof", "intensity", "gb")]
            # minidl has gone on since.
            said = f"{name} (of that day)" if name.startswith("minidl") and name not in self.places else name
            lines.append(f"| {self.places.get(name, '')} | {said} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def roofline(self) -> str:
        points = [(self.intensity(n), self.steps[n]["tflops"], place, n) for n, place in self.places.items()]
        peer = next(s["tflops"] for n, s in self.steps.items() if n.startswith("torch"))
        return _roofline(self.title, points, peer)


def _gemm_bytes(size: int) -> dict[str, float]:
    """What the programs of each rung of a product of float16 ask for, all together."""
    outputs = size * size
    tile, wide = 128, 256
    tiled = outputs / tile**2 * size * 2 * tile * HALF + outputs * HALF
    boxes = outputs / (tile * wide) * size * (tile + wide) * HALF + outputs * HALF
    return {
        "one output per program": outputs * (2 * size + 1) * HALF,
        "tiled": tiled, "grouped": tiled, "pipelined": tiled, "TMA, persistent": boxes, "minidl.kernels.gemm": boxes,
    }  # fmt: skip


def _of_layer(
    results: dict[str, Any], rows: dict[str, Any], layer: str, C: int, M: int, size: int, kernel: int
) -> Ladder:
    N = 10_000
    steps = results["layers"][layer][str(N)]
    out, K = size - kernel + 1, kernel**2 * C
    pixels = N * out**2
    results_bytes, tile = pixels * M * HALF, 128
    tiled = pixels / tile * K * (tile + max(M, 16)) * HALF + results_bytes
    asked = {
        "one output per program": pixels * M * (2 * K + 1) * HALF,
        "tiled": tiled, "matrix form": tiled, "batch-tiled": tiled,
    }  # fmt: skip
    G, KP, NP = _group(C, M, kernel, out)
    groups = N * out * math.ceil(out / G)
    asked["banded"] = groups * kernel * KP * (1 + NP / 64) * HALF + results_bytes
    G, KP, NP = _group(C, M, kernel, out // 2 * 2)
    pairs = N * (out // 2) * math.ceil(out // 2 * 2 / G)
    asked["banded, with ReLU and pool"] = pairs * (kernel + 1) * KP * (1 + 2 * NP / 64) * HALF + results_bytes / 4
    flop = 2.0 * pixels * M * K
    row = next(row for name, row in rows.items() if name.startswith(f"conv {C}->{M} "))
    last = CONV_RUNGS[7 if C == 1 else 8]
    if C == 1:  # ten outputs and the ten below them are of one K of 128, whose band is read once
        asked[last] = N * math.ceil(out / 2) * math.ceil(out / 10) * 128 * HALF + results_bytes
    else:  # 128 images at a pair of outputs, of half a tap more
        asked[last] = pixels / 2 / tile * K * (kernel + 1) / kernel * (tile + 2 * M) * HALF + results_bytes
    steps = {**steps, last: {"ms": row["ours_ms"], "tflops": flop / row["ours_ms"] / 1e9}}
    return Ladder(f"{layer} pixels", CONV_RUNGS, steps, {n: b for n, b in asked.items() if n in steps}, flop)


def _group(C: int, M: int, S: int, width: int) -> tuple[int, int, int]:
    """(G, KP, NP) as `group` of notebooks/03_convolution_ladder.py has them."""
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
    lines = ["| work | ours, ms | best of the others, ms | ratio | share of the floor |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        if name.startswith(start):
            own = _row(row)
            others = f"{own['theirs']} ({own['peer']})"
            lines.append(f"| {name} | {own['ms']} | {others} | {own['ratio']} | {own['share']} |")
    return "\n".join(lines)


def _drawn_table(drawn: dict[str, list[Any]], of: str, direction: str | None, by_form: bool = False) -> str:
    """Ratios of shapes drawn at random, in geometric mean with their number, on each card."""
    found: dict[str, dict[str, list[float]]] = {}
    for card, rows in drawn.items():
        for row in rows:
            if row["of"] == of and direction in (None, row["direction"]) and row.get("ratio"):
                key = row["plan"].partition(":")[0].rpartition(", ")[2] if by_form else row["direction"]
                found.setdefault(key, {}).setdefault(card, []).append(row["ratio"])
    lines = [
        f"| {'form' if by_form else 'direction'} | " + " | ".join(f"{card}, ratio (shapes)" for card in drawn) + " |"
    ]
    lines.append("| --- |" + " ---: |" * len(drawn))
    for key, cards in sorted(found.items(), key=lambda each: -sum(map(len, each[1].values()))):
        cells = [f"{geometric_mean(cards[card]):.2f} ({len(cards[card])})" if card in cards else "" for card in drawn]
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _slug(name: str) -> str:
    """A name that a page can have: letters, digits and underlines."""
    return re.sub(r"\W+", "_", name).strip("_")


def _short(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _figure(width: int, height: int, alt: str, body: Sequence[str]) -> str:
    # One line: a blank one would end it in Markdown.
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(alt)}">'
    return f'<figure class="drawn">{head}{"".join(body)}</svg></figure>'


def _tag(name: str, inside: str = "", **given: object) -> str:
    """An element; `stroke_width` is its stroke-width."""
    words = "".join(f' {key.replace("_", "-")}="{html.escape(str(value))}"' for key, value in given.items())
    return f"<{name}{words}>{inside}</{name}>" if inside else f"<{name}{words}/>"


def _text(x: float, y: float, words: str, place: str = "middle", **given: object) -> str:
    return _tag("text", html.escape(words), x=f"{x:g}", y=f"{y:g}", text_anchor=place, **given)


def _program(alt: str, panels: Sequence[Panel]) -> str:
    """What one program touches of each tensor."""
    side, apart, top = 108, 160, 22
    body = []
    for i, (title, (columns, rows), cells, below) in enumerate(panels, 1):
        scale, middle = side / max(columns, rows), apart * (i - 0.5)
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
    said = "; ".join(f"{title}: {below.replace('|', ' ')}" for title, _, _, below in panels)
    return _figure(apart * len(panels), top + side + 38, f"{alt} Read, and in the last place written: {said}.", body)


def _roofline(title: str, points: Sequence[tuple[float, float, int, str]], peer: float) -> str:
    """TFLOP/s over operations a byte, both in powers of ten, with the number of each rung in its table."""
    width, height = 480, 300
    left, right, top, bottom = 46, width - 12, 24, height - 40
    first, last, low, high = 10**-0.5, 10**3, 10**-1.5, 10**3.2

    def across(intensity: float) -> float:
        return left + (right - left) * math.log(intensity / first) / math.log(last / first)

    def up(rate: float) -> float:
        return bottom - (bottom - top) * math.log(rate / low) / math.log(high / low)

    def line(*ends: tuple[float, float], **given: object) -> str:
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in ends)
        return _tag("polyline", points=path, fill="none", stroke="currentColor", **given)

    body = [
        line((first, high), (first, low), (last, low), stroke_opacity=0.5),
        *(_text(across(10**power), bottom + 16, f"{10**power}") for power in range(4)),
        *(_text(left - 6, up(10**power) + 4, f"{10.0**power:g}", "end") for power in range(-1, 4)),
        _text(width / 2, height - 6, "operations for each byte that programs ask for"),
        _text(4, 13, "TFLOP/s", "start"),
        line((first, COPY * first), (MATRIX / COPY, MATRIX), (last, MATRIX), stroke_width=1.5),
        line((SCALAR / COPY, SCALAR), (last, SCALAR), stroke_dasharray="4 4"),
        line((first, peer), (last, peer), stroke_dasharray="1 4"),
        _text(across(1.3), up(1.3), f"memory: {COPY:.2f} TB/s", "start"),
    ]
    for rate, words in ((MATRIX, "tensor cores"), (SCALAR, "multiply-adds"), (peer, "torch")):
        body.append(_text(right, up(rate) + (14 if rate is peer else -5), f"{words}: {_short(rate)}", "end"))
    numbers: list[str] = []
    taken: list[tuple[float, float, float]] = []
    for intensity, rate, number, _ in points:
        x, y = across(intensity), up(rate)
        # A number in the way of another goes beside it, above if its rate is higher, and leaves a line to its point.
        near = min(taken, key=lambda other: math.dist(other[:2], (x, y)), default=(x, y, rate))
        turn = 1 if rate >= near[2] else -1
        places = (
            (r * math.cos(t), -turn * r * math.sin(t)) for r in range(0, 99, 11) for t in (1.57, 0.8, 2.3, 0, 3.14)
        )
        free = (p for p in places if all(math.dist(other[:2], (x + p[0], y + p[1])) > 20.5 for other in taken))
        aside, below = next(free)
        taken.append((x + aside, y + below, rate))
        path = f"M{x:.1f} {y:.1f}l{aside:.1f} {below:.1f}"
        body.append(_tag("path", d=path, stroke=OURS, stroke_width=2))
        body.append(_tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, fill=OURS))
        numbers.append(_tag("circle", cx=f"{x + aside:.1f}", cy=f"{y + below:.1f}", r=10, fill=OURS))
        numbers.append(_text(x + aside, y + below + 4.5, str(number), fill=PAPER, font_weight=600))
    said = "; ".join(f"{number}, {name}: {_short(rate)} at {_short(of)}" for of, rate, number, name in points)
    return _figure(width, height, f"Roofline of {title}, TFLOP/s at operations a byte. {said}.", [*body, *numbers])


def _rows_bars(rows: dict[str, Any], start: str) -> str:
    """Shares of the floor, ours and the best of the others."""
    width, each = 480, 46
    body, said = [], []
    for name, row in rows.items():
        if not name.startswith(start):
            continue
        y = each * len(said)
        body.append(_text(0, y + 14, name, "start"))
        shares = [row["floor_ms"] / row[side] for side in ("ours_ms", "peer_ms")]
        for line, (share, colour) in enumerate(zip(shares, (OURS, THEIRS), strict=True)):
            long = f"{share * (width - 50):.1f}"
            body.append(_tag("rect", y=y + 19 + 11 * line, width=long, height=10, fill=colour))
            body.append(_text(float(long) + 5, y + 28 + 11 * line, f"{share:.0%}", "start", font_size=11))
        said.append(f"{name} {shares[0]:.0%} and {shares[1]:.0%}")
    alt = f"Shares of the floor, minidl (coloured) and the best of the others (grey): {'; '.join(said)}."
    return _figure(width, each * len(said), alt, body)


def _tree(leaves: int, processes: int) -> str:
    """The tree of a sum over shards, and which of its nodes are added where their shards are."""
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
            own = any(start >= part.start and start + size <= part.stop for part in parts)
            fill, ink = (OURS, PAPER) if own else (PAPER, "currentColor")
            nodes.append(_tag("circle", cx=f"{x:g}", cy=y, r=radius, fill=fill, stroke="currentColor"))
            nodes.append(_text(x, y + 4.5, "+" if level else str(start), fill=ink))
    for process, part in enumerate(parts):
        a, b = part.start * each + 6, part.stop * each - 6
        path = f"M{a:g} {bottom + 20}v6H{b:g}v-6"
        nodes.append(_tag("path", d=path, fill="none", stroke="currentColor"))
        nodes.append(_text((a + b) / 2, bottom + 42, f"process {process}"))
    alt = (
        f"A tree of {leaves} shards, number of processes: {processes}. The additions are the same; filled nodes are "
        "added where their shards are, the others after segments were exchanged."
    )
    return _figure(width, bottom + 50, alt, [*lines, *nodes])


def _plan() -> str:
    """The parts of minidl in their layers, which import-linter holds, each as wide as it has lines of code."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in next(c["layers"] for c in contracts if c["id"] == "layers")]
    width, each, left, body = 480, 23, 118, []
    counts = [sum(map(_lines, layer)) for layer in layers]
    for place, (layer, lines) in enumerate(zip(layers, counts, strict=True)):
        y, long = place * each, max(2.0, (width - left - 50) * lines / max(counts))
        names = ", ".join(layer)
        body.append(_tag("rect", x=left, y=y + 3, width=f"{long:.1f}", height=each - 6, fill=OURS))
        if len(layer) > 2:
            body += [_text(left - 8, y + 16, f"{len(layer)} small ones", "end")]
            body += [_text(left + long + 6, y + 16, f"{lines:,}: {names}", "start", font_size=9)]
        else:
            body += [_text(left - 8, y + 16, names, "end"), _text(left + long + 6, y + 16, f"{lines:,}", "start")]
    order = "; ".join(", ".join(layer) for layer in layers)
    return _figure(width, each * len(layers), f"The layers, from what imports to what is imported: {order}.", body)


def _lines(part: str) -> int:
    folder = ROOT / "minidl" / part
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    return sum(len(path.read_text().splitlines()) for path in files)
