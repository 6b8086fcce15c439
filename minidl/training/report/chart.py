"""Draw the line charts of report.html as SVG."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from minidl.common.console import one_line

_COLOURS = ("#2a78d6", "#c2541b", "#2f8f4e", "#8a4fbf", "#b8860b", "#1b9aaa", "#d1477a", "#7a7f87")


def text_of(value: Any) -> str:
    """Escape a value for HTML, with control characters and lone surrogates written out."""
    return html.escape(one_line(str(value)))


def chart(name: str, lines: Mapping[str, Sequence[Any]], chosen: int | None) -> str:
    """Return an SVG chart of lines over the epochs; a dashed line marks the epoch that is kept."""
    values = [v for line in lines.values() for v in line if v is not None and math.isfinite(v)]
    if not values:
        return ""
    ticks, count = _ticks(min(values), max(values)), max(map(len, lines.values()))

    def x(epoch: int) -> str:
        return f"{50 + 380 * (epoch - 1) / max(1, count - 1):.1f}"

    def y(value: float) -> str:
        return f"{190 - 160 * (value - ticks[0]) / (ticks[-1] - ticks[0]):.1f}"

    parts = [f'<text x="50" y="16">{text_of(name)}</text><text x="240" y="224" text-anchor="middle">epoch</text>']
    for tick in ticks:
        parts.append(f'<path d="M50 {y(tick)}H430" stroke="var(--line)"/>')
        parts.append(f'<text x="44" y="{float(y(tick)) + 4:.0f}" text-anchor="end">{tick:.6g}</text>')
    parts += [f'<text x="{x(epoch)}" y="208" text-anchor="middle">{epoch}</text>' for epoch in _epoch_ticks(count)]
    if chosen:
        parts.append(f'<path d="M{x(chosen)} 30V190" stroke="var(--soft)" stroke-dasharray="3"/>')
    for line, colour in zip(lines.values(), itertools.cycle(_COLOURS), strict=False):
        points = [(epoch, v) for epoch, v in enumerate(line, 1) if v is not None and math.isfinite(v)]
        corners = " ".join(f"{x(epoch)},{y(value)}" for epoch, value in points)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for epoch, value in points if len(points) <= 60 else points[-1:]:
            hint = f"<title>epoch {epoch}: {value:.4g}</title>"
            parts.append(f'<circle cx="{x(epoch)}" cy="{y(value)}" r="3" fill="{colour}">{hint}</circle>')
    label = f"{name} over {count} epochs, last {', '.join(f'{line[-1]}' for line in lines.values())}"
    keys = "".join(
        f' <span style="color:{colour}">&#9632;</span>&nbsp;{text_of(line)}'
        for line, colour in zip(lines, itertools.cycle(_COLOURS), strict=False)
        if line and len(lines) > 1
    )
    keys += f" &#9482;&nbsp;kept: epoch {chosen}" if chosen else ""
    svg = f'<svg viewBox="0 0 440 230" role="img" aria-label="{text_of(label)}">{"".join(parts)}</svg>'
    return f'<div class="chart">{svg}<div class="soft">{keys}</div></div>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers whose first is at most `low` and whose last is at least `high`."""
    span = min(high - low, 1e300) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= span / 4)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [number * step for number in range(first, last + 1)]


def _epoch_ticks(count: int) -> list[int]:
    """Return at most seven round epochs from 1 to `count`."""
    step = next(step for digits in itertools.count() for f in (1, 2, 5) if count / (step := f * 10**digits) <= 6)
    return sorted({1, *range(step, count + 1, step)})
