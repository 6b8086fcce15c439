"""The rows, with the goals of their ratios; a row meets its goal from 0.01 (the noise) below it."""

from __future__ import annotations

from collections.abc import Sequence

from minidl.tools.bench import generator_rows, image_rows, matrix_rows

NOISE = 0.01
ROWS = (*matrix_rows.rows(), *image_rows.rows(), *generator_rows.rows())
GOALS = {name: goal for name, goal, _ in ROWS}


def chosen(words: Sequence[str]) -> list[str]:
    """Return the names of the rows that contain one of `words`; without words all. Raises ValueError for a word that
    matches none."""
    names = [name for name, _, _ in ROWS]
    for word in words:
        if not word or not any(word in name for name in names):
            raise ValueError(f"no row's name contains {word!r}; `minidl bench --list` shows them")
    return [name for name in names if not words or any(word in name for word in words)]
