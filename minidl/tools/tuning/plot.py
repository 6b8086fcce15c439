"""A plot of a search: for each class, the times of its tiles, relative to the current tile."""

from __future__ import annotations

from collections.abc import Sequence

from minidl.tools.bench.chart import as_bytes
from minidl.tools.tuning.search import TIMED, SearchResult
from minidl.tools.tuning.space import describe
from minidl.training.report.plot_processes import own_settings

SHOWN = 24  # bars of a class: the fastest


@own_settings()
def picture(results: Sequence[SearchResult], device: str, kind: str = "svg") -> bytes:
    """Draw a panel for each searched class, as "svg" or "png". Needs the plots extra."""
    from matplotlib.figure import Figure

    panels = [(each, _bars(each)) for each in results if any(trial.outcome == TIMED for trial in each.trials)]
    heights = [0.9 + 0.2 * len(rows) for _, rows in panels]
    figure = Figure(figsize=(10, 0.8 + sum(heights)), layout="constrained")
    figure.suptitle(f"tiles on {device}: time as a share of the present tile's", fontsize=11)
    axes = figure.subplots(len(panels) or 1, 1, squeeze=False, height_ratios=heights or [1])[:, 0]
    for axis, (each, rows) in zip(axes, panels, strict=False):
        positions = range(len(rows))
        axis.barh(positions, [share for _, share, _ in rows], color=[colour for *_, colour in rows], height=0.75)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_yticks(positions, [label for label, *_ in rows], fontsize=6)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        timed = sum(trial.outcome == TIMED for trial in each.trials)
        axis.set_title(
            f"{each.shape_class.name} ({timed} timed, {sum(each.dropped.values())} dropped, of {each.candidates})",
            fontsize=8, loc="left",
        )  # fmt: skip
    if not panels:
        axes[0].set_axis_off()
        axes[0].text(0.5, 0.5, "nothing was timed", ha="center")
    return as_bytes(figure, kind)


def _bars(result: SearchResult) -> list[tuple[str, float, str]]:
    """Return (tile, time / current time, colour) of the fastest tiles and the current one, sorted by time."""
    timed = sorted((t for t in result.trials if t.outcome == TIMED), key=lambda trial: -trial.ratio)[:SHOWN]
    rows = [
        (describe(trial.tile), 1.0 / trial.ratio, "tab:green" if trial.tile == result.chosen else "tab:blue")
        for trial in timed
    ]
    return sorted([*rows, (f"{describe(result.shape_class.tile)} (present)", 1.0, "black")], key=lambda row: row[1])
