"""The memory that this process may still take: the least that the machine, control groups and limits leave.

Inactive file pages of a control group count as free, as in the machine's MemAvailable.
"""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 2**60  # version 1 of control groups writes the largest number of whole pages below 2^63
_GROUPS = {  # kind of file system: (limits, use, entry of memory.stat)
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def free(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can take without swapping, None if unknown.

    `root` is the folder that contains /proc and the mount points of control groups.
    """
    return min((max(0, left) for left in (*_machine(root), *_groups(root), *_limits(root))), default=None)


def in_groups(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups leave to this process, None if they have no limit."""
    return min((max(0, left) for left in _groups(root)), default=None)


def data(root: Path = Path("/")) -> int:
    """Return the bytes of private memory that this process has mapped, as RLIMIT_DATA counts them."""
    return next(_kilobytes(root / "proc/self/status", "VmData"), 0)


def _machine(root: Path) -> Iterator[int]:
    yield from _kilobytes(root / "proc/meminfo", "MemAvailable")


def _groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group leaves, from the innermost to the outermost."""
    paths = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = (*after.split(" ", 2), "", "")[:3]
        mount = before.split(" ")
        if kind not in _GROUPS or len(mount) < 5 or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top = root / mount[4].lstrip("/")
        for _, controllers, path in (entry for entry in paths if len(entry) == 3):
            if (kind == "cgroup2") == (controllers == "") and (kind == "cgroup2" or "memory" in controllers.split(",")):
                # A container sees its group as the mount's root, but the path may be the one outside of the container.
                folder = top / path.removeprefix(mount[3]).lstrip("/")
                for group in (folder, *folder.parents):
                    yield from _group(group, *_GROUPS[kind])
                    if group == top:
                        break


def _group(folder: Path, limits: tuple[str, ...], use: str, unused: str) -> Iterator[int]:
    used = _number(_text(folder / use))
    match = re.search(rf"^{unused} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    for name in limits:
        limit = _number(_text(folder / name))
        if limit is not None and used is not None and limit < _UNLIMITED:
            yield limit - max(0, used - (int(match[1]) if match else 0))


def _limits(root: Path) -> Iterator[int]:
    """Yield the bytes that the limits of `ulimit -v` and `ulimit -d` leave."""
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            yield from (most - used for used in _kilobytes(root / "proc/self/status", name))


def _kilobytes(path: Path, name: str) -> Iterator[int]:
    match = re.search(rf"^{name}:\s+(\d+) kB$", _text(path), re.MULTILINE)
    if match:
        yield int(match[1]) * 1024


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
