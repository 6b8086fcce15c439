"""`minidl compare`."""

from __future__ import annotations

from typing import Any

import typer

from minidl.cli.options import command
from minidl.training.config import Compare


def _compare(given: dict[str, Any]) -> None:
    config = Compare(**given)
    from minidl.training import compare

    typer.echo(compare.compare(config), nl=False)


add_to = command("compare", Compare, _compare)
