"""How many changes to the kernels the suite sees.

    python -m tests.mutation                              every mutant that verdicts.json has no verdict of
    python -m tests.mutation --only gemm --sample 50      50 of those of a family, drawn by --seed
    python -m tests.mutation --minutes 30                 as many as 30 minutes allow, in an order drawn by --seed
    python -m tests.mutation --table                      what verdicts.json holds, by file
    python -m tests.mutation --repeat --minutes 2         whether tests still see what they saw, in an order by --seed

Exits with 1 where fewer than 95 % of the mutants without an explanation are killed.
"""

import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Kernels are interpreted, by one thread: both are decided when torch and Triton are imported.
os.environ["TRITON_INTERPRET"] = "1"
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

from tests.mutation import children, record, report, sources  # noqa: E402
from tests.mutation.campaign import Campaign, Verdict  # noqa: E402
from tests.mutation.reach import Map, digest  # noqa: E402

TESTS = ("tests/kernels", "tests/test_operations.py", "tests/ops", "tests/optim", "tests/test_random.py")
# What they test runs in processes of their own, where no kernel is changed.
ELSEWHERE = ("tests/runtime/test_fast_launch.py", "tests/interpreter/test_patches.py")
SECONDS = 5.0  # that a test which is repeated may usually take
MOST = 400  # mutants that a run repeats
MAP = sources.ROOT / "build" / "mutation-map.json"

# The suite's examples, without the search for smaller ones.
settings.register_profile(
    "mutation",
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="mutants whose file or function has this in its name; more than one with commas")
    parser.add_argument("--sample", type=int, help="how many to draw (default: all)")
    parser.add_argument("--seed", default="0", help="decides which are drawn, and in which order (default: 0)")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes of mutants")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for each (default: 60; 0: all)")
    parser.add_argument("--processes", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--record", type=Path, metavar="F", default=record.PATH, help="where verdicts are kept")
    parser.add_argument("--again", action="store_true", help="judge what survived so far, and nothing else")
    parser.add_argument("--repeat", action="store_true", help="run the tests that saw a mutant, and no others")
    parser.add_argument("--table", action="store_true", help="print what the record holds, and run nothing")
    parser.add_argument("--list", action="store_true", help="print the mutants, and the functions that have none")
    parser.add_argument("--tests", nargs="+", default=TESTS, help=f"tests to use (default: {' '.join(TESTS)})")
    parser.add_argument("--map", type=Path, default=MAP, help="where it is kept what each test reaches")
    return parser.parse_args()


def drawn(options: argparse.Namespace, every: list) -> list:
    """The mutants that are asked for, in the order of the seed."""
    wanted = (options.only or "").split(",")
    chosen = [m for m in every if any(name in f"{m.file}:{m.function}" for name in wanted)]
    if not chosen:
        raise SystemExit(
            f"--only {options.only}: no mutant; families are {', '.join(sorted({m.family for m in every}))}"
        )
    # By a hash of each, so that a mutant more or less leaves the others in their order.
    return sorted(chosen, key=lambda mutant: digest(f"{options.seed} {mutant.key}"))[: options.sample]


def warm_up() -> None:
    """What each child would do again."""
    for function in sources.functions().values():
        function.rewrite()
    children.warm_up()


class Run:
    """One run, inside pytest, which has collected the tests."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.every = sources.all_mutants()
        self.reasons = report.explanations(self.every)
        self.verdicts = record.read(options.record, self.every)
        self.plugin = children.Plugin(self.repeat if options.repeat else self.work)
        self.enough = False
        self._saving = threading.Lock()

    def left(self) -> list[report.Mutant]:
        """The mutants that are asked for and have no verdict yet, or those that survived; what is explained has been
        looked at by hand."""

        def wanted(mutant: report.Mutant) -> bool:
            verdict = self.verdicts.get(mutant)
            return verdict is None if not self.options.again else verdict is not None and not verdict.killed

        asked = (mutant for mutant in drawn(self.options, self.every) if mutant.key not in self.reasons)
        return [mutant for mutant in asked if wanted(mutant)]

    def work(self, session) -> None:
        warm_up()
        known = Map(self.options.map)
        with self.progress() as bar:
            missing = known.missing(session.items)
            if missing:
                self.console.print(f"running {len(missing)} tests once, for what each of them reaches")
                task = bar.add_task("tests", total=len(missing))
                known.make(self.plugin, missing, lambda: bar.advance(task), self.options.processes)
                bar.remove_task(task)
            self.warn(session.items, known)
            campaign = Campaign(self.plugin, session.items, known, self.options.budget or None)

            def judge(mutant: report.Mutant) -> None:
                verdict = campaign.judge(mutant)
                with self._saving:
                    self.verdicts[mutant] = verdict
                    record.write(self.options.record, self.every, self.verdicts)

            self.each("mutants", self.left(), judge, bar)
        self.enough = report.show(self.console, self.verdicts, self.reasons, self.every).score >= report.LEAST

    def repeat(self, session) -> None:
        """Whether tests still see the mutants that they saw."""
        warm_up()
        campaign = Campaign(self.plugin, session.items, Map.assumed(session.items, SECONDS), None)
        found: dict[report.Mutant, Verdict | None] = {}

        def judge(mutant: report.Mutant) -> None:
            found[mutant] = campaign.repeat(mutant, self.verdicts[mutant])

        with self.progress() as bar:
            self.each("mutants", self.seen(), judge, bar)
        told = {mutant: verdict for mutant, verdict in found.items() if verdict is not None}
        for mutant, verdict in told.items():
            if not verdict.killed:
                report.print_mutant(self.console, mutant, f"not seen any more by {self.verdicts[mutant].test}")
        killed = sum(verdict.killed for verdict in told.values())
        gone = f"; of {len(found) - len(told)} the test is gone: make mutation" if len(told) < len(found) else ""
        self.console.print(f"{killed} of {len(told)} mutants are seen as before{gone}")
        self.enough = bool(told) and killed >= report.LEAST * len(told)

    def seen(self) -> list[report.Mutant]:
        """Those of the mutants asked for that a test saw; no more than a run can repeat."""
        kept = (mutant for mutant in drawn(self.options, self.every) if mutant in self.verdicts)
        return [mutant for mutant in kept if self.verdicts[mutant].killed][:MOST]

    def files(self) -> list[str]:
        """Those of the tests that `repeat` runs."""
        return sorted({str(self.verdicts[mutant].test).partition("::")[0] for mutant in self.seen()})

    def progress(self) -> Progress:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        return Progress(*columns, console=self.console, disable=not self.console.is_terminal)

    def each(
        self, what: str, mutants: list[report.Mutant], judge: Callable[[report.Mutant], None], bar: Progress
    ) -> None:
        """Judge mutants, some at a time, until the minutes are over."""
        task, until = bar.add_task(what, total=len(mutants)), time.monotonic() + 60 * (self.options.minutes or math.inf)

        def unless_late(mutant: report.Mutant) -> None:
            if time.monotonic() < until:
                judge(mutant)
                bar.advance(task)

        with ThreadPoolExecutor(self.options.processes) as pool:
            for done in [pool.submit(unless_late, mutant) for mutant in mutants]:
                done.result()

    def warn(self, items, known: Map) -> None:
        """Tests that fail as the kernels are see nothing."""
        failing = [item.nodeid for item in items if known.tests[item.nodeid].outcome not in ("passed", "skipped")]
        for name in failing:
            self.console.print(f"left out, it fails without any change: {name}", markup=False)


def main() -> int:
    options = arguments()
    console = Console(soft_wrap=True)
    if options.list:
        for mutant in drawn(options, sources.all_mutants()):
            report.print_mutant(console, mutant, "not run")
        for name in sources.functions():
            if reason := sources.reason_not_mutated(name):
                console.print(f"not mutated: {name} ({reason})", markup=False)
        return 0
    run = Run(options, console)
    if options.table:
        report.show(console, run.verdicts, run.reasons, run.every)
        return 0
    tests = run.files() if options.repeat else options.tests
    if not tests:
        console.print(f"{options.record} has no mutant that a test saw: run `make mutation`", markup=False)
        return 2
    started = time.monotonic()
    code = pytest.main(
        [
            *tests, "-q", "-s", "--device", "cpu", "--tb=native", "--assert=plain", "--timeout=0",
            "--hypothesis-profile=mutation", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist",
        ],
        plugins=[run.plugin],
    )  # fmt: skip
    console.print(f"{time.monotonic() - started:.0f} seconds")
    if code:
        console.print(f"pytest ran no mutants (exit code {int(code)})")
        return 2
    return 0 if run.enough else 1


if __name__ == "__main__":
    sys.exit(main())
