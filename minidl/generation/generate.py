"""`minidl generate`: from seeds, a walk or a file of latents to pictures in a folder.

The folder has a picture for each latent, or a file of all of them, a grid where one is asked for, and images.json,
which says what made them. A picture is named after its seed alone, as seed-000003.png, or after its place in a walk or
a file of latents: the same picture has the same name whichever others are made with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from minidl.compilers import Progress
from minidl.data import encoding
from minidl.data.workers import Job, Message, Workers, available
from minidl.generation import folder, latents, output, passes
from minidl.generation.config import Generate, grid_too_small
from minidl.generation.model import Loaded, load
from minidl.training import environment, files, samples, saved_run
from minidl.training.display import Display
from minidl.training.errors import ConfigError, RunError
from minidl.training.outputs import cannot_write
from minidl.version import __version__

_DIGITS = 6  # of the number in a name, at least
_TOGETHER, _TOGETHER_BYTES = 64, 2**20  # pictures, and their pixels, that a worker gets at a time
_MANY, _EACH = 2**23, 1500  # bytes of pixels, and what a picture takes besides: for fewer, processes start too slowly


def generate(config: Generate) -> None:
    """Make the pictures. Raises ConfigError and DataError for what cannot be made, RunError for a model that cannot
    be read and a folder that cannot be written, WorkerError when a process that makes files is ended."""
    folder.check(config.out, config.overwrite)
    loaded = load(config.model, config.precision)
    _check_format(config, loaded)
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
    facts, entries, display = _facts(config, loaded), _entries(config, names), Display(config.quiet)
    try:
        with folder.replaced(config.out, config.overwrite, _manifest(config, loaded, facts, entries)) as staged:
            started = time.perf_counter()
            with display.counted("images") as progress:
                progress(0, len(z))
                if config.format == "npy":
                    _write_array(staged, _parts(config, loaded, z), loaded, len(z), progress)
                else:
                    _write_pictures(config, staged, _parts(config, loaded, z), loaded, facts, entries, progress)
            seconds = time.perf_counter() - started
    except OSError as error:
        raise RunError(cannot_write(config.out, error)) from None
    what = "1 image" if len(z) == 1 else f"{len(z):,} images"
    size = f"{loaded.size[0]}x{loaded.size[1]}{'' if loaded.channels == 1 else 'x' + str(loaded.channels)}"
    speed = f"{seconds:.1f} s, {len(z) / max(seconds, 1e-9):,.1f} images/s"
    display.note(f"{what} of {size} in {config.out} by model {loaded.name} ({loaded.sha256[:12]}): {speed}")


def _check_format(config: Generate, loaded: Loaded) -> None:
    """Raises ConfigError for pictures that the format does not hold, and for a Pillow that has it not."""
    from PIL import features

    (height, width), (rows, columns) = loaded.size, config.grid or (1, 1)
    side, longest = max(rows * (height + 1), columns * (width + 1)) + 1, encoding.LONGEST.get(config.format)
    if longest is not None and side > longest:
        what = f"--grid {rows}x{columns} of pictures" if config.grid else "a picture"
        raise ConfigError(
            f"{what} of {height}x{width} has a side of {side:,} pixels, and a {config.format} at most {longest:,}: "
            "give --format png" + (" or a smaller --grid" if config.grid else "")
        )
    if config.format == "webp" and not features.check("webp"):
        raise ConfigError("the Pillow that is installed has no WebP: install one that has, or give --format png")


def _parts(config: Generate, loaded: Loaded, z: np.ndarray) -> Iterator[np.ndarray]:
    """The generator's pictures [n, C, H, W], each of finite values; each part is overwritten by a later one."""
    done = 0
    for part in passes.images(loaded.generator, z, loaded.channels, loaded.size, config.batch_size):
        passes.check_finite(part, done)
        done += len(part)
        yield part


def _write_array(staged: Path, parts: Iterable[np.ndarray], loaded: Loaded, count: int, progress: Progress) -> None:
    shape, dtype = (count, loaded.channels, *loaded.size), np.dtype(loaded.dtype_name)
    with output.array_file(staged / "images.npy", shape, dtype) as write:
        done = 0
        for part in parts:
            write(part)
            done += len(part)
            progress(done, count)


def _write_pictures(
    config: Generate, staged: Path, parts: Iterable[np.ndarray], loaded: Loaded, facts: dict[str, Any],
    entries: list[dict[str, Any]], progress: Progress
) -> None:  # fmt: skip
    """Files of pictures, made by workers while the generator makes the next pictures; an archive is written here."""
    shape = *loaded.size, loaded.channels
    kind = "png" if config.format == "zip" else config.format
    together = max(1, min(_TOGETHER, _TOGETHER_BYTES // math.prod(shape)))
    shared = {"shape": shape, "kind": kind, "text": _texts(facts), "folder": str(staged)}
    sheet = None if config.grid is None else np.zeros((config.grid[0] * config.grid[1], *shape), np.uint8)

    def asked() -> Iterator[Message]:
        done = 0
        for part in parts:
            pictures = output.pixels(part)
            if sheet is not None:
                sheet[done : done + len(pictures)] = pictures
            for some in np.split(pictures, range(together, len(pictures), together)):
                names, texts = _own(entries[done : done + len(some)])
                yield Message({**shared, "names": names, "texts": texts}, [some])
                done += len(some)

    few = len(entries) * (_EACH + math.prod(shape)) < _MANY
    job: Job = encoding.write
    into: AbstractContextManager[output.Save | None] = nullcontext()
    if config.format == "zip":
        job, into = encoding.encode, output.into_archive(staged / "images.zip")
    written = 0
    with Workers(1 if few else config.workers or available()) as workers, into as save:
        for found in workers.map(job, asked()):
            if save is not None:
                save(found.values["names"], found.buffers)
            written += len(found.values["names"])
            progress(written, len(entries))
    files.flush_folder(staged)
    if sheet is not None and config.grid is not None:
        text = _texts({**facts, "seeds": _ranges(config, [entry.get("seed") for entry in entries])})
        output.write_picture(staged / f"grid.{kind}", samples.grid(sheet, config.grid[1]), text)


def _manifest(config: Generate, loaded: Loaded, facts: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of images.json."""
    whole = [{"file": f"images.{config.format}"}] if config.format in ("npy", "zip") else []
    manifest = {
        "format": folder.FORMAT,
        "version": folder.VERSION,
        **facts,
        "device": environment.device_name(),
        "shape": [loaded.channels, *loaded.size],
        "files": [*whole, *entries],
        "grid": None,
    }
    if config.grid is not None:
        manifest["grid"] = {"file": f"grid.{config.format}", "rows": config.grid[0], "columns": config.grid[1]}
    return manifest


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


def _entries(config: Generate, names: Sequence[Any]) -> list[dict[str, Any]]:
    """A record per picture: its file, or its name in an archive (none in an array), and its seed, or its place in a
    walk or a file."""
    kind = "seed" if config.latents is None else "latent"
    if config.interpolate is not None:
        kind = "step"
    if config.format == "npy":
        return [{kind: name} for name in names]
    place, suffix = ("member", "png") if config.format == "zip" else ("file", config.format)
    return [{place: f"{kind}-{name:0{_DIGITS}}.{suffix}", kind: name} for name in names]


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
    """The metadata that all pictures have."""
    texts = {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in facts.items()
        if name != "minidl"
    }
    return {"Software": f"minidl {__version__}", **texts}


def _own(entries: list[dict[str, Any]]) -> tuple[list[str], list[dict[str, str]]]:
    """The names of pictures, and the metadata that each has of its own."""
    place, kind = entries[0]
    return [entry[place] for entry in entries], [{kind: str(entry[kind])} for entry in entries]
