"""`minidl compare`."""

from __future__ import annotations

from typing import Any

from minidl.cli.options import command
from minidl.console import echo
from minidl.training.config import Compare


def _compare(given: dict[str, Any]) -> None:
    config = Compare(**given)
    from minidl.training import compare

    echo(compare.compare(config), end="")


add_to = command("compare", Compare, _compare)
