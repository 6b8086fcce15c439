"""`minidl compare`."""

from __future__ import annotations

from typing import Any

from minidl.cli.options import command
from minidl.common.console import echo
from minidl.training.settings.command import Compare


def _compare(options: dict[str, Any]) -> None:
    config = Compare(**options)
    from minidl.training.report import compare

    echo(compare.compare(config), end="")


add_to = command("compare", Compare, _compare)
