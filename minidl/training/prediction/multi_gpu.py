"""Apply a finished run's model on several GPUs, one process for each.

The processes use the same batches as one process, so the results have the same bits. Inputs and outputs pass through
pipes, see `data.workers`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from minidl.data.records import Pictures
from minidl.data.workers import Message, Workers
from minidl.distributed import workers
from minidl.errors import ConfigError, DamagedError
from minidl.training.process.device import prepare, processes
from minidl.training.run_folder.folder import RunFolder
from minidl.training.run_folder.saved_run import SavedRun


class Spread:
    """`count` processes with a GPU each; a count of 1 starts none."""

    def __init__(self, run: SavedRun, device: str, count: int) -> None:
        self.processes = Workers(count, [workers.only(gpu) for gpu in range(count)], "--devices")
        self._run = {"run": str(run.folder), "identity": run.identity, "device": device}

    def begin(self) -> None:
        """Start the processes; each loads the model. Raises WorkerError."""
        self.processes.start()
        for _ in range(self.processes.count):
            self.processes.submit(load_model, Message(self._run))

    def outputs(self, features: Any, width: int) -> Iterator[np.ndarray]:
        """Yield the outputs as `forward.saved_outputs` does."""
        from minidl.training.loop.forward import batch_and_part

        count = int(features.shape[0])
        batch, part = batch_and_part(features, width)
        parts = []  # the slices of each part's inputs, one for each process
        for start in range(0, count, part):
            stop = min(count, start + part)
            batches = -(-(stop - start) // batch)
            size = -(-batches // self.processes.count) * batch
            parts.append([(first, min(stop, first + size)) for first in range(start, stop, size)])
        values = {**self._run, "width": width}
        messages = (_packed(features, *ends, values) for slices in parts for ends in slices)
        answers = self.processes.map(outputs_of_message, messages)
        for slices in parts:
            arrays = [np.frombuffer(raw, np.float32) for _ in slices for raw in next(answers).buffers]
            yield np.concatenate(arrays).reshape(-1, width)


def spread(run: SavedRun, devices: int | str, device: str) -> Spread:
    """Return the processes for --devices. Raises ConfigError for more than exist, and under torchrun."""
    ranks = workers.ranks()
    if ranks is not None and ranks.world > 1:
        raise ConfigError("this command starts its processes itself: give --devices, without torchrun")
    return Spread(run, device, processes(devices, device))


def load_model(message: Message) -> Message:
    """Load the model, as a process's first job."""
    _ = _predictor(**message.values).model
    return Message({})


def outputs_of_message(message: Message) -> Message:
    """Return the outputs for the inputs of a message, as a process's job."""
    from minidl.training.loop.forward import saved_outputs

    predictor = _predictor(*(message.values[name] for name in ("run", "identity", "device")))
    return Message({}, list(saved_outputs(predictor.model, _unpacked(message), message.values["width"])))


@functools.cache
def _predictor(run: str, identity: str, device: str) -> Any:
    """Return the predictor of this process."""
    prepare(device, "minidl.training.loop.forward")
    saved = RunFolder(Path(run)).read_finished()
    if saved.identity != identity:
        raise DamagedError(f"{run} was replaced by another run while it was read; run the command again")
    return saved.predictor()


def _packed(features: Any, first: int, end: int, values: dict[str, Any]) -> Message:
    """Return a message with inputs `first` to `end` of scipy CSR, an array [N, F] or Pictures."""
    if isinstance(features, Pictures):
        arrays = [features.pixels[first:end]]
        values = {**values, "mean": features.mean, "std": features.std}
    elif isinstance(features, np.ndarray):
        arrays = [features[first:end]]
    else:
        rows = features[first:end]
        arrays = [rows.data, rows.indices, rows.indptr]
    arrays = [np.ascontiguousarray(array) for array in arrays]
    shape = [end - first, *features.shape[1:]]
    return Message({**values, "shape": shape, "types": [array.dtype.str for array in arrays]}, arrays)


def _unpacked(message: Message) -> Any:
    shape = message.values["shape"]
    pairs = zip(message.buffers, message.values["types"], strict=True)
    # Copies, as the buffers are read-only, of which torch warns.
    arrays = [np.frombuffer(raw, np.dtype(kind)).copy() for raw, kind in pairs]
    if "mean" in message.values:
        return Pictures(arrays[0].reshape(shape), tuple(message.values["mean"]), tuple(message.values["std"]))
    if len(arrays) == 1:
        return arrays[0].reshape(shape)
    from scipy.sparse import csr_matrix

    return csr_matrix(tuple(arrays), shape=shape)
