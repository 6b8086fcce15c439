"""The source lines of kernels, which Triton asks `inspect` for when a kernel is defined.

`inspect` tokenizes every function to find its end: 0.44 of the 0.70 s that importing all operations takes. The code of
a function knows its last line.
"""

import inspect
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from triton.runtime import jit

PACKAGE = __name__.partition(".")[0] + "."


def install() -> None:
    """Let Triton find the lines of this package's kernels by `source_lines`."""
    quick = ModuleType("inspect")
    vars(quick).update(vars(inspect))
    vars(quick)["getsourcelines"] = source_lines
    vars(jit)["inspect"] = quick


def source_lines(function: Any) -> tuple[list[str], int]:
    """Return what `inspect.getsourcelines` returns: the lines of a function and the number of the first one.

    Raises OSError if there is no source.
    """
    if _is_ours(function):
        code = function.__code__
        linecache.checkcache(code.co_filename)  # a reloaded module may have changed
        lines = linecache.getlines(code.co_filename, function.__globals__)
        last = max(_last_lines(code), default=0)
        if code.co_firstlineno <= last <= len(lines):
            return lines[
                code.co_firstlineno - 1 : _with_comments(lines, code.co_firstlineno, last)
            ], code.co_firstlineno
    return inspect.getsourcelines(function)


def _is_ours(function: Any) -> bool:
    """Whether a function is of this package, and no wrapper of another one, whose lines `inspect` would return."""
    return (
        isinstance(function, FunctionType)
        and (function.__module__ or "").startswith(PACKAGE)
        and not hasattr(function, "__wrapped__")
    )


def _last_lines(code: CodeType) -> Iterator[int]:
    """Yield the last line of each instruction, also of nested functions.

    Without columns Python keeps no positions and gives the first line as the last, so nothing is yielded.
    """
    yield from (end for _, end, column, _ in code.co_positions() if end is not None and column is not None)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _last_lines(constant)


def _with_comments(lines: list[str], first: int, last: int) -> int:
    """Return the last line with the comments that end the function, which are indented."""
    outside = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    for number in range(last, len(lines)):
        text = lines[number].lstrip()
        if not text:
            continue
        if not text.startswith("#") or len(lines[number]) - len(text) <= outside:
            break
        last = number + 1
    return last
