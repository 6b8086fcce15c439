"""The files of pictures: one each, an archive, an array or a grid, and images.json, which describes them.

A picture is named after its seed, such as seed-000003.png, or after its number in an interpolation or a file of
latents: so its name does not depend on the other pictures of the command.
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

Report = Callable[[int], None]  # gets the number of written pictures

_DIGITS = 6  # minimum, of the number in a name
_JOB_PICTURES, _JOB_BYTES = 64, 2**20  # pictures that a worker encodes at a time, and their pixels
# Bytes of pixels that are worth starting processes for; a picture counts as 1500 more.
_MANY, _PER_PICTURE = 2**23, 1500


@dataclass(frozen=True)
class Files:
    """The files of a command: `facts` describe all pictures, `names` are their seeds or numbers, in order."""

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
        """The shape of a picture, (H, W, C)."""
        return *self.loaded.size, self.loaded.channels

    @property
    def kind(self) -> str:
        """The kind of number that names a picture."""
        if self.config.latents is not None:
            return "latent"
        return "seed" if self.config.interpolate is None else "step"

    @property
    def suffix(self) -> str:
        """The suffix of a picture's file, or of its name in an archive."""
        return "png" if self.config.format == "zip" else self.config.format

    def file(self, name: int) -> str:
        """Return the name of a picture's file."""
        return f"{self.kind}-{name:0{_DIGITS}}.{self.suffix}"

    def manifest(self) -> dict[str, Any]:
        """Return the content of images.json: an entry per picture has its file, or its name in an archive (none in an
        array), and its seed or number."""
        config, kind = self.config, self.kind
        common = [{"file": f"images.{config.format}"}] if config.format in ("npy", "zip") else []
        key = "member" if config.format == "zip" else "file"
        entries = [{} if config.format == "npy" else {key: self.file(name)} for name in self.names]
        manifest = {
            "format": folder.FORMAT,
            "version": folder.VERSION,
            **self.facts,
            "device": environment.device_name(),
            "shape": [self.loaded.channels, *self.loaded.size],
            "files": [*common, *({**entry, kind: name} for entry, name in zip(entries, self.names, strict=True))],
            "grid": None,
        }
        if config.grid is not None:
            manifest["grid"] = {"file": f"grid.{config.format}", "rows": config.grid[0], "columns": config.grid[1]}
        return manifest

    def about(self) -> dict[str, Any]:
        """Return the values that determine the pictures and files, as JSON: they must be the same in all processes."""
        host = {} if launch.ON_CPU else {"processor", "blas", "threads", "libc"}
        described = environment.describe(torch.get_num_threads())
        return {
            **self.facts,
            "format": self.config.format,
            "grid": None if self.config.grid is None else list(self.config.grid),
            "pictures": len(self.names),
            "seeds": hashlib.sha256(np.asarray(self.names, np.int64).tobytes()).hexdigest(),
            **{name: described[name] for name in environment.DECIDING if name not in host},
        }

    def rows(self, staged: Path) -> output.RowFile | None:
        """Return the file of all pictures that several processes write to: the array, or the pictures of a grid."""
        count, values = len(self.names), math.prod(self.shape)
        if self.config.format != "npy":
            return None if self.config.grid is None else output.RowFile(staged / "grid.rows", b"", values, count)
        header = output.array_header(*self._array())
        return output.RowFile(staged / "images.npy", header, values * self._array()[1].itemsize, count)

    def _array(self) -> tuple[tuple[int, ...], np.dtype]:
        return (len(self.names), self.loaded.channels, *self.loaded.size), np.dtype(self.loaded.dtype_name)

    def write(self, staged: Path, parts: Iterable[np.ndarray], part: sharing.Part | None, report: Report) -> None:
        """Write all pictures, or the pictures of a part."""
        rows, written = None if part is None else self.rows(staged), 0
        if self.config.format != "npy":
            self._write_pictures(staged, parts, part, rows, report)
        elif part is None or rows is None:
            with output.array_file(staged / "images.npy", *self._array()) as write:
                for images in parts:
                    write(images)
                    written += len(images)
                    report(written)
        else:
            for images in parts:
                numbers = part.numbers[written : written + len(images)]
                part.log(numbers, rows.write(numbers, images))
                written += len(images)
                report(part.finished())

    def _write_pictures(
        self, staged: Path, parts: Iterable[np.ndarray], part: sharing.Part | None, rows: output.RowFile | None,
        report: Report
    ) -> None:  # fmt: skip
        """Encode pictures in workers while the generator makes the next ones. Write an archive or a grid, unless other
        processes make pictures too: then `finish` writes it."""
        config, shape = self.config, self.shape
        per_job = max(1, min(_JOB_PICTURES, _JOB_BYTES // math.prod(shape)))
        with write_files.open_folder(staged) as handle:
            folder_values = {"folder": str(staged), "identity": write_files.identity(handle)}
        shared = {"shape": shape, "kind": self.suffix, "text": _texts(self.facts), **folder_values}
        numbers = np.arange(len(self.names)) if part is None else part.numbers
        row_checksums: list[str] = []
        sheet = None if config.grid is None or part else np.zeros((len(numbers), *shape), np.uint8)

        def jobs() -> Iterator[Message]:
            start = 0
            for images in parts:
                pictures, at = output.pixels(images), numbers[start : start + len(images)]
                if sheet is not None:
                    sheet[at] = pictures
                row_checksums.extend([""] * len(images) if rows is None else rows.write(at, pictures))
                for batch in np.split(pictures, range(per_job, len(pictures), per_job)):
                    names = [self.names[i] for i in numbers[start : start + len(batch)].tolist()]
                    texts = [{self.kind: str(name)} for name in names]
                    yield Message({**shared, "names": [*map(self.file, names)], "texts": texts}, [batch])
                    start += len(batch)

        few = len(numbers) * (_PER_PICTURE + math.prod(shape)) < _MANY
        processors = max(1, available() // (1 if part is None else part.ranks.local_world))
        job: Job = encoding.write
        into: AbstractContextManager[output.Save | None] = nullcontext()
        if config.format == "zip" and part is None:
            job, into = encoding.encode, output.into_archive(staged / "images.zip")
        written = 0
        with Workers(1 if few else config.workers or processors) as encoders, into as save:
            for result in encoders.map(job, jobs()):
                count = len(result.values["names"])
                if save is not None:
                    save(result.values["names"], result.buffers)
                if part is not None:
                    batch = slice(written, written + count)
                    checksums = map(sharing.joined, row_checksums[batch], result.values["sums"])
                    part.log(numbers[batch], [*checksums])
                written += count
                report(written if part is None else part.finished())
        files.flush_folder(staged)
        if sheet is not None:
            self._write_grid(staged, sheet)

    def finish(self, staged: Path) -> None:
        """Write the archive or the grid from the pictures of all processes."""
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
    """Return the metadata that all pictures have."""
    texts = {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in facts.items()
        if name != "minidl"
    }
    return {"Software": f"minidl {__version__}", **texts}
