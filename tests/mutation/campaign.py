"""Each mutant against the tests that reach it, until one of them fails."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from minidl.testing import sanitize
from tests.mutation import children, sources
from tests.mutation.operators import Mutant, mutated
from tests.mutation.reach import Map, digest

# A test, and whether it runs under the sanitizer.
Step = tuple[str, bool]
# How many times longer a test takes there, about.
SANITIZER = 6.0


@dataclasses.dataclass
class Verdict:
    """What became of a mutant.

    how      "failed", "sanitizer", "crashed" or "timed out" of one that a test sees; "survived"; "not reached"
    test     the test that saw it
    seconds  of the processor's usual time, of the tests that were run
    guarded  whether the test that saw it ran under the sanitizer
    """

    how: str
    test: str | None
    seconds: float
    guarded: bool = False

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
        self.passing: set[Step] = set()
        self.unreliable: set[Step] = set()
        self.killers: dict[str, list[Step]] = defaultdict(list)

    def tests(self, mutant: Mutant) -> list[Step]:
        """Those that reach it, within the budget: first what has seen others of the function, then of the file.

        Then come quick ones, of a test with many parameters the quickest first, the second after those of all others.
        Every second one is drawn by lot, since what is quick has few tiles. Then come the same under the sanitizer.
        """
        name = f"{mutant.file}:{mutant.function}"
        line = mutant.statement - sources.tree(name).lineno
        seconds = {test: self.known.tests[test].seconds for test in self.reaching[name, line]}
        ranks: dict[str, int] = defaultdict(int)
        order = []
        for test in sorted(seconds, key=lambda test: (seconds[test], test)):
            function = test.split("[")[0]
            order.append((ranks[function], seconds[test], test))
            ranks[function] += 1
        quick = [test for *_, test in sorted(order)]
        drawn = sorted(quick, key=lambda test: digest(f"{mutant.key} {test}"))
        every = list(dict.fromkeys(test for pair in zip(quick, drawn, strict=True) for test in pair))
        plain, checked = (
            self._affordable(
                [step for place in (name, mutant.file) for step in reversed(self.killers[place]) if step[1] == guarded],
                every,
                guarded,
            )
            for guarded in (False, True)
        )
        # A load without `other` gives 0 in the interpreter: it is the sanitizer that sees it.
        return [*checked, *plain] if mutant.operator == "other" else [*plain, *checked]

    def _affordable(self, killers: list[Step], every: list[str], guarded: bool) -> list[Step]:
        steps, total = [], 0.0
        for step in dict.fromkeys([*(k for k in killers if k[0] in every), *((test, guarded) for test in every)]):
            if step in self.unreliable:
                continue
            total += self.known.tests[step[0]].seconds * (SANITIZER if guarded else 1.0)
            if steps and self.budget is not None and total > self.budget:
                break
            steps.append(step)
        return steps

    def repeat(self, mutant: Mutant, verdict: Verdict) -> Verdict | None:
        """What the test that saw a mutant says now; None where there is no such test, or it fails without a change.

        It runs under the sanitizer, too: what is read beyond a tensor is another number each time.
        """
        test = str(verdict.test)
        if test not in self.items:
            return None
        found, seen = self._try(mutant, [(test, verdict.guarded), *([] if verdict.guarded else [(test, True)])])
        return found if seen is None or self._passes(mutant, seen) else None

    def judge(self, mutant: Mutant) -> Verdict:
        """Run the tests that reach a mutant until one of them sees it."""
        steps = self.tests(mutant)
        if not steps:
            return Verdict("not reached", None, 0.0)
        while True:
            verdict, step = self._try(mutant, steps)
            if step is None or self._passes(mutant, step):
                break
            self.unreliable.add(step)
            steps = [other for other in steps if other != step]
        if step is not None:
            for place in (f"{mutant.file}:{mutant.function}", mutant.file):
                self.killers[place] = [*(other for other in self.killers[place] if other != step), step]
        return verdict

    def _passes(self, mutant: Mutant, step: Step) -> bool:
        """Whether a test passes alone in a child, as kernels are: else it says nothing about a mutant."""
        if step not in self.passing and self._try(mutant, [step], change=False)[1] is None:
            self.passing.add(step)
        return step in self.passing

    def _try(self, mutant: Mutant, steps: list[Step], change: bool = True) -> tuple[Verdict, Step | None]:
        longest = SANITIZER * max((self.known.tests[test].seconds for test, _ in steps), default=0.0)
        events, died = children.child(lambda tell: self._run(mutant, steps, change, tell), longest)
        started = [number for kind, number in events if kind == "start"]
        failed = [how for kind, how in events if kind == "failed"]
        how = failed[0] if failed else died or "survived"
        step = None if how == "survived" else steps[started[-1] if started else 0]
        if step is not None and step[1] and how == "failed":
            how = "sanitizer"  # of a finding that a test turned into an error of its own
        seconds = sum(self.known.tests[steps[number][0]].seconds for number in started)
        return Verdict(how, step and step[0], round(seconds, 3), bool(step and step[1])), step

    def _run(self, mutant: Mutant, steps: list[Step], change: bool, tell: Callable[..., None]) -> None:
        name = f"{mutant.file}:{mutant.function}"
        tree = sources.tree(name)
        sources.put(self.functions[name], mutated(tree, mutant) if change else tree)
        for number, (test, guarded) in enumerate(steps):
            tell("start", number)
            with children.at_most(self.known.tests[test].seconds * (SANITIZER if guarded else 1.0)):
                outcome = self.plugin.outcome(self.items[test], sanitize if guarded else nullcontext)
            if outcome not in ("passed", "skipped"):
                tell("failed", outcome)
                return
