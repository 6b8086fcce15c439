"""A finished run's model on several GPUs: processes that have it answer parts of the inputs, in the same batches as one
process, and so with the same bits. What they are asked and answer goes over pipes (see `data.workers`)."""

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
from minidl.training.run_folder.saved_run import SavedRun, finished_run, saved_settings
from minidl.training.tasks import TASKS


class Spread:
    """`count` processes, each with a GPU of its own; for one, none is started."""

    def __init__(self, run: SavedRun, device: str, count: int) -> None:
        self.processes = Workers(count, [workers.only(gpu) for gpu in range(count)], "--devices")
        self._run = {"run": str(run.folder), "identity": run.identity, "device": device}

    def begin(self) -> None:
        """Start the processes, and let them read the model. Raises WorkerError."""
        self.processes.start()
        for _ in range(self.processes.count):
            self.processes.later(ready, Message(self._run))

    def outputs(self, features: Any, width: int) -> Iterator[np.ndarray]:
        """As `forward.saved_outputs`."""
        from minidl.training.loop.forward import batch_and_part

        count = int(features.shape[0])
        batch, whole = batch_and_part(features, width)
        ends = []  # of the pieces, by part
        for start in range(0, count, whole):
            stop = min(count, start + whole)
            batches = -(-(stop - start) // batch)
            each = -(-batches // self.processes.count) * batch
            ends.append([(first, min(stop, first + each)) for first in range(start, stop, each)])
        asked = (_packed(features, *piece, {**self._run, "width": width}) for pieces in ends for piece in pieces)
        answers = self.processes.map(answered, asked)
        for pieces in ends:
            found = [np.frombuffer(part, np.float32) for _ in pieces for part in next(answers).buffers]
            yield np.concatenate(found).reshape(-1, width)


def spread(run: SavedRun, devices: int | str, device: str) -> Spread:
    """The processes for --devices. Raises ConfigError for more than there are, and under torchrun."""
    ranks = workers.ranks()
    if ranks is not None and ranks.world > 1:
        raise ConfigError("this command starts its processes itself: give --devices, without torchrun")
    return Spread(run, device, processes(devices, device))


def ready(asked: Message) -> Message:
    """A process's job, after which it has the model."""
    _ = _predictor(**asked.values).model
    return Message({})


def answered(asked: Message) -> Message:
    """A process's job: the outputs of some inputs."""
    from minidl.training.loop.forward import saved_outputs

    predictor = _predictor(*(asked.values[name] for name in ("run", "identity", "device")))
    return Message({}, list(saved_outputs(predictor.model, _unpacked(asked), asked.values["width"])))


@functools.cache
def _predictor(run: str, identity: str, device: str) -> Any:
    """The run in this process."""
    prepare(device, "minidl.training.loop.forward")
    saved = finished_run(Path(run))
    if saved.identity != identity:
        raise DamagedError(f"{run} was replaced by another run while it was read; run the command again")
    return TASKS[saved.kind].predictor(saved_settings(saved), saved.files)


def _packed(features: Any, first: int, end: int, values: dict[str, Any]) -> Message:
    """Inputs `first` to `end`: scipy CSR, an array [N, F] or Pictures."""
    if isinstance(features, Pictures):
        arrays = [features.pixels[first:end]]
        values = {**values, "mean": features.mean, "std": features.std}
    elif isinstance(features, np.ndarray):
        arrays = [features[first:end]]
    else:
        some = features[first:end]
        arrays = [some.data, some.indices, some.indptr]
    arrays = [np.ascontiguousarray(array) for array in arrays]
    shape = [end - first, *features.shape[1:]]
    return Message({**values, "shape": shape, "types": [array.dtype.str for array in arrays]}, arrays)


def _unpacked(asked: Message) -> Any:
    shape = asked.values["shape"]
    pairs = zip(asked.buffers, asked.values["types"], strict=True)
    # Copied: what came over a pipe cannot be written to, and torch warns of that.
    arrays = [np.frombuffer(part, np.dtype(kind)).copy() for part, kind in pairs]
    if "mean" in asked.values:
        return Pictures(arrays[0].reshape(shape), tuple(asked.values["mean"]), tuple(asked.values["std"]))
    if len(arrays) == 1:
        return arrays[0].reshape(shape)
    from scipy.sparse import csr_matrix

    return csr_matrix(tuple(arrays), shape=shape)
