"""The shape classes of a family: the rules of its table, each with the problems that use it.

A tuned table keeps the rules of the current one with their order and conditions; only the tiles change. So a new batch
size needs no tuning, and the two tables can be compared line by line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minidl.kernels.conv import UnableError
from minidl.runtime import launch
from minidl.runtime.launch import Tile
from minidl.runtime.tile_tables import Table
from minidl.tools.tuning import kind, space
from minidl.tools.tuning.problem import Problem
from minidl.tools.tuning.problems import problems

ALWAYS = "all other shapes"


@dataclass(frozen=True)
class ShapeClass:
    """The rule `index` of a family's table for a target. Without `problems` that use it, it keeps its tile."""

    family: str
    target: str
    index: int
    when: dict[str, Any]
    tile: Tile
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        """Return the family and the rule's conditions: "softmax: float64, N to 1024"."""
        return f"{self.family}: {conditions(self.when)}"


def conditions(when: dict[str, Any]) -> str:
    """Return a rule's conditions as text."""
    texts = []
    for name, value in when.items():
        if name in ("dtype", "precision"):
            texts.append(" or ".join(value))
        else:
            texts.append(f"{name[:-4]} {'to' if name.endswith('_max') else 'from'} {value}")
    return ", ".join(texts) or ALWAYS


def of_family(family: str, target: str) -> list[ShapeClass]:
    """Return the classes of the table in use, in its order; none for a target without this family. Runs no kernel."""
    rules = kind.rules_of(launch.table(family), target)
    by_rule: list[list[Problem]] = [[] for _ in rules]
    for problem in problems(family, target):
        for index in rules_met(family, target, problem):
            by_rule[index].append(problem)
    return [
        ShapeClass(family, target, index, rule.get("when", {}), launch.tile_of(rule), tuple(by_rule[index]))
        for index, rule in enumerate(rules)
    ]


def rules_met(family: str, target: str, problem: Problem) -> list[int]:
    """Return the rules whose tiles the problem's launches use; none if the form does not support the problem."""
    seen: set[int] = set()
    rules: list[dict[str, Any]] = [
        _WatchedRule(rule, index, seen) for index, rule in enumerate(kind.rules_of(launch.table(family), target))
    ]
    recorded = launch.record(lambda *launched: None, kind.recorded(target))
    with launch.use_tables(**{family: {**launch.table(family), target: rules}}), recorded:
        try:
            call = problem.empty()
            seen.clear()  # rules used by the forward pass of a gradient
            call()
        except UnableError:
            return []
    return sorted(seen)


class _WatchedRule(dict[str, Any]):
    """A rule that records when its tile is used."""

    def __init__(self, rule: dict[str, Any], index: int, seen: set[int]) -> None:
        super().__init__(rule)
        self._index, self._seen = index, seen

    def __getitem__(self, name: str) -> Any:
        if name == "tile":
            self._seen.add(self._index)
        return super().__getitem__(name)


def with_tile(table: Table, target: str, index: int, tile: Tile) -> Table:
    """Return the table with another tile in one rule; a table without rules for the CPU gets them."""
    rules = [dict(rule) for rule in kind.rules_of(table, target)]
    rules[index]["tile"] = dict(tile.sizes)
    if target not in ("interpreted", space.CPU):
        rules[index] |= {"warps": tile.num_warps, "stages": tile.num_stages}
    return {**table, target: rules}
