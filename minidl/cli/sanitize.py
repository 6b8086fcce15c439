"""`minidl sanitize`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from minidl.cli.options import command
from minidl.data.parsing import counted
from minidl.training import device
from minidl.training.errors import ConfigError
from minidl.training.outputs import check_output
from minidl.training.provenance import FINDINGS
from minidl.training.settings import REPEATED, Positional, Settings

if TYPE_CHECKING:
    from minidl.testing import Sanitizer


class Sanitize(Settings):
    """Run a script and check every load and store of its Triton kernels, on the CPU, without a GPU.

    The kernels are interpreted; where there is no GPU, "cuda" stands for the CPU. Reported are accesses out of bounds,
    masked loads without other= whose lanes reach a store, reads of uninitialized memory, and writes of two programs or
    lanes to one element, each with kernel, program, line and index. An access out of bounds is skipped, and the script
    continues.

    The exit code is that of the script; where this is 0, it is 1 if a bug is found or no kernel launched.
    """

    examples = (
        "minidl sanitize my_kernel.py",
        "minidl sanitize --first train.py --epochs 1",
        "minidl sanitize -m pytest tests/test_kernels.py -q",
    )
    script: Annotated[str, Positional("SCRIPT"), Field(description="A Python file; with -m, the name of a module.")]
    arguments: Annotated[
        tuple[str, ...], Positional("[ARGUMENT]..."), Field(description="Arguments of the script."), REPEATED
    ] = ()
    module: Annotated[bool, Field(alias="m", description="SCRIPT is a module, as in python -m.")] = False
    first: Annotated[bool, Field(description="Stop at the first bug.")] = False
    json_file: Annotated[
        Path | None, FINDINGS, Field(alias="json", description="Also write the findings to this file.")
    ] = None


def _sanitize(given: dict[str, Any]) -> None:
    config = Sanitize(**given)
    script, json = config.script, config.json_file
    if json is not None:
        json = json.absolute()  # the script may change the working directory
    device.choose("cpu")
    check_scripts([script], module=config.module)
    from minidl.testing.sanitizer import script as work
    from minidl.training import files

    outcome = work.run(script, list(config.arguments), module=config.module, stop=config.first)
    _show(outcome.sanitizer, outcome.code)
    fine = outcome.sanitizer.launches and not outcome.sanitizer.findings
    if json is not None:
        check_output("--json", json, FINDINGS)  # again: the script may have made it
        files.write_json(json, _as_json(outcome.sanitizer))
    raise typer.Exit(outcome.code or int(not fine))


def check_scripts(names: Sequence[str], *, module: bool) -> None:
    """Raises ConfigError for a script, or a module, that is not there."""
    from minidl.testing.sanitizer.script import has_module

    for name in names:
        if module and not has_module(name):
            raise ConfigError(f"there is no module {name!r}; -m takes the name of a module, such as package.module")
        if not module and not Path(name).is_file():
            raise ConfigError(f"{name} is not a file; expected a Python script, or -m and the name of a module")


def _show(sanitizer: Sanitizer, code: int) -> None:
    for number, finding in enumerate(sanitizer.findings, 1):
        typer.echo(f"{number}. {finding}", err=True)
    failed = f"the script {'was interrupted' if code == 130 else f'failed (exit code {code})'}; " if code else ""
    launches = sum(sanitizer.launches.values())
    if launches == 0:
        typer.echo(f"{failed}nothing was checked: the script launched no Triton kernel", err=True)
        return
    count = len(sanitizer.findings)
    bugs = counted(count, "bug") if count else "no bugs"
    checked = f"{bugs} in {counted(launches, 'launch')} of {counted(len(sanitizer.launches), 'kernel')}"
    typer.echo(f"{failed}{checked}{' up to there' if code else ''}", err=True)


def _as_json(sanitizer: Sanitizer) -> dict[str, object]:
    return {
        "launches": dict(sanitizer.launches),
        "findings": [
            {
                "kind": finding.kind, "kernel": finding.kernel, "program": list(finding.program),
                "file": finding.place.file, "line": finding.place.line, "tensor": finding.tensor,
                "index": None if finding.index is None else list(finding.index), "what": finding.what,
                "accesses": finding.elements, "programs": len(finding.programs),
            }
            for finding in sanitizer.findings
        ],
    }  # fmt: skip


add_to = command("sanitize", Sanitize, _sanitize, context={"allow_interspersed_args": False})
