"""How many changes to the kernels the suite sees.

    python -m tests.mutation                              every mutant of every kernel
    python -m tests.mutation --only gemm --sample 50      50 of those of a family, drawn by --seed
    python -m tests.mutation --minutes 30 --json F        as many as 30 minutes allow, in an order drawn by --seed

Exits with 1 where fewer than 95 % of the mutants without an explanation are killed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

# Kernels are interpreted, by one thread: both are decided when torch and Triton are imported.
os.environ["TRITON_INTERPRET"] = "1"
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

from tests.mutation import children, report, sources  # noqa: E402
from tests.mutation.campaign import Campaign, Verdict  # noqa: E402
from tests.mutation.reach import Map, digest  # noqa: E402

TESTS = ("tests/kernels", "tests/test_operations.py", "tests/ops", "tests/optim", "tests/test_random.py")
# What they test runs in processes of their own, where no kernel is changed.
ELSEWHERE = ("tests/runtime/test_direct.py", "tests/runtime/test_interpret.py")
MAP = sources.ROOT / "build" / "mutation-map.json"

# The suite's examples, without the search for smaller ones.
settings.register_profile(
    "mutation",
    max_examples=16,
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
    parser.add_argument("--seed", type=int, default=0, help="which are drawn, and in which order (default: 0)")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes of mutants")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for each (default: 60; 0: all)")
    parser.add_argument("--json", type=Path, metavar="F", help="write every verdict to F")
    parser.add_argument(
        "--resume", action="store_true", help="take over from the file of --json what was killed or is explained"
    )
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


class Run:
    """One run, inside pytest, which has collected the tests."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        self.every = sources.all_mutants()
        self.chosen = drawn(options, self.every)
        self.reasons = report.explanations(self.every)
        self.plugin = children.Plugin(self.work)
        self.verdicts: dict[report.Mutant, Verdict] = {}
        self.enough = False

    def work(self, session) -> None:
        for function in sources.functions().values():
            function.rewrite()
        children.warm_up()
        known = Map(self.options.map)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            missing = known.missing(session.items)
            if missing:
                self.console.print(f"running {len(missing)} tests once, for what each of them reaches")
                task = bar.add_task("tests", total=len(missing))
                known.make(self.plugin, missing, lambda: bar.advance(task))
                bar.remove_task(task)
            self.warn(session.items, known)
            campaign = Campaign(self.plugin, session.items, known, self.options.budget or None)
            task = bar.add_task("mutants", total=len(self.chosen))
            taken, until = self.taken_over(), time.monotonic() + 60 * (self.options.minutes or float("inf"))
            for mutant in self.chosen:
                if time.monotonic() > until:
                    break
                self.verdicts[mutant] = taken.get(mutant.key) or campaign.judge(mutant)
                bar.advance(task)
                self.save()
        self.enough = report.show(self.console, self.verdicts, self.reasons, len(self.every)).score >= report.LEAST

    def warn(self, items, known: Map) -> None:
        """Tests that fail as the kernels are see nothing."""
        failing = [item.nodeid for item in items if known.tests[item.nodeid].outcome not in ("passed", "skipped")]
        for name in failing:
            self.console.print(f"left out, it fails without any change: {name}", markup=False)

    def taken_over(self) -> dict[tuple[str, ...], Verdict]:
        if not (self.options.resume and self.options.json and self.options.json.exists()):
            return {}
        stored = json.loads(self.options.json.read_text(encoding="utf-8"))["verdicts"]
        names = Verdict.__dataclass_fields__
        pairs = [(tuple(v[f] for f in report.FIELDS), Verdict(**{n: v[n] for n in names})) for v in stored]
        return {key: verdict for key, verdict in pairs if verdict.killed or key in self.reasons}

    def save(self) -> None:
        if self.options.json:
            found = report.as_json(self.verdicts, len(self.every), self.options.seed)
            self.options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


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
    started = time.monotonic()
    code = pytest.main(
        [
            *options.tests, "-q", "-s", "--device", "cpu", "--tb=native", "--assert=plain", "--timeout=0",
            "--hypothesis-profile=mutation", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist",
        ],
        plugins=[run.plugin],
    )  # fmt: skip
    console.print(f"{time.monotonic() - started:.0f} seconds")
    if not run.verdicts:
        console.print(f"pytest collected no tests (exit code {int(code)})")
        return 2
    return 0 if run.enough else 1


if __name__ == "__main__":
    sys.exit(main())
