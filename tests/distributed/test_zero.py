"""What cannot be shared out, the parts, and a process that is alone; see test_together for several."""

import pytest
import torch

from minidl import distributed, optim
from minidl.distributed.zero import _Part
from minidl.tensors import Tensor, default_device

# Some are large, and their parts small; blocks end within parts.
SHAPES = [(300, 257), (40, 130), (8, 9, 5, 5), (100,), (7,), ()]
RULES = {
    "SGD": lambda p, **more: optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, **more),
    "RMSprop": lambda p, **more: optim.RMSprop(p, momentum=0.9, centered=True, **more),
    "Adagrad": lambda p, **more: optim.Adagrad(p, lr_decay=0.1, **more),
    "Adam": lambda p, **more: optim.Adam(p, 0.1, amsgrad=True, weight_decay=0.1, **more),
    "AdamW": lambda p, **more: optim.AdamW(p, 0.1, **more),
    "RAdam": lambda p, **more: optim.RAdam(p, 0.1, **more),
}


class Alone(_Part):
    """A part whose process hears nothing of the others."""

    def join(self, params):
        pass


def values(shape, seed, dtype):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(default_device(), dtype)
    return drawn.to(memory_format=torch.channels_last) if drawn.ndim == 4 else drawn


@pytest.mark.parametrize(("size", "dtype"), [(3, torch.float16), (8, torch.float32)])
@pytest.mark.parametrize("rule", RULES)
def test_parts_change_as_they_do_in_the_whole(rule, size, dtype):
    """Bit for bit: parameters, and all that is kept beside them."""
    params = [[Tensor(values(s, i, dtype), requires_grad=True) for i, s in enumerate(SHAPES)] for _ in range(size + 1)]
    whole, *parts = (RULES[rule](each, max_norm=20.0) for each in params)
    for rank, optimizer in enumerate(parts):
        optimizer._update.share_out(Alone(rank, size))
    for step in range(2):
        before = [param.data.clone() for param in params[0]]
        for optimizer, own in zip((whole, *parts), params, strict=True):
            for i, (param, value) in enumerate(zip(own, before, strict=True)):
                param.data.copy_(value)
                param.grad = Tensor(values(value.shape, 100 * step + i, dtype))
            optimizer.step()
    for rank, (optimizer, own) in enumerate(zip(parts, params[1:], strict=True)):
        part = optimizer._update.part
        for ours, right in zip(own, params[0], strict=True):
            assert torch.equal(part.of(ours.data), part.of(right.data)), rank
            for name, kept in whole.state[right].items():
                mine = optimizer.state[ours][name]
                assert torch.equal(mine, kept if name == "step" else part.of(kept)), (rank, name)
        assert torch.equal(optimizer.grad_norm.data, whole.grad_norm.data)


def parameters():
    return [Tensor(torch.ones(6, 5).to(default_device()), requires_grad=True)]


def test_alone_nothing_changes():
    optimizer = optim.AdamW(parameters())
    assert distributed.shard_optimizer(optimizer) is optimizer
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (6, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (optim.Muon, "Muon needs complete matrices"),
        (lambda params: optim.Adam(params, lazy=True), "Adam: lazy updates cannot be combined"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        distributed.shard_optimizer(make(parameters()))


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("shape", [(), (0,), (16,), (17,), (5, 100), (2, 3, 4, 5)])
def test_parts_are_all_of_a_tensor_in_the_order_of_its_memory(shape, size):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
    if tensor.ndim == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    parts = [_Part(rank, size).of(tensor) for rank in range(size)]
    in_memory = tensor.permute(0, 2, 3, 1).flatten() if tensor.ndim == 4 else tensor.flatten()
    assert torch.equal(torch.cat(parts), in_memory)
    assert all(part.data_ptr() % 16 == 0 for part in parts if part.numel())
    assert max(map(len, parts)) <= tensor.numel() / size + 16
