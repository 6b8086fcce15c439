"""Starts the checks of every Python process of a sanitized script, which imports this file through PYTHONPATH.

It imports no other module at first, since that Python may lack minidl.
"""

from __future__ import annotations

import os
import sys
from importlib import machinery, util
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).parent
_RECORD, _FIRST = "SANITIZED_RECORD", "SANITIZED_FIRST"  # the record of all processes; whether to stop
_STARTS = {"subprocess.Popen": (0, 1, 3), "os.exec": (0, 1, 2), "os.posix_spawn": (0, 1, 2)}


def tell(**entry: Any) -> None:
    """Append an entry to the record; a deleted record has no reader."""
    import json

    try:
        record = os.open(os.environ[_RECORD], os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return
    os.write(record, f"{json.dumps(entry, default=int)}\n".encode())  # one write, since other processes append, too
    os.close(record)


class _AfterTorch:
    """Starts the checks after the import of torch, before which no kernel is launched."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _begin()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    if util.find_spec("triton") is None:
        return
    sys.path.append(str(_FOLDER.parents[3]))
    try:
        from minidl.testing.sanitizer import processes

        processes.begin(tell, os.environ[_RECORD], stop=_FIRST in os.environ)
    except Exception as error:  # noqa: BLE001 (recorded; the script continues)
        tell(unchecked=" ".join(sys.argv), why=f"{type(error).__name__}: {error}")
    finally:
        sys.path.pop()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Record a Python process that will not import this file."""
    if event not in _STARTS:
        return
    program, words, env = (args[index] for index in _STARTS[event])
    command = [os.fsdecode(word) for word in ([words] if isinstance(words, (str, bytes, os.PathLike)) else words)]
    lost = env is not None and not any(os.fsdecode(name) == _RECORD for name in env)
    is_python = Path(os.fsdecode(program or command[0])).name.startswith("python")
    isolated = is_python and not {"-I", "-E", "-S"}.isdisjoint(command)
    if isolated or (lost and "python" in " ".join(command)):
        tell(unchecked=" ".join(command), why="it was started without the environment of the script")


if _RECORD in os.environ:
    sys.path[:] = [folder for folder in sys.path if folder != str(_FOLDER)]
    sys.meta_path.insert(0, _AfterTorch())
    sys.addaudithook(_audit)
# The sitecustomize that Python would import without this file.
_other = machinery.PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder != str(_FOLDER)])
if _other is not None and _other.loader is not None:
    _other.loader.exec_module(util.module_from_spec(_other))
