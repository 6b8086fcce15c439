"""A stand-in for CUDA graphs on a CPU: what a step launches is listed, and run again at the same addresses.

Kernels and torch's operations of storage run again with the arguments that they had. Memory is never used twice, so
this shows what a step leaves to Python and reads on the host, and not what a graph does with memory.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidl import random
from minidl.compilation import capture, cuda_graph
from minidl.runtime import launch
from tests.launches import replace_run

ALLOCATION = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.done, self.paused, self.ran = [], False, True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if self.paused or name in ALLOCATION or func.is_view:
            return result
        in_place = func._schema.is_mutable
        self.done.append((func, args, kwargs, None if in_place else result))
        return result

    def launch(self, run):
        def recorded(kernel, grid, *args, **meta):
            self.paused = True
            try:
                run(kernel, grid, *args, **meta)
            finally:
                self.paused = False
            self.done.append((run, (kernel, grid, *args), meta, None))

        return recorded

    def replay(self):
        if self.ran:  # CUDA runs nothing while it records; here the recording was the first run
            self.ran = False
            return
        with torch.no_grad():
            for function, args, kwargs, result in self.done:
                again = function(*args, **kwargs)
                if result is not None:
                    result.copy_(again)


def record(call, stream, pool):
    recorder, run = Recorder(), launch.run
    with pytest.MonkeyPatch.context() as patched, cuda_graph.NoHostReads("cpu"):
        replace_run(patched, recorder.launch(run))
        with recorder:
            outputs = call()
    return recorder, outputs


@pytest.fixture
def graphs(monkeypatch):
    """On a CPU steps are recorded and replayed by the stand-in; on a GPU by CUDA."""
    if launch.INTERPRETED:
        monkeypatch.setattr(capture, "_has_graphs", lambda device: True)
        monkeypatch.setattr(capture, "shared_resources", lambda device: (None, None))
        monkeypatch.setattr(capture, "record_graph", record)


@pytest.fixture(autouse=True)
def same_random():
    """Leave random numbers as other tests expect them."""
    before = random.get_state()
    yield
    random.set_state(before)
