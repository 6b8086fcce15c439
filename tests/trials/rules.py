"""The steps of `soak`: commands with what befalls them, and what users do to their folders, in any order.

A step is drawn without looking at the machine, so that the same draws are the same steps; one that has no meaning where
it is met, such as a copy of a run that is not there, does nothing. After each step `World.wrongs` must be empty.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.trials import child, harms, hurts, world
from tests.trials.hurts import DEATHS, KINDS, Hurt, Usual
from tests.trials.world import ALBUMS, NAMES, QUESTIONS, SEEDS, Own, World

KEYS = ("text", "table", "text-1", "table-1", "images", "gan-1", "gan")
OWN = "its own"  # the key of the run that is there
_REPLACED = 40  # operations on files that replacing a run adds
_OPEN = (
    "report.json",
    "report.txt",
    "report.html",
    "manifest.json",
    "model.safetensors",
)  # what a run gets when it is finished
_SUFFIXES = (".json", ".jsonl", ".txt", ".safetensors")
_LINKED = ("checkpoints", "samples", "model.safetensors", "metrics.jsonl", "config.json", "report.json")
_OWN_PLACES = ("mine.txt", "checkpoints/mine.bin", "samples/mine.png", "model.bin", ".hidden")
_SAYS = re.compile(r"is being written by (another process|process (\d+) on )")

names = st.sampled_from(NAMES)
albums = st.sampled_from(ALBUMS)
keys = st.sampled_from((OWN, OWN, OWN, *KEYS, "text", "table", "text-1", "table-1"))
modes = st.sampled_from(("resume", "overwrite", "new", "resume", "overwrite"))
blows = st.builds(
    Hurt, st.sampled_from([kind for kind, often in KINDS.items() for _ in range(often)]),
    st.integers(0, 999), st.integers(0, 7),
)  # fmt: skip
trainings = st.tuples(st.just("train"), names, keys, modes, blows)
questions = st.tuples(st.just("ask"), names, st.sampled_from(QUESTIONS), st.just(""), blows)


class ViolationError(AssertionError):
    """What does not hold."""


class TimeIsUp(KeyboardInterrupt):
    """The session is over."""


class Task:
    """A command, with what was there before it and what it is expected to do; `codes` are what faults may bring."""

    def __init__(self, command, expected, before):
        self.kind, self.name, *_ = self.command = command
        self.expected, self.before = expected, before
        self.start, self.life, self.codes = None, None, set(self.command[-1].codes)
        self.writes = self.kind == "train" or "evaluate" in command


class Machine(RuleBasedStateMachine):
    """One machine; `session` has the folders and the references, and takes the counts and what is wrong."""

    session = None

    def __init__(self):
        super().__init__()
        self.session.check_time()
        self.steps, self.lives = [], []
        self.world = World(self.session.new_folder(), self.session.top, self.session.references, self.session.logs)
        self.number = 0

    # Steps of users.

    @initialize(runs=st.tuples(*[st.tuples(st.sampled_from(("", *KEYS)), st.booleans())] * len(NAMES)))
    def begin(self, runs):
        for name, (key, whole) in zip(NAMES, runs, strict=True):
            if not key:
                continue
            self.say(f"{name} is a copy of {key}{'' if whole else ', not yet finished'}")
            place = self.world.place(name)
            shutil.copytree(self.world.references[key].folder, place)
            if whole:
                self.world.slots[name].whole = key
            else:
                for each in _OPEN:
                    (place / each).unlink()
        self.check()

    @rule(source=names, to=names, how=st.sampled_from(("copy", "rename", "delete", "copy of the previous")))
    def move(self, source, to, how):
        w = self.world
        place, target = w.place(source), w.place(to)
        if how == "copy of the previous":
            place = w.previous(source)
        if how == "delete":
            if place.is_dir() or w.previous(source).is_dir():
                self.deed(how, f"delete {source}")
                self._forget(place, w.previous(source))
                w.slots[source] = world.Slot(locked=w.slots[source].locked)
        elif place.is_dir() and not place.is_symlink() and not target.exists() and not self._links(place):
            slot = w.slots[source]
            known = w.known(place)
            self.deed(how, f"{how} of {source} to {to}")
            seen = w.look(place)
            if how == "rename":
                place.rename(target)
                moved = slot.whole if seen.finished and seen.key == slot.whole else None
                w.slots[source] = world.Slot(None if moved else slot.whole, slot.parts, slot.locked)
            else:
                shutil.copytree(place, target, symlinks=True)
                number = target.stat().st_ino
                w.folders[number] = world.Known(known.key, set(known.touched))
                w.own += [Own(number, own.name, own.content) for own in w.own if own.folder == place.stat().st_ino]
                moved = seen.key if seen.finished and not self._unsure(known) else None
            old = w.slots[to]
            mark = slot.mark or slot.parts or how == "copy of the previous"
            w.slots[to] = world.Slot(moved or old.whole, slot.parts or old.parts, old.locked, mark)
        self.check()

    def _links(self, place):
        return any(path.is_symlink() for path in place.rglob("*"))

    def _forget(self, *places):
        for place in places:
            if place.is_symlink():
                place.unlink()
            elif place.is_dir():
                number = place.stat().st_ino
                self.world.own = [own for own in self.world.own if own.folder != number]
                self.world.folders.pop(number, None)
                shutil.rmtree(place)

    @rule(name=names, other=names, number=st.integers(0, 99))
    def swap(self, name, other, number):
        w = self.world
        place, source = w.place(name), w.place(other)
        seen, there = w.look(place), w.look(source)
        if seen.key and there.key and not there.known.touched and not self._links(place) and not self._links(source):
            both = sorted(world.tree(place).keys() & world.tree(source).keys())
            both = [file for file in both if Path(file).suffix in _SUFFIXES and file in w.references[seen.key].files]
            # The files of a run of another kind would stay beside those of the kind that config.json then has.
            alike = w.references[seen.key].kind == w.references[there.key].kind and seen.key != "gan"
            file = both[number % len(both)] if both else "config.json"
            files = [file]
            if file.startswith("checkpoints/") and number % 2:
                files = [str(path.relative_to(source)) for path in (source / "checkpoints").glob("[!.]*")]
            files = [each for each in files if Path(each).suffix in _SUFFIXES]
            if (seen.finished or alike or file != "config.json") and not all(
                (place / each).is_file() and (place / each).read_bytes() == (source / each).read_bytes()
                for each in files
            ):
                self.deed("swap", f"{' and '.join(files)} of {other} in place of that of {name}")
                for each in files:
                    shutil.copyfile(source / each, place / each)
                    self._touch(name, seen.known, each)
        self.check()

    @rule(name=names, number=st.integers(0, 99), how=st.sampled_from((*harms.HARMS, "gone")), seed=st.integers(0, 9))
    def damage(self, name, number, how, seed):
        w = self.world
        place = w.place(name)
        if w.look(place).key and not self._links(place):
            number_of = place.stat().st_ino
            own = {own.name for own in w.own if own.folder == number_of}
            found = sorted(
                rel
                for rel in (str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
                if rel not in own and not rel.endswith(".part") and (place / rel).stat().st_size
            )
            file = found[number % len(found)]
            known = w.known(place)
            self.deed("damage", f"{file} of {name}: {how}")
            if how == "gone":
                (place / file).unlink()
                self._touch(name, known, file)
            elif harms.harm(place / file, how, random.Random(seed)):
                self._touch(name, known, file)
        self.check()

    def _touch(self, name, known, file):
        known.touched.add(file)
        if self._unsure(known):
            self.world.slots[name].whole = None

    def _unsure(self, known):
        """Whether the model cannot tell what a folder is."""
        return bool({"config.json", "report.json"} & known.touched)

    @rule(name=names)
    def repair(self, name):
        w = self.world
        place = w.place(name)
        known = w.known(place)
        reference = w.references.get(known.key)
        if known.touched and reference is not None and not self._links(place):
            finished = w.look(place).finished or "report.json" in known.touched
            if finished and all((reference.folder / file).exists() for file in known.touched):
                # Those with times in them are told by each other.
                known.touched |= {"report.json", "report.txt", "report.html", "manifest.json", "metrics.jsonl"}
                known.touched |= {str(path.relative_to(reference.folder)) for path in reference.folder.glob("*/*.json")}
                self.deed("repair", f"{name} gets its files back")
                for file in known.touched:
                    (place / file).parent.mkdir(exist_ok=True)
                    shutil.copyfile(reference.folder / file, place / file)
                known.touched.clear()
        self.check()

    @rule(name=names, file=st.sampled_from(_OWN_PLACES), content=st.binary(max_size=3))
    def put(self, name, file, content):
        path = self.world.place(name) / file
        if path.parent.is_dir() and not path.parent.is_symlink() and not path.exists():
            self.deed("own file", f"the user puts {file} into {name}")
            path.write_bytes(content)
            self.world.own.append(Own(self.world.place(name).stat().st_ino, file, content))
        self.check()

    @rule(name=albums)
    def put_picture(self, name):
        folder = self.world.albums / name
        path = folder / "holiday.png"
        if folder.is_dir() and not path.exists():
            self.deed("own file", f"the user puts a picture into pictures/{name}")
            path.write_bytes(b"sun")
            self.world.own.append(Own(folder.stat().st_ino, path.name, b"sun"))
        self.check()

    @rule(name=names, how=st.sampled_from(("folder", "link", "broken link", "clear")))
    def occupy(self, name, how):
        """The user has something of the name to which runs are moved aside."""
        w = self.world
        aside = w.previous(name)
        there = aside.is_symlink() or aside.exists()
        if how == "clear":
            if there and (aside.is_symlink() or not (w.is_marked(aside) and w.slots[name].whole)):
                self.deed("own folder", f"{aside.name} is cleared")
                self._forget(aside)
        elif not there:
            self.deed("own folder", f"the user makes {aside.name}, a {how}")
            if how == "folder":
                aside.mkdir()
                (aside / "mine.txt").write_bytes(b"old")
                w.own.append(Own(aside.stat().st_ino, "mine.txt", b"old"))
            else:
                aside.symlink_to(w.elsewhere if how == "link" else w.elsewhere / "nothing")
        self.check()

    @rule(name=names, file=st.sampled_from(_LINKED), back=st.booleans())
    def link(self, name, file, back):
        w = self.world
        place, away = w.place(name), w.elsewhere / f"{name}-{file.replace('/', '-')}"
        path = place / file
        if path.is_symlink() and back:
            self.deed("link", f"{file} of {name} is put back in place of a link")
            path.unlink()
            shutil.move(path.parent / away, path)
            w.accept()
        elif path.exists() and not path.is_symlink() and not away.exists() and file not in w.known(place).touched:
            inside = [own for own in w.own if own.folder == place.stat().st_ino and own.name.startswith(file)]
            if not inside and not w.slots[name].parts:
                self.deed("link", f"{file} of {name} becomes a link to a copy elsewhere")
                shutil.move(path, away)
                path.symlink_to(away)
                w.accept()
        self.check()

    @rule(name=names, years=st.sampled_from((-20, -1, 1)))
    def age(self, name, years):
        place = self.world.place(name)
        if place.is_dir():
            self.deed("other times", f"the files of {name} are of {years} years")
            moment = time.time() + years * 3e7
            for path in place.rglob("*"):
                os.utime(path, (moment, moment), follow_symlinks=False)
        self.check()

    # Commands.

    @rule(training=trainings)
    def train(self, training):
        self.together(training)

    @rule(training=trainings)
    def train_again(self, training):
        self.together(training)

    @rule(name=names, hurt=blows)
    def resume(self, name, hurt):
        self.together(("train", name, OWN, "resume", hurt))

    @rule(name=names)
    def recover(self, name):
        self.together(("train", name, OWN, "resume", Hurt()))

    @rule(question=questions)
    def ask(self, question):
        self.together(question)

    @rule(name=names, album=albums, seeds=st.sampled_from(sorted(SEEDS)), overwrite=st.booleans(), hurt=blows)
    def generate(self, name, album, seeds, overwrite, hurt):
        self.together(("generate", name, album, f"{seeds}{' --overwrite' if overwrite else ''}", hurt))

    @rule(commands=st.lists(st.one_of(trainings, trainings, questions), min_size=2, max_size=3))
    def several(self, commands):
        self.together(*commands)

    @rule(first=trainings, second=trainings, at=st.integers(0, 999), killed=st.booleans())
    def two_writers(self, first, second, at, killed):
        """The first is stopped anywhere, the second comes to the same folder, and the first goes on or is killed."""
        _, name, key, mode, _ = first
        _, _, other_key, other_mode, _ = second
        task = self._task(("train", name, key, mode, Hurt()), stop_at=at)
        self._begin(task)
        if not hurts.wait_for_stop(task.life):
            self._end([task])
            return
        pid, holds = task.life.pid, self.world.is_locked(name)
        writes = self.world.contents(name) != task.before and not self.world.look(self.world.place(name)).finished
        if writes and not holds:
            self.fail([f"{name}: a process writes without its lock"])
        other = self._task(("train", name, other_key, other_mode, Hurt()))
        self._begin(other)
        hurts.wait(other.life)
        self._said(other)
        found = []
        if holds:
            found += child.wrongs(other.life.ended, (2,))
            told = _SAYS.search(other.life.ended.err)
            if told is None or told[2] != str(pid):
                found.append(f"the second writer is not told of process {pid}: {other.life.ended.err}")
        else:
            self._after_training(other, found)
            if other.life.ended.code == 0:  # the first is to find another run than it has seen
                task.expected = (*task.expected[:2], "unsure")
        self.fail(found)
        task.life.hurt = Hurt("kill" if killed else "nothing")
        task.codes |= set(task.life.hurt.codes)
        task.life.go_on(signal.SIGKILL if killed else signal.SIGCONT)
        hurts.wait(task.life)
        self._end([task])

    def together(self, *commands):
        """Commands at the same time."""
        tasks = [self._task(command) for command in commands]
        around = [task for task in tasks if task.command[-1].kind in hurts.AROUND]
        for task in tasks:
            for other in around:
                task.codes |= other.codes
        with self._surroundings(commands):
            for task in tasks:
                self._begin(task)
            hurts.wait(*(task.life for task in tasks))
        self._end(tasks)

    @contextlib.contextmanager
    def _surroundings(self, commands):
        """A full disk, other permissions and links, while the commands run."""
        w = self.world
        with contextlib.ExitStack() as stack:
            blows = [(w.place(name), w.lock(name), hurt) for _, name, *_, hurt in commands]
            full = [hurt for *_, hurt in blows if hurt.kind == "full disk"]
            if full and self.session.own_disk:
                stack.enter_context(hurts.Full(w.root, full[0]))
            for _, lock, hurt in blows:
                if hurt.kind == "lock is a link" and not lock.exists():
                    lock.symlink_to(w.elsewhere / "letter.txt")
                    stack.callback(lock.unlink, missing_ok=True)
            # After the links, which are made and taken away with the permission to.
            for place, _, hurt in blows:
                if hurt.kind == "revoked":
                    ways = (place, place.parent, place / "checkpoints", place / "model.safetensors", w.albums)
                    stack.enter_context(hurts.Revoked(ways[hurt.at % len(ways)], w.root, hurt))
            yield

    def _begin(self, task):
        task.life = task.start()
        self.lives.append(task.life)

    def _task(self, command, stop_at=None):
        """A command that is to begin."""
        kind, name, what, how, hurt = command
        w = self.world
        self.number += 1
        log = w.logs / f"command-{self.number}"
        usual = Usual(10, 3, 0.2)  # of a question
        if kind == "train":
            key = what if what != OWN else w.look(w.place(name)).key
            reference = w.references.get(key) or next(iter(w.references.values()))
            argv = [*reference.argv, "--out", w.runs / name, *([f"--{how}"] if how != "new" else [])]
            usual = reference.usual
            if how == "overwrite":
                usual = Usual(usual.operations + _REPLACED, usual.steps + _REPLACED, usual.seconds)
            expected = reference.key, how, self._expected(name, reference.key, how)
        elif kind == "ask":
            seen = w.look(w.place(name))
            reference = w.references.get(seen.key) or next(iter(w.references.values()))
            argv = world.asked(what, reference, w.runs / name, w.top) or ["predict", w.runs / name, "a"]
            expected = what, reference, self._expected_answer(what, name)
        else:
            seeds, _, flag = how.partition(" ")
            argv = ["generate", "--model", w.runs / name, "--seeds", seeds, "--grid", "2x2", "--out", w.albums / what]
            argv += [flag] if flag else []
            usual = Usual(30, 50, 0.6)
            expected = self._expected_pictures(name, what, seeds, bool(flag))
        if stop_at is not None:
            stop_at = 1 + stop_at * usual.operations // 1000
        task = Task(command, expected, w.contents(name))
        task.start = functools.partial(hurts.start, argv, log, w.root, w.home, hurt, usual, stop_at)
        self.session.count("commands", f"{kind} {how}" if kind == "train" else what if kind == "ask" else kind)
        self.session.count("faults", hurt.kind if stop_at is None else "stopped, for a second writer")
        return task

    def _expected(self, name, key, mode):
        """What a command that trains does if nothing befalls it: "trains", "is done", an exit status, or "unsure"."""
        w = self.world
        place, aside = w.place(name), w.previous(name)
        seen = w.look(place)
        if w.lock(name).is_symlink():
            return "unsure"
        if seen.new:
            return "trains"
        if mode == "new":
            return 2
        if "config.json" in seen.known.touched:
            return "unsure"
        if seen.key is None:
            return 2
        if mode == "overwrite":
            if w.links(place):
                return 2
            held = aside.exists() and not w.is_marked(aside) and not (aside.is_dir() and not world.names_in(aside))
            if w.is_marked(aside) and seen.finished:  # it is deleted, but for what the user has put there
                held = any(own.folder == aside.stat().st_ino for own in w.own)
            if aside.is_symlink():
                return "unsure" if not held else 1
            return 1 if held else "trains"
        if seen.key != key or w.links(place):
            return 2
        if {"report.json", "report.txt", "manifest.json"} & seen.known.touched:
            return "unsure"
        if seen.finished:
            return "is done"
        return "unsure" if seen.known.touched else "trains"

    def _expected_answer(self, question, name):
        seen = self.world.look(self.world.place(name))
        if seen.known.touched:
            return "unsure"
        if not seen.finished:
            return 2
        return "answers" if question in self.world.references[seen.key].answers else 2

    def _end(self, tasks):
        """Judge commands that have ended, and the machine after them."""
        found, by_name = [], Counter(task.name for task in tasks if task.writes)
        for task in tasks:
            self._said(task)
        for task in tasks:
            # Others were at work in the same folder.
            mixed = by_name[task.name] > task.writes
            if task.kind == "train":
                self._after_training(task, found, mixed)
            elif task.kind == "ask":
                self._after_question(task, found, mixed)
            else:
                self._after_pictures(task, found)
        for name, times in by_name.items():
            trained = [task for task in tasks if task.kind == "train" and task.name == name]
            # Not those on a disk that another command finds full.
            quiet = not any(task.life.hurt.kind in hurts.AROUND for task in tasks)
            if quiet and 1 < times == len(trained) and all(t.life.hurt.kind in hurts.HARMLESS for t in trained):
                wanted = [task.expected[2] in ("trains", "is done") for task in trained]
                if any(wanted) and not any(task.life.ended.code == 0 for task in trained):
                    found.append(f"none of {times} writers of {name} does its work")
        self.session.step()
        self.fail(found + self.world.wrongs())

    def _said(self, task):
        kind, name, what, how, hurt = task.command
        ended = task.life.ended
        told = ended.err.strip().splitlines()[-1:] or [""]
        self.session.count("exit statuses", str(ended.code))
        words = {
            "train": f"train {what} in {name}, {how}",
            "ask": f"{what} {name}",
            "generate": f"generate by {name} into {what}, {how}",
        }
        self.say(f"{words[kind]}; {hurt}: exit status {ended.code} {told[0][:160]}")

    def _wrong_end(self, task, wanted, mixed):
        """What is wrong with the exit status of a command, and with what it says."""
        codes = {wanted} if isinstance(wanted, int) else {0, 1, 2} if wanted == "unsure" else {0}
        codes |= task.codes
        if mixed:
            codes |= {0, 1, 2}
        ended = task.life.ended
        found = child.wrongs(ended, tuple(codes))
        if ended.code in (1, 2) and not (ended.err.strip().splitlines() or [""])[-1].startswith("error: "):
            found.append(f"an error of more than one line: {ended.err[-600:]}")
        return found

    def _after_training(self, task, found, mixed=False):
        w, name, life = self.world, task.name, task.life
        key, mode, wanted = task.expected
        slot, code = w.slots[name], life.ended.code
        found += self._wrong_end(task, wanted, mixed)
        if code in DEATHS or life.hurt.leaves_parts:
            slot.parts = slot.locked = True
        changes = [now != before for now, before in zip(w.contents(name), task.before, strict=True)]
        # A run that was replaced is deleted, and what the user has put there then stands in the way.
        if world.MARK in (task.before[1] or ()):
            changes = changes[:1]
        if isinstance(wanted, int) and not mixed and any(changes):
            found.append(f"{name}: a command that is refused changes the run")
        place = w.place(name)
        known = w.known(place)
        if code == 0 and wanted in ("trains", "unsure"):
            if mode == "overwrite" or (wanted == "unsure" and not self._was_finished(task)):
                # Grids of epochs before are not drawn again, and the film has those that are there.
                grids = {file for file in known.touched if file.startswith("samples/") and mode != "overwrite"}
                known.touched.clear()
                known.touched.update(grids, ["training.gif"] if grids else [])
            if wanted == "trains" and not mixed:
                slot.parts = slot.mark = False
                known.touched.clear()
        elif code == 0 and wanted == "is done":
            slot.parts = False
        seen = w.look(place)
        if seen.finished and not self._unsure(known) and wanted in ("trains", "unsure"):
            slot.whole = seen.key
        if code == 130 and seen.finished and w.is_marked(w.previous(name)):
            slot.parts = True  # the next command deletes the rest of the run that was replaced
        if code == 0 and wanted == "trains" and not mixed and not (seen.finished and seen.key == key):
            found.append(f"{name}: the command has ended well, and the run is not finished")
        if not w.lock(name).exists():
            slot.locked = False

    def _was_finished(self, task):
        before = task.before[0] or {}
        return bool(before.get("report.json"))

    def _after_question(self, task, found, mixed):
        w, life = self.world, task.life
        question, reference, wanted = task.expected
        found += self._wrong_end(task, wanted, mixed)
        if question == "evaluate" and (life.ended.code in DEATHS or life.hurt.leaves_parts):
            w.slots[task.name].parts = w.slots[task.name].locked = True
        if life.ended.code == 0:
            said = world.answer(life.ended.out, w.runs / task.name)
            answers = [each.answers.get(question) for each in w.references.values()] if mixed else []
            if said not in (reference.answers.get(question), *answers):
                found.append(f"another answer of {task.name}: {said[:300]!r}")
        if not mixed and question == "predict" and w.contents(task.name) != task.before:
            found.append(f"{task.name}: a question changes the run")

    def _expected_pictures(self, name, album, seeds, overwrite):
        w = self.world
        folder = w.albums / album
        seen = w.look(w.place(name))
        made = None
        if seen.known.touched or not seen.finished or w.references[seen.key].kind != "gan":
            wanted = "unsure" if seen.known.touched else 2
        else:
            there = any(not re.fullmatch(r"\.images\.json\..*\.part|\.new-pictures", n) for n in world.names_in(folder))
            ours = (folder / "images.json").is_file()
            wanted = "makes" if not there or (overwrite and ours) else 2
            made = self.session.pictures(seen.key, name, seeds)
        return wanted, made

    def _after_pictures(self, task, found):
        w, life = self.world, task.life
        album = task.command[2]
        wanted, made = task.expected
        found += self._wrong_end(task, wanted, False)
        if life.ended.code in DEATHS or life.hurt.leaves_parts:
            w.spoiled.add(album)
        if wanted == "unsure":
            # By a model that the user has changed: these pictures are not looked at.
            self._forget(w.albums / album)
            w.pictures[album] = []
        elif life.ended.code == 0 and wanted == "makes":
            w.pictures[album] = [made]
            w.spoiled.discard(album)
        elif wanted == "makes":
            w.pictures[album] = [*(w.pictures[album] or [None]), made]

    # What is told.

    def deed(self, kind, text):
        self.session.count("deeds", kind)
        self.say(text)

    def say(self, text):
        self.steps.append(text)

    def fail(self, found):
        if found:
            self.session.failed(self.steps, found, self.world.root)
            raise ViolationError("\n".join(found))

    def check(self):
        """What must hold between two steps."""
        self.session.step()
        self.fail(self.world.wrongs())

    def teardown(self):
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, ViolationError | HypothesisException):
            self.session.failed(self.steps, traceback.format_exception(error)[-3:], self.world.root)
        try:
            if error is None:
                # What was begun can be finished, and what was finished answers.
                for name in NAMES:
                    if self.world.look(self.world.place(name)).key is not None:
                        self.together(("train", name, OWN, "resume", Hurt()))
                        self.together(("ask", name, "predict", "", Hurt()))
        finally:
            for life in self.lives:
                life.kill()
            self.session.close_folder(self.world.root)
