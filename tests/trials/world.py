"""A machine on which commands run: runs, pictures, files of the user's, and what must hold between the commands.

    runs/NAME            runs; the last of NAMES is a link to far/NAME
    pictures/NAME        what `minidl generate` makes
    elsewhere/           what links in runs lead to; the user's
    home/, tmp/          where commands run, and TMPDIR: nothing may be left there

What must hold is told from the folders themselves. A run is known by its config.json, which names one of the commands
in `Reference`; if it is finished, every file must be that of the same command when nothing befell it, and if not, every
file must be whole and one that this command would have written by then. The model adds what cannot be seen: which run
must not be lost, which files the user has changed, and where a killed process may have left unfinished ones.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from minidl.errors import DamagedError
from minidl.training.run_folder import files
from tests.trials import data, hurts
from tests.trials.same import differences

NAMES = ("alpha", "beta", "gamma")
ALBUMS = ("one", "two")
SEEDS = {"1-3": [1, 2, 3], "2-5": [2, 3, 4, 5]}
QUESTIONS = ("predict", "evaluate")
_EXTRA = ("evaluation.json", "nearest.png")  # what evaluation adds to the run of a generator
MARK = "replaced"
# Files with times in them, or that other files are told by.
_NOT_BYTES = ("report.txt", "report.html", "report.json", "manifest.json", "training.gif", *_EXTRA)
_STEP = re.compile(r"checkpoints/step-\d+\.safetensors")


@dataclass
class Reference:
    """A command that trains, the run that it makes when nothing befalls it, what that does, and its answers."""

    key: str
    argv: list  # without --out
    folder: Path
    usual: hurts.Usual = None
    answers: dict = field(default_factory=dict)  # by question

    @property
    def kind(self):
        return self.argv[1]

    @property
    def files(self):
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}


def references(top, only=None):
    """Make the data and the runs that nothing befalls, in `top`: all, or `only` these."""
    source = top / "data"
    source.mkdir()
    flags = data.write(source)
    draw = random.Random(0)
    rows = [(draw.uniform(-2, 2), draw.uniform(-2, 2)) for _ in range(60)]
    (source / "rows.csv").write_text("a,b,y\n" + "".join(f"{a:.3f},{b:.3f},{a + 2 * b:.3f}\n" for a, b in rows))
    table = ["--data", source / "rows.csv", "--target", "y", "--epochs", "3", "--hidden", "4", "--batch-size", "16"]
    plain, large = "--no-plots", {"--batch-size": "12"}
    commands = {
        "text": ["train", "text", *flags["text"], plain, "--seed", "0"],
        "table": ["train", "table", *table, plain, "--seed", "0"],
        "text-1": ["train", "text", *flags["text"], "--seed", "1"],
        "table-1": ["train", "table", *table, plain, "--seed", "1"],
        "images": ["train", "images", *_changed(flags["images"], large), plain],
        "gan": ["train", "gan", *_changed(flags["gan"], large), plain, "--seed", "0"],
        "gan-1": ["train", "gan", *_changed(flags["gan"], {**large, "--epochs": "1"}), plain, "--seed", "1"],
    }
    made = {}
    for key, argv in commands.items():
        if only is not None and key not in only:
            continue
        found = Reference(key, [str(word) for word in argv], top / "references" / key)
        life = _done([*argv, "--out", found.folder], top / "log", found.folder, top)
        found.usual = hurts.usual(life)
        made[key] = found
    for found in made.values():
        for question in QUESTIONS:
            argv = asked(question, found, found.folder, top)
            if argv is not None:
                keep = top / "asked" / found.key
                shutil.copytree(found.folder, keep)  # evaluation adds files to the run of a generator
                argv = [str(word).replace(str(found.folder), str(keep)) for word in argv]
                found.answers[question] = answer(_done(argv, top / "log", keep, top).ended.out, keep)
                shutil.rmtree(keep)
    return made


def _changed(flags, values):
    return [values.get(before, flag) for before, flag in zip(["", *flags], flags, strict=False)]


def _done(argv, log, root, top):
    life = hurts.start(argv, log, root, top)
    hurts.wait(life)
    if life.ended.code != 0:
        raise SystemExit(f"a command that nothing befalls ends with exit status {life.ended.code}: {life.ended.err}")
    return life


def asked(question, reference, place, top):
    """The command that asks a run; None where there is none."""
    inputs = {
        "text": ["oil barrel of the opec"],
        "table": ['{"a": 1, "b": 2}'],
        "images": [top / "data" / "pictures" / "down" / "1.png"],
    }
    if question == "predict":
        return ["predict", place, *inputs[reference.kind]] if reference.kind in inputs else None
    judge = ["--evaluator", top / "references" / "images", "--samples", "100"] if reference.kind == "gan" else []
    return ["evaluate", place, *judge]


def answer(out, place):
    """What a command said, without the name of its run and the time it took."""
    said = out.replace(str(place), "RUN").replace(f" by {Path(place).name} (", " by RUN (")
    return re.sub(r" in [\d.]+ s\n", "\n", said)


@dataclass
class Known:
    """What the model knows of a folder: the command that made the run, and files that are no longer its own."""

    key: str | None = None
    touched: set = field(default_factory=set)


@dataclass
class Slot:
    """What the model knows of a name. `whole` is the finished run that must be there, in NAME or in NAME.previous."""

    whole: str | None = None
    parts: bool = False  # a killed process may have left unfinished files
    locked: bool = False  # and a lock
    mark: bool = False  # and the mark of a replaced run


@dataclass
class Seen:
    """A folder as it is: `key` of its run, None for another or none."""

    key: str | None
    finished: bool
    known: Known
    new: bool  # missing, or as good as empty


@dataclass(frozen=True)
class Own:
    """A file of the user's, in a folder that may be renamed, known by its inode."""

    folder: int
    name: str
    content: bytes


class World:
    """`folder` is empty; `top` has the references and their data, `logs` takes what commands say."""

    def __init__(self, folder, top, made, logs):
        self.root, self.top, self.references, self.logs = folder, top, made, logs
        self.runs, self.albums, self.elsewhere = folder / "runs", folder / "pictures", folder / "elsewhere"
        self.home, self.tmp, self.far = folder / "home", folder / "tmp", folder / "far"
        for each in (self.runs, self.albums, self.elsewhere, self.home, self.tmp, self.far):
            each.mkdir()
        (self.runs / NAMES[-1]).symlink_to(self.far / NAMES[-1])
        (self.runs / "notes.txt").write_text("mine")
        (self.runs / "alpha.previous.txt").write_text("mine, too")
        (self.elsewhere / "letter.txt").write_text("dear reader")
        self.slots = {name: Slot() for name in NAMES}
        self.pictures = {name: [] for name in ALBUMS}  # the sets that may be there, the one that must be there first
        self.spoiled = set()  # albums with unfinished files
        self.folders = {}  # Known by inode
        self.own = []
        self.album_sets = {}
        self.keys = {}
        self.mine = self._mine()
        os.environ["TMPDIR"] = str(self.tmp)

    # Where things are, and what they are.

    def place(self, name):
        """The folder of a run."""
        return Path(os.path.realpath(self.runs / name))

    def previous(self, name):
        """The folder of the run that is being replaced."""
        place = self.place(name)
        return place.with_name(place.name + ".previous")

    def lock(self, name):
        """The lock file of a run."""
        place = self.place(name)
        return place.with_name(f".{place.name}.lock")

    def is_locked(self, name):
        """Whether a process holds the lock of a run."""
        try:
            with self.lock(name).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def known(self, place):
        """The model's knowledge of a folder."""
        try:
            return self.folders.setdefault(place.stat().st_ino, Known())
        except OSError:
            return Known()

    def look(self, place):
        """A folder as it is, and as it was known before where its files were touched."""
        known = self.known(place)
        names = names_in(place)
        new = all(name == ".lock" or re.fullmatch(r"\.config\.json\..*\.part", name) for name in names)
        if "config.json" not in known.touched:
            known.key = self._key(place / "config.json")
        finished = False
        with contextlib.suppress(OSError, DamagedError):
            finished = bool(files.read_json(place / "report.json"))
        return Seen(known.key, finished and known.key is not None, known, new)

    def _key(self, path):
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if content not in self.keys:
            found = [
                key
                for key, reference in self.references.items()
                if content == (reference.folder / "config.json").read_bytes()
            ]
            self.keys[content] = found[0] if found else "another"
        return self.keys[content]

    def is_marked(self, place):
        """Whether a folder is a run that was moved aside."""
        return (place / MARK).is_file() and not place.is_symlink()

    def links(self, place):
        """Folders of a run that are links."""
        return [name for name in ("checkpoints", "samples") if (place / name).is_symlink()]

    # What must hold.

    def wrongs(self, busy=()):
        """What does not hold; `busy` are names at which a command is at work, as numbers of processes by name."""
        found = []
        for name, slot in self.slots.items():
            if name not in busy:
                found += self._wrong_run(name, slot)
        for name in ALBUMS:
            found += self._wrong_album(name)
        found += self._wrong_places()
        for pid, line in hurts.survivors(set(dict(busy).values())):
            found.append(f"a process is left: {line}")
            hurts.end(pid)
        return found

    def _wrong_run(self, name, slot):
        place, aside = self.place(name), self.previous(name)
        found = [f"{name}: {wrong}" for wrong in self.wrong_folder(place, slot)]
        if slot.whole is not None:
            both = {
                path.name: self.unlike(path, slot.whole, slot) if self.look(path).finished else ["it is not finished"]
                for path in (place, aside)
                if path.is_dir()
            }
            if all(both.values()) or not both:
                found.append(f"{name}: the finished run {slot.whole} is lost: {both}")
        if aside.is_dir() and not aside.is_symlink() and not slot.parts and self.look(place).finished:
            strange = self._strangers(aside, set(), slot) - {MARK}
            if strange:
                found.append(f"{name}: the run that was replaced is left: {sorted(strange)}")
        lock = self.lock(name)
        if lock.exists() and not lock.is_symlink():
            if not slot.locked:
                found.append(f"{name}: a lock is left")
            if self.is_locked(name):
                found.append(f"{name}: the lock of a process that has ended is held")
        return found

    def wrong_folder(self, place, slot):
        """What is wrong with the run in a folder."""
        if not place.is_dir():
            return []
        seen = self.look(place)
        if seen.key == "another":
            return ["its config.json is that of no command"]
        if seen.key is None:
            strange = self._strangers(place, set(), slot)
            return [] if seen.known.touched else [f"{rel} is in no run" for rel in sorted(strange)]
        if seen.finished:
            return self.unlike(place, seen.key, slot)
        if "config.json" in seen.known.touched:
            return []
        return self._half(place, seen, slot)

    def unlike(self, place, key, slot):
        """How the run in a folder differs from the finished run of a command, but for what the user has done to it."""
        known = self.known(place)
        reference = self.references[key]
        found = []
        leave_out = {*known.touched, "manifest.json"}
        if "report.json" in leave_out:
            leave_out |= {"report.txt", "report.html"}
        for wrong in differences(place, reference.folder, leave_out):
            rel = wrong.partition(" is in ")[0].partition(":")[0]
            if (place / rel).parent.is_symlink():
                continue  # what is linked was looked at when it was put there
            if rel in reference.files or rel in self._strangers(place, reference.files, slot):
                found.append(wrong)
        return found + self._wrong_manifest(place, known, reference) + self._wrong_evaluation(place, known)

    def _wrong_manifest(self, place, known, reference):
        """Each file must be the one that the manifest names."""
        if "manifest.json" in known.touched:
            return []
        try:
            told = files.read_json(place / "manifest.json")
        except (FileNotFoundError, DamagedError) as error:
            return [f"manifest.json: {error}"]
        expected = files.read_json(reference.folder / "manifest.json")
        found = [] if told["run"] == expected["run"] else ["manifest.json is of another run"]
        names = {*told["files"]} - {*_EXTRA}
        others = (names ^ {*expected["files"]}) - known.touched
        if others:
            found.append(f"manifest.json has other files: {others}")
        for name in sorted(names - known.touched):
            path = place / name
            if not path.is_file() or told["files"][name] != hashlib.sha256(path.read_bytes()).hexdigest():
                found.append(f"manifest.json: {name} is another one")
        return found

    def _strangers(self, place, expected, slot):
        """Files and folders in a run that neither its command nor the user has made."""
        number = place.stat().st_ino
        own = {own.name for own in self.own if own.folder == number}
        own |= {str(Path(name).parent) for name in own}
        found = set()
        for path in place.rglob("*"):
            rel = str(path.relative_to(place))
            if rel in expected or rel in own or path.parent.is_symlink():
                continue
            if path.name.endswith(".part") and slot.parts:
                continue
            if rel == MARK and (slot.parts or slot.mark or place.name.endswith(".previous")):
                continue
            if rel == ".lock" and slot.locked:
                continue
            if rel in _EXTRA and "gan" in (self.known(place).key or ""):
                continue
            found.add(rel)
        return found

    def _wrong_evaluation(self, place, known):
        """An evaluation must be of the model beside it."""
        path = place / "evaluation.json"
        if not path.exists() or {"model.safetensors", "evaluation.json"} & known.touched:
            return []
        try:
            told = files.read_json(path)["model_sha256"]
        except DamagedError as error:
            return [str(error)]
        if told != hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest():
            return ["evaluation.json is of another model"]
        return []

    def _half(self, place, seen, slot):
        """What is wrong with a run that is not finished."""
        reference = self.references[seen.key]
        expected = {*reference.files, "checkpoints", "checkpoints/best.json", "checkpoints/last.json"}
        found = []
        for path in sorted(place.rglob("*")):
            rel = str(path.relative_to(place))
            if rel in seen.known.touched or path.is_dir() or path.name.endswith(".part"):
                continue
            try:
                wrong = self._wrong_file(rel, path, reference, seen.known.touched)
            except (DamagedError, ValueError, KeyError, OSError) as error:
                wrong = [f"{rel}: {error!r}"]
            found += wrong
        strange = {rel for rel in self._strangers(place, expected, slot) if not _STEP.fullmatch(rel)}
        return found + [f"{rel} is in no run of {seen.key}" for rel in sorted(strange)]

    def _wrong_file(self, rel, path, reference, touched):
        if rel in ("checkpoints/last.json", "checkpoints/best.json"):
            state = files.read_json(path)
            tensors = f"checkpoints/{state['tensors']}"
            if tensors not in touched:
                files.read_tensors(path.with_name(state["tensors"]), state["sha256"])
            expected = files.read_json(reference.folder / "config.json")
            same = (state["config"], state["run"]) == (expected["config"], expected["run"])
            return [] if same else [f"{rel} is of another run"]
        if _STEP.fullmatch(rel):
            files.read_tensors(path)
            return []
        if rel == "metrics.jsonl":
            lines, expected = (
                [json.loads(line) for line in each.read_text().splitlines()] for each in (path, reference.folder / rel)
            )
            for line in (*lines, *expected):
                line.pop("seconds", None)
            return [] if lines == expected[: len(lines)] else ["metrics.jsonl is of another run"]
        if rel not in reference.files or rel in _NOT_BYTES:
            return []
        same = path.read_bytes() == (reference.folder / rel).read_bytes()
        if rel == "model.safetensors":
            same = _equal(files.read_tensors(path), files.read_tensors(reference.folder / rel))
        return [] if same else [f"{rel} is not that of {reference.key}"]

    def _wrong_album(self, name):
        folder, sets = self.albums / name, self.pictures[name]
        if not folder.is_dir():
            return [f"pictures/{name}: gone"] if sets and sets[0] is not None else []
        found = []
        own = {own.name: own.content for own in self.own if own.folder == folder.stat().st_ino}
        for path in sorted(folder.rglob("*")):
            rel = str(path.relative_to(folder))
            spare = name in self.spoiled and (rel.endswith(".part") or rel.startswith(".new-pictures"))
            if rel in own or spare:
                continue
            content = path.read_bytes() if path.is_file() else None
            wanted = [each[rel] for each in sets if each is not None and rel in each]
            if rel == "images.json" and len(sets) > 1:
                files.read_json(path)
            elif content not in wanted:
                found.append(f"pictures/{name}/{rel} is of no set of pictures")
        if sets and sets[0] is not None:
            # Until images.json is another one, all that it lists are there.
            whole = (folder / "images.json").exists() and _content(folder / "images.json") == sets[0]["images.json"]
            gone = [rel for rel in sets[0] if not (folder / rel).exists()]
            if gone and (whole or len(sets) == 1):
                found.append(f"pictures/{name}: gone: {gone}")
        lock = self.albums / f".{name}.lock"
        if lock.exists() and name not in self.spoiled:
            found.append(f"pictures/{name}: a lock is left")
        return found

    def _wrong_places(self):
        found = []
        now = self._mine()
        for path in sorted(self.mine.keys() | now.keys()):
            if self.mine.get(path) != now.get(path):
                what = "is gone" if path not in now else "is new" if path not in self.mine else "is changed"
                found.append(f"{path}, which is the user's, {what}")
        self.mine = now
        folders = {}
        for name in NAMES:
            for place in (self.place(name), self.previous(name)):
                if place.is_dir():
                    folders[place.stat().st_ino] = place
        for name in ALBUMS:
            if (self.albums / name).is_dir():
                folders[(self.albums / name).stat().st_ino] = self.albums / name
        for own in list(self.own):
            path = folders.get(own.folder, self.root / "nowhere") / own.name
            if not path.is_file() or path.read_bytes() != own.content:
                found.append(f"{own.name}, which the user has put into a folder, is gone or changed ({path})")
                self.own.remove(own)
        return found

    def _mine(self):
        """The content of everything outside of the folders of runs and pictures, and the names there."""
        found = {}
        for folder in (self.elsewhere, self.home, self.tmp, self.top / "data"):
            for path in folder.rglob("*"):
                found[str(path)] = path.read_bytes() if path.is_file() else None
        for folder, names in ((self.runs, NAMES[:-1]), (self.far, NAMES[-1:]), (self.albums, ALBUMS)):
            own = {form.format(name) for name in names for form in ("{}", "{}.previous", ".{}.lock")}
            for name in set(names_in(folder)) - own:
                path = folder / name
                found[str(path)] = str(path.readlink()) if path.is_symlink() else _content(path)
        return found

    def accept(self):
        """Take the files outside of runs as they are now: the user has changed them."""
        self.mine = self._mine()

    def contents(self, name):
        """All that is in the folders of a run, to see whether a command changes it."""
        return [tree(place) for place in (self.place(name), self.previous(name))]


def names_in(folder):
    """The names in a folder, none where there is no folder."""
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def tree(folder):
    """What is below a folder, without unfinished files."""
    if not folder.is_dir():
        return None
    found = {}
    for path in folder.rglob("*"):
        if not path.name.endswith(".part") and path.name != ".lock":
            found[str(path.relative_to(folder))] = str(path.readlink()) if path.is_symlink() else _content(path)
    return found


def _content(path):
    return path.read_bytes() if path.is_file() else None


def _equal(one, other):
    return one.keys() == other.keys() and all(
        one[name].contiguous().numpy().tobytes() == other[name].contiguous().numpy().tobytes() for name in one
    )
