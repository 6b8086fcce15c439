"""`minidl sanitize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minidl.cli.common import Command, check_file, choose_device, errors, examples, switch
from minidl.training.errors import ConfigError

if TYPE_CHECKING:
    from minidl.testing import Sanitizer

EXAMPLES = examples(
    "minidl sanitize my_kernel.py",
    "minidl sanitize --first train.py --epochs 1",
    "minidl sanitize -m pytest tests/test_kernels.py -q",
)


def sanitize(
    script: Annotated[str, typer.Argument(help="A Python file; with -m, the name of a module.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.", metavar="[ARGUMENT]...")] = None,
    module: Annotated[bool, switch("-m", "SCRIPT is a module, as in python -m.")] = False,
    first: Annotated[bool, switch("--first", "Stop at the first bug.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write what was found to this file.")] = None,
) -> None:
    """Run a script and check every load and store of its Triton kernels, on the CPU, without a GPU.

    The kernels are interpreted. Found are accesses out of bounds, masked loads without other= whose lanes reach a
    store, reads of memory that nothing has written, and two programs or lanes that write one element, each with kernel,
    program, line and index. An access out of bounds is left out, and the script goes on.

    It fails where a bug is found; else the exit code is that of the script.
    """
    with errors():
        if json is not None:
            check_file("--json", json)
            json = json.absolute()  # the script may change folder
        choose_device("cpu")
        from minidl.testing.sanitizer import script as work
        from minidl.training import files

        if module and not work.has_module(script):
            raise ConfigError(f"there is no module {script!r}; -m takes the name of a module, such as package.module")
        if not module and not Path(script).is_file():
            raise ConfigError(f"{script} is no file; expected a Python script, or -m and the name of a module")
        outcome = work.run(script, arguments or [], module=module, stop=first)
        _show(outcome.sanitizer)
        found = outcome.sanitizer.findings
        if json is not None:
            files.write_json(json, _as_json(outcome.sanitizer))
        raise typer.Exit(outcome.code or int(bool(found)))


def _show(sanitizer: Sanitizer) -> None:
    for number, finding in enumerate(sanitizer.findings, 1):
        typer.echo(f"{number}. {finding}", err=True)
    launches = sum(sanitizer.launches.values())
    if launches == 0:
        typer.echo("nothing was checked: the script launched no Triton kernel", err=True)
        return
    count = len(sanitizer.findings)
    bugs = f"{count} bug{'s' if count > 1 else ''}" if count else "no bugs"
    kernels = len(sanitizer.launches)
    typer.echo(
        f"{bugs} in {launches:,} launch{'es' if launches > 1 else ''} of {kernels} kernel{'s' if kernels > 1 else ''}",
        err=True,
    )


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


def add_to(app: typer.Typer) -> None:
    """Add the command `sanitize`; what stands after the script is the script's."""
    app.command(cls=Command, epilog=EXAMPLES, context_settings={"allow_interspersed_args": False})(sanitize)
