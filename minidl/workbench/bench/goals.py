"""The rows, with their goals for the time of the best peer divided by ours: reached from 0.01 (the noise) below on."""

from __future__ import annotations

from collections.abc import Sequence

from minidl.workbench.bench import generator_rows, image_rows, matrix_rows, network_rows

NOISE = 0.01
ROWS = (*matrix_rows.rows(), *image_rows.rows(), *generator_rows.rows(), *network_rows.rows())
GOALS = {name: goal for name, goal, _ in ROWS}


def chosen(words: Sequence[str]) -> list[str]:
    """The rows whose name contains one of `words`; without words all but whole networks. Raises ValueError for an
    unmatched word."""
    for word in words:
        if not word or not any(word in name for name in GOALS):
            raise ValueError(f"no row's name contains {word!r}; `minidl bench --list` shows them")
    if not words:
        return [name for name in GOALS if not name.startswith(network_rows.WORD)]
    return [name for name in GOALS if any(word in name for word in words)]
