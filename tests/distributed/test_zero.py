"""What cannot be shared out, the parts, and a process that is alone; see test_together for several."""

import pytest
import torch

from minidl import distributed, optim
from minidl.distributed.zero import _Part
from minidl.tensors import Tensor


def parameters():
    return [Tensor(torch.ones(6, 5), requires_grad=True)]


def test_alone_nothing_changes():
    optimizer = optim.AdamW(parameters())
    assert distributed.shard_optimizer(optimizer) is optimizer
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (6, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (optim.Muon, "Muon: its iterations take whole matrices"),
        (lambda params: optim.Adam(params, lazy=True), "Adam: lazy updates rows"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        distributed.shard_optimizer(make(parameters()))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("shape", [(), (0,), (16,), (17,), (5, 100), (2, 3, 4, 5)])
def test_parts_are_all_of_a_tensor_in_the_order_of_its_memory(shape, size):
    tensor = torch.arange(max(1, int(torch.tensor(shape).prod())))[: torch.Size(shape).numel()].reshape(shape).float()
    if tensor.ndim == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    parts = [_Part(rank, size).of(tensor) for rank in range(size)]
    in_memory = tensor.permute(0, 2, 3, 1).flatten() if tensor.ndim == 4 else tensor.flatten()
    torch.testing.assert_close(torch.cat(parts), in_memory, rtol=0, atol=0)
    assert all(part.data_ptr() % 16 == 0 for part in parts if part.numel())
    assert max(map(len, parts)) <= tensor.numel() / size + 16
