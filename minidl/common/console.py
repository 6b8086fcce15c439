"""Print the output of commands. Control characters in names and texts are escaped, because a terminal obeys them.

Otherwise a label, a file name or a text of a data set could erase the line above it, or write another one.
"""

from __future__ import annotations

import re
import sys
from typing import Any

# C0 except tab and line feed, DEL, C1, line separators, direction overrides, halves of surrogate pairs.
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_SHORT = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}
_CONTROLS, _LINE = re.compile(f"[{_CONTROL}]"), re.compile(rf"[{_CONTROL}\t\n]")


def escaped(text: str) -> str:
    """Return a text of one or more lines with control characters escaped as in JSON, so that JSON remains valid."""
    return _CONTROLS.sub(_escape, text)


def one_line(text: str) -> str:
    """Return text for part of a line, such as a name: `escaped`, tabs and line feeds too."""
    return _LINE.sub(_escape, text)


def echo(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Print `escaped` text to standard output or error, at once."""
    stream = sys.stderr if error else sys.stdout
    stream.write(escaped(text) + end)
    stream.flush()


def note(text: str) -> None:
    """Print a note of one line to standard error, because standard output has results."""
    echo(f"note: {one_line(text)}", error=True)


def rich_console(**settings: Any) -> Any:
    """Return a console of rich, for tables and colours, that prints `escaped` texts."""
    from rich.console import Console

    class Escaping(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(escaped(text), **options)

    return Escaping(**settings)


def _escape(match: re.Match[str]) -> str:
    return _SHORT.get(match[0]) or f"\\u{ord(match[0]):04x}"


def cut(value: object, most: int = 300) -> str:
    """Return the text of a value for a message, cut off after `most` characters."""
    text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."
