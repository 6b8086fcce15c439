"""`minidl tune`."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from minidl.cli.common import check_plot
from minidl.cli.options import check_alone, command
from minidl.common.console import echo, one_line, rich_console
from minidl.errors import ConfigError
from minidl.training.process import device
from minidl.training.run_folder.outputs import check_output
from minidl.training.run_folder.provenance import ESTIMATES, MEASURED, PLOT
from minidl.training.settings.declaration import FLOAT32, REPEATED, Expected, Positional, Settings
from minidl.training.settings.fields import Device

if TYPE_CHECKING:
    from minidl.runtime.tile_tables import Table
    from minidl.tools.tuning.classes import ShapeClass
    from minidl.tools.tuning.search import SearchResult


class Tune(Settings):
    """Search for faster tiles for this device and write tile tables.

    A class is a rule in the tile table of a kernel family. Its tile is compared with others on representative shapes.
    Tiles that do not compile, spill, or give a wrong result are dropped. A new tile must be faster twice, by more than
    the noise.

    --estimates fits the constants of the time estimates of forms and tiles instead: it times all of them on random
    shapes and fits the constants to the times.

    Tables and constants are used only if MINIDL_TILES names their folder.
    """

    examples = (
        "minidl tune --list",
        "minidl tune softmax --budget 60 --plot softmax.svg",
        'minidl tune gemm --only "N to 128" --dry-run --json sweep.json',
        "minidl tune --budget 3600 --out tiles",
        "minidl tune --estimates --budget 600 --json trials.json",
    )
    names: Annotated[
        tuple[str, ...],
        Positional("NAME"),
        Field(description="Kernel families whose name contains one of these words. Default: all."),
        REPEATED,
    ] = ()
    only: Annotated[
        tuple[str, ...],
        Field(description="Tune only shape classes whose name contains this text; may be repeated."),
        REPEATED,
    ] = ()
    budget: Annotated[
        float,
        Field(gt=0, le=FLOAT32, description="Time limit in seconds for all classes together."),
        Expected("seconds above 0"),
    ] = 300.0
    out: Annotated[
        Path | None,
        Field(description="Folder of the new tables. Default: a folder for this device in the user configuration."),
    ] = None
    write: Annotated[bool, Field(description="Write into the package itself (for minidl developers).")] = False
    dry_run: Annotated[bool, Field(description="Do not write tables.")] = False
    estimates: Annotated[
        bool, Field(description="Fit the constants of the time estimates instead of searching tiles.")
    ] = False
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description="With --estimates: seed of the shapes.")] = 0
    list_: Annotated[bool, Field(alias="list", description="Only list the classes and their tiles.")] = False
    json_file: Annotated[
        Path | None,
        MEASURED,
        Field(alias="json", description="Also write all measurements to this file; --estimates continues from them."),
    ] = None
    plot: Annotated[Path | None, PLOT, Field(description="Also draw the sweep to this .svg or .png file.")] = None
    device: Device = "auto"


def _run(options: dict[str, Any]) -> None:
    config = Tune(**options)
    out, write = config.out, config.write
    if out is not None and write:
        raise ConfigError("--write and --out cannot be combined")
    _check_folder(out, "--out")
    device.choose(config.device)
    if config.estimates:
        for name, option in {"names": "NAME", "only": "--only", "list": "--list", "plot": "--plot"}.items():
            if name in options:
                raise ConfigError(f"--estimates cannot be combined with {option}")
        _estimates(config)
        return
    if "seed" in options:
        raise ConfigError("--seed requires --estimates")
    selected = _classes(list(config.names), list(config.only))
    from minidl.tools.tuning import space

    if config.list_:
        check_alone(options, "out", "write", "dry_run", "json", "plot")
        for each in selected:
            count = len(space.candidates(each.family, each.target, each.tile))
            problems = ", ".join(problem.name for problem in each.problems) or "no problem uses it"
            echo(f"{each.name}: {space.describe(each.tile)} ({count} candidates; {problems})")
        return
    _tune(selected, config)


def _classes(names: list[str], only: list[str]) -> list[ShapeClass]:
    import torch

    from minidl.runtime import launch
    from minidl.tools.tuning import run

    if not launch.ON_CPU and not torch.cuda.is_available():
        raise ConfigError("tune needs a CUDA device or a CPU (--device cpu), and neither is available")
    try:
        selected = run.select(names, only)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not selected:
        raise ConfigError(f"these families have no tiles for {launch.target()}: their kernels are not used there")
    return selected


def _tune(selected: list[ShapeClass], config: Tune) -> None:
    from minidl.runtime import launch, tile_tables
    from minidl.tools.tuning import check, run
    from minidl.tools.tuning import files as written
    from minidl.training.run_folder import files

    out, write, dry_run, json, plot = config.out, config.write, config.dry_run, config.json_file, config.plot
    check_plot(plot)
    folder = tile_tables.FOLDER if write else out or written.usual_folder()
    if not dry_run:
        _check_folder(folder, "--write:" if write else "--out" if out else "the folder of tables")
    reserved = {(folder / f"{name}.json").resolve() for name in (*launch.families(), "estimates")}
    for flag, path in (("--json", json), ("--plot", plot)):
        if path is not None and path.resolve() in reserved:
            raise ConfigError(f"{flag} {path} is a tile table in {folder}: give another name")
    try:
        tables = {family: written.start_from(folder, family) for family in {each.family for each in selected}}
    except tile_tables.TableError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    if any(table != tile_tables.read(family) for family, table in tables.items()):
        echo(one_line(f"continuing from the tables in {folder}"))
        selected = _with_tables(selected, tables)
    paths: set[Path] = set()

    def save(family: str, table: Table) -> None:
        if not dry_run:
            paths.add(written.write_table(folder, family, table))

    results: list[SearchResult] = []
    try:
        run.run(selected, tables, config.budget, check.for_device(), rich_console(), save, results)
    finally:
        # Also after Ctrl-C, and each output even if another fails: measurements take long.
        with contextlib.ExitStack() as outputs:
            if plot is not None and results:
                outputs.callback(_draw, plot, results)
            if json is not None and results:
                outputs.callback(files.write_json, json, written.record(results))
            if paths:
                echo(one_line(f"wrote {', '.join(sorted(path.name for path in paths))} into {folder}"))
                if not write:
                    echo(one_line(f"to use them: export {tile_tables.VARIABLE}={folder.resolve()}"))
    faster = sum(each.chosen is not None for each in results)
    echo(f"{faster} of {len(results)} classes have a faster tile")
    if any(each.error for each in results):
        raise typer.Exit(1)


def _estimates(config: Tune) -> None:
    import torch

    from minidl.runtime import launch, tile_tables
    from minidl.runtime.cost_model import devices, schema
    from minidl.runtime.cost_model import selection as used
    from minidl.tools.tuning import estimates
    from minidl.tools.tuning import files as written
    from minidl.training.run_folder import files

    if launch.INTERPRETED or not torch.cuda.is_available():
        raise ConfigError("tune --estimates requires a CUDA device with compiled kernels")
    about, json = estimates.about(config.seed), config.json_file
    path = (config.out or written.usual_folder()) / devices.NAME
    if config.write:
        existing = devices.file_of(about["device"], schema.Figures(**about["figures"]))
        path = existing or devices.FOLDER / f"{written.slug(about['device'])}.json"
    if not config.dry_run:
        _check_folder(path.parent, "--write:" if config.write else "--out" if config.out else "the folder of estimates")
        if path.parent.is_dir():
            check_output("--out", path, ESTIMATES)
    rows = estimates.stored_rows(json, about)
    try:
        estimates.measure(rows, config.budget, rich_console(), lambda: None if json is None else rows.save(json))
    except KeyboardInterrupt:
        echo("interrupted: the constants are fitted to the measurements so far", error=True)
    constants = estimates.fitted(rows, used.of(launch.target()), echo)
    if constants is None:
        echo("the choices for held-out shapes became worse: the constants stay unchanged")
    if constants is None or config.dry_run:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, estimates.as_text(estimates.content(rows, constants, path)) + "\n")
    echo(one_line(f"wrote {path}"))
    if not config.write:
        echo(one_line(f"to use them: export {tile_tables.VARIABLE}={path.parent.resolve()}"))


def _draw(plot: Path, results: list[SearchResult]) -> None:
    from minidl.tools.tuning import files as written
    from minidl.tools.tuning import plot as drawn
    from minidl.training.run_folder import files

    files.write_bytes(plot, drawn.picture(results, written.device_name(), plot.suffix[1:]))


def _with_tables(selected: list[ShapeClass], tables: dict[str, Table]) -> list[ShapeClass]:
    """Return the same classes with the tiles of the tables that tuning starts from."""
    from minidl.runtime import launch
    from minidl.tools.tuning import classes, kind

    with launch.use_tables(**tables):
        by_rule = {
            (each.family, each.index): each
            for family in tables
            for each in classes.of_family(family, kind.target())
        }  # fmt: skip
    return [by_rule[each.family, each.index] for each in selected if (each.family, each.index) in by_rule]


def _check_folder(out: Path | None, what: str) -> None:
    """Raise ConfigError, before the work, if the folder cannot be created or written; `what` is its option."""
    if out is None:
        return
    try:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"{what} {out} is a file: give the name of a folder")
        if out.is_symlink() and not out.exists():
            raise ConfigError(f"{what} {out} is a broken link: give the name of a folder")
        parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:
        name = "" if error.errno == errno.ENAMETOOLONG else f" {out}"
        raise ConfigError(f"{what}{name} cannot be created: {error.strerror}; give another with --out") from None
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"{what} {out} cannot be created in {parent}; give another folder with --out")


add_to = command("tune", Tune, _run)
