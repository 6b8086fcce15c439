"""Batch norm over the shards of a batch in one process: as over the batch without shards; shards that take turns."""

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minidl import distributed, nn, ops, optim, random
from minidl.compilation.capture import capture
from minidl.tensors import Tensor, default_device
from tests.graphs import graphs, same_random

__all__ = ["graphs", "same_random"]

ROWS, SHARDS = 13, 5


def numbers(*shape, seed=0, dtype=torch.float64):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Tensor(drawn.to(dtype).to(default_device()))


class Net(nn.Module):
    """Batch norms after a convolution, before a sum, with an activation, and of rows."""

    def __init__(self, sync):
        super().__init__()
        random.manual_seed(0)
        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None, act="gelu")
        self.linear, self.norm3 = nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False)
        self.last = nn.Linear(6, 2)
        if sync:
            nn.SyncBatchNorm.convert_sync_batchnorm(self)

    def forward(self, x):
        x = self.conv1(x)
        x = ops.gelu(self.norm1(x) + x)
        x = ops.mean(self.norm2(self.conv2(x)).flatten(2), 2)
        return self.last(self.norm3(self.linear(x)))


def steps(sync, shards, dtype=torch.float64, shift=0.0, net=Net):
    """The gradients, buffers and losses of two steps."""
    model = net(sync).to(dtype=dtype)
    parallel = distributed.DataParallel(model, distributed.shards(shards))
    found = []
    for rows in (ROWS, 3):  # fewer than shards
        x, y = numbers(rows, 2, 5, 5, seed=rows, dtype=dtype) + shift, numbers(rows, 2, seed=1, dtype=dtype)
        found.append(parallel(lambda x, y: ops.mse_loss(model(x), y), x, y).data)
        found += [p.grad.data for p in model.parameters()]
    return [*found, *(buffer.data for buffer in model.buffers())]


@pytest.mark.parametrize("shift", [0.0, 1000.0])
@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_shards_give_what_the_batch_gives(dtype, off, shift):
    """As plain batch norms of the whole batch, also where a shard has one example or none."""
    right = steps(False, 1, torch.float64, shift)
    for got, wanted in zip(steps(True, SHARDS, dtype, shift), right, strict=True):
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=off, atol=off * scale)


def test_with_one_shard_it_is_a_plain_batch_norm():
    for got, wanted in zip(steps(True, 1), steps(False, 1), strict=True):
        assert torch.equal(got, wanted)


def test_the_gradient_of_the_loss_of_all_shards():
    """By differences in float64: of the mean loss over shards of different sizes."""
    model = Net(True).to(dtype=torch.float64)
    parallel = distributed.DataParallel(model, distributed.shards(3))
    x, y = numbers(5, 2, 4, 4), numbers(5, 2, seed=1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loss():
        model.load_state_dict(state)
        return parallel(lambda x, y: ops.mse_loss(model(x), y), x, y)

    loss()
    right = {name: (p.grad.data * numbers(*p.shape, seed=2).data).sum().item() for name, p in model.named_parameters()}
    assert min(map(abs, right.values())) < 1e-12  # nothing depends on what a batch norm takes away
    assert sum(abs(slope) > 1e-4 for slope in right.values()) > 8
    for name, parameter in model.named_parameters():
        kept, along, losses = state[name], numbers(*parameter.shape, seed=2).data, []
        for step in (1e-6, -1e-6):
            state[name] = kept + step * along
            losses.append(loss().item())
        state[name] = kept
        assert abs((losses[0] - losses[1]) / 2e-6 - right[name]) < 1e-8, name


def test_shards_take_turns_and_keep_apart_what_is_theirs():
    """Order, random numbers, gradients of inner walks, and buffers of a plain batch norm beside."""
    x, calls, drawn, made = Tensor(torch.arange(8.0).reshape(8, 1).to(default_device())), [], {}, []
    model = nn.Sequential(nn.SyncBatchNorm(1), nn.BatchNorm1d(1), nn.SyncBatchNorm(1))
    weight = model.weight = nn.Parameter(torch.ones(1))

    def loss(x):
        first = int(x.data[0, 0])
        ops.sum(weight * x).backward()  # an inner walk: its gradient waits for that of the outer one
        y = x
        for place, norm in enumerate(model.children()):
            calls.append((place, first))
            drawn[first, place] = ops.rand(len(x)).tolist()
            y = norm(y)
        made.append(y.data)
        return ops.mean(y * weight)

    def plain(x):
        expected = {(int(x.data[0, 0]), place): ops.rand(len(x)).tolist() for place in range(3)}
        assert all(drawn[at] == numbers for at, numbers in expected.items())
        return ops.mean(x * weight)

    random.manual_seed(3)
    distributed.DataParallel(model, distributed.shards(4))(loss, x)
    one, two = ([(place, first) for first in (0, 2, 4, 6) for place in places] for places in ((0,), (1, 2)))
    assert calls == [*one, *two]
    right = sum(0.25 * (part.sum() + y.mean()) for part, y in zip(x.data.split(2), made, strict=True))
    assert abs(weight.grad.item() - right.item()) < 1e-5
    assert all(int(norm.num_batches_tracked.data) == 1 for norm in model.children())
    # A plain batch norm has the mean of the shards' statistics, each of which has begun with those before.
    assert abs(model[1].running_mean.item()) < 1e-6
    assert abs(model[0].running_mean.item() - 0.35) < 1e-6
    alone = distributed.DataParallel(nn.Linear(1, 1), distributed.shards(4))
    random.manual_seed(3)
    alone(plain, x)


def failing(at, error):
    """A work whose shard `at` fails after the first of two batch norms."""
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.SyncBatchNorm(3))

    def loss(x):
        first = x.data[0, 0].item()
        y = model[0](x)
        if first == at:
            raise error
        return ops.sum(model[1](y))

    return model, loss


@pytest.mark.parametrize("error", [ValueError("of one shard"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 4, 6])
def test_an_error_of_one_shard_ends_all_of_them(at, error):
    x = Tensor(torch.arange(8.0).repeat_interleave(3).reshape(8, 3).to(default_device()))
    model, loss = failing(at, error)
    parallel, before = distributed.DataParallel(model, distributed.shards(4)), threading.active_count()
    with pytest.raises(type(error)) as caught:
        parallel(loss, x)
    assert caught.value is error
    assert threading.active_count() == before
    assert not any(parameter._after for parameter in model.parameters())
    parallel(lambda x: ops.sum(model(x)), x)  # nothing is left of it


def test_shards_that_take_other_ways_have_one_error():
    x = Tensor(torch.arange(8.0).repeat_interleave(3).reshape(8, 3).to(default_device()))
    one, other = nn.SyncBatchNorm(3), nn.SyncBatchNorm(6)
    model = nn.Sequential(one, other)
    ways = (
        lambda x: ops.sum(one.weight * x if x.data[0, 0] == 2 else one(x)),
        lambda x: ops.sum(other(ops.cat([x, x], 1)) if x.data[0, 0] == 2 else one(x)),
    )
    for way in ways:
        with pytest.raises(RuntimeError, match="wait at different batch norms, or one ended while others wait"):
            distributed.DataParallel(model, distributed.shards(4))(way, x)


def test_what_may_be_wrong():
    x = Tensor(torch.arange(24.0).reshape(8, 3).to(default_device()))
    norm, model = nn.SyncBatchNorm(3), nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shards are computed one after another"):
        distributed.DataParallel(model, distributed.shards(4))(lambda x: ops.sum(norm(model(x))), x)
    parallel = distributed.DataParallel(model, distributed.shards(4), sync_batch_norm=True)
    with pytest.raises(RuntimeError, match=r"2 examples have input \[3, 3\], expected as many values each"):
        parallel(lambda x: ops.sum(norm(ops.cat([model(x), x[:1]]))), x)
    kept = []
    parallel(lambda x: (kept.append(norm(model(x))), ops.sum(model(x)))[1], x)
    with pytest.raises(RuntimeError, match="was called outside the thread of a shard"):
        ops.sum(kept[0] * kept[0]).backward()
    with pytest.raises(ValueError, match=r"more than 1 value per channel .* input size \[1, 3\]"):
        parallel(lambda x: ops.sum(norm(model(x))), x[:1])
    for make in (nn.SyncBatchNorm, nn.SyncBatchNorm.convert_sync_batchnorm):
        with pytest.raises(ValueError, match="process_group is given, expected None: all shards"):
            make(3, process_group=object())


def test_threads_have_the_settings_of_the_one_that_waits():
    """Modes of torch, and whether it records."""

    class Functions(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Functions.seen += threading.current_thread() is not threading.main_thread()
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Operations.seen += threading.current_thread() is not threading.main_thread()
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.SyncBatchNorm(3), nn.Dropout(0.5), nn.Linear(3, 1))
    parallel = distributed.DataParallel(model, distributed.shards(4))
    x = numbers(8, 3, dtype=torch.float32)
    held = []

    def loss(x):
        held.append(torch.is_grad_enabled())
        return ops.mean(model(x))

    with Functions(), Operations():
        parallel(loss, x)
    assert Functions.seen
    assert Operations.seen
    assert held == [True] * 4
    held.clear()
    with torch.no_grad(), pytest.raises(RuntimeError, match="nothing was recorded"):
        parallel(loss, x)
    assert held
    assert not any(held)


def test_a_recorded_step_gives_what_the_step_gives(graphs):
    """Threads record with the one that waits for them, and draw from the device the numbers that they draw anyway."""

    def course(captured):
        random.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), nn.Dropout(0.5), nn.Linear(4, 1))
        parallel, optimizer = distributed.DataParallel(model, distributed.shards(4)), optim.SGD(model.parameters(), 0.1)

        def step(x):
            loss = parallel(lambda x: ops.mean(model(x) * model(x)), x)
            optimizer.step()
            return loss

        taken = capture(step) if captured else step
        losses = [taken(numbers(8, 3, seed=seed, dtype=torch.float32)).item() for seed in range(6)]
        return losses, [tensor.clone() for tensor in model.state_dict().values()]

    (losses, found), (expected, right) = course(True), course(False)
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


def test_converted_modules_have_the_same_parameters_and_buffers():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3, act="relu", momentum=None)), nn.LayerNorm(3))
    model.eval()
    before, names = dict(model.named_tensors()), list(model.state_dict())
    assert nn.SyncBatchNorm.convert_sync_batchnorm(model) is model
    made = model[1][0]
    assert type(made) is nn.SyncBatchNorm
    assert (made.act, made.momentum, made.training) == ("relu", None, False)
    assert list(model.state_dict()) == names
    assert all(before[name] is tensor for name, tensor in model.named_tensors())
    norm = nn.BatchNorm2d(4)
    alone = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
    assert alone is not norm
    assert alone.weight is norm.weight
    for shape in ((5, 4), (5, 4, 2), (5, 4, 2, 2), (2, 4, 2, 2, 2)):
        x = numbers(*shape, dtype=torch.float32)
        assert torch.equal(nn.SyncBatchNorm(4)(x).data, ops.batch_norm(x, None, None, training=True).data)
