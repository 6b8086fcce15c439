"""Faults at every step of saving, harmed files, signals, numbers that are none, and memory that runs out.

    python -m tests.trials.faults --trials 1000 [--seed 0] [--only KIND]

A trial is drawn from the seed and its number. Kinds:

    write     a step fails (full disk, error of the device, read-only, not permitted, no memory) or the process dies
              there, in everything that minidl writes (`writers`); what was there before is whole
    train     the same in a whole command that trains: new, continued, or replacing another run
    generate  the same in a command that makes pictures, over older ones
    taken     a name that is to be written is that of a folder
    harm      a file is cut off, has a wrong bit or a block of zeros (`harms`): told, or of no effect
    signal    SIGINT or SIGTERM, once or twice, at any moment of training or of making pictures
    numbers   NaN, infinities and huge numbers in the data, and rates that make training diverge

After each: a clear error or a result; no part of a file under its name, no temporary file where the process lived on;
and the same command, continued or given again, ends as it would have without the fault. The exit status is 1 at any
violation, and its folder is kept.
"""

import argparse
import collections
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.trials import child, data, harms, writers
from tests.trials.failpoints import CODES, DEAD, Failpoints, drawn, leftovers
from tests.trials.same import differences

KINDS = {"write": 46, "harm": 33, "train": 8, "generate": 5, "signal": 4, "taken": 2, "numbers": 2}
FAULTS = (*CODES, "memory", "death")
PLAIN = ["--no-plots", "--quiet"]
_TAKEN = (
    "metrics.jsonl",
    "model.safetensors",
    "report.json",
    "report.txt",
    "checkpoints/last.json",
    "environment.json",
)


class Trials:
    """What trials share, made once in `folder`: runs of these kinds."""

    def __init__(self, folder, kinds=("text", "table", "images", "gan")):
        self.folder = folder
        self.answers = {}
        child.warm()
        source = folder / "data"
        source.mkdir()
        flags = data.write(source)
        self.train = ["train", "text", *flags["text"], *PLAIN]
        self.train[self.train.index("--epochs") + 1] = "2"
        draw = random.Random(0)
        rows = [(draw.uniform(-2, 2), draw.uniform(-2, 2)) for _ in range(60)]
        self.rows = [f"{a:.3f},{b:.3f},{a + 2 * b:.3f}" for a, b in rows]
        (source / "rows.csv").write_text("a,b,y\n" + "\n".join(self.rows) + "\n")
        self.table = ["--target", "y", "--epochs", "2", "--hidden", "4", "--batch-size", "32", *PLAIN]
        self.runs = {}
        commands = {
            "text": self.train,
            "other": [*self.train, "--seed", "1"],
            "table": ["train", "table", "--data", source / "rows.csv", *self.table],
            "images": ["train", "images", *flags["images"], *PLAIN, "--epochs", "1", "--batch-size", "12"],
            "gan": ["train", "gan", *flags["gan"], *PLAIN, "--epochs", "1", "--batch-size", "12"],
        }
        for name, argv in commands.items():
            if name not in (*kinds, "other"):
                continue
            self.runs[name] = folder / name
            # Of the batches that a generator is calibrated with, two do what eight do.
            with mock.patch("minidl.training.loop.adversaries.CALIBRATION", 2):
                self._must([*_once(argv), "--out", self.runs[name]])
        self.runs["open"] = folder / "open"
        shutil.copytree(self.runs["text"], self.runs["open"])
        for name in ("report.json", "report.txt", "model.safetensors"):
            (self.runs["open"] / name).unlink()
        self.generate = ["generate", "--model", self.runs["gan"], "--quiet", "--grid", "1x4"]
        for name, seeds in (("old", "4-7"), ("pictures", "2-5")):
            self._must([*self.generate, "--seeds", seeds, "--out", folder / name])
        self.targets = harms.targets(self.runs, source)
        self.points = {}
        self.idle = 0  # trials whose fault met no step

    def _must(self, argv):
        ended = child.command(argv, self.folder / "log")
        assert ended.code == 0, (argv, ended)

    def run(self, kind, draw, folder):
        """A trial; (what it was, what is wrong)."""
        return getattr(self, f"_{kind}")(draw, folder)

    def _write(self, draw, folder):
        writer = draw.choice(writers.WRITERS)
        place = folder / "place"
        place.mkdir()
        writer(place, 1)
        before = _contents(place)
        if writer not in self.points:
            expected = folder / "expected"
            shutil.copytree(place, expected)
            with Failpoints(expected) as points:
                writer(expected, 2)
            self.points[writer] = points.points, _contents(expected)
        known, after = self.points[writer]
        fault = drawn(draw, FAULTS, known, 0.2)
        points = Failpoints(place, fault)
        what = f"{writer.__name__} {fault.kind}"
        found = []
        if fault.kind == "death":
            ended = child.call(lambda: writer(place, 2), folder / "log", points)
            if ended.code != DEAD:
                found.append(f"exit status {ended.code}: {ended.err[-600:]}")
        else:
            try:
                with points:
                    writer(place, 2)
            except (OSError, MemoryError, ValueError) as error:
                if isinstance(error, OSError) and not str(error.filename or "").startswith(str(folder)):
                    found.append(f"the error names no file: {error!r}")
            self.idle += points.struck is None
            stays = leftovers(place)
            # What lets nothing be deleted any more leaves the file it met.
            if stays and not (fault.lasting and fault.kind in ("EROFS", "EACCES", "EIO")):
                found.append(f"left: {stays}")
        now = _contents(place)
        for name, content in now.items():
            if writer is writers.trace:
                json.loads(content)
            elif content not in (before.get(name), after.get(name)):
                found.append(f"{name} is neither the old nor the new file")
        # Checkpoints replace their tensor files by others: the newest state that is named must be whole.
        gone = [name for name in before.keys() - now.keys() if name in after]
        if gone:
            found.append(f"gone: {gone}")
        if writer is writers.checkpoint:
            kept = writers.checkpoints.Checkpoints(place / "checkpoints")
            found += [f"{state} is lost" for state in ("last", "best") if getattr(kept, state)() is None]
        writer(place, 2)
        again = _contents(place)
        if writer is not writers.trace and again != after:
            found.append(f"written again it differs: {sorted(again)} and {sorted(after)}")
        return what, found

    def _train(self, draw, folder):
        run = folder / "run"
        manner = draw.choice(["new", "resume", "overwrite"])
        argv = [*self.train, "--out", run]
        if manner == "resume":
            shutil.copytree(self.runs["open"], run)
        elif manner == "overwrite":
            shutil.copytree(self.runs["other"], run)
        argv += [] if manner == "new" else [f"--{manner}"]
        fault = drawn(draw, (*FAULTS, "vanish"), self._points(manner, argv, run, folder), 0.3)
        ended = child.command(argv, folder / "log", Failpoints(run, fault))
        self.idle += not _struck(folder / "log")
        found = child.wrongs(ended, (DEAD,) if ended.code == DEAD and fault.kind == "death" else (0, 1, 2))
        what = f"{manner} {fault.kind}"
        if manner == "overwrite" and fault.kind != "vanish":
            found += self._one_is_whole(run)
        if ended.code != DEAD and not (fault.lasting and fault.kind in ("EROFS", "EACCES", "EIO")):
            found += [f"left: {name}" for name in _all_leftovers(run)]
        return what, found + self._ends_well(run, folder)

    def _points(self, name, argv, place, folder):
        """The points of the command, which writes to `place`; it is run once in a copy of that."""
        if name not in self.points:
            clean = folder / "clean"
            clean.mkdir()
            copy = clean / place.name
            if place.exists():
                shutil.copytree(place, copy)
            ended = child.command([copy if word == place else word for word in argv], folder / "log", Failpoints(copy))
            assert ended.code == 0, ended
            self.points[name] = (folder / "log.points").read_text().splitlines()[1:]
        return self.points[name]

    def _one_is_whole(self, run):
        """Of the run that is replaced and the one that replaces it."""
        aside = run.with_name("run.previous")
        for place in (run, aside):
            for reference in (self.runs["other"], self.runs["text"]):
                if place.is_dir() and (place / "report.json").exists():
                    wrong = [name for name in differences(place, reference) if not name.startswith("replaced")]
                    if not [name for name in wrong if ".part" not in name]:
                        return []
        return ["neither the old run nor the new one is whole"]

    def _ends_well(self, run, folder):
        """Continue a run, or begin it again where the old one is back; what differs from the run without a fault."""
        argv = [*self.train, "--out", run]
        config = run / "config.json"
        old = config.exists() and json.loads(config.read_text())["config"]["seed"] == 1
        ended = child.command([*argv, "--overwrite" if old else "--resume"], folder / "again")
        if ended.code != 0:
            return [f"it does not go on: {ended.err[-600:]}"]
        found = differences(run, self.runs["text"])
        # An empty folder may stay where even that could not be deleted.
        aside = run.with_name("run.previous")
        if aside.exists() and any(aside.iterdir()):
            found.append("the replaced run stays")
        return found

    def _taken(self, draw, folder):
        run, name = folder / "run", draw.choice(_TAKEN)
        shutil.copytree(self.runs["open"], run)
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()
        ended = child.command([*self.train, "--out", run, "--resume"], folder / "log")
        found = child.wrongs(ended, (1, 2)) + [f"left: {left}" for left in leftovers(run)]
        if not (run / name).is_dir():
            found.append("the folder is gone")
        shutil.rmtree(run / name)
        if name == "checkpoints/last.json":
            return "taken", found
        return "taken", found + self._ends_well(run, folder)

    def _generate(self, draw, folder):
        place = folder / "place"
        manner = draw.choice(["new", "overwrite"])
        if manner == "overwrite":
            shutil.copytree(self.folder / "old", place)
        argv = [*self.generate, "--seeds", "2-5", "--out", place, *(["--overwrite"] if manner == "overwrite" else [])]
        fault = drawn(draw, FAULTS, self._points(f"generate {manner}", argv, place, folder), 0.3)
        ended = child.command(argv, folder / "log", Failpoints(place, fault))
        self.idle += not _struck(folder / "log")
        found = child.wrongs(ended, (DEAD,) if ended.code == DEAD and fault.kind == "death" else (0, 1, 2))
        if ended.code != DEAD and not (fault.lasting and fault.kind in ("EROFS", "EACCES", "EIO")):
            found += [f"left: {name}" for name in leftovers(place)]
        return f"generate {fault.kind}", found + self._pictures_well(place, folder)

    def _pictures_well(self, place, folder):
        known = [_contents(self.folder / name) for name in ("old", "pictures")]
        found = []
        for name, content in _contents(place).items():
            # Where new pictures are made, nobody reads them before all are there. While they change places, images.json
            # names them and the old ones.
            apart = name.startswith(".new-pictures/")
            both = name == "images.json" and {f"seed-{seed:06}.png" for seed in range(2, 8)} == {
                entry["file"] for entry in json.loads(content)["files"]
            }
            if not apart and not both and content not in [contents.get(name) for contents in known]:
                found.append(f"{name} is not whole")
        ended = child.command([*self.generate, "--seeds", "2-5", "--out", place, "--overwrite"], folder / "again")
        if ended.code != 0:
            return [*found, f"it cannot be done again: {ended.err[-400:]}"]
        now = _contents(place)
        if now != known[1] or leftovers(place):
            found.append(f"another result: {sorted(now)}, {leftovers(place)}")
        return found

    def _harm(self, draw, folder):
        target, kind = draw.choice(self.targets), draw.choice(harms.HARMS)
        found = harms.harmed(target, kind, draw, folder, self.answers, self.runs["text"])
        return f"{kind} {target.name}", found

    def _signal(self, draw, folder):
        number = draw.choice([signal.SIGINT, signal.SIGTERM])
        work = draw.choice(["new", "resume", "overwrite", "generate"])
        place = folder / ("place" if work == "generate" else "run")
        send = [(draw.uniform(0.02, 1.5), number)]
        if draw.random() < 0.4:
            send.append((send[0][0] + draw.uniform(0, 0.2), number))
        if work == "generate":
            ended = child.command([*self.generate, "--seeds", "2-5", "--out", place], folder / "log", send=send)
        else:
            if work != "new":
                shutil.copytree(self.runs["open" if work == "resume" else "other"], place)
            more = [] if work == "new" else [f"--{work}"]
            ended = child.command([*self.train, "--out", place, *more], folder / "log", send=send)
        found = child.wrongs(ended, (0, 130))
        if work == "generate":
            return f"signal {work}", found + self._pictures_well(place, folder)
        if work == "overwrite":
            found += self._one_is_whole(place)
        if len(send) == 1:
            found += [f"left: {name}" for name in _all_leftovers(place)]
        if ended.code == 130 and len(send) == 1 and "interrupted" not in ended.err:
            found.append(f"it does not say that it was interrupted: {ended.err!r}")
        return f"signal {work}", found + self._ends_well(place, folder)

    def _numbers(self, draw, folder):
        rows = [row.split(",") for row in self.rows]
        bad = draw.choice(["nan", "inf", "-inf", "1e39", "1e300", "-1e38", "", "NaN", "1e400"])
        where = draw.randrange(3)
        for _ in range(draw.choice([1, 1, 5, 60])):
            draw.choice(rows)[where] = bad
        (folder / "rows.csv").write_text("a,b,y\n" + "\n".join(map(",".join, rows)) + "\n")
        rate = draw.choice([[], [], ["--lr", draw.choice(["1e18", "1e30", "1e38"])]])
        run = folder / "run"
        argv = ["train", "table", "--data", folder / "rows.csv", *self.table, *rate, "--out", run]
        ended = child.command(argv, folder / "log")
        found = child.wrongs(ended, (0, 1, 2))
        if ended.code == 0:
            report = json.loads((run / "report.json").read_text())
            if report["task"] == "regression" and not math.isfinite(report["rmse"]):
                found.append("scores that are not finite")
        elif (run / "report.json").exists():
            found.append("a report of a run that failed")
        return "numbers", found + [f"left: {name}" for name in _all_leftovers(run)]


def _struck(log):
    """Whether the fault of a child met a point; one that dies of it says nothing more."""
    told = Path(f"{log}.points")
    return not told.exists() or told.read_text().splitlines()[0] != "None"


def _once(argv):
    """A flag that is given twice has its last value."""
    found = list(map(str, argv))
    for flag in ("--epochs", "--batch-size"):
        while found.count(flag) > 1:
            place = found.index(flag)
            del found[place : place + 2]
    return found


def _all_leftovers(run):
    return leftovers(run) + leftovers(run.with_name(run.name + ".previous"))


def _contents(folder):
    """The bytes of each file below a folder that is not temporary."""
    return {
        str(path.relative_to(folder)): _in_order(path.read_bytes())
        if path.suffix == ".safetensors"
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".part"
    }


def _in_order(content):
    """A tensor file with its metadata in order, which safetensors writes in any."""
    length = int.from_bytes(content[:8], "little")
    try:
        return json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True).encode() + content[8 + length :]
    except ValueError:
        return content


def trial(trials, seed, number, folder, only=None):
    """(kind, what it was, what is wrong) of trial `number`."""
    draw = random.Random(f"{seed} {number}")
    kind = only or draw.choices(list(KINDS), list(KINDS.values()))[0]
    try:
        what, found = trials.run(kind, draw, folder)
    except Exception:  # noqa: BLE001 (told with its number)
        what, found = "?", [traceback.format_exc()]
    return kind, what, found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--only", choices=list(KINDS), help="one kind")
    chosen = parser.parse_args()
    console = Console()
    top = Path(tempfile.mkdtemp(prefix="faults-"))
    trials = Trials(top)
    counts, wrong = collections.Counter(), collections.Counter()
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bar:
        task = bar.add_task("faults", total=chosen.trials)
        for number in range(chosen.first, chosen.first + chosen.trials):
            folder = top / f"trial-{number}"
            folder.mkdir()
            kind, what, found = trial(trials, chosen.seed, number, folder, chosen.only)
            counts[kind] += 1
            wrong[kind] += bool(found)
            if found:
                bar.console.print(
                    f"trial {number} of seed {chosen.seed}, {kind} ({what}), kept in {folder}:", markup=False
                )
                for sentence in found:
                    bar.console.print(f"  {sentence}", markup=False)
            else:
                shutil.rmtree(folder)
            bar.advance(task)
    table = Table("kind", "trials", "violations", title=f"{chosen.trials} trials of seed {chosen.seed}")
    for kind in KINDS:
        if counts[kind]:
            table.add_row(kind, str(counts[kind]), str(wrong[kind]))
    table.add_row("all", str(counts.total()), str(wrong.total()))
    console.print(table)
    console.print(f"{trials.idle} faults met no step")
    if not wrong.total():
        shutil.rmtree(top)
    sys.exit(1 if wrong.total() else 0)


if __name__ == "__main__":
    main()
