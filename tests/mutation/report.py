"""What a campaign found: explanations of survivors, the table by file, and the survivors as lines of source."""

import dataclasses
import tomllib
from collections.abc import Iterable
from pathlib import Path

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
class Counts:
    """Those of the mutants of a file; the score leaves out what is explained and what is not judged yet."""

    mutants: int = 0
    killed: int = 0
    survived: int = 0
    explained: int = 0

    @property
    def judged(self) -> int:
        return self.killed + self.survived + self.explained

    @property
    def score(self) -> float:
        return self.killed / (self.killed + self.survived) if self.killed + self.survived else 1.0


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


def by_file(
    verdicts: dict[Mutant, Verdict], reasons: dict[tuple[str, ...], str], every: Iterable[Mutant]
) -> dict[str, Counts]:
    """Counts by file. Raises ExplanationError where a test sees a mutant that is explained."""
    found: dict[str, Counts] = {}
    for mutant in every:
        counts = found.setdefault(mutant.file.removeprefix("minidl/kernels/"), Counts())
        counts.mutants += 1
        if mutant.key in reasons:
            if mutant in verdicts and verdicts[mutant].killed:
                seen = verdicts[mutant].test
                raise ExplanationError(f"{EXPLAINED.name} explains a mutant that {seen} sees: {mutant.key}")
            counts.explained += 1
        elif mutant in verdicts:
            counts.killed += verdicts[mutant].killed
            counts.survived += not verdicts[mutant].killed
    return dict(sorted(found.items()))


def show(
    console: Console, verdicts: dict[Mutant, Verdict], reasons: dict[tuple[str, ...], str], every: Iterable[Mutant]
) -> Counts:
    """Print survivors, then the table; returns the sums over all files."""
    counts = by_file(verdicts, reasons, every)
    for mutant, verdict in sorted(verdicts.items(), key=lambda pair: (pair[0].file, pair[0].line)):
        if not verdict.killed and mutant.key not in reasons:
            print_mutant(console, mutant, f"{verdict.how}, {verdict.seconds:.0f} s of tests")
    table = Table()
    for name in ("file", "mutants", "judged", "killed", "survived", "explained", "score"):
        table.add_column(name, justify="left" if name == "file" else "right")
    names = [field.name for field in dataclasses.fields(Counts)]
    whole = Counts(*(sum(getattr(found, name) for found in counts.values()) for name in names))
    for name, found in [*counts.items(), ("all", whole)]:
        if name == "all":
            table.add_section()
        figures = found.mutants, found.judged, found.killed, found.survived, found.explained
        table.add_row(name, *map(str, figures), f"{found.score:.1%}")
    console.print(table)
    return whole


def print_mutant(console: Console, mutant: Mutant, note: str) -> None:
    """file:line with the line as it is and as it becomes."""
    before, after = sources.shown(mutant)
    console.print(
        f"{mutant.file}:{mutant.line} {mutant.function}: {mutant.operator} ({note})", style="bold", markup=False
    )
    console.print(f"- {before}", style="red", markup=False, highlight=False)
    console.print(f"+ {after}", style="green", markup=False, highlight=False)
