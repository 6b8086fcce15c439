"""`minidl generate`: from seeds, a walk or a file of latents to pictures in a folder.

The folder has a picture for each latent, a grid where one is asked for, and images.json, which says what made them: a
folder without it is never overwritten. A picture is named after its seed alone, as seed-000003.png, or after its place
in a walk or a file of latents: the same picture has the same name whichever others are made with it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from minidl import storage
from minidl.generation import latents, output, passes
from minidl.generation.config import Generate, grid_too_small
from minidl.generation.model import Loaded, load
from minidl.training import environment, files, locks, saved_run
from minidl.training.display import Display
from minidl.training.errors import ConfigError, DamagedError, RunError
from minidl.training.outputs import cannot_write, check_length
from minidl.version import __version__

MANIFEST = "images.json"
_STAGED = ".new-pictures"  # in the folder, until all of them are made
_DIGITS = 6  # of the number in a name, at least
FORMAT, VERSION = "minidl-images", 1
_BEGUN = re.compile(rf"\.{re.escape(MANIFEST)}\..*{re.escape(storage.PART)}")  # what a killed process left at its start
_NAME = re.compile(r"((seed|step|latent)-[0-9]+|grid)\.(png|bmp)|images\.npy")


def check_out(config: Generate) -> None:
    """Raises ConfigError when pictures must not be written to `out`: told before the work."""
    folder = config.out
    check_length(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {folder} is a file: give the name of a folder")
        if not folder.exists() or all(map(_is_begun, folder.iterdir())):
            return
    except OSError as error:
        raise ConfigError(cannot_write(folder, error)) from None
    if not config.overwrite:
        raise ConfigError(
            f"--out {folder} exists and is not empty: choose another folder, or replace the pictures in it with "
            "--overwrite"
        )
    _written(folder)


def generate(config: Generate) -> None:
    """Make the pictures. Raises ConfigError and DataError for what cannot be made, RunError for a model that cannot
    be read and a folder that cannot be written."""
    check_out(config)
    loaded = load(config.model, config.precision)
    if not config.quiet:
        saved_run.tell(loaded.notes)
    if config.latents is not None:
        z = latents.read(config.latents, loaded.latent)
        names: Sequence[Any] = range(len(z))
        if config.grid is not None and len(z) > config.grid[0] * config.grid[1]:
            grid_too_small(config.grid, len(z))
    elif config.interpolate is not None:
        ends = latents.from_seeds(config.interpolate, loaded.latent, config.truncation)
        z = latents.walk(ends[0], ends[1], config.total())
        names = range(len(z))
    else:
        names = config.all_seeds()
        z = latents.from_seeds(names, loaded.latent, config.truncation)
    try:
        files.make_folder(config.out, parents=True)
        with locks.held(config.out):
            check_out(config)
            for path in config.out.iterdir():
                if _BEGUN.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            if config.overwrite and (config.out / MANIFEST).exists():
                _replace(config, loaded, z, names)
            else:
                _write(config, config.out, loaded, z, names)
    except OSError as error:
        raise RunError(cannot_write(config.out, error)) from None


def _is_begun(path: Path) -> bool:
    """Whether a process that only began has left this file, or one that is at work holds it."""
    return path.name == locks.INSIDE or _BEGUN.fullmatch(path.name) is not None


def _replace(config: Generate, loaded: Loaded, z: np.ndarray, names: Sequence[Any]) -> None:
    """Make the pictures in a folder inside `out`, and put them in the place of the old ones once all are made.

    Raises ConfigError where a new one has the name of a file that an earlier command did not make.
    """
    folder, staged = config.out, config.out / _STAGED
    old = _written(folder)
    for name in [entry["file"] for entry in _listed(_manifest(config, loaded, names))]:
        if name not in old and (folder / name).exists():
            raise ConfigError(
                f"--out {folder} has a {name} that {MANIFEST} does not list: move it, or give another folder"
            )
    _unstage(staged)
    try:
        files.make_folder(staged)
        _write(config, staged, loaded, z, names)
        _change_places(folder, staged, old)
    finally:
        _unstage(staged)


def _change_places(folder: Path, staged: Path, old: list[str]) -> None:
    """Put the pictures in `staged`, and its images.json, in the place of the `old` ones in `folder`."""
    manifest = files.read_json(staged / MANIFEST)
    new = [entry["file"] for entry in _listed(manifest)]
    gone = [name for name in old if name not in new]
    # All are listed while they change places, so that a stopped command leaves nothing that the next cannot clear.
    files.write_json(folder / MANIFEST, {**manifest, "files": [*manifest["files"], *({"file": name} for name in gone)]})
    for name in new:
        (staged / name).replace(folder / name)
    for name in gone:
        (folder / name).unlink(missing_ok=True)
    files.sweep(folder)
    (staged / MANIFEST).replace(folder / MANIFEST)
    files.flush_folder(folder)


def _unstage(staged: Path) -> None:
    files.remove_folder(staged, lambda name: name == MANIFEST or _NAME.fullmatch(name) is not None)


def _manifest(config: Generate, loaded: Loaded, names: Sequence[Any]) -> dict[str, Any]:
    """The content of images.json."""
    made = _file_names(config, names)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        **_facts(config, loaded),
        "device": environment.device_name(),
        "shape": [loaded.channels, *loaded.size],
        "files": made if config.format != "npy" else [{"file": "images.npy"}, *made],
        "grid": None,
    }
    if config.grid is not None:
        manifest["grid"] = {"file": f"grid.{config.format}", "rows": config.grid[0], "columns": config.grid[1]}
    return manifest


def _write(config: Generate, folder: Path, loaded: Loaded, z: np.ndarray, names: Sequence[Any]) -> None:
    facts, made = _facts(config, loaded), _file_names(config, names)
    # First: what a stopped command leaves can be told from a folder of the user's.
    files.write_json(folder / MANIFEST, _manifest(config, loaded, names))
    kept: list[np.ndarray] = []
    done, started = 0, time.perf_counter()
    columns = TextColumn("images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    hidden = config.quiet or not sys.stdout.isatty()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, transient=True, disable=hidden))
        task = bar.add_task("", total=len(z))
        shape, dtype = (len(z), loaded.channels, *loaded.size), np.dtype(loaded.dtype_name)
        array = output.array_file(folder / "images.npy", shape, dtype)
        write = stack.enter_context(array) if config.format == "npy" else None
        for part in passes.images(loaded.generator, z, loaded.channels, loaded.size, config.batch_size):
            passes.check_finite(part, done)
            if write is not None:
                write(part)
            else:
                pictures = output.pixels(part)
                for picture, entry in zip(pictures, made[done:], strict=False):
                    output.write_picture(folder / entry["file"], picture, _texts({**facts, **entry}))
                if config.grid is not None:
                    kept.append(pictures)
            done += len(part)
            bar.advance(task, len(part))
    seconds = time.perf_counter() - started
    if config.grid is not None:
        sheet = output.grid(np.concatenate(kept), *config.grid)
        text = _texts({**facts, "seeds": _ranges(config, names)})
        output.write_picture(folder / f"grid.{config.format}", sheet, text)
    what = "1 image" if len(z) == 1 else f"{len(z):,} images"
    size = f"{loaded.size[0]}x{loaded.size[1]}{'' if loaded.channels == 1 else 'x' + str(loaded.channels)}"
    speed = f"{seconds:.1f} s, {done / max(seconds, 1e-9):,.1f} images/s"
    display = Display(config.quiet)
    display.note(f"{what} of {size} in {config.out} by model {loaded.name} ({loaded.sha256[:12]}): {speed}")


def _facts(config: Generate, loaded: Loaded) -> dict[str, Any]:
    """What all pictures of a command share, for images.json and the metadata of each."""
    facts: dict[str, Any] = {
        "minidl": __version__,
        "model": loaded.name,
        "model_sha256": loaded.sha256,
        "precision": config.precision,
    }
    if config.truncation is not None:
        facts["truncation"] = config.truncation
    if config.interpolate is not None:
        facts["interpolate"] = list(config.interpolate)
    if config.latents is not None:
        facts["latents"] = str(config.latents)
        facts["latents_sha256"] = output.sha256(config.latents)
    return facts


def _file_names(config: Generate, names: Sequence[Any]) -> list[dict[str, Any]]:
    """A record per picture: its file (none in an array) and its seed, or its place in a walk or a file."""
    kind = "seed" if config.latents is None else "latent"
    if config.interpolate is not None:
        kind = "step"
    if config.format == "npy":
        return [{kind: name} for name in names]
    return [{"file": f"{kind}-{name:0{_DIGITS}}.{config.format}", kind: name} for name in names]


def _ranges(config: Generate, names: Sequence[Any]) -> str:
    """Seeds as --seeds takes them; the ends of a walk as "A to B"; "" for latents of a file."""
    if config.latents is not None:
        return ""
    if config.interpolate is not None:
        return " to ".join(map(str, config.interpolate))
    runs: list[list[int]] = []
    for seed in names:
        if runs and seed == runs[-1][1] + 1:
            runs[-1][1] = seed
        else:
            runs.append([seed, seed])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _texts(facts: dict[str, Any]) -> dict[str, str]:
    """The metadata of a picture."""
    texts = {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in facts.items()
        if name not in ("minidl", "file")
    }
    return {"Software": f"minidl {__version__}", **texts}


def _written(folder: Path) -> list[str]:
    """The files that an earlier command made in a folder. Raises ConfigError when it has no images.json of minidl's."""
    refused = ConfigError(f"--overwrite replaces only what `minidl generate` made; {folder} has no intact {MANIFEST}")
    try:
        manifest = files.read_json(folder / MANIFEST)
    except (OSError, DamagedError):
        raise refused from None
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("files"), list):
        raise refused
    # No others, whatever the manifest says: nothing outside the folder, and nothing of the user's.
    return [entry["file"] for entry in _listed(manifest) if _NAME.fullmatch(entry["file"])]


def _listed(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of images.json that name a file."""
    entries = [*manifest["files"], manifest.get("grid")]
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("file"), str)]
