"""`minidl generate`: from seeds, a walk or a file of latents to pictures in a folder (see `writing`), by one process or
by several (see `sharing`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from minidl.common import timing, write_files
from minidl.data import encoding
from minidl.distributed import workers
from minidl.distributed.workers import Place
from minidl.errors import ConfigError, RunError
from minidl.generation import folder, latents, passes, sharing, writing
from minidl.generation.config import Generate, grid_too_small
from minidl.generation.model import Loaded, load
from minidl.training.process import out_of_memory
from minidl.training.process.display import Display
from minidl.training.run_folder.outputs import cannot_write

_MEASURED = 0.5  # seconds of making pictures after which --devices auto chooses


class _Spread(Exception):  # noqa: N818  (a choice, not an error)
    """So many processes make the rest sooner than this one."""


def generate(config: Generate, most: int = 1) -> int:
    """Make the pictures, or this process's part of them. For --devices auto, `most` processes can be had: when more
    than one pay for the rest, what is made stays, and their number is returned; else 1.

    Raises ConfigError and DataError for what cannot be made, RunError for a model that cannot be read and a folder that
    cannot be written, WorkerError when a process that makes files is ended.
    """
    place = workers.place() or sharing.ALONE
    first = place.rank == 0
    if first:
        folder.check(config.out, config.overwrite)
    loaded = load(config.model, config.precision)
    _check_format(config, loaded)
    if first and not config.quiet:
        loaded.show_notes()
    names, z_of = _asked(config, loaded)
    wanted, count = writing.Files.of(config, loaded, names), len(names)
    display, started = Display(config.quiet or not first), time.perf_counter()
    try:
        if first and folder.finish(config.out, wanted.manifest()):
            display.note(f"{config.out}: the images of an interrupted command were moved into place")
            return 1
        with contextlib.ExitStack() as block:
            part, staged = _part(wanted, place, most, block)
            if part is not None and first and (there := part.done()):
                display.note(f"{there:,} of {count:,} images already exist")
            made = _parts(config, loaded, z_of(np.arange(count) if part is None else part.mine))
            if part is not None and most > 1:
                made = _paced(made, len(part.mine), most, display)
            with display.counted("images") as progress:
                wanted.write(staged, made, part, lambda done: progress(done, count))
                if part is not None and first:
                    part.wait(lambda done: progress(done, count))
            if part is not None and first:
                wanted.finish(staged)
    except _Spread as choice:
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


def _asked(config: Generate, loaded: Loaded) -> tuple[Sequence[int], Callable[[np.ndarray], np.ndarray]]:
    """The seed, or the place, of each picture, and what makes the latents of those of some numbers."""
    if config.latents is not None:
        z = latents.read(config.latents, loaded.latent)
        if config.grid is not None and len(z) > config.grid[0] * config.grid[1]:
            grid_too_small(config.grid, len(z))
        return range(len(z)), lambda at: z[at]
    seeds = config.all_seeds()
    if config.interpolate is None:
        return seeds, lambda at: latents.from_seeds([seeds[i] for i in at.tolist()], loaded.latent, config.truncation)
    ends = latents.from_seeds(seeds, loaded.latent, config.truncation)
    walk = latents.walk(ends[0], ends[1], config.total())
    return range(len(walk)), lambda at: walk[at]


def _part(
    wanted: writing.Files, place: Place, most: int, block: contextlib.ExitStack
) -> tuple[sharing.Part | None, Path]:
    """This process's part, None for all of what nobody has begun, and the folder of new pictures, until the block
    ends."""
    config, staged = wanted.config, folder.staged_in(wanted.config.out)
    if place.world == 1 and most == 1 and sharing.read(staged) is None:
        return None, block.enter_context(folder.replaced(config.out, config.overwrite, wanted.manifest()))
    about = wanted.about()
    run, _met = sharing.run_of(place)
    names = [] if config.format == "npy" else [*map(wanted.file, wanted.names)]
    if place.rank > 0:
        part = sharing.join(staged, place, run, about)
        block.enter_context(write_files.pin_folder(config.out))
    else:
        old = sharing.read(staged)
        kept = old is not None and old.about == about
        block.enter_context(folder.replaced(config.out, config.overwrite, wanted.manifest(), kept))
        part = sharing.begin(staged, place, run, about, names, wanted.rows(staged))
    block.callback(part.close)
    if names:
        part.clear(names)
    return part, staged


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


def _paced(parts: Iterator[np.ndarray], count: int, most: int, display: Display) -> Iterator[np.ndarray]:
    """The parts; raises _Spread once it has been measured that more processes pay for the rest of `count`."""
    given, waited, began, start = 0, 0.0, 0.0, 0.0
    asked = time.perf_counter()
    for part in parts:
        now = time.perf_counter()
        if given == 0:  # it is not measured: it takes compiling with it
            start, began = timing.age(), now
        else:
            waited += now - asked
        yield part
        asked, given = time.perf_counter(), given + len(part)
        if waited and asked - began > _MEASURED:
            rest, each = count - given, (asked - began) / given
            chosen = sharing.processes(rest, each, waited / given, start, most)
            why = f"the rest takes one {rest * each:.1f} s, of which its GPU {rest * waited / given:.1f} s"
            display.note(f"--devices auto: {chosen} of {most}: {why}, and others start in {start:.1f} s")
            if chosen > 1:
                raise _Spread(chosen)
            break
    else:
        display.note(f"--devices auto: 1 of {most}: all are made before others would have begun")
    yield from parts
