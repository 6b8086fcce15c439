"""The host's numbers on the device, in and outside of CUDA graphs."""

from array import array
from types import SimpleNamespace

import pytest
import torch

from minidl.kernels.update import device_list
from minidl.kernels.update.device_list import RELAXED, DeviceList


def test_numbers_are_on_the_device(device):
    numbers = DeviceList(torch.device(device))
    for count in (3, 1, 40):
        held = numbers.hold(array("q", range(count)))
        assert held.device.type == torch.device(device).type
        assert held[:count].tolist() == list(range(count))


@pytest.mark.gpu
def test_numbers_of_a_graph_are_there_at_once_and_stay(device):
    """The graph does not copy them, and what ran before them in it does not write over them."""
    numbers = DeviceList(torch.device(device))
    total = torch.zeros(3, dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(8):
            torch.full((3,), 7, dtype=torch.int64, device=device)
        first, second = numbers.captured(array("q", [1, 2, 3])), numbers.captured(array("q", [10, 20, 30]))
        total += first + second
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [10, 20, 30])
    graph.replay()
    assert total.tolist() == [11, 22, 33]
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [10, 20, 30])
    second.fill_(0)
    graph.replay()
    assert total.tolist() == [12, 24, 36]


def test_the_mode_of_capture_is_restored_where_the_driver_fails(monkeypatch):
    mode = 0

    def exchange(pointer):
        nonlocal mode
        pointer._obj.value, mode = mode, pointer._obj.value
        return 0

    def fails(*_):
        assert mode == RELAXED
        return 2

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange, cuMemcpyHtoDAsync_v2=fails)
    monkeypatch.setattr(device_list, "_driver", lambda: driver)
    with pytest.raises(RuntimeError, match=r"cuMemcpyHtoDAsync_v2 failed with CUDA error 2"), device_list._relaxed():
        device_list._copy(torch.zeros(1, dtype=torch.int64), array("q", [1]), 0)
    assert mode == 0
