"""Record the launches of a call as a CUDA graph, and refuse operations that a graph cannot have."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidl.common import locks


def shared_resources(device: torch.device) -> tuple[Any, Any]:
    """Return what all recordings of a step share: a stream, and a memory pool for intermediate results."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


_capturing = locks.lock()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A context for a capture, in one thread at a time: garbage collection could free a graph or an event, which CUDA
    forbids during a capture."""
    with _capturing:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def record_graph(call: Callable[[], Any], stream: Any, pool: Any) -> tuple[Any, Any]:
    """Return a CUDA graph of the launches of `call`, and its result.

    Raises RuntimeError if `call` reads a value on the host.
    """
    graph = torch.cuda.CUDAGraph()
    with _without_garbage_collection():
        torch.cuda.synchronize(stream.device)
        # Return the memory of earlier calls, so that the graph's pool can use it.
        torch.cuda.empty_cache()
        with torch.cuda.stream(stream):
            # Other threads may allocate memory during the capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with NoHostReads("cuda"):
                    outputs = call()
            except BaseException as error:
                _abandon(graph, stream, pool)
                if isinstance(error, torch.AcceleratorError) or "stream is capturing" in str(error):
                    raise RuntimeError(
                        f"the step waits for the device while it is recorded ({error}): {_WHY}"
                    ) from error
                raise
            graph.capture_end()
    return graph, outputs


def _abandon(graph: Any, stream: Any, pool: Any) -> None:
    """End a failed recording."""
    try:
        graph.capture_end()
    except RuntimeError:
        # CUDA has already ended the capture, but torch's allocator would keep allocating from the graph's pool.
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with contextlib.suppress(RuntimeError):
                end(stream.device.index, pool)


_WHY = "a graph runs without the host, so return the tensor and read it after the call"
READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"}
_COPIES = {"aten::copy_", "aten::_to_copy"}


class NoHostReads(TorchDispatchMode):
    """A context that raises when a tensor on this type of device is read on the host or copied from pageable memory.

    CUDA also refuses both, but its error does not name the cause.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch never compiles steps, and True would make it import its compiler, which takes 2.6 s."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in READS and self._is_on_device(args[0]):
            raise RuntimeError(f"the step reads a value on the host while it is recorded ({func}): {_WHY}")
        if name in _COPIES:
            to, source = (args[0].device, args[1]) if name == "aten::copy_" else (kwargs.get("device"), args[0])
            to = source.device if to is None else to
            if self._is_on_device(source) and to.type != self._device_type:
                raise RuntimeError(f"the step copies a tensor to the host while it is recorded ({func}): {_WHY}")
            if to.type == self._device_type and not self._is_on_device(source) and not source.is_pinned():
                raise RuntimeError(
                    f"the step copies a tensor from the host to the device while it is recorded ({func}): the "
                    "graph would copy the same memory at every call; create it before, or pass it as an input"
                )
        return func(*args, **kwargs)

    def _is_on_device(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.device.type == self._device_type
