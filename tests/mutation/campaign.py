"""Each mutant against the tests that reach it, until one of them fails."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from tests.mutation import children, sources
from tests.mutation.operators import Mutant, mutated
from tests.mutation.reach import Map


@dataclasses.dataclass
class Verdict:
    """What became of a mutant.

    how      "failed", "sanitizer", "crashed" or "timed out" of one that a test sees; "survived"; "not reached"
    test     the test that saw it
    seconds  of the processor's usual time, of the tests that were run
    tests    how many were run
    """

    how: str
    test: str | None
    seconds: float
    tests: int

    @property
    def killed(self) -> bool:
        return self.how not in ("survived", "not reached")


class Campaign:
    """Runs mutants in children of this process, which has collected `items`.

    budget  seconds of tests, as the map has them, that a mutant may survive; None for all tests that reach it
    """

    def __init__(self, plugin: children.Plugin, items: Iterable[Any], known: Map, budget: float | None) -> None:
        self.plugin, self.known, self.budget = plugin, known, budget
        self.items = {item.nodeid: item for item in items}
        self.functions = sources.functions()
        self.reaching: dict[tuple[str, int], list[str]] = defaultdict(list)
        for test in self.items:
            reached = known.tests[test]
            if reached.outcome == "passed":
                for name, lines in reached.lines.items():
                    for line in lines:
                        self.reaching[name, line].append(test)
        self.passing: set[str] = set()
        self.unreliable: set[str] = set()
        self.killers: dict[str, list[str]] = defaultdict(list)

    def tests(self, mutant: Mutant) -> list[str]:
        """Those that reach it, within the budget: first what has seen other mutants of the function, then quick ones.

        Of a test with many parameters the quickest comes first, and the second quickest after those of all others.
        """
        name = f"{mutant.file}:{mutant.function}"
        line = mutant.statement - sources.tree(name).lineno
        seconds = {test: self.known.tests[test].seconds for test in self.reaching[name, line]}
        seconds = {test: value for test, value in seconds.items() if test not in self.unreliable}
        ranks: dict[str, int] = defaultdict(int)
        order = []
        for test in sorted(seconds, key=lambda test: (seconds[test], test)):
            function = test.split("[")[0]
            order.append((ranks[function], seconds[test], test))
            ranks[function] += 1
        killers = [test for test in reversed(self.killers[name]) if test in seconds]
        chosen, total = [], 0.0
        for test in dict.fromkeys([*killers, *(test for *_, test in sorted(order))]):
            total += seconds[test]
            if chosen and self.budget is not None and total > self.budget:
                break
            chosen.append(test)
        return chosen

    def judge(self, mutant: Mutant) -> Verdict:
        """Run the tests that reach a mutant until one of them sees it."""
        while True:
            chosen = self.tests(mutant)
            if not chosen:
                return Verdict("not reached", None, 0.0, 0)
            verdict = self._try(mutant, chosen)
            if not verdict.killed or self._passes(mutant, verdict.test):
                break
            self.unreliable.add(verdict.test)
        if verdict.killed:
            killers = self.killers[f"{mutant.file}:{mutant.function}"]
            killers[:] = [*(other for other in killers if other != verdict.test), verdict.test]
        return verdict

    def _passes(self, mutant: Mutant, test: str) -> bool:
        """Whether a test passes alone in a child, as kernels are: else it says nothing about a mutant."""
        if test not in self.passing and not self._try(mutant, [test], change=False).killed:
            self.passing.add(test)
        return test in self.passing

    def _try(self, mutant: Mutant, chosen: list[str], change: bool = True) -> Verdict:
        longest = max(self.known.tests[test].seconds for test in chosen)
        events, died = children.child(lambda tell: self._run(mutant, chosen, change, tell), longest)
        started = [test for kind, test in events if kind == "start"]
        failed = [how for kind, how in events if kind == "failed"]
        how = failed[0] if failed else died or "survived"
        test = None if how == "survived" else started[-1] if started else chosen[0]
        return Verdict(how, test, round(sum(self.known.tests[t].seconds for t in started), 3), len(started))

    def _run(self, mutant: Mutant, chosen: list[str], change: bool, tell: Callable[..., None]) -> None:
        name = f"{mutant.file}:{mutant.function}"
        tree = sources.tree(name)
        sources.put(self.functions[name], mutated(tree, mutant) if change else tree)
        for test, guard in self._runs(chosen):
            tell("start", test)
            with children.at_most(self.known.tests[test].seconds):
                outcome = self.plugin.outcome(self.items[test], guard)
            if outcome not in ("passed", "skipped"):
                tell("failed", outcome)
                return

    def _runs(self, chosen: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Every test as it is, then those that pass under the sanitizer once more under it."""
        for test in chosen:
            yield test, nullcontext
        if children.sanitize is not None:
            for test in chosen:
                if self.known.tests[test].clean:
                    yield test, children.sanitize
