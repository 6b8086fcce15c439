"""Commands in children of this process, and what befalls them: kills, signals, full disks, no permission, other clocks.

A child has a session of its own, so that what it leaves running is found. Faults are placed by counting: the n-th
operation on a file below one folder, or the n-th step of writing (`failpoints`). The same numbers meet the same place
again, as far as a command does the same again; a moment is a share of the time that the command usually takes.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import minidl.cli
from tests.trials import child
from tests.trials.failpoints import CODES, DEAD, Failpoints, Fault
from tests.trials.warm import FILE_EVENTS

# How often each is drawn; the first is what a violation is shrunk to.
KINDS = {
    "nothing": 9, "kill": 5, "kill at a moment": 3, "SIGINT": 2, "SIGTERM": 2, "two signals": 1,
    "signal at a moment": 2, "fault": 4, "death in a write": 2, "no memory": 1, "full disk": 3, "revoked": 3,
    "clock": 1, "lock is a link": 1,
}  # fmt: skip
# Those that no command notices.
HARMLESS = ("nothing", "clock")
# Those that every command meets that is at work at the time.
AROUND = ("full disk", "revoked", "lock is a link")
DEATHS = (-signal.SIGKILL, DEAD)
_CLOCKS = (-400 * 86400, -3600, 86400, -(10**9))  # seconds
_LEFT = (0, 3000, 12000, 40000)  # bytes of a full disk
_MODES = (0o500, 0o000, 0o400)
_MOST_SECONDS = 150
_SUBREAPER, _NEWNS, _CAPABILITIES = 36, 0x20000, 0x20080522
_PERMISSIONS = 1 << 1 | 1 << 2 | 1 << 3  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


@dataclass(frozen=True)
class Hurt:
    """`at` is a place, in thousandths of what the command does; `more` chooses among the ways of a kind."""

    kind: str = "nothing"
    at: int = 0
    more: int = 0

    def __str__(self):
        if self.kind in HARMLESS:
            return self.kind
        where = "" if self.kind in AROUND else f" at {self.at / 1000:.3f}"
        return f"{self.kind}{where} ({self.detail})"

    @property
    def detail(self):
        """What `more` chooses."""
        if self.kind == "fault":
            name = list(CODES)[self.more % len(CODES)]
            return f"{name}, lasting" if self.lasting else name
        if self.kind == "full disk":
            return f"{_LEFT[self.more % len(_LEFT)]} bytes left"
        if self.kind == "revoked":
            return f"{_MODES[self.more % len(_MODES)]:o}"
        return str(self.more)

    @property
    def lasting(self):
        """Whether a fault meets every later step, too."""
        return self.kind == "fault" and self.more >= len(CODES)

    @property
    def codes(self):
        """The exit statuses that it may bring, besides that of a command which it did not meet."""
        return {
            "kill": DEATHS, "kill at a moment": DEATHS, "death in a write": DEATHS, "SIGINT": (130,), "SIGTERM": (130,),
            "two signals": (130,), "signal at a moment": (130,), "fault": (1, 2), "no memory": (1,),
            "full disk": (1, 2), "revoked": (1, 2), "lock is a link": (1, 2),
        }.get(self.kind, ())  # fmt: skip

    @property
    def leaves_parts(self):
        """Whether a command that lives on may be kept from deleting its unfinished files, or is to end at once."""
        return self.kind in ("revoked", "two signals") or (self.kind == "fault" and "ENOSPC" not in self.detail)


@dataclass
class Usual:
    """What a command does when nothing befalls it: operations on files, steps of writing, seconds."""

    operations: int = 60
    steps: int = 20
    seconds: float = 0.5


@dataclass
class Life:
    """A command in a child. `ended` once it has; `stopped` while SIGSTOP holds it."""

    argv: list
    hurt: Hurt
    pid: int
    log: Path
    due: list = field(default_factory=list)  # (seconds after its first operation on a file, signal)
    begun: float | None = None
    started: float = field(default_factory=time.monotonic)
    ended: child.Ended | None = None
    seconds: float = 0.0
    stopped: bool = False

    def look(self):
        """See whether it has ended or stopped, and send what is due."""
        if self.ended is not None:
            return
        done, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        now = time.monotonic()
        if done and os.WIFSTOPPED(status):
            self.stopped = True
            return
        if done:
            self.ended, self.seconds = child.ended(status, self.log), now - self.started
            return
        if self.begun is None and Path(f"{self.log}.on").exists():
            self.begun = now
        while self.due and self.begun is not None and now > self.begun + self.due[0][0]:
            os.kill(self.pid, self.due.pop(0)[1])
        if now > self.started + _MOST_SECONDS and not self.stopped:
            self.kill()
            self.ended = child.Ended(-signal.SIGALRM, "", f"it hangs: no end after {_MOST_SECONDS} s")

    def go_on(self, number=signal.SIGCONT):
        """End a stop, by SIGCONT or SIGKILL."""
        self.stopped = False
        os.kill(self.pid, number)

    def kill(self):
        """End it, if it has not."""
        if self.ended is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def start(argv, log, root, home, hurt=None, usual=None, stop_at=None):
    """Begin `minidl argv`. Operations on files below `root` count; before the `stop_at`-th it stops itself."""
    hurt, usual = hurt or Hurt(), usual or Usual()
    for suffix in ("on", "points", "operations"):
        Path(f"{log}.{suffix}").unlink(missing_ok=True)
    blows = _blows(hurt, usual.operations)
    if stop_at is not None:
        blows[stop_at] = signal.SIGSTOP

    def run():
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(home)
        tempfile.tempdir = None
        if hurt.kind == "clock":
            real, shift = time.time, _CLOCKS[hurt.more % len(_CLOCKS)]
            time.time = lambda: real() + shift
        count = _watch(str(root), blows, f"{log}.on")
        sys.argv = ["minidl", *map(str, argv)]
        try:
            minidl.cli.main()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):  # which come too late
                signal.signal(number, signal.SIG_IGN)
            Path(f"{log}.operations").write_text(str(count[0]))

    points = Failpoints(root, _fault(hurt, usual.steps))
    life = Life([str(word) for word in argv], hurt, child.begin(run, log, points), log)
    after = 0.002 + usual.seconds * hurt.at / 1000
    if hurt.kind == "kill at a moment":
        life.due = [(after, signal.SIGKILL)]
    elif hurt.kind == "signal at a moment":
        life.due = [(after, (signal.SIGINT, signal.SIGTERM)[hurt.more % 2])]
    return life


def _blows(hurt, operations):
    """Signals by the number of the operation before which the command sends them to itself."""
    at = 1 + hurt.at * operations // 1000
    if hurt.kind == "kill":
        return {at: signal.SIGKILL}
    if hurt.kind in ("SIGINT", "SIGTERM"):
        return {at: signal.Signals[hurt.kind]}
    if hurt.kind == "two signals":
        first, second = (signal.SIGINT, signal.SIGTERM)[:: 1 if hurt.more % 2 else -1]
        return {at: first, at + 1 + hurt.more: second}
    return {}


def _fault(hurt, steps):
    kinds = {"fault": list(CODES)[hurt.more % len(CODES)], "death in a write": "death", "no memory": "memory"}
    kind = kinds.get(hurt.kind)
    return kind and Fault(kind, hurt.at * steps // 1000, hurt.lasting)


def _watch(root, blows, on):
    """Count the operations on files below `root` in a list of one number; send this process the `blows`."""
    count = [0]

    def hook(event, args):
        if event not in FILE_EVENTS or not args or not str(args[0]).startswith(root):
            return
        count[0] += 1
        if count[0] == 1:
            os.close(os.open(on, os.O_WRONLY | os.O_CREAT))
        number = blows.get(count[0])
        if number is not None:
            os.kill(os.getpid(), number)

    sys.addaudithook(hook)
    return count


def usual(life):
    """What a command did that ended well."""
    operations = int(Path(f"{life.log}.operations").read_text())
    steps = len(Path(f"{life.log}.points").read_text().splitlines()) - 1
    return Usual(operations, steps, life.seconds)


def wait(*lives):
    """Until all have ended."""
    while any(life.ended is None for life in lives):
        for life in lives:
            life.look()
        time.sleep(0.001)


def wait_for_stop(life):
    """Until it has stopped or ended; whether it has stopped."""
    while life.ended is None and not life.stopped:
        life.look()
        time.sleep(0.001)
    return life.stopped


def survivors(known=()):
    """Processes that commands have left running, as (number, command line): children of this process that are none of
    its own, since orphans become its children."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in known:
            continue
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if int(after_name[1]) != os.getpid():
            continue
        if after_name[0] == "Z":
            os.waitpid(int(folder.name), 0)
        else:
            found.append((int(folder.name), line[:200]))
    return found


def end(pid):
    """Kill a survivor."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class Revoked:
    """While entered, this path has another mode; afterwards everything below `root` is the user's again."""

    def __init__(self, path, root, hurt):
        self.path, self.root, self.mode = path, root, _MODES[hurt.more % len(_MODES)]

    def __enter__(self):
        # Its folder may be revoked as well.
        with contextlib.suppress(PermissionError):
            if self.path.exists():
                self.path.chmod(self.mode)

    def __exit__(self, *error):
        give_back(self.root)


def give_back(folder):
    """Make everything below a folder the user's again."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        if path.is_dir():
            give_back(path)
        else:
            path.chmod(0o644)


class Full:
    """While entered, the disk of a folder has so little left."""

    def __init__(self, folder, hurt):
        self.path, self.left = folder / "filler", _LEFT[hurt.more % len(_LEFT)]

    def __enter__(self):
        free = shutil.disk_usage(self.path.parent).free - self.left
        with self.path.open("wb") as file:
            if free > 0:
                os.posix_fallocate(file.fileno(), 0, free)

    def __exit__(self, *error):
        self.path.unlink()


def adopt_orphans():
    """Become the parent of processes whose own parent has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def own_disk(folder, size):
    """Mount a small disk, which this process and its children alone see; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.unshare(_NEWNS):
        return False
    if libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None):  # MS_REC | MS_PRIVATE
        return False
    return not libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())


def obey_permissions():
    """Give up what lets root read and write everything."""
    if os.geteuid() != 0:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for i in range(3):  # effective, permitted, inheritable: the lower half
        sets[i] &= ~_PERMISSIONS & 0xFFFFFFFF
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
