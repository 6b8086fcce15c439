"""The rows, with their goals for the time of the best peer divided by ours: reached from 0.01 (the noise) below on."""

from __future__ import annotations

from collections.abc import Sequence

from minidl.tools.bench import accelerated_rows, generator_rows, image_rows, matrix_rows, network_rows

NOISE = 0.01
ROWS = (*matrix_rows.rows(), *image_rows.rows(), *generator_rows.rows())
# Those of whole networks come last; `network_run` and `accelerated_run` measure them.
_NETS = {**network_rows.NETS, **accelerated_rows.NETS}
GOALS = {name: goal for name, goal, _ in ROWS} | {row: net.goal for row, net in _NETS.items()}


def chosen(words: Sequence[str]) -> list[str]:
    """The rows, but for whole networks, whose name contains one of `words`; all without words. Raises ValueError for an
    unmatched word."""
    names = [name for name, _, _ in ROWS]
    for word in words:
        if not word or not any(word in name for name in names):
            raise ValueError(f"no row's name contains {word!r}; `minidl bench --list` shows them")
    return [name for name in names if not words or any(word in name for word in words)]
