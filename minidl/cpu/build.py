"""Compile C with the system's compiler, and keep the libraries in Triton's cache.

A file's name is the key of its source and its own checksum, so a damaged file is compiled again. Files appear complete
or not at all: processes may share the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import NamedTuple

from minidl.common import write_files

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-shared", "-fPIC")
# The second because GCC 12 vectorises loops with branches wrongly in places.
OPTIONAL = ("-mprefer-vector-width=512", "-fno-tree-loop-if-convert")
NO_COMPILER = "no C compiler works: install gcc or clang, or run pip install ziglang"
_HERE = Path(__file__).parent


class CompilerError(RuntimeError):
    """No C compiler works, or the compiler failed; the message then has its output."""


class Compiler(NamedTuple):
    """A command that compiles C, what it calls itself, and the options of OPTIONAL that it knows."""

    command: tuple[str, ...]
    version: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The first line of the version."""
        return self.version.partition("\n")[0]


@functools.cache
def compiler() -> Compiler | None:
    """Return the first of $CC, cc, gcc, clang and the package ziglang that compiles and whose result loads, or None."""
    zig = (sys.executable, "-P", "-m", "ziglang", "cc") if util.find_spec("ziglang") else ()
    for command in (tuple(shlex.split(os.environ.get("CC", ""))), ("cc",), ("gcc",), ("clang",), zig):
        present = command and shutil.which(command[0])
        for options in (OPTIONAL, OPTIONAL[:1], OPTIONAL[1:], ()) if present else ():
            if _works(Compiler(command, "", options)):
                version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
                return Compiler(command, version, options)
    return None


def _works(candidate: Compiler) -> bool:
    with tempfile.TemporaryDirectory() as temporary:
        try:
            ctypes.CDLL(str(_compile(candidate, "int x;", Path(temporary) / "test.so", ("-Werror",))))
        except (OSError, CompilerError):
            return False
        return True


def folder() -> Path:
    """Return the folder of compiled kernels, in Triton's cache."""
    import triton  # after `minidl.runtime` has chosen where kernels run

    return Path(triton.knobs.cache.dir) / "minidl-cpu"


@functools.cache
def _machine() -> str:
    """Return what machine code depends on: compiler, flags, processor and the translator."""
    import triton

    chosen, cpu = compiler(), _processor()
    sources = sorted([*_HERE.glob("*.py"), *_HERE.glob("*.[ch]")])
    text = b"".join(path.read_bytes() for path in sources)
    return hashlib.sha256(repr((chosen, FLAGS, cpu, triton.__version__)).encode() + text).hexdigest()


@functools.cache
def _processor() -> str:
    """Return the model and the features of the processor."""
    text = platform.machine() + platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += "".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
    return text


def library(name: str, source: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile C and load it. Raises CompilerError, and OSError if no folder can be written."""
    return lookup(name) or store(name, source, flags)


def _key(name: str) -> str:
    return hashlib.sha256((_machine() + name).encode()).hexdigest()[:32]


def lookup(name: str) -> ctypes.CDLL | None:
    """Return a compiled library of an earlier process, None if there is none or it is damaged."""
    for path in folder().glob(f"{_key(name)}-*.so"):
        try:
            if path.stem.partition("-")[2] == _checksum(path):
                return ctypes.CDLL(str(path))
        except OSError:
            pass
    return None


def store(name: str, source: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile C, keep the library if the folder can be written, and load it. Raises CompilerError."""
    if (chosen := compiler()) is None:
        raise CompilerError(NO_COMPILER)
    with tempfile.TemporaryDirectory() as temporary:
        built = _compile(chosen, source, Path(temporary) / "kernel.so", flags)
        try:
            folder().mkdir(parents=True, exist_ok=True)
            target = folder() / f"{_key(name)}-{_checksum(built)}.so"
            write_files.write_bytes(target, built.read_bytes())
        except OSError:  # a full or read-only disk: this process has its library
            return ctypes.CDLL(str(built))
        return ctypes.CDLL(str(target))


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compile(chosen: Compiler, source: str, target: Path, flags: tuple[str, ...]) -> Path:
    path = target.with_suffix(".c")
    path.write_text(source)
    files = "-o", str(target), str(path), "-lm", "-lpthread"
    command = [*chosen.command, *FLAGS, *chosen.options, *flags, *files]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
        raise CompilerError(f"{chosen.command[0]} failed with {result.returncode}: {' '.join(lines[:3])[:500]}")
    return target
