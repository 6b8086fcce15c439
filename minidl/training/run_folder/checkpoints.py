"""The state of an unfinished run: weights, optimiser and generator state, position and history.

    checkpoints/step-000123.safetensors   weights and optimiser tensors after step 123
    checkpoints/last.json                 the last state: the name of its tensor file and everything else
    checkpoints/best.json                 the same for the best epoch so far

A JSON file is renamed into place once its tensor file is flushed to disk; tensor files that neither JSON file names are
deleted after that. So whenever the machine stops, `last.json` names a complete state. For the best state so far,
`best.json` is written first; if the machine stops before `last.json` is written, it is copied from `best.json`.

A state is copied when it is saved, and a thread writes it while training continues, as flushing takes longer than a
short epoch. If states are saved faster than they are written, those in between are skipped.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minidl.common import write_files
from minidl.common.console import cut
from minidl.errors import DamagedError, damaged
from minidl.training.process import out_of_memory
from minidl.training.run_folder import files, provenance

if TYPE_CHECKING:
    import torch

FORMAT, VERSION = "minidl-checkpoint", 1
FOLDER = "checkpoints"  # in the folder of the run
_TENSOR = "tensor:"  # before the name of a tensor in place of the tensor
JSON_FILES = ("last.json", "best.json")
_NAME = re.compile(r"step-\d+\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A state read from `path` and `tensors`: the arguments `weights`, `optimizer` and `state` of `save`."""

    path: Path
    tensors: Path
    weights: dict[str, torch.Tensor]
    optimizer: Any
    state: dict[str, Any]


class _State(NamedTuple):
    """A state to be written: tensors on the CPU, and the JSON content without the checksum."""

    tensors: dict[str, torch.Tensor]
    content: dict[str, Any]
    is_best: bool


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer_name = f"writer of {folder}"
        self._lock = threading.Lock()
        # At most two: the newest, after the best if that is older.
        self._waiting: list[_State] = []
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self, step: int, weights: Mapping[str, torch.Tensor], optimizer: Any, state: Mapping[str, Any], best: bool
    ) -> None:
        """Start writing the state after `step` steps as the last one, and if `best` as the best one; see `wait`.

        `optimizer` is a state_dict: nested dicts, lists, tensors and JSON values. Raises OSError if an earlier state
        could not be written; the checkpoint before that one is intact.
        """
        tensors = {f"weights.{name}": tensor for name, tensor in weights.items()}
        plain = _take_tensors(optimizer, "optimizer", tensors)
        with out_of_memory.used_for("a checkpoint", "a smaller model"):
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        name = f"step-{step:06d}.safetensors"
        content = {"format": FORMAT, "version": VERSION, "tensors": name, "sha256": "", **state, "optimizer": plain}
        with self._lock:
            self._raise_failure()
            older = [] if best else [state for state in self._waiting if state.is_best]
            self._waiting = [*older, _State(copies, content, best)]
            has_writer = self._writer is not None or self._start_writer()
        if not has_writer:
            self._write_all()

    def wait(self) -> None:
        """Wait until all saved states are flushed to disk. Raises OSError if one could not be written."""
        if (writer := self._writer) is not None:
            writer.join()
        with self._lock:
            self._raise_failure()

    def last(self) -> Checkpoint | None:
        """Return the last state, or None if there is none. Raises DamagedError.

        If a process stopped between writing the two files, last.json becomes a copy of best.json. Raises OSError if it
        cannot be written.
        """
        self.wait()
        last, best = (-1 if content is None else _step(content) for content in map(self._content, JSON_FILES))
        if best > last:
            self._read("best.json")  # raises if it is incomplete, before the other is replaced
            files.write_bytes(self.folder / "last.json", files.read_bytes(self.folder / "best.json"))
        return self._read("last.json")

    def best(self) -> Checkpoint | None:
        """Return the best state, or None if there is none. Raises DamagedError."""
        self.wait()
        return self._read("best.json")

    @property
    def exist(self) -> bool:
        """Whether there is a last state."""
        return (self.folder / "last.json").exists()

    @property
    def is_writing(self) -> bool:
        """Whether a thread of this process writes a state there: Ctrl-C during `wait` does not stop the writing."""
        return any(thread.name == self._writer_name for thread in threading.enumerate())

    def drop_unnamed(self) -> None:
        """Delete the tensor files that neither JSON file names. Raises DamagedError if a JSON file cannot be read."""
        named = set()
        for name in JSON_FILES:
            with contextlib.suppress(FileNotFoundError):
                named.add(files.read_json(self.folder / name).get("tensors"))
        for path in self.folder.glob("step-*.safetensors"):
            if _NAME.fullmatch(path.name) and path.name not in named and provenance.is_of_run(path):
                write_files.remove(path)

    def _start_writer(self) -> bool:
        """Start the thread; return False if the system cannot start one, so that the caller writes the state."""
        writer = threading.Thread(target=self._write_all, name=self._writer_name)
        try:
            writer.start()
        except RuntimeError:
            return False
        # Not before: after a Ctrl-C in between, `wait` would wait for a thread that does not run.
        self._writer = writer
        return True

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_all(self) -> None:
        """Write the waiting states."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._writer = None
                    return
                state = self._waiting.pop(0)
            try:
                self._write(state)
            except BaseException as failure:  # noqa: BLE001 (raised in the thread that trains)
                with self._lock:
                    self._failure, self._writer = failure, None
                    self._waiting.clear()
                return

    def _write(self, state: _State) -> None:
        files.make_folder(self.folder)
        with out_of_memory.used_for("a checkpoint", "a smaller model"):
            checksum = files.write_tensors(self.folder / state.content["tensors"], state.tensors)
        for name in ("best.json", "last.json") if state.is_best else ("last.json",):
            files.write_json(self.folder / name, {**state.content, "sha256": checksum}, sealed=True)
        self.drop_unnamed()

    def _content(self, name: str) -> dict[str, Any] | None:
        """Return the content of a JSON file, None if it is missing. Raises DamagedError."""
        path = self.folder / name
        try:
            content = files.read_json(path)
        except FileNotFoundError:
            return None
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise DamagedError(f"{path} is not a checkpoint of version {VERSION}; train again with --overwrite")
        tensors = content.get("tensors")
        if not isinstance(tensors, str) or not _NAME.fullmatch(tensors):
            raise DamagedError(
                f"{path} names {cut(repr(tensors), 60)} as its tensor file; train again with --overwrite"
            )
        return content

    def _read(self, name: str) -> Checkpoint | None:
        content = self._content(name)
        if content is None:
            return None
        path, file = self.folder / name, self.folder / content["tensors"]
        try:
            tensors = files.read_tensors(file, str(content["sha256"]))
            weights = {
                key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")
            }
            optimizer = _put_tensors(content["optimizer"], tensors)
        except FileNotFoundError:
            raise DamagedError(f"{path} names {file}, which is missing; train again with --overwrite") from None
        except KeyError as error:
            raise damaged(path, f"{error} is missing") from None
        if not isinstance(optimizer, dict):
            raise damaged(path, f"optimizer is {cut(repr(content['optimizer']), 60)}, expected its state")
        return Checkpoint(path, file, weights, optimizer, content)


def is_own(name: str) -> bool:
    """Return whether `save` writes files of this name."""
    return name in JSON_FILES or _NAME.fullmatch(name) is not None


def _step(content: dict[str, Any]) -> int:
    return int(content["tensors"].removeprefix("step-").removesuffix(".safetensors"))


def _take_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` with each tensor moved to `tensors` and replaced by its name there."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return _TENSOR + name
    if isinstance(value, Mapping):
        return {str(key): _take_tensors(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_tensors(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    return value


def _put_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `_take_tensors`; keys become strings and tuples lists."""
    if isinstance(value, str) and value.startswith(_TENSOR):
        return tensors[value.removeprefix(_TENSOR)]
    if isinstance(value, dict):
        return {key: _put_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_put_tensors(item, tensors) for item in value]
    return value
