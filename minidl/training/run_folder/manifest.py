"""manifest.json: the SHA-256 of each file of a finished run, so that no edited or foreign file is used unnoticed.

It also has the run's identity, the checksum of its kind, settings and data, which the metadata of the model and every
checkpoint have, too: a model that was copied together with the manifest of its run is known as foreign.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.data.saved import Checked, validate
from minidl.errors import DamagedError, damaged, missing
from minidl.training.run_folder import files

if TYPE_CHECKING:
    import torch

FILE = "manifest.json"
FORMAT, VERSION = "minidl-manifest", 1
OF_RUN = "run"  # the entry of config.json, checkpoints and a model's metadata that is the run's identity
MODEL = "model.safetensors"


def identity(kind: str, config: Mapping[str, Any], data_sha256: str) -> str:
    """What tells a run from others: equal for runs of the same settings on the same data."""
    return files.json_checksum({"kind": kind, "config": config, "data_sha256": data_sha256})


@dataclass(frozen=True)
class Manifest(Checked):
    """The identity of a run, and the SHA-256 of its files by name."""

    run: str
    files: dict[str, str]

    def write(self, folder: Path) -> None:
        content = {"format": FORMAT, "version": VERSION, OF_RUN: self.run, "files": dict(sorted(self.files.items()))}
        files.write_json(folder / FILE, content, sealed=True)


def write(folder: Path, run: str, names: Iterable[str], contents: Mapping[str, bytes]) -> None:
    """Write the manifest of a run with the files of these names, and with files yet to be written: `contents`."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    Manifest(run, {**_sums(folder, names), **sums}).write(folder)


def add(folder: Path, names: Iterable[str]) -> None:
    """Put files that a later command made into the manifest of a run; without effect where it has none."""
    found = read(folder)
    if found is not None:
        replace(found, files={**found.files, **_sums(folder, names)}).write(folder)


def read(folder: Path) -> Manifest | None:
    """The manifest of a run, None where there is none. Raises DamagedError."""
    path = folder / FILE
    try:
        found = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if (found.pop("format", None), found.pop("version", None)) != (FORMAT, VERSION):
        raise damaged(path, f"not a {FORMAT} file of version {VERSION}")
    try:
        return validate(Manifest, found)
    except ValueError as error:
        raise damaged(path, error) from None


@dataclass(frozen=True)
class RunFiles:
    """The files of a finished run, each checked when it is read.

    `sums` are those of its manifest, None for a run of an earlier version, which has none; `documents` the checksums
    of the documents in config.json; `identity` see above.
    """

    folder: Path
    identity: str
    documents: Mapping[str, str]
    sums: Mapping[str, str] | None

    def text(self, name: str) -> str:
        """The text of a document. Raises DamagedError when it is missing or not what training wrote."""
        text = files.as_text(self.read(name), self.folder / name)
        if name in self.documents and self.documents[name] != files.text_checksum(text):
            raise damaged(self.folder / name, "its content does not match its checksum in config.json")
        return text

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of the model. Raises DamagedError when they are missing or not what training wrote."""
        tensors, about = files.as_tensors(self.read(MODEL), self.model)
        if about.get(OF_RUN, self.identity) != self.identity:
            raise damaged(self.model, "it is the model of another run")
        return tensors

    @property
    def model(self) -> Path:
        """The file of the model."""
        return self.folder / MODEL

    def read(self, name: str) -> bytes:
        """The content of a file. Raises DamagedError when it is missing or not what training wrote."""
        path = self.folder / name
        try:
            raw = files.read_bytes(path)
        except FileNotFoundError:
            raise missing(path) from None
        if not self.is_own(name, raw):
            raise changed(path)
        return raw

    def is_own(self, name: str, raw: bytes) -> bool:
        """Whether a file of this content is in the manifest, or the run has none."""
        return self.sums is None or self.sums.get(name) == hashlib.sha256(raw).hexdigest()


def changed(path: Path) -> DamagedError:
    """The error for a file that is another than its run's manifest says."""
    return damaged(path, f"it is not the file that training wrote: its SHA-256 is not that in {FILE}")


def _sums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: files.sha256(folder / name) for name in names}
