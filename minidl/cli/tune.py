"""`minidl tune`."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minidl.cli.common import Command, Device, check_alone, check_file, choose_device, errors, examples, switch
from minidl.training.config import DEVICES, check_different
from minidl.training.errors import ConfigError

if TYPE_CHECKING:
    from minidl.kernels.tables import Table
    from minidl.tuning.classes import ShapeClass
    from minidl.tuning.search import Found

EXAMPLES = examples(
    "minidl tune --list",
    "minidl tune softmax --budget 60 --plot softmax.svg",
    'minidl tune gemm --only "N to 128" --dry-run --json sweep.json',
    "minidl tune --budget 3600 --out tiles",
)


def tune(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Words: kernel families whose name has one of them. Default: all.", metavar="[NAME]..."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Shape classes with this in their name; may be repeated.")
    ] = None,
    budget: Annotated[float, typer.Option("--budget", help="Seconds in all, shared by the classes.")] = 300.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the new tables. Default: one for this device in your configuration."),
    ] = None,
    write: Annotated[bool, switch("--write", "Write into the package itself: for developers of minidl.")] = False,
    dry_run: Annotated[bool, switch("--dry-run", "Write no tables.")] = False,
    list_: Annotated[bool, switch("--list", "Only show the classes with their tiles.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write every measurement here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the sweep here, as SVG.")] = None,
    device: Device = "auto",
) -> None:
    """Search faster tiles for this device and write tile tables.

    A class is a rule of a family's table; its tile is measured beside others on representative shapes. Tiles that do
    not compile, spill or give a wrong result are dropped. A new tile must be faster twice, by more than the noise.

    Nothing uses the tables until MINIDL_TILES names their folder.
    """
    with errors():
        if not (math.isfinite(budget) and budget > 0):
            raise ConfigError(f"--budget is {budget:g}, expected seconds above 0")
        if out is not None and write:
            raise ConfigError("--write is the package's own folder; give it or --out, not both")
        if device not in DEVICES:
            raise ConfigError(f"--device is {device}, expected {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
        for flag, path in (("--json", json), ("--plot", plot)):
            if path is not None:
                check_file(flag, path)
        check_different(json=json, plot=plot)
        _check_folder(out, "--out")
        choose_device(device)
        wanted = _classes(names or [], only or [])
        from minidl.tuning import space

        check_alone("--list", list_, out=out, write=write, dry_run=dry_run, json=json, plot=plot)
        if list_:
            for shapes in wanted:
                count = len(space.candidates(shapes.family, shapes.target, shapes.tile))
                met = ", ".join(problem.name for problem in shapes.problems) or "no problem meets it"
                typer.echo(f"{shapes.name}: {space.describe(shapes.tile)} ({count} candidates; {met})")
            return
        _tune(wanted, budget, out, write, dry_run, json, plot)


def _classes(names: list[str], only: list[str]) -> list[ShapeClass]:
    import torch

    from minidl.kernels import launch
    from minidl.tuning import run

    if not launch.INTERPRETED and not torch.cuda.is_available():
        raise ConfigError("tune measures on a CUDA device or in the interpreter (--device cpu), and neither is here")
    try:
        found = run.chosen(names, only)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not found:
        raise ConfigError(f"these families have no tiles for {launch.target()}: their kernels are not used there")
    return found


def _tune(
    wanted: list[ShapeClass],
    budget: float,
    out: Path | None,
    write: bool,
    dry_run: bool,
    json: Path | None,
    plot: Path | None,
) -> None:
    from rich.console import Console

    from minidl.kernels import launch, tables
    from minidl.training import files, plots
    from minidl.tuning import check, run
    from minidl.tuning import files as written

    if plot is not None and not plots.available():
        raise ConfigError(plots.MISSING)
    folder = tables.FOLDER if write else out or written.usual_folder()
    if not dry_run:
        _check_folder(folder, "--write:" if write else "--out" if out else "the folder of tables")
    tables_there = {(folder / f"{family}.json").resolve() for family in launch.families()}
    for flag, path in (("--json", json), ("--plot", plot)):
        if path is not None and path.resolve() in tables_there:
            raise ConfigError(f"{flag} {path} is a tile table in {folder}: give another name")
    try:
        begun = {family: written.start_from(folder, family) for family in {shapes.family for shapes in wanted}}
    except tables.TableError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    if any(table != tables.read(family) for family, table in begun.items()):
        typer.echo(f"going on from the tables in {folder}")
        wanted = _again(wanted, begun)
    paths: set[Path] = set()

    def keep(family: str, table: Table) -> None:
        if not dry_run:
            paths.add(written.write_table(folder, family, table))

    found: list[Found] = []
    try:
        run.run(wanted, begun, budget, check.for_device(), Console(), keep, found)
    finally:
        # After Ctrl-C, too, and each whatever becomes of the others: what was measured is worth keeping.
        with contextlib.ExitStack() as outputs:
            if plot is not None and found:
                outputs.callback(_draw, plot, found)
            if json is not None and found:
                outputs.callback(files.write_json, json, written.record(found))
            if paths:
                typer.echo(f"wrote {', '.join(sorted(path.name for path in paths))} into {folder}")
                if not write:
                    typer.echo(f"to use them: export {tables.VARIABLE}={folder.resolve()}")
    faster = sum(each.chosen is not None for each in found)
    typer.echo(f"{faster} of {len(found)} classes have a faster tile")
    if any(each.error for each in found):
        raise typer.Exit(1)


def _draw(plot: Path, found: list[Found]) -> None:
    from minidl.training import files
    from minidl.tuning import files as written
    from minidl.tuning import plot as drawn

    files.write_bytes(plot, drawn.picture(found, written.device_name()))


def _again(wanted: list[ShapeClass], begun: dict[str, Table]) -> list[ShapeClass]:
    """The same classes with the tiles of the tables that tuning begins with."""
    from minidl.kernels import launch
    from minidl.tuning import classes

    with launch.use_tables(**begun):
        found = {
            (each.family, each.index): each
            for family in begun
            for each in classes.of_family(family, launch.target())
        }  # fmt: skip
    return [found[shapes.family, shapes.index] for shapes in wanted if (shapes.family, shapes.index) in found]


def _check_folder(out: Path | None, what: str) -> None:
    """Raises ConfigError when the folder, which is `what`, cannot be made or written: told before the work."""
    if out is None:
        return
    try:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"{what} {out} is a file: give the name of a folder")
        if out.is_symlink() and not out.exists():
            raise ConfigError(f"{what} {out} is a link to nothing: give the name of a folder")
        there = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    except OSError as error:
        raise ConfigError(f"{what} cannot be made: {error.strerror}; give another name") from None
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"{what} {out} cannot be made in {there}; give another folder with --out")


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=Command, epilog=EXAMPLES)(tune)
