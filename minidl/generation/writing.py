"""The files of pictures: one each, an archive, an array or a grid, and images.json, which says what made them.

A picture is named after its seed alone, as seed-000003.png, or after its place in a walk or a file of latents: the same
picture has the same name whichever others are made with it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidl.common import read_files, write_files
from minidl.data import encoding
from minidl.data.workers import Job, Message, Workers, available
from minidl.generation import folder, output, sharing
from minidl.generation.config import Generate
from minidl.generation.model import Loaded
from minidl.runtime import launch
from minidl.training.process import environment
from minidl.training.run_folder import files
from minidl.version import __version__

Tell = Callable[[int], None]  # how many pictures are written

_DIGITS = 6  # of the number in a name, at least
_TOGETHER, _TOGETHER_BYTES = 64, 2**20  # pictures, and their pixels, that a worker gets at a time
_MANY, _EACH = 2**23, 1500  # bytes of pixels, and what a picture takes besides: for fewer, processes start too slowly


@dataclass(frozen=True)
class Files:
    """Those of a command: `facts` are what all pictures share, `names` the seed or the place of each, in order."""

    config: Generate
    loaded: Loaded
    facts: dict[str, Any]
    names: Sequence[int]

    @classmethod
    def of(cls, config: Generate, loaded: Loaded, names: Sequence[int]) -> Files:
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
            facts["latents_sha256"] = files.sha256(config.latents)
        return cls(config, loaded, facts, names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a picture."""
        return *self.loaded.size, self.loaded.channels

    @property
    def kind(self) -> str:
        """What a number names."""
        if self.config.latents is not None:
            return "latent"
        return "seed" if self.config.interpolate is None else "step"

    @property
    def suffix(self) -> str:
        """Of a picture's file, or of its name in an archive."""
        return "png" if self.config.format == "zip" else self.config.format

    def file(self, name: int) -> str:
        """The name of a picture's file."""
        return f"{self.kind}-{name:0{_DIGITS}}.{self.suffix}"

    def manifest(self) -> dict[str, Any]:
        """The content of images.json: a record per picture has its file, or its name in an archive (none in an
        array), and what it is named after."""
        config, kind = self.config, self.kind
        whole = [{"file": f"images.{config.format}"}] if config.format in ("npy", "zip") else []
        place = "member" if config.format == "zip" else "file"
        own = [{} if config.format == "npy" else {place: self.file(name)} for name in self.names]
        manifest = {
            "format": folder.FORMAT,
            "version": folder.VERSION,
            **self.facts,
            "device": environment.device_name(),
            "shape": [self.loaded.channels, *self.loaded.size],
            "files": [*whole, *({**each, kind: name} for each, name in zip(own, self.names, strict=True))],
            "grid": None,
        }
        if config.grid is not None:
            manifest["grid"] = {"file": f"grid.{config.format}", "rows": config.grid[0], "columns": config.grid[1]}
        return manifest

    def about(self) -> dict[str, Any]:
        """What determines the pictures and their files, as JSON: the same in all processes that make them."""
        host = {} if launch.INTERPRETED else {"processor", "blas", "threads", "libc"}
        described = environment.describe(torch.get_num_threads())
        return {
            **self.facts,
            "format": self.config.format,
            "grid": None if self.config.grid is None else list(self.config.grid),
            "pictures": len(self.names),
            "seeds": hashlib.sha256(np.asarray(self.names, np.int64).tobytes()).hexdigest(),
            **{name: described[name] for name in environment.DECIDING if name not in host},
        }

    def rows(self, staged: Path) -> sharing.Rows | None:
        """The file of all pictures that several processes write to: the array, or what a grid is made of."""
        count, values = len(self.names), math.prod(self.shape)
        if self.config.format != "npy":
            return None if self.config.grid is None else sharing.Rows(staged / "grid.rows", b"", values, count)
        head = output.array_header(*self._array())
        return sharing.Rows(staged / "images.npy", head, values * self._array()[1].itemsize, count)

    def _array(self) -> tuple[tuple[int, ...], np.dtype]:
        return (len(self.names), self.loaded.channels, *self.loaded.size), np.dtype(self.loaded.dtype_name)

    def write(self, staged: Path, parts: Iterable[np.ndarray], part: sharing.Part | None, tell: Tell) -> None:
        """Write all pictures, or those of a part."""
        rows, written = None if part is None else self.rows(staged), 0
        if self.config.format != "npy":
            self._write_pictures(staged, parts, part, rows, tell)
        elif part is None or rows is None:
            with output.array_file(staged / "images.npy", *self._array()) as write:
                for some in parts:
                    write(some)
                    written += len(some)
                    tell(written)
        else:
            for some in parts:
                at = part.mine[written : written + len(some)]
                part.made(at, rows.put(at, some))
                written += len(some)
                tell(part.done())

    def _write_pictures(
        self, staged: Path, parts: Iterable[np.ndarray], part: sharing.Part | None, rows: sharing.Rows | None,
        tell: Tell
    ) -> None:  # fmt: skip
        """Files are made by workers while the generator makes the next pictures. An archive and a grid are written
        here; those of several processes by `finish`."""
        config, shape = self.config, self.shape
        together = max(1, min(_TOGETHER, _TOGETHER_BYTES // math.prod(shape)))
        with write_files.open_folder(staged) as handle:
            place = {"folder": str(staged), "identity": write_files.identity(handle)}
        shared = {"shape": shape, "kind": self.suffix, "text": _texts(self.facts), **place}
        mine = np.arange(len(self.names)) if part is None else part.mine
        of_rows: list[str] = []
        sheet = None if config.grid is None or part else np.zeros((len(mine), *shape), np.uint8)

        def asked() -> Iterator[Message]:
            done = 0
            for made in parts:
                pictures, at = output.pixels(made), mine[done : done + len(made)]
                if sheet is not None:
                    sheet[at] = pictures
                of_rows.extend([""] * len(made) if rows is None else rows.put(at, pictures))
                for some in np.split(pictures, range(together, len(pictures), together)):
                    named = [self.names[i] for i in mine[done : done + len(some)].tolist()]
                    texts = [{self.kind: str(name)} for name in named]
                    yield Message({**shared, "names": [*map(self.file, named)], "texts": texts}, [some])
                    done += len(some)

        few = len(mine) * (_EACH + math.prod(shape)) < _MANY
        processors = max(1, available() // (1 if part is None else part.place.local_world))
        job: Job = encoding.write
        into: AbstractContextManager[output.Save | None] = nullcontext()
        if config.format == "zip" and part is None:
            job, into = encoding.encode, output.into_archive(staged / "images.zip")
        written = 0
        with Workers(1 if few else config.workers or processors) as encoders, into as save:
            for found in encoders.map(job, asked()):
                count = len(found.values["names"])
                if save is not None:
                    save(found.values["names"], found.buffers)
                if part is not None:
                    done = slice(written, written + count)
                    part.made(mine[done], [*map(sharing.joined, of_rows[done], found.values["sums"])])
                written += count
                tell(written if part is None else part.done())
        files.flush_folder(staged)
        if sheet is not None:
            self._write_grid(staged, sheet)

    def finish(self, staged: Path) -> None:
        """Write the files that are made of what all processes have made."""
        if self.config.format == "zip":
            with output.into_archive(staged / "images.zip") as save:
                for name in map(self.file, self.names):
                    save([name], [read_files.read_bytes(staged / name)])
        if self.config.grid is not None:
            with read_files.opened(staged / "grid.rows") as file:
                pixels = np.fromfile(file, np.uint8)
            self._write_grid(staged, pixels.reshape(-1, *self.shape))

    def _write_grid(self, staged: Path, pictures: np.ndarray) -> None:
        assert self.config.grid is not None
        seeds = sharing.ranges(self.names) if self.kind == "seed" else ""
        if self.config.interpolate is not None:
            seeds = " to ".join(map(str, self.config.interpolate))
        text = _texts({**self.facts, "seeds": seeds})
        output.write_picture(staged / f"grid.{self.suffix}", output.grid(pictures, *self.config.grid), text)


def _texts(facts: dict[str, Any]) -> dict[str, str]:
    """The metadata that all pictures have."""
    texts = {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in facts.items()
        if name != "minidl"
    }
    return {"Software": f"minidl {__version__}", **texts}
