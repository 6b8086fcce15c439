"""manifest.json: the SHA-256 of each file of a finished run, so that no edited or foreign file is used unnoticed.

It also has the run's identity, the checksum of its kind, settings and data, which is also in the metadata of the model
and in every checkpoint: a model that was copied together with the manifest of its run is known as foreign.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.data.saved import Checked, validate
from minidl.errors import DamagedError, damaged, missing
from minidl.training.run_folder import files

if TYPE_CHECKING:
    import torch

CONFIG, MANIFEST, MODEL, REPORT = "config.json", "manifest.json", "model.safetensors", "report.json"
OF_RUN = "run"  # the key of the run's identity in config.json, checkpoints and the metadata of a model
_FORMAT = {"format": "minidl-manifest", "version": 1}


def run_identity(kind: str, config: Mapping[str, Any], data_sha256: str) -> str:
    """Return the identity of a run: equal for runs of the same settings on the same data."""
    return files.json_checksum({"kind": kind, "config": config, "data_sha256": data_sha256})


@dataclass(frozen=True)
class Manifest(Checked):
    """The identity of a run, and the SHA-256 of its files by name."""

    run: str
    files: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write the manifest of the run in a folder."""
        content = {**_FORMAT, OF_RUN: self.run, "files": dict(sorted(self.files.items()))}
        files.write_json(folder / MANIFEST, content, sealed=True)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of the run in a folder, None if there is none. Raises DamagedError."""
        path = folder / MANIFEST
        try:
            content = files.read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if {name: content.pop(name, None) for name in _FORMAT} != _FORMAT:
            raise damaged(path, "not a minidl-manifest file of version 1")
        try:
            return validate(cls, content)
        except ValueError as error:
            raise damaged(path, error) from None


@dataclass(frozen=True)
class RunFiles:
    """The files of a finished run, each checked when it is read.

    `documents` are the checksums of the documents in config.json (older runs have none), `checksums` those of all
    files in the manifest, None for a run of an earlier version, which has no manifest.
    """

    folder: Path
    identity: str
    documents: Mapping[str, str]
    checksums: Mapping[str, str] | None

    def text(self, name: str) -> str:
        """Return the text of a document. Raises DamagedError if it is missing or not the one that training wrote."""
        text = files.as_text(self.read(name), self.folder / name)
        if name in self.documents and self.documents[name] != files.text_checksum(text):
            raise damaged(self.folder / name, "its content does not match its checksum in config.json")
        return text

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model. Raises DamagedError if they are missing or not those of the run."""
        tensors, about = files.as_tensors(self.read(MODEL), self.model)
        if about.get(OF_RUN, self.identity) != self.identity:
            raise damaged(self.model, "it is the model of another run")
        return tensors

    @property
    def model(self) -> Path:
        """The file of the model."""
        return self.folder / MODEL

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises DamagedError if it is missing or not the one that training wrote."""
        path = self.folder / name
        try:
            content = files.read_bytes(path)
        except FileNotFoundError:
            raise missing(path) from None
        if not self.is_own(name, content):
            raise changed(path)
        return content

    def is_own(self, name: str, content: bytes) -> bool:
        """Return whether a file of this content is in the manifest, or the run has none."""
        return self.checksums is None or self.checksums.get(name) == hashlib.sha256(content).hexdigest()


def changed(path: Path) -> DamagedError:
    """Return the error for a file that differs from the one in the manifest."""
    return damaged(path, f"it is not the file that training wrote: its SHA-256 is not that in {MANIFEST}")
