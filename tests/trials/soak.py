"""Commands, faults and users on one machine, in random order, against what must hold after each step.

    python -m tests.trials.soak --minutes 10 [--seed 0] [--processes 2]

Each process has a machine (`world`) of three runs and two folders of pictures, and draws steps from the seed
(`rules`): commands that train, continue, replace, predict, evaluate and generate, up to three at a time, most of which
meet a kill, a signal, a full disk or another fault (`hurts`); and what users do between them: copy, rename and delete
runs, damage and swap files, put files of their own into a run, and link its folders elsewhere. After each step

    nothing is lost       a finished run is complete, and a run that is to be replaced stays until the new one is
    nothing is half       every file is whole; unfinished ones are found where a process was killed, until it goes on
    nothing is mixed up   a run has the files of its own command, bit for bit as when nothing befalls it, and answers so
    nothing is touched    outside of the folders of runs, and what the user has put into them
    nothing is left       no process, no lock that is held
    every error           is one that says what to do, with exit status 1, 2 or 130

After some forty steps all runs are continued, and a new machine begins. A violation is shrunk by Hypothesis to fewer
steps, and told with these; its folder is kept, and the exit status is 1.
"""

import argparse
import collections
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.trials import child, hurts, rules, world

STEPS = 40  # of a machine
_DISK = 64 << 20  # bytes of a machine's disk
_SHRINKING = 120  # seconds, at most
_LOOK = 15  # seconds between two lines of progress


class Session:
    """What the machines of one process share. `folder` takes the machines, `top` has the references."""

    def __init__(self, folder, top, references, until, first_only):
        self.folder, self.top, self.references = folder, top, references
        self.until, self.first_only = until, first_only
        self.logs = folder / "logs"
        self.logs.mkdir()
        disk = folder / "disk"
        disk.mkdir()
        self.own_disk = hurts.own_disk(disk, _DISK)
        hurts.obey_permissions()
        hurts.adopt_orphans()
        self.disk, self.counts, self.found = disk, collections.Counter(), None
        self.made, self.machines, self.told = {}, 0, set()

    def check_time(self):
        """Raises TimeIsUp at the end of the session, and of shrinking."""
        if time.monotonic() > self.until or (self.found and time.monotonic() > self.found["until"]):
            raise rules.TimeIsUp

    def new_folder(self):
        """An empty folder for a machine."""
        self.machines += 1
        folder = self.disk / f"machine-{self.machines}"
        folder.mkdir()
        return folder

    def close_folder(self, folder):
        """Delete that of a machine."""
        hurts.give_back(folder)
        shutil.rmtree(folder)

    def pictures(self, key, name, seeds):
        """The files of pictures that the run of a command makes under this name."""
        if (key, name, seeds) not in self.made:
            place = self.folder / "made"
            place.mkdir()
            shutil.copytree(self.references[key].folder, place / name)
            argv = ["generate", "--model", place / name, "--seeds", seeds, "--grid", "2x2", "--out", place / "out"]
            life = hurts.start(argv, place / "log", place, place)
            hurts.wait(life)
            if life.ended.code != 0:
                raise SystemExit(f"pictures that nothing befalls are not made: {life.ended.err}")
            self.made[key, name, seeds] = world.tree(place / "out")
            shutil.rmtree(place)
        return self.made[key, name, seeds]

    def count(self, group, kind):
        """Count a command, a fault or a deed."""
        if self.found is None:
            self.counts[group, kind] += 1

    def step(self):
        """Count a step."""
        self.check_time()
        if self.found is None:
            self.counts["all", "steps"] += 1
            self.save()

    def save(self):
        """Write the counts for the process that shows them."""
        content = [[*names, number] for names, number in self.counts.items()]
        path = self.folder / "counts.json"
        path.with_suffix(".new").write_text(json.dumps(content))
        path.with_suffix(".new").replace(path)

    def failed(self, steps, wrongs, folder):
        """Keep a violation, if it is the first or has fewer steps than those before."""
        if self.found and len(steps) >= len(self.found["steps"]):
            return
        wrongs, steps = ([line.replace(str(folder), "MACHINE") for line in lines] for lines in (wrongs, steps))
        known = self.first_only or kinds_of(wrongs) & self.told
        until = self.found["until"] if self.found else time.monotonic() + (0 if known else _SHRINKING)
        kept = self.folder / f"violation-{self.counts['all', 'violations'] + 1}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept, symlinks=True)
        self.found = {"steps": steps, "wrongs": wrongs, "until": until, "kept": str(kept)}


def kinds_of(wrongs):
    """What is wrong, without names and numbers."""
    return {re.sub(r"alpha|beta|gamma|\d+", "", line)[:120] for line in wrongs}


def work(session, seed):
    """Run machines until the time is up, and tell each violation once in violations.jsonl."""
    limits = settings(
        # Of each nine, one is the simplest; with more, Hypothesis begins with many simple ones.
        max_examples=9, stateful_step_count=STEPS, database=None, deadline=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
        verbosity=Verbosity.quiet,
    )  # fmt: skip
    turn = 0
    while time.monotonic() < session.until and not (session.told and session.first_only):
        machine = type("Machine", (rules.Machine,), {"session": session})
        number, turn = int.from_bytes(f"{seed} {turn}".encode()[-12:], "big"), turn + 1
        try:
            run_state_machine_as_test(hypothesis.seed(number)(machine), settings=limits)
        except rules.TimeIsUp:
            pass
        except (rules.ViolationError, hypothesis.errors.Flaky, ExceptionGroup) as error:
            if session.found is None:
                session.found = {"steps": [], "wrongs": [repr(error)], "kept": ""}
        if session.found:
            found, session.found = session.found, None
            if kinds_of(found["wrongs"]) - session.told:
                session.told |= kinds_of(found["wrongs"])
                session.counts["all", "violations"] += 1
                with (session.folder / "violations.jsonl").open("a") as file:
                    file.write(json.dumps({**found, "seed": seed}) + "\n")
        session.save()


def alone(folder, top, made):
    """A machine without Hypothesis, whose steps are called; it takes this process, as `Session` does."""
    session = Session(folder, top, made, time.monotonic() + 3600, True)
    return type("Machine", (rules.Machine,), {"session": session})()


def begin(session_of, seed):
    """`work` in a child; its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the one that shows the counts
        session = session_of()

        def stop(number, frame):
            session.until = 0.0
            raise rules.TimeIsUp

        signal.signal(signal.SIGTERM, stop)
        work(session, seed)
        code = 0
    except BaseException:  # noqa: BLE001 (nothing may go on into the parent's code)
        traceback.print_exc()
    finally:
        os._exit(code)


def main(argv=None):
    """The command."""
    options = _options(argv)
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    os.environ.update(COLUMNS="200", NO_COLOR="1")
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    top = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder))
    child.warm()
    made = world.references(top)
    print(f"{len(made)} runs that nothing befalls are in {top}", flush=True)
    until = time.monotonic() + 60 * options.minutes
    workers = {}
    for number in range(options.processes):
        folder = top / f"process-{number}"
        folder.mkdir()

        def session(folder=folder):
            return Session(folder, top, made, until, options.first)

        workers[begin(session, f"{options.seed} {number}")] = folder
    folders, failed = list(workers.values()), False
    try:
        failed = _watch(workers)
    except KeyboardInterrupt:
        for pid in list(workers):
            os.kill(pid, signal.SIGTERM)
        _watch(workers)
    _show(folders)
    violations = [json.loads(line) for folder in folders for line in _lines(folder / "violations.jsonl")]
    for found in violations:
        print(f"\nviolation, with seed {found['seed']}, kept in {found['kept']}:")
        for number, step in enumerate(found["steps"], 1):
            print(f"  {number:2}. {step}")
        print("\n".join(f"  wrong: {wrong}" for wrong in found["wrongs"]))
    if not violations and not failed:
        shutil.rmtree(top)
    sys.exit(1 if violations or failed else 0)


def _watch(workers):
    """Show the counts until all processes have ended; whether one has failed."""
    started = looked = time.monotonic()
    failed, folders = False, list(workers.values())
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in workers:
            del workers[pid]
            failed |= status != 0
        if time.monotonic() > looked + _LOOK:
            looked = time.monotonic()
            count = _counts(folders)
            print(
                f"{(looked - started) / 60:.1f} min: {count['all', 'steps']} steps, "
                f"{sum(n for (group, _), n in count.items() if group == 'commands')} commands, "
                f"{count['all', 'violations']} violations",
                flush=True,
            )
        time.sleep(0.05)
    return failed


def _counts(folders):
    total = collections.Counter()
    for folder in folders:
        path = folder / "counts.json"
        if path.exists():
            for group, kind, number in json.loads(path.read_text()):
                total[group, kind] += number
    return total


def _lines(path):
    return path.read_text().splitlines() if path.exists() else []


def _show(folders):
    count = _counts(folders)
    for group in ("commands", "faults", "exit statuses", "deeds"):
        kinds = {kind: number for (of, kind), number in count.items() if of == group}
        print(f"\n{sum(kinds.values())} {group}")
        for kind in sorted(kinds):
            print(f"  {kinds[kind]:5} {kind}")
    print(f"\n{count['all', 'steps']} steps, {count['all', 'violations']} violations", flush=True)


def _options(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.trials.soak", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="decides the steps")
    parser.add_argument("--processes", type=int, default=2, help="machines at a time")
    parser.add_argument("--first", action="store_true", help="end at the first violation, as it is found")
    parser.add_argument("--folder", help="where everything is made; default: the system's for temporary files")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
