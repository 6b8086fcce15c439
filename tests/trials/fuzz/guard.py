"""Watches one input at a time: what the process opens, starts and imports, how much memory and time it takes.

The audit hook cannot be taken out again, so this is for a process of its own. While armed it refuses, with
PermissionError, every write outside the worker's folder: what is tried harms nothing.
"""

import os
import resource
import signal
import site
import sys
import sysconfig
from pathlib import Path

from tests.trials.fuzz import limits

ROOT = Path(__file__).parents[3]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen",
    "pickle.find_class", "socket.", "urllib.", "ftplib.", "http.", "smtplib.", "ctypes.dlopen", "ctypes.dlsym",
    "code.__new__", "webbrowser.", "os.kill", "shutil.chown", "os.chown", "sqlite3.",
)  # fmt: skip
# Events that change the file system, with the places of the paths among their arguments.
_CHANGES = {
    "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.link": (0, 1),
    "os.symlink": (1,), "os.truncate": (0,), "os.chmod": (0,), "os.utime": (0,), "shutil.rmtree": (0,),
    "shutil.move": (0, 1), "shutil.copyfile": (1,), "tempfile.mkstemp": (0,), "tempfile.mkdtemp": (0,),
}  # fmt: skip


class TooSlow(BaseException):
    """An input took more than limits.SECONDS; no `except Exception` may swallow it."""


class Guard:
    """One per process. `armed` switches it on; `broken` is what the input did that it must not."""

    def __init__(self, folder: Path, reads_anything: bool = False) -> None:
        """`reads_anything`: a command line may name any file to be read, and one outside the folder to be written."""
        self.folder = os.path.realpath(folder)
        self.reads_anything = reads_anything
        self.armed = False
        self.broken: list[str] = []
        code = {ROOT, sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()}
        self._code = tuple(os.path.realpath(path) for path in code)
        self._readable = (self.folder, *self._code, "/proc/", "/sys/", "/dev/", "/usr/share/", "/etc/localtime")
        self._peak = Path("/proc/self/clear_refs").open("wb", buffering=0)  # noqa: SIM115  (open as long as it lives)
        self._status = Path("/proc/self/status").open("rb", buffering=0)  # noqa: SIM115
        sys.addaudithook(self._hook)
        signal.signal(signal.SIGPROF, self._late)

    def limit_address_space(self) -> None:
        """Call it when all is loaded."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def resident(self, name: bytes) -> int:
        """VmRSS (now) or VmHWM (the most since `forget_peak`) in bytes."""
        self._status.seek(0)
        for line in self._status.read(4096).splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no such line in /proc/self/status")

    def forget_peak(self) -> int:
        """Begin to measure anew; resident bytes now."""
        self._peak.write(b"5")
        return self.resident(b"VmRSS:")

    def arm(self) -> None:
        self.broken.clear()
        signal.setitimer(signal.ITIMER_PROF, limits.SECONDS)
        self.armed = True

    def disarm(self) -> None:
        self.armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _late(self, number: int, frame: object) -> None:
        if self.armed:
            raise TooSlow(f"more than {limits.SECONDS:g} s")

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self.armed:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int) or path is None:
                return
            if isinstance(flags, int) and flags & _WRITES:
                self._write(event, path)
            elif not self.reads_anything:
                self._read(path)
        elif event in _CHANGES:
            for place in _CHANGES[event]:
                self._write(event, arguments[place])
        elif event == "exec":
            name = getattr(arguments[0], "co_filename", "?")
            # Modules that are imported late, and namedtuple's and dataclass's own code.
            if not (name.startswith(("<frozen", "<string>", "<__array_function__", "<attrs")) or self._is_code(name)):
                self.broken.append(f"executes {name}")
        elif event.startswith(_FORBIDDEN):
            self.broken.append(f"{event} {arguments!r:.200}")

    def _is_code(self, path: str) -> bool:
        return os.path.realpath(path).startswith(self._code)

    def _read(self, path: str | bytes | os.PathLike) -> None:
        try:
            real = os.path.realpath(os.fsdecode(path))
        except ValueError:  # a zero byte: no file has such a name
            return
        if not real.startswith(self._readable):
            self.broken.append(f"reads {real!r:.200}")

    def _write(self, event: str, path: str | bytes | os.PathLike | int) -> None:
        if isinstance(path, int):
            return
        try:
            real = os.path.realpath(os.fsdecode(path))
        except ValueError:
            return
        if real.startswith(self.folder) or real == "/dev/null":
            return
        if not self.reads_anything:
            self.broken.append(f"{event}: writes {real!r:.200}")
        raise PermissionError(13, "Permission denied", os.fsdecode(path))
