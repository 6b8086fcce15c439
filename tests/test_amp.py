"""`amp.GradScaler` and autocast train as torch's: same dtypes, same scales, losses within float16."""

import copy

import pytest
import torch

import minidl
from minidl import amp, nn, optim
from minidl.tensors import Tensor, default_device

KIND = default_device().type


def loop(lib, f, optimizer, model, x, y, clip=False, bad=()):
    """The usual loop of mixed precision: losses, scales and the scaler's state. Steps in `bad` have an infinite
    gradient."""
    scaler = lib.amp.GradScaler(KIND, init_scale=1024.0 if clip else 2.0**20, growth_interval=3)
    losses, scales = [], []
    for step in range(9):
        optimizer.zero_grad()
        with lib.autocast(KIND, dtype=torch.float16):
            out = model(x)
            loss = f.functional.cross_entropy(out, y)
        assert (out.dtype, loss.dtype) == (torch.float16, torch.float32)
        scaler.scale(loss).backward()
        if step in bad:
            next(model.parameters()).grad.data.view(-1)[0] = float("inf")
        if clip:
            scaler.unscale_(optimizer)
            f.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales, scaler.state_dict()


def net(f):
    return f.Sequential(f.Linear(6, 16), f.LayerNorm(16), f.ReLU(), f.Linear(16, 3))


@pytest.mark.parametrize(("clip", "bad"), [(False, ()), (False, (5,)), (True, ())])
def test_a_loop_of_mixed_precision_is_torchs(clip, bad):
    torch.manual_seed(0)
    theirs, x, y = net(torch.nn).to(default_device()), torch.randn(10, 6), torch.arange(10) % 3
    x, y, ours = x.to(default_device()), y.to(default_device()), net(nn)
    ours.load_state_dict(theirs.state_dict())
    expected = loop(torch, torch.nn, torch.optim.Adam(theirs.parameters(), lr=0.05), theirs, x, y, clip, bad)
    found = loop(minidl, nn, optim.Adam(ours.parameters(), lr=0.05), ours, Tensor(x), Tensor(y), clip, bad)
    assert found[1:] == expected[1:]
    assert len(set(found[1])) > 2
    assert found[0] == pytest.approx(expected[0], rel=2e-2)
    assert found[0][-1] < 0.7 * found[0][0]
    restored = amp.GradScaler(KIND)
    restored.load_state_dict(expected[2])
    assert restored.state_dict() == expected[2]


def test_float16_weights_are_unscaled_in_the_update():
    """Gradients of 2^-28, which float16 cannot hold after the division by the scale, move the float32 master."""
    weight = Tensor(torch.zeros(4, dtype=torch.float16, device=default_device()), requires_grad=True)
    optimizer, scaler = optim.SGD([weight], lr=1.0), amp.GradScaler(init_scale=2.0**15)
    scaler.scale((weight * 2.0**-14 * 2.0**-14).sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients: clip them by max_norm="):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    master = optimizer.state_dict()["state"][0]["master"]
    assert master.tolist() == [-(2.0**-28)] * 4


def test_a_step_that_overflows_changes_nothing_and_warns_of_nothing(recwarn):
    weight = Tensor(torch.ones(2, device=default_device()), requires_grad=True)
    optimizer, scaler = optim.AdamW([weight], lr=0.1), amp.GradScaler(init_scale=8.0)
    before = copy.deepcopy(optimizer.state_dict())
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale(), optimizer.skipped) == ([1.0, 1.0], 4.0, 1)
    assert all(torch.equal(a, b) for a, b in zip(
        optimizer.state_dict()["state"][0].values(), before["state"][0].values(), strict=True
    ))  # fmt: skip
    assert (optimizer.loss_scale, optimizer.warns, recwarn.list) == (None, True, [])


def test_a_disabled_scaler_scales_nothing():
    weight = Tensor(torch.ones(2, device=default_device()), requires_grad=True)
    optimizer, scaler = optim.SGD([weight], lr=1.0), amp.GradScaler(enabled=False)
    scaler.scale([weight.sum()])[0].backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.get_scale(), scaler.state_dict()) == ([0.0, 0.0], 1.0, {})


@pytest.mark.parametrize("options", [{"loss_scale": 2.0}, {"skip_nonfinite": False}])
def test_another_scaling_is_refused(options):
    weight = Tensor(torch.ones(2, device=default_device()), requires_grad=True)
    with pytest.raises(ValueError, match="expected minidl's optimizer without loss_scale"):
        amp.GradScaler().step(optim.SGD([weight], lr=1.0, **options))
    with pytest.raises(ValueError, match="expected minidl's optimizer"):
        amp.GradScaler().step(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
    scaler, optimizer = amp.GradScaler(), optim.SGD([weight], lr=1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="has already been called on this optimizer since the last update"):
        scaler.unscale_(optimizer)
