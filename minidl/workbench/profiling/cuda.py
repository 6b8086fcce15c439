"""Times of kernels on a GPU, from CUPTI through torch.profiler, which also sees those that a CUDA graph launches."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile


class CudaTrace:
    """Records what the GPU does from `start` to `stop`, which returns it in Chrome's format."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Raises RuntimeError where another profiler of torch's is running."""
        torch.cuda.synchronize()
        with warnings.catch_warnings(action="ignore"):
            self._profile = torch_profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()

    def stop(self) -> dict[str, Any]:
        """The trace; kernels are events with `cat` "kernel", `ts` and `dur` in microseconds."""
        torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
            self._profile.stop()
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace: dict[str, Any] = json.loads(path.read_text())
        self._profile = None
        return trace
