"""What a campaign found: explanations of survivors, the table per family, and the survivors as lines of source."""

import dataclasses
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.mutation import sources
from tests.mutation.campaign import Verdict
from tests.mutation.operators import Mutant

EXPLAINED = Path(__file__).with_name("explained.toml")
LEAST = 0.95
FIELDS = ("file", "function", "operator", "before", "after", "occurrence")


class ExplanationError(Exception):
    """An explanation of something that is not there, or that a test sees."""


@dataclasses.dataclass
class Family:
    """Counts of a kernel family; the score leaves out what is explained."""

    run: int = 0
    killed: int = 0
    explained: int = 0

    @property
    def survived(self) -> int:
        return self.run - self.killed - self.explained

    @property
    def score(self) -> float:
        return self.killed / (self.run - self.explained) if self.run > self.explained else 1.0

    @property
    def raw(self) -> float:
        """The score with explained mutants counted as survivors."""
        return self.killed / self.run if self.run else 1.0


def explanations(mutants: Iterable[Mutant], path: Path = EXPLAINED) -> dict[tuple[str, ...], str]:
    """The reasons by the key of their mutant. Raises ExplanationError for one without a mutant or without a reason."""
    keys = {mutant.key for mutant in mutants}
    found: dict[tuple[str, ...], str] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        key = tuple(str(entry.get(name, 0 if name == "occurrence" else "")) for name in FIELDS)
        if key not in keys:
            raise ExplanationError(f"{path.name} explains what is no mutant: {dict(zip(FIELDS, key, strict=True))}")
        if not entry.get("reason"):
            raise ExplanationError(f"{path.name} gives no reason for {dict(zip(FIELDS, key, strict=True))}")
        if key in found:
            raise ExplanationError(f"{path.name} explains twice {dict(zip(FIELDS, key, strict=True))}")
        found[key] = entry["reason"]
    return found


def families(verdicts: dict[Mutant, Verdict], reasons: dict[tuple[str, ...], str]) -> dict[str, Family]:
    """Counts by family. Raises ExplanationError where a test sees a mutant that is explained."""
    found: dict[str, Family] = {}
    for mutant, verdict in verdicts.items():
        family = found.setdefault(mutant.family, Family())
        family.run += 1
        family.killed += verdict.killed
        if mutant.key in reasons:
            if verdict.killed:
                raise ExplanationError(f"{EXPLAINED.name} explains a mutant that {verdict.test} sees: {mutant.key}")
            family.explained += 1
    return dict(sorted(found.items()))


def total(counts: dict[str, Family]) -> Family:
    """The sum of all families."""
    return Family(*(sum(getattr(f, name) for f in counts.values()) for name in ("run", "killed", "explained")))


def show(console: Console, verdicts: dict[Mutant, Verdict], reasons: dict[tuple[str, ...], str], every: int) -> Family:
    """Print survivors, then the table; returns the sum of all families."""
    counts = families(verdicts, reasons)
    for mutant, verdict in sorted(verdicts.items(), key=lambda pair: (pair[0].file, pair[0].line)):
        if not verdict.killed and mutant.key not in reasons:
            print_mutant(console, mutant, f"{verdict.how}, {verdict.tests} tests")
    table = Table()
    for name in ("family", "mutants", "killed", "survived", "explained", "score"):
        table.add_column(name, justify="left" if name == "family" else "right")
    whole = total(counts)
    for name, family in [*counts.items(), ("all", whole)]:
        if name == "all":
            table.add_section()
        table.add_row(
            name, str(family.run), str(family.killed), str(family.survived), str(family.explained),
            f"{family.score:.1%}",
        )  # fmt: skip
    console.print(table)
    how: dict[str, int] = {}
    for verdict in verdicts.values():
        how[verdict.how] = how.get(verdict.how, 0) + 1
    told = ", ".join(f"{count} {name}" for name, count in sorted(how.items()))
    console.print(f"{whole.run} of {every} mutants: {told}; {whole.raw:.1%} killed with those explained as survivors")
    return whole


def print_mutant(console: Console, mutant: Mutant, note: str) -> None:
    """file:line with the line as it is and as it becomes."""
    before, after = sources.shown(mutant)
    console.print(
        f"{mutant.file}:{mutant.line} {mutant.function}: {mutant.operator} ({note})", style="bold", markup=False
    )
    console.print(f"- {before}", style="red", markup=False, highlight=False)
    console.print(f"+ {after}", style="green", markup=False, highlight=False)


def as_json(verdicts: dict[Mutant, Verdict], every: int, seed: int) -> dict[str, Any]:
    """Everything, for a file that `--resume` reads."""
    return {
        "mutants": every,
        "seed": seed,
        "verdicts": [
            {**dict(zip(FIELDS, mutant.key, strict=True)), "line": mutant.line, **dataclasses.asdict(verdict)}
            for mutant, verdict in verdicts.items()
        ],
    }
