"""What lies on the device as a whole."""

import pytest
import torch

from minidl.data import ahead


@pytest.mark.parametrize(("free", "fits"), [(399, False), (400, True), (10**12, True)])
def test_a_data_set_may_take_a_quarter_of_the_free_memory(monkeypatch, free, fits):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**12))
    assert ahead.fits(100, torch.device("cuda", 0)) is fits
    assert ahead.fits(100, torch.device("cpu"))


def test_on_a_cpu_batches_are_there_already():
    batches = [(torch.zeros(1),), (torch.ones(1),)]
    assert all(one is other for one, other in zip(ahead.ahead(batches, torch.device("cpu")), batches, strict=True))
    part = torch.zeros(2)
    assert ahead.pinned(part, torch.device("cpu")) is part
