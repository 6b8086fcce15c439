"""Which tests reach which statements of which kernels, found once by running them, and kept in a file.

Every statement of every function that Triton runs is preceded by a mark, in a child; what a mutant of a statement can
be seen by is then known, and how long it takes.
"""

import ast
import copy
import dataclasses
import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.mutation import children, sources

# A test takes this long at most in the map; none of the suite does.
LONGEST = 300.0
# Tests in one child.
TOGETHER = 100
MARK = "mark_of_mutation"


@dataclasses.dataclass
class Reached:
    """What a test reaches, as lines of a function counted from its `def`, and its seconds of the processor."""

    file: str
    outcome: str
    seconds: float
    lines: dict[str, list[int]]


def digest(text: str | bytes) -> str:
    """A short hash of a source."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


@functools.cache
def source_of(name: str) -> str:
    """The hash of a function's source, comments and line breaks aside."""
    return digest(ast.unparse(sources.tree(name)))


class Map:
    """Of each test what it reaches; kept in `path` as JSON.

    A test is run again when its file has changed, or the source of a function that it reaches; a change of what both
    use (specs, launchers) needs a new map.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._writing = path, threading.Lock()
        self.tests: dict[str, Reached] = {}
        self.functions = {name: source_of(name) for name in sources.functions()}
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            same = {name for name, value in stored["functions"].items() if self.functions.get(name) == value}
            for name, fields in stored["tests"].items():
                reached = Reached(**fields)
                if reached.lines.keys() <= same:
                    self.tests[name] = reached

    def missing(self, items: Iterable[Any]) -> list[Any]:
        """The tests among `items` that are to be run for the map."""
        files: dict[Path, str] = {}
        found = []
        for item in items:
            if item.path not in files:
                files[item.path] = digest(item.path.read_bytes())
            known = self.tests.get(item.nodeid)
            if known is None or known.file != files[item.path] or known.outcome not in ("passed", "skipped"):
                found.append(item)
        return found

    @classmethod
    def assumed(cls, items: Iterable[Any], seconds: float) -> "Map":
        """One that knows nothing of tests, but that each of them takes so long at most."""
        made = cls(Path("none"))
        made.tests = {item.nodeid: Reached("", "passed", seconds, {}) for item in items}
        return made

    def make(self, plugin: children.Plugin, items: list[Any], advance: Callable[[], None], processes: int) -> None:
        """Run tests and keep what they reach, some at a time: what is found is written as it is found."""
        parts = [items[first : first + TOGETHER] for first in range(0, len(items), TOGETHER)]
        with ThreadPoolExecutor(processes) as pool:
            for done in [pool.submit(self._make, plugin, part, advance) for part in parts]:
                done.result()

    def _make(self, plugin: children.Plugin, left: list[Any], advance: Callable[[], None]) -> None:
        """A child that dies is followed by another from the next test on."""
        while left:
            told, died = children.child(
                lambda tell, part=left: _run(plugin, part, tell), LONGEST, lambda event: advance()
            )
            found = {item: Reached("", *event) for item, event in zip(left, told, strict=False)}
            left = left[len(told) :]
            if died and left:
                found[left.pop(0)] = Reached("", died, LONGEST, {})
                advance()
            with self._writing:
                for item, reached in found.items():
                    reached.file = digest(item.path.read_bytes())
                    self.tests[item.nodeid] = reached
                self.save()

    def save(self) -> None:
        tests = {name: dataclasses.asdict(reached) for name, reached in self.tests.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"functions": self.functions, "tests": tests}), encoding="utf-8")


def _run(plugin: children.Plugin, items: list[Any], tell: Callable[..., None]) -> None:
    reached: dict[str, set[int]] = {}
    for name, function in sources.functions().items():
        lines = reached.setdefault(name, set())
        mark = f"{MARK}_{name.split(':')[1]}"
        function.fn.__globals__[mark] = lines.add
        sources.put(function, marked(sources.tree(name), mark))
    for item, following in zip(items, [*items[1:], None], strict=True):
        for lines in reached.values():
            lines.clear()
        before = time.process_time()
        with children.at_most(LONGEST / children.SLOWER):
            outcome = plugin.outcome(item, nullcontext, following)
        seconds = time.process_time() - before
        found = {name: sorted(lines) for name, lines in reached.items() if lines}
        tell(outcome, round(seconds, 4), found)


def marked(function: ast.FunctionDef, mark: str) -> ast.FunctionDef:
    """The function with `mark(line)` before each statement, lines counted from its `def`."""

    class Marks(ast.NodeTransformer):
        def generic_visit(self, node):
            super().generic_visit(node)
            for field in ("body", "orelse"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    setattr(node, field, [x for s in statements for x in (call(s), s)])
            return node

    def call(statement: ast.stmt) -> ast.stmt:
        line = ast.Constant(statement.lineno - function.lineno)
        return ast.copy_location(ast.Expr(ast.Call(ast.Name(mark, ast.Load()), [line], [])), statement)

    return ast.fix_missing_locations(Marks().visit(copy.deepcopy(function)))
