"""Parse TTIR, the text of Triton's first intermediate representation, into operations.

    %b_y = arith.addf %b_x, %b_b : tensor<128xf32> loc(#loc7)

A line is an operation; `scf.for`, `scf.if`, `scf.while`, `tt.reduce` and `tt.scan` have regions of further lines.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_LOCATION = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)")
_OPERATION = re.compile(r'(?:(%[^=]*?) = )?"?((?:[a-z_]+\.)+[a-z_0-9]+)"?(.*)$')
_TYPE = re.compile(r"tensor<[^<>]*(?:<[^<>]*>[^<>]*)*>|[^\s,()]+")
_BASE = r"%[\w.$-]+"
_NAME = _BASE + r"(?:#\d+)?"
_DECLARATION = re.compile(rf"({_NAME}): ((?:[^,(){{}}<>]|<(?:[^<>]|<[^<>]*>)*>)+)")


@dataclass(frozen=True)
class Type:
    """A type: `element` is "f32", "i1", "ptr<f16>", ...; `shape` is empty for a number."""

    element: str
    shape: tuple[int, ...] = ()

    @staticmethod
    def parse(text: str) -> Type:
        """Return the type that a text names, such as "tensor<64x32x!tt.ptr<f16>>"."""
        text = text.strip()
        if text.startswith("tensor<"):
            *shape, element = re.split(r"(?<=\d)x", text[7:-1])
            return Type(element.removeprefix("!tt."), tuple(map(int, shape)))
        return Type(text.removeprefix("!tt."))


@dataclass
class Region:
    """The lines between braces, with the arguments of the region."""

    arguments: list[tuple[str, Type]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Operation:
    """One operation: names of results and operands, and the text between its name and its types."""

    name: str
    results: list[str]
    text: str
    types: str
    regions: list[Region]
    location: str = ""

    @functools.cached_property
    def operands(self) -> list[str]:
        """The names of values in the text, in order, without those that it defines."""
        return re.findall(_NAME + r"(?![\w.$#-]| = )", self.text)

    @property
    def carried(self) -> list[tuple[str, str]]:
        """The values that a loop carries: their names, and the values that these have at first."""
        pairs = re.findall(rf"({_BASE}) = ({_NAME})", self.text)
        return pairs[1:] if self.name == "scf.for" else pairs

    @property
    def result_types(self) -> list[Type]:
        """The types of the results."""
        last = re.split(r"-> | to ", self.types)[-1]
        return [Type.parse(part) for part in _TYPE.findall(last)]

    def integer(self, name: str) -> int:
        """Return an integer attribute."""
        match = re.search(rf"\b{name} = (-?\d+)", self.text)
        if match is None:
            raise ValueError(f"{self.name} has no attribute {name}")
        return int(match[1])


@dataclass
class Function:
    """A kernel: its name, parameters and operations."""

    name: str
    parameters: list[tuple[str, Type]]
    body: list[Operation]
    locations: dict[str, str]

    def line_of(self, operation: Operation) -> str:
        """Return "file:line" of an operation, "" if it is unknown."""
        seen, text = set(), operation.location
        while (match := re.search(r"#loc\d*", text)) and match[0] not in seen:
            seen.add(match[0])
            text = self.locations.get(match[0], "")
            if line := re.match(r'loc\("([^"]*)":(\d+)', text):
                return f"{line[1]}:{line[2]}"
        return ""


def parse(text: str) -> Function:
    """Parse a module with one function. Raises ValueError for anything else."""
    lines = [line.strip() for line in text.splitlines()]
    locations = dict(line.split(" = ", 1) for line in lines if line.startswith("#loc"))
    body = _unique(line for line in lines if line and not line.startswith(("#", "module", "//")))
    head = next((line for line in body if line.startswith("tt.func")), None)
    if head is None:
        raise ValueError("no tt.func in this module")
    match = re.match(r"tt\.func (?:\w+ )?@([\w.$]+)\((.*)$", _LOCATION.sub("", head))
    if match is None:
        raise ValueError(f"cannot read {head[:200]!r}")
    parameters = _declarations(match[2].split(") attributes")[0])
    function = Function(match[1], parameters, _block(body)[0], locations)
    if any(line.startswith("tt.func") for line in body):
        raise ValueError("functions that are not inlined are not supported")
    return function


def _unique(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines with one name for each value: regions beside each other use names twice."""
    scope: ChainMap[str, str] = ChainMap()
    counts: Counter[str] = Counter()

    def define(names: list[str]) -> None:
        for name in names:
            scope[name] = f"{name}${counts[name]}" if counts[name] else name
            counts[name] += 1

    for line in lines:
        if line.startswith("}"):
            scope = scope.parents
        results, _, rest = line.partition(" = ") if line.startswith("%") else ("", "", line)
        define(re.findall(_BASE, results))
        if line.endswith("{"):
            scope = scope.new_child()
        define(re.findall(_BASE + ("(?=: )" if line.startswith("^") else "(?= = )"), rest))
        yield re.sub(_BASE, lambda match: scope.get(match[0], match[0]), line)  # noqa: B023


def _declarations(text: str) -> list[tuple[str, Type]]:
    return [(name, Type.parse(kind)) for name, kind in _DECLARATION.findall(text)]


def _block(lines: Iterator[str]) -> tuple[list[Operation], str]:
    """Return the operations up to a closing brace, and that line."""
    operations: list[Operation] = []
    for line in lines:
        if line.startswith("}"):
            return operations, line
        operations.append(_operation(line, lines))
    return operations, ""


def _operation(line: str, lines: Iterator[str]) -> Operation:
    location, line = _split_location(line)
    match = _OPERATION.match(line)
    if line.startswith("^"):
        raise NotImplementedError("an early return is not supported on the CPU: put the rest of the kernel into `if`")
    if match is None:
        raise ValueError(f"cannot read the operation {line[:200]!r}")
    names, name, rest = match.groups()
    regions: list[Region] = []
    if rest.endswith("{"):
        rest = rest[:-1].rstrip().removesuffix("(").rstrip()
        close = "{"
        while close.endswith("{"):
            region, close = _region(lines)
            regions.append(region)
            close_location, close = _split_location(close)
            location = location or close_location
        rest += close.lstrip("})")
    text, _, types = rest.rpartition(" : ")
    if not text or "}" in types:  # the colon of an attribute
        text, types = rest, ""
    if "->" in text:  # scf.for and scf.if name the types of their results before any others
        text, types = text.rsplit("->", 1)
    return Operation(name, _results(names or ""), text, types, regions, location)


def _region(lines: Iterator[str]) -> tuple[Region, str]:
    region, rest = Region(), lines
    first = next(lines)
    if first.startswith("^bb0"):
        region.arguments = _declarations(_LOCATION.sub("", first)[5:])
    else:
        rest = itertools.chain([first], lines)
    region.operations, close = _block(rest)
    return region, close


def _split_location(line: str) -> tuple[str, str]:
    match = re.search(r"\s*loc\([^()]*(?:\([^()]*(?:\([^()]*\))*[^()]*\))*[^()]*\)$", line)
    return (match[0], line[: match.start()]) if match else ("", line)


def _results(names: str) -> list[str]:
    results = []
    for part in names.split(",") if names else []:
        name, _, count = part.strip().partition(":")
        results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return results
