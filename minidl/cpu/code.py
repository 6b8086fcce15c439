"""The lines of a function in C, its names and its buffers."""

from __future__ import annotations

from minidl.cpu.values import BYTES, c_type


class Code:
    """The text of a function: lines go to `lines`, which loops exchange for the lines of their levels."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names = 0
        self.bytes = 0  # of buffers in use
        self.most = 0

    def write(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)

    def fresh(self, prefix: str) -> str:
        """Return a new name."""
        self._names += 1
        return f"{prefix}{self._names}"

    def assign(self, text: str, element: str) -> str:
        """Put an expression into a new variable; return its name."""
        variable = self.fresh("v")
        self.write(f"const {c_type(element)} {variable} = {text};")
        return variable

    def memory(self, element: str, size: int) -> str:
        """Return the name of a new buffer of this scope."""
        variable, kind = self.fresh("b"), c_type(element)
        self.write(f"{kind} *{variable} = ({kind} *)(scratch + {self.bytes});")
        self.bytes += -(-size * (8 if element.startswith("ptr") else max(BYTES[element], 4)) // 64) * 64
        self.most = max(self.most, self.bytes)
        return variable
