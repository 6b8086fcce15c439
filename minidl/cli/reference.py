"""Print the reference page of all commands and their settings, in Markdown: `python -m minidl.cli.reference`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from minidl.cli import COMMANDS, Deferred
from minidl.common.console import echo
from minidl.training.settings.declaration import Positional, description, expected, note, value_type


def page() -> str:
    """Return the page in Markdown, with a section and a table of options for each command."""
    sections = [section for name in COMMANDS for section in _sections(f"minidl {name}", Deferred(name).load())]
    return "\n\n".join(["# Commands and settings", _INTRODUCTION, *sections, _VARIABLES]) + "\n"


_INTRODUCTION = (
    "This page lists every command, option, range and default; look up an option here or with `minidl COMMAND --help`. "
    "Exit codes: 0 success, 1 failure, 2 bad usage or input, 130 stopped by Ctrl-C or SIGTERM."
)

_VARIABLES = """## Environment variables

| variable | meaning |
| --- | --- |
| `MINIDL_DATA` | Folder with data sets; a data set that it lacks is downloaded. |
| `MINIDL_TILES` | Folder with tile tables and estimates from `minidl tune`, which replace those of the package. |
| `MINIDL_EXPLAIN` | 1: log the form of each convolution, with the reason. |
| `MINIDL_RUN` | Set by `--devices` for its processes; leave it unset. |
| `XDG_CACHE_HOME` | Data sets and decoded pictures are cached in its folder `minidl`. Default: `~/.cache`. |
| `CUDA_VISIBLE_DEVICES` | GPUs to use. Empty: no GPU. |
| `MINIDL_CPU` | compiled: without a GPU, compile kernels, also in Python; interpreted: interpret them. |
| `TRITON_INTERPRET` | 1: interpret kernels; 0: compile them. Default: compile if there is a GPU. |
| `TRITON_CACHE_DIR` | Folder for compiled kernels. Default: `~/.triton/cache`. |
| `CC` | C compiler that Triton and MINIDL_CPU=compiled call. Default: gcc or clang. |
| `OMP_NUM_THREADS` | Threads of NumPy and PyTorch; affects interpreted products. Default: processors, at most 4. |
| `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` | Set by torchrun. |"""


def _sections(path: str, command: Any) -> Iterator[str]:
    for name, each in getattr(command, "commands", {}).items():
        yield from _sections(f"{path} {name}", each)
    if not hasattr(command, "commands"):
        examples = "\n".join(inspect.unwrap(command.callback).settings.examples)
        table = "\n".join(["| option | value | meaning |", "| --- | --- | --- |", *_rows(command)])
        yield f"## {path}\n\n{command.help}\n\n```\n{examples}\n```\n\n{table}"


def _rows(command: Any) -> Iterator[str]:
    fields = inspect.unwrap(command.callback).fields
    for option in command.params:
        info = fields[option.name]
        is_argument = note(info, Positional) is not None
        names = [option.name.upper()] if is_argument else [*option.opts, *option.secondary_opts]
        value = "" if value_type(info) is bool else expected(info)
        text = description(info) + (" Required." if option.required else "")
        yield f"| {', '.join(f'`{name}`' for name in names)} | {value} | {text} |".replace("|  |", "| |")


if __name__ == "__main__":
    echo(page(), end="")
