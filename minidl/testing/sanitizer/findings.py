"""The sanitizer's findings: kind of bug, kernel, program, line, tensor and element."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minidl.common.console import one_line

OUT_OF_BOUNDS_READ = "out-of-bounds read"
OUT_OF_BOUNDS_WRITE = "out-of-bounds write"
MISALIGNED = "misaligned access"
MISSING_OTHER = "missing other"
UNWRITTEN_READ = "read of unwritten memory"
WRITE_RACE = "write race"
READ_RACE = "read race"
WRONG_HINT = "wrong hint"
KINDS = (
    OUT_OF_BOUNDS_READ, OUT_OF_BOUNDS_WRITE, MISALIGNED, MISSING_OTHER, UNWRITTEN_READ, WRITE_RACE, READ_RACE,
    WRONG_HINT,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A line of a kernel or of a function called by it."""

    file: str
    line: int

    @property
    def text(self) -> str:
        """Return the line without its indentation; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        path = Path(self.file)
        folder = Path.cwd()
        return one_line(f"{path.relative_to(folder) if path.is_relative_to(folder) else path}:{self.line}")


@dataclass
class Finding:
    """A bug: its first occurrence, and how often it occurred at this line on this argument.

    kind      one of KINDS
    kernel    name of the kernel that was launched
    program   (x, y, z) of the first program with the bug
    place     the line
    tensor    the argument of the kernel, or a description of the memory
    what      a sentence on the element and the bug
    index     of the element in the tensor; None if it lies outside
    elements  number of such accesses
    programs  all programs with the bug
    """

    kind: str
    kernel: str
    program: tuple[int, int, int]
    place: Place
    tensor: str
    what: str
    index: tuple[int, ...] | None = None
    elements: int = 0
    programs: set[tuple[int, int, int]] = field(default_factory=set)

    def __str__(self) -> str:
        count = f"{self.elements} access{'es' if self.elements > 1 else ''} in {len(self.programs)} program"
        return (
            f"{self.kind} in {self.kernel}, program {self.program}, {self.place}\n"
            f"    {self.place.text}\n"
            f"    {self.what} ({count}{'s' if len(self.programs) > 1 else ''})"
        )


class SanitizerError(AssertionError):
    """A kernel accessed memory incorrectly; `findings` has each bug."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        count = f"{len(self.findings)} bug{'s' if len(self.findings) > 1 else ''}"
        super().__init__("\n".join([f"the sanitizer found {count} in kernels:", *map(str, self.findings)]))
