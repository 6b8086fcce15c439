"""`minidl generate`: pictures from seeds, an interpolation or a file of latents, written to a folder (see `writing`) by
one process or several (see `sharing`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from minidl.common import timing, write_files
from minidl.data import encoding
from minidl.distributed import workers
from minidl.distributed.workers import Ranks
from minidl.errors import ConfigError, RunError
from minidl.generation import folder, latents, passes, sharing, writing
from minidl.generation.config import Generate, grid_too_small
from minidl.generation.model import Loaded, load
from minidl.training.process import out_of_memory
from minidl.training.process.display import Display
from minidl.training.run_folder.outputs import cannot_write

_MEASURED = 0.5  # seconds of pictures after which --devices auto chooses the number of processes


class _MoreProcesses(Exception):  # noqa: N818  (a choice, not an error)
    """Its argument is the number of processes that make the rest sooner than this one."""


def generate(config: Generate, most: int = 1) -> int:
    """Make the pictures, or this process's part of them, and return 1. With --devices auto, up to `most` processes are
    available: if several are faster for the rest, keep the finished pictures and return the number of processes.

    Raises ConfigError and DataError for impossible requests, RunError for a model that cannot be read or a folder that
    cannot be written, WorkerError if a process that encodes pictures ends.
    """
    ranks = workers.ranks() or sharing.ALONE
    first = ranks.rank == 0
    if first:
        folder.check(config.out, config.overwrite)
    loaded = load(config.model, config.precision)
    _check_format(config, loaded)
    if first and not config.quiet:
        loaded.show_notes()
    names, latents_of = _requested(config, loaded)
    pictures, count = writing.Files.of(config, loaded, names), len(names)
    display, started = Display(config.quiet or not first), time.perf_counter()
    try:
        if first and folder.finish(config.out, pictures.manifest()):
            display.note(f"{config.out}: the images of an interrupted command were moved to it")
            return 1
        with contextlib.ExitStack() as stack:
            part, staged = _part(pictures, ranks, most, stack)
            if part is not None and first and (finished := part.finished()):
                display.note(f"{finished:,} of {count:,} images already exist")
            images = _images(config, loaded, latents_of(np.arange(count) if part is None else part.numbers))
            if part is not None and most > 1:
                images = _measured(images, len(part.numbers), most, display)
            with display.counted("images") as progress:
                pictures.write(staged, images, part, lambda done: progress(done, count))
                if part is not None and first:
                    part.wait(lambda done: progress(done, count))
            if part is not None and first:
                pictures.finish(staged)
    except _MoreProcesses as choice:
        return int(choice.args[0])
    except OSError as error:
        if out_of_memory.read(error) is not None:
            raise
        raise RunError(cannot_write(config.out, error)) from None
    seconds = time.perf_counter() - started
    what = "1 image" if count == 1 else f"{count:,} images"
    size = f"{loaded.size[0]}x{loaded.size[1]}{'' if loaded.channels == 1 else 'x' + str(loaded.channels)}"
    speed = f"{seconds:.1f} s, {count / max(seconds, 1e-9):,.1f} images/s"
    display.note(f"{what} of {size} in {config.out} by model {loaded.name} ({loaded.sha256[:12]}): {speed}")
    return 1


def _requested(config: Generate, loaded: Loaded) -> tuple[Sequence[int], Callable[[np.ndarray], np.ndarray]]:
    """Return the seeds or numbers of the pictures, and a function from their indices to their latents."""
    if config.latents is not None:
        z = latents.read(config.latents, loaded.latent)
        if config.grid is not None and len(z) > config.grid[0] * config.grid[1]:
            grid_too_small(config.grid, len(z))
        return range(len(z)), lambda at: z[at]
    seeds = config.all_seeds()
    if config.interpolate is None:
        return seeds, lambda at: latents.from_seeds([seeds[i] for i in at.tolist()], loaded.latent, config.truncation)
    ends = latents.from_seeds(seeds, loaded.latent, config.truncation)
    rows = latents.slerp(ends[0], ends[1], config.total())
    return range(len(rows)), lambda at: rows[at]


def _part(
    pictures: writing.Files, ranks: Ranks, most: int, stack: contextlib.ExitStack
) -> tuple[sharing.Part | None, Path]:
    """Return this process's part, None if it makes all pictures from the start, and the folder of new pictures, which
    is valid while `stack` is open."""
    config, staged = pictures.config, folder.staged_in(pictures.config.out)
    if ranks.world == 1 and most == 1 and sharing.read(staged) is None:
        return None, stack.enter_context(folder.replaced(config.out, config.overwrite, pictures.manifest()))
    about = pictures.about()
    run, _store = sharing.run_of(ranks)
    names = [] if config.format == "npy" else [*map(pictures.file, pictures.names)]
    if ranks.rank > 0:
        part = sharing.join(staged, ranks, run, about)
        stack.enter_context(write_files.pin_folder(config.out))
    else:
        old = sharing.read(staged)
        resumed = old is not None and old.about == about
        stack.enter_context(folder.replaced(config.out, config.overwrite, pictures.manifest(), resumed))
        part = sharing.begin(staged, ranks, run, about, names, pictures.rows(staged))
    stack.callback(part.close)
    if names:
        part.clear(names)
    return part, staged


def _check_format(config: Generate, loaded: Loaded) -> None:
    """Raise ConfigError for pictures too large for the format, or a Pillow without the format."""
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
        raise ConfigError("the installed Pillow does not support WebP: install another Pillow, or give --format png")


def _images(config: Generate, loaded: Loaded, z: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the generator's images [n, C, H, W], all finite; a later array overwrites an earlier one."""
    done = 0
    for part in passes.images(loaded.generator, z, loaded.channels, loaded.size, config.batch_size):
        passes.check_finite(part, done)
        done += len(part)
        yield part


def _measured(parts: Iterator[np.ndarray], count: int, most: int, display: Display) -> Iterator[np.ndarray]:
    """Yield the parts, and raise _MoreProcesses once measured times show that more are faster for the rest."""
    done, waiting, begin, start = 0, 0.0, 0.0, 0.0
    requested = time.perf_counter()
    for part in parts:
        now = time.perf_counter()
        if done == 0:  # not measured, because it includes compiling
            start, begin = timing.age(), now
        else:
            waiting += now - requested
        yield part
        requested, done = time.perf_counter(), done + len(part)
        if waiting and requested - begin > _MEASURED:
            rest, each = count - done, (requested - begin) / done
            chosen = sharing.processes(rest, each, waiting / done, start, most)
            why = f"the rest takes one {rest * each:.1f} s, of which its GPU {rest * waiting / done:.1f} s"
            display.note(f"--devices auto: {chosen} of {most}: {why}, and others start in {start:.1f} s")
            if chosen > 1:
                raise _MoreProcesses(chosen)
            break
    else:
        display.note(f"--devices auto: 1 of {most}: all images are finished before other processes would have started")
    yield from parts
