"""Every row by name. Making one allocates its inputs on the GPU."""

from __future__ import annotations

from collections.abc import Callable

from minidl.bench.goals import GOALS
from minidl.bench.measure import Work


def makers() -> dict[str, Callable[[], Work]]:
    """Every row's name, in the order of GOALS, and the function that makes its inputs."""
    from minidl.bench import generator_rows, image_rows, matrix_rows

    made = {**dict(matrix_rows.rows()), **dict(image_rows.rows()), **dict(generator_rows.rows())}
    return {name: made[name] for name in GOALS}
