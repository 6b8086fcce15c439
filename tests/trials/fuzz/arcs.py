"""Which lines follow which, by `sys.settrace`: an input that takes a new way through the code is worth changing."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any


class Arcs:
    """While entered, notes the pairs of lines run one after the other in files whose path has one of `parts`."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts
        self.seen: set[tuple[CodeType, int, int]] = set()
        self._wanted: dict[CodeType, bool] = {}

    def __enter__(self) -> "Arcs":
        sys.settrace(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        wanted = self._wanted.get(code)
        if wanted is None:
            wanted = self._wanted[code] = any(part in code.co_filename for part in self.parts)
        if not wanted:
            return None
        seen, before = self.seen, 0

        def line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            nonlocal before
            if event == "line":
                seen.add((code, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        return line
