"""`minidl sanitize`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from minidl.cli.options import command
from minidl.common.console import echo, one_line
from minidl.data.parsing import counted
from minidl.errors import ConfigError
from minidl.training.process import device
from minidl.training.run_folder.outputs import check_output
from minidl.training.run_folder.provenance import FINDINGS
from minidl.training.settings.declaration import REPEATED, Positional, Settings

if TYPE_CHECKING:
    from minidl.tools.sanitizing import Outcome


class Sanitize(Settings):
    """Run a script on the CPU and check every load and store of its Triton kernels.

    The kernels are interpreted; without a GPU, the device "cuda" is the CPU. The sanitizer reports out-of-bounds
    accesses, masked loads without other= whose lanes reach a store, reads of uninitialized memory, and writes of two
    programs or lanes to the same element, each with kernel, program, line and index. It skips out-of-bounds accesses,
    so the script continues. Processes that the script starts are also checked.

    The exit code is that of the script. If that is 0, the exit code is 1 if a bug was found, no kernel was launched, or
    a process could not be checked.
    """

    examples = (
        "minidl sanitize my_kernel.py",
        "minidl sanitize --first train.py --epochs 1",
        "minidl sanitize -m pytest tests/test_kernels.py -q",
    )
    script: Annotated[str, Positional("SCRIPT"), Field(description="Python file; with -m, name of a module.")]
    arguments: Annotated[
        tuple[str, ...], Positional("ARGUMENT"), Field(description="Arguments of the script."), REPEATED
    ] = ()
    module: Annotated[bool, Field(alias="m", description="Run SCRIPT as a module, like python -m.")] = False
    first: Annotated[bool, Field(description="Stop at the first bug.")] = False
    json_file: Annotated[
        Path | None, FINDINGS, Field(alias="json", description="Also write the findings to this file.")
    ] = None


def _sanitize(options: dict[str, Any]) -> None:
    config = Sanitize(**options)
    script, json = config.script, config.json_file
    if json is not None:
        json = json.absolute()  # the script may change the working directory
    device.choose("cpu")
    check_scripts([script], module=config.module)
    from minidl.tools import sanitizing
    from minidl.training.run_folder import files

    outcome = sanitizing.run(script, list(config.arguments), module=config.module, stop=config.first)
    _show(outcome)
    clean = outcome.launches and not outcome.findings and not outcome.unchecked
    if json is not None:
        check_output("--json", json, FINDINGS)  # the script may have created it
        files.write_json(json, _as_json(outcome))
    raise typer.Exit(outcome.code or int(not clean))


def check_scripts(names: Sequence[str], *, module: bool) -> None:
    """Raise ConfigError for a missing script or module."""
    from minidl.tools.sanitizing import has_module

    for name in names:
        if module and not has_module(name):
            raise ConfigError(f"no module {name!r} was found; -m requires a module's name, such as package.module")
        if not module and not Path(name).is_file():
            raise ConfigError(f"{name} is not a file; expected a Python script, or -m and the name of a module")


def _show(outcome: Outcome) -> None:
    code = outcome.code
    for number, finding in enumerate(outcome.findings, 1):
        echo(f"{number}. {finding}", error=True)
    for process in outcome.unchecked:
        echo(f"not checked: {one_line(process)}", error=True)
    partly = "; not all processes were checked" if outcome.unchecked else ""
    end = f" before the script {'was interrupted' if code == 130 else f'failed (exit code {code})'}" if code else ""
    launches = sum(outcome.launches.values())
    if launches == 0:
        echo(f"nothing was checked: no Triton kernel was launched{end}{partly}", error=True)
        return
    count = len(outcome.findings)
    bugs = counted(count, "bug") if count else "no bugs"
    checked = f"{bugs} in {counted(launches, 'launch')} of {counted(len(outcome.launches), 'kernel')}"
    echo(f"{checked}{end}{partly}", error=True)


def _as_json(outcome: Outcome) -> dict[str, object]:
    return {
        "launches": dict(outcome.launches),
        "findings": [
            {
                "kind": finding.kind, "kernel": finding.kernel, "program": list(finding.program),
                "file": finding.place.file, "line": finding.place.line, "tensor": finding.tensor,
                "index": None if finding.index is None else list(finding.index), "what": finding.what,
                "accesses": finding.elements, "programs": len(finding.programs),
            }
            for finding in outcome.findings
        ],
    }  # fmt: skip


add_to = command("sanitize", Sanitize, _sanitize, context={"allow_interspersed_args": False})
