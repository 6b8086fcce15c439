"""The commands. Options become one frozen class of settings per command; other packages do the work.

Read `options` first (from settings to flags), then `common` and a command: a module of its name, which is imported when
the command is called. Only commands that need torch, Triton, numpy or pydantic import them, so help is shown at once.
Exit codes: 0 done, 1 a failure, 2 bad usage or input, 130 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from minidl.cli.common import Command, Group, check_folder, examples, output_lost, prepare_streams, terminated
from minidl.common.console import echo
from minidl.version import __version__

# The first line of each command's help (a test compares them).
COMMANDS = {
    "train": "Train a model and report how good it is.",
    "evaluate": "Score a finished run on its test split or on other data, or a generator by its pictures.",
    "predict": "Predict each input: print one JSON line with the label and its probability, or with the number.",
    "explain": "Show how much each term of a text raised or lowered the score of its labels.",
    "compare": "Compare finished runs: scores, time, and the settings that differ.",
    "generate": "Generate pictures with a trained generator.",
    "bench": "Compare the speed of minidl and PyTorch on this GPU.",
    "tune": "Search for faster tiles for this device and write tile tables.",
    "doctor": "Check what this machine can run and what is missing, or compile every kernel.",
    "sanitize": "Run a script on the CPU and check every load and store of its Triton kernels.",
}


class Deferred(Command):
    """A command in the overview, which is imported when it is called."""

    def load(self) -> Any:
        """Import and return the typer command."""
        app = typer.Typer(rich_markup_mode="rich", add_completion=False)
        app.callback()(lambda: None)
        importlib.import_module(f"minidl.cli.{self.name}").add_to(app)
        group: Any = typer.main.get_command(app)
        return group.commands[self.name]

    def make_context(self, *args: Any, **more: Any) -> Any:
        check_folder()
        return self.load().make_context(*args, **more)


class Overview(Group):
    def __init__(self, **settings: Any) -> None:
        commands = {name: Deferred(name, help=text, rich_markup_mode="rich") for name, text in COMMANDS.items()}
        super().__init__(**{**settings, "commands": commands})


app = typer.Typer(
    cls=Overview,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train and use small neural networks. Every floating-point operation is a Triton kernel, compiled on an "
    "NVIDIA GPU or interpreted on a CPU.",
    epilog=examples(
        "minidl train text --data docstrings --out runs/first", 'minidl predict runs/first "Open a socket"'
    ),
)


def main(command: Callable[[], Any] = app) -> None:
    """Run `minidl`, or another command, and exit with its code."""
    prepare_streams()
    try:
        try:
            with terminated():
                command()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        echo("interrupted", error=True)
        sys.exit(130)
    except SystemExit as end:
        # Typer shows nothing for a Ctrl-C while it parses the command line.
        if isinstance(end.__context__, typer.Exit) and isinstance(end.__context__.__cause__, KeyboardInterrupt):
            echo("interrupted", error=True)
        raise
    except OSError as error:  # from the help, or the last lines
        sys.exit(output_lost(error))
    finally:
        # All output is written: another Ctrl-C must not print a traceback while Python exits.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _show_version(enabled: bool) -> None:
    if enabled:
        echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, metavar="", help="Show the version and exit."),
    ] = False,
) -> None:
    pass
