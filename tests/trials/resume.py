"""Training that is killed at random moments and continued, against training that was left alone, bit for bit.

    python -m tests.trials.resume --trials 100 [--trainer text|images|gan|all] [--seed 0] [--device auto]

For each trainer a run on tiny data is made by `python -m minidl train` without a stop. Then trial after trial starts
the same command, kills it by SIGKILL, starts it again with --resume, may kill that too, and compares every file of what
the last life has left (`same`). Most lives are forked from warm parents (`warm` says how they differ from real ones);
every tenth trial of a trainer takes real processes. A life is killed

    moment   within one of the places of training, chosen first, so that short ones are met as often as long ones
    file     before an operation on a file of the run: between any two of them the folder is as a user may find it
    stop     soon after SIGTERM, while the state within an epoch is saved

The exit status is 1 when any trial ends in another run, and the folder of that trial is kept. On a GPU captured steps
are the default, as they are for users.
"""

import argparse
import collections
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.trials import data
from tests.trials.lives import MOST_SECONDS, PLACES, Cold, Parent, start_real
from tests.trials.same import differences

TRAINERS = ("text", "images", "gan")
# How often a moment is chosen in each place: most of them after start-up.
WEIGHTS = {"start-up": 1, "set-up": 2, "steps": 9, "validation": 5, "end of an epoch": 3, "saving": 5, "report": 5}
MANNERS = {"moment": 6, "file": 3, "stop": 2}
KILLS = {1: 6, 2: 3, 3: 1}  # of one run, and how often
REPLACED = 0.2  # of the runs replace one that is there, and must leave nothing of it
REAL_EVERY = 10
_LOOK = 0.0005  # seconds between two looks at a timeline


@dataclass
class Reference:
    """The run that was left alone; the lengths of a warm life's visits to each place, and its operations on files.

    A real life is in the run's folder after `begun` seconds and ends after `seconds`.
    """

    run: Path
    visits: dict[str, list[float]]
    files: int
    begun: float
    seconds: float


class Trials:
    """Trials of one session, in `folder`, with lives from `parents` in turn; `flags` are added to every command."""

    def __init__(self, folder, parents, device, flags=()):
        self.folder, self.parents, self.flags = folder, parents, ["--device", device, *flags]
        self.inputs = data.write(folder)
        self.references = {}

    def argv(self, trainer, run, *more):
        """The command of a life."""
        return ["train", trainer, *self.inputs[trainer], *self.flags, "--out", str(run), *more]

    def prepare(self, trainer, real=True):
        """Make the reference: by a real process, and a warm life that must be the same, or by the warm life alone."""
        folder = self.folder / trainer
        folder.mkdir()
        warm = folder / ("warm" if real else "run")
        with self.parents[0].start(self.argv(trainer, warm), folder, "warm") as life:
            _finished(life)
        places, begun, seconds = life.places(), 0.0, 0.0
        if real:
            with start_real(self.argv(trainer, folder / "run"), folder, "reference") as life:
                while not (folder / "run" / "config.json").exists() and not life.ended(_LOOK):
                    pass
                begun = time.monotonic() - life.started
                _finished(life)
                seconds = time.monotonic() - life.started
            found = differences(warm, folder / "run")
            if found:
                raise SystemExit("\n".join(["two runs that were left alone differ:", *found]))
        files = sum(place == "file" for _, place in places)
        self.references[trainer] = Reference(folder / "run", visits(places), files, begun, seconds)

    def run(self, trainer, number, draw, kills=None, manner=None, real=False):
        """One trial: the places where lives ended, and what is not the same in the end.

        So often, and in the manner that is given; else as `draw` decides.
        """
        folder = self.folder / trainer / f"trial-{number}"
        folder.mkdir()
        run, deaths = folder / "run", []
        replaced = draw.random() < REPLACED
        if replaced:
            shutil.copytree(self.references[trainer].run, run)
        for kill in range(kills or _drawn(draw, KILLS)):
            argv = self.argv(trainer, run, *(["--resume"] if kill else ["--overwrite"] if replaced else []))
            deaths.append(self._killed(trainer, argv, folder, draw, kill, real, manner))
        argv = self.argv(trainer, run, "--resume")
        with (
            start_real(argv, folder, "last") if real else self._parent(len(deaths)).start(argv, folder, "last") as last
        ):
            last.ended(MOST_SECONDS)
        found = differences(run, self.references[trainer].run) if last.code == 0 else [f"exit status {last.code}"]
        found += [f"{path} is left" for path in folder.iterdir() if path.is_dir() and path != run]
        if not found:
            shutil.rmtree(folder)
        return deaths, found

    def _parent(self, turn):
        return self.parents[turn % len(self.parents)]

    def _killed(self, trainer, argv, folder, draw, turn, real, manner):
        """The place where a life died, "end" when it was done before."""
        reference, name = self.references[trainer], f"life-{turn}"
        if real:
            with start_real(argv, folder, name) as life:
                first = 0.0 if draw.random() < 0.15 else reference.begun
                life.ended(draw.uniform(first, reference.seconds))
                return _end(life, (0,), "real process")
        manner = manner or _drawn(draw, MANNERS)
        # The run that is replaced is moved aside at first and deleted in the end.
        files = reference.files + (2 * len(list(reference.run.rglob("*"))) if "--overwrite" in argv else 0)
        die_at = draw.randrange(files) + 1 if manner == "file" else None
        with self._parent(turn).start(argv, folder, name, die_at) as life:
            if manner == "file":
                life.ended(MOST_SECONDS)
            else:
                place = _drawn(draw, WEIGHTS) if manner == "moment" else "steps"
                lengths = reference.visits[place]
                # A run that is continued has fewer of them.
                visit = draw.randrange(len(lengths) if turn == 0 else 1)
                self._reach(life, place, visit)
                life.ended(draw.uniform(0.0, lengths[visit]))
            if manner == "stop":
                saved = len(visits(life.places())["saving"])
                life.send(signal.SIGTERM)
                self._reach(life, "saving", saved)
                life.ended(draw.uniform(0.0, 2.0 * max(reference.visits["saving"])))
            return _end(life, (0, 130))

    def _reach(self, life, place, visit):
        """Wait until a life has come to a place so many times, or to its end."""
        while len(visits(life.places())[place]) <= visit and not life.ended(_LOOK):
            pass


def _drawn(draw, weights):
    return draw.choices(list(weights), list(weights.values()))[0]


def _finished(life):
    if not life.ended(MOST_SECONDS) or life.code != 0:
        raise SystemExit(f"a run that was left alone ends with exit status {life.code}:\n{life.log.read_text()}")


def _end(life, allowed, what=None):
    """Kill a life; the place where it died. Raises unless it was killed, or ended by itself in an `allowed` way."""
    if not life.ended(0.0):
        life.kill()
    if life.code == -signal.SIGKILL:
        return what or life.place()
    if life.code in allowed:
        return "end" if life.code == 0 else "stopped by itself"
    raise LostLifeError(f"exit status {life.code}: {life.log.read_text()[-2000:]}")


class LostLifeError(Exception):
    """A life that ended neither by SIGKILL nor well."""


def visits(places):
    """By place, the seconds of each visit in a timeline; the last one is not over, and has 0."""
    found = collections.defaultdict(list)
    now, since, saving = None, 0.0, 0.0
    for moment, place in places:
        if place == "+saving":
            saving = moment
            found["saving"].append(0.0)
        elif place == "-saving":
            found["saving"][-1] = moment - saving
        elif place != "file":
            if now is not None:
                found[now][-1] = moment - since
            now, since = place, moment
            found[now].append(0.0)
    return found


def main():
    """The command."""
    options = _options()
    console = Console()
    names = TRAINERS if options.trainer == "all" else (options.trainer,)
    folder = Path(tempfile.mkdtemp(prefix="resume-trials-", dir=options.folder))
    more = {"TRITON_INTERPRET": "1"} if options.device == "cpu" else {}
    parents = [Parent(seed, **more) for seed in (1, 2)]
    if not all(parent.ready for parent in parents):
        console.print("a forked child cannot be trusted here (threads, or CUDA): each life is a process of its own")
        for parent in parents:
            parent.close()
        parents = [Cold()]
    counts = {name: collections.Counter() for name in names}
    failures = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        trials = Trials(folder, parents, options.device)
        bar = progress.add_task("runs that are left alone", total=len(names))
        for name in names:
            trials.prepare(name)
            progress.advance(bar)
        bar = progress.add_task("trials", total=options.trials)
        for number in range(options.trials):
            name = names[number % len(names)]
            draw = random.Random(f"{options.seed} {name} {number}")
            # Each trainer has its share of them.
            real = number // len(names) % REAL_EVERY == REAL_EVERY - 1
            try:
                deaths, found = trials.run(name, number, draw, real=real)
            except LostLifeError as error:
                deaths, found = [], [str(error)]
            counts[name].update(deaths)
            counts[name]["trials"] += 1
            counts[name]["real"] += real
            counts[name]["kills"] += sum(place not in ("end", "stopped by itself") for place in deaths)
            if found:
                counts[name]["differ"] += 1
                failures.append((folder / name / f"trial-{number}", found))
                progress.console.print(f"{failures[-1][0]}:", *found, sep="\n  ", markup=False, soft_wrap=True)
            progress.advance(bar)
    for parent in parents:
        parent.close()
    console.print(_table(counts))
    if failures:
        console.print(f"{len(failures)} of {options.trials} trials differ; they are in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


def _options():
    parser = argparse.ArgumentParser(prog="python -m tests.trials.resume", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=100, help="in all, the trainers in turn")
    parser.add_argument("--trainer", choices=(*TRAINERS, "all"), default="all")
    parser.add_argument("--seed", type=int, default=0, help="decides the moments, as far as a machine can repeat them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--folder", help="where runs are made; default: the system's for temporary files")
    return parser.parse_args()


def _table(counts):
    table = Table(title="trials, and where lives ended")
    table.add_column("")
    for name in (*counts, "all"):
        table.add_column(name, justify="right")
    rows = ("trials", "real", "kills", *PLACES, "real process", "stopped by itself", "differ")
    titles = {
        "real": "of them with real processes", "kills": "lives killed", "end": "done before the kill",
        "real process": "anywhere, in a real process", "stopped by itself": "stopped by SIGTERM before the kill",
        "differ": "trials that differ", "report": "test and report",
    }  # fmt: skip
    for row in rows:
        values = [count[row] for count in counts.values()]
        table.add_row(titles.get(row, row), *map(str, values), str(sum(values)), end_section=row in ("kills", "end"))
    return table


if __name__ == "__main__":
    main()
