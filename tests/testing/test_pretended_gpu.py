"""Without a GPU "cuda" stands for the CPU, and the two are told apart as where there is one."""

import io

import numpy as np
import pytest
import torch

from minidl.testing.fake_gpu import pretended_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it does nothing")


@pytest.fixture(autouse=True)
def gpu():
    with pretended_gpu():
        torch.ones(1, device="cuda")
        yield
    assert not torch.cuda.is_available()


def test_what_the_host_makes_is_copied():
    array = np.ones(3, np.float32)
    host = torch.from_numpy(array)
    there = host.cuda()
    there.add_(1)
    assert (host.device.type, there.device, there.is_cuda, there.cpu().is_cuda) == (
        "cpu", torch.device("cuda", 0), True, False,
    )  # fmt: skip
    assert array.tolist() == [1, 1, 1]


def test_modules_move():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert {tensor.is_cuda for tensor in model.state_dict().values()} == {False}
    model.to("cuda")
    assert {tensor.is_cuda for tensor in model.state_dict().values()} == {True}
    model(torch.ones(4, 2, device="cuda")).sum().backward()
    assert model[0].weight.grad.is_cuda
    assert not model.cpu()[0].weight.is_cuda
    assert torch.nn.Linear(2, 2, device="cuda").weight.is_cuda


def test_a_file_with_a_place_and_devices_by_number():
    file = io.BytesIO()
    torch.save({"a": torch.ones(2)}, file)  # noqa: TID251
    file.seek(0)
    assert torch.load(file, map_location="cuda")["a"].tolist() == [1, 1]  # noqa: TID251
    with torch.cuda.device(0) as _:
        assert torch.cuda.device(0).idx == 0
